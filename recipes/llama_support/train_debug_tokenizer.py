"""Train the debug model's tokenizer anew: `python recipes/llama_support/train_debug_tokenizer.py`.

The result is kept in the repository, so that every machine trains on the same tokens; run this only to replace it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llama_support.stdlib_corpus import stdlib_functions

FOLDER = Path(__file__).resolve().parent / "debug_model"
VOCABULARY = 4096
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|pad|>", "<|role|>", "<|content|>", "<|turn_end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|role|>{{ message.role }}<|content|>{{ message.content }}<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant<|content|>{% endif %}"
)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text into the words within which it merges."""


def train(texts: Iterable[str], vocabulary: int = VOCABULARY, words: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer over `texts` that adds the begin token, with a chat template.

    Args:
        texts: what to train on.
        vocabulary: entries, special tokens included; fewer where `texts` have no more.
        words: a pattern of the words within which to merge, by default GPT-2's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    train([prompt + completion for prompt, completion in stdlib_functions()]).save_pretrained(FOLDER)
