"""The training text: the documented functions of Python's standard library, as tokens, in an order for each seed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

TOKENIZER = Path(__file__).resolve().parents[2] / "llama_support" / "debug_model" / "tokenizer.json"
VOCABULARY = 4096


def write_corpus(path: Path) -> int:
    """Tokenize the text, write it to `path`, and return its number of tokens.

    Raises:
        FileNotFoundError: this Python's library has no sources.
    """
    from llama_support.stdlib_corpus import stdlib_functions
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    end = tokenizer.token_to_id("<|end|>")
    texts = [prompt + completion for prompt, completion in stdlib_functions()]
    if not texts:
        raise FileNotFoundError("this Python's standard library is there without its sources: use another Python")
    documents = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]
    tokens = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
    torch.save({"tokens": tokens, "lengths": [len(document) for document in documents]}, path)
    return len(tokens)


def read_sequences(path: Path, seed: int, length: int) -> Tensor:
    """The text's tokens in sequences of `length`, (sequences, length) int64: documents shuffled, joined and cut."""
    content = torch.load(path, weights_only=True)
    documents = torch.split(content["tokens"], content["lengths"])
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    joined = torch.cat([documents[place] for place in order]).long()
    return joined[: len(joined) // length * length].view(-1, length)
