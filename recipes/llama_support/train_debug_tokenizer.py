"""Train the debug model's tokenizer anew: `python recipes/llama_support/train_debug_tokenizer.py`.

The result is kept in the repository, so that every machine trains on the same tokens; run this only to replace it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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


def train(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer over `texts` that adds the begin token, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
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
