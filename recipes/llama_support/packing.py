"""Packing: several documents in one sequence, none cut, positions counted from 0 in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .encode import Document

IGNORED = -100
"""Label of a position that the loss does not count."""

_OPEN_SEQUENCES = 64

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepBatches:
    """What one rank sees of one optimizer step.

    Attributes:
        micro_batches: this rank's slice of the global batch, as `collate` lays it out. Every rank has as many.
        trained_tokens: predictions that the loss counts in the whole global batch, over all ranks.
    """

    micro_batches: list[Batch]
    trained_tokens: int


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group documents, given by their lengths in the order wanted, into sequences of at most `capacity` positions.

    Best fit: a document goes into the fullest of the 64 newest open sequences that still has room, else opens one.
    Returns the documents' indices per sequence. Depends on nothing but the arguments. Lengths above `capacity` are a
    ValueError.
    """
    packed: list[list[int]] = []
    open_sequences = np.empty(0, dtype=np.int64)
    rooms = np.empty(0, dtype=np.int64)
    for document, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"document {document} has {length} positions, more than the capacity {capacity}")
        fits = np.flatnonzero(rooms >= length)
        if fits.size == 0:
            packed.append([document])
            open_sequences = np.append(open_sequences, len(packed) - 1)[-_OPEN_SEQUENCES:]
            rooms = np.append(rooms, capacity - length)[-_OPEN_SEQUENCES:]
        else:
            best = fits[np.argmin(rooms[fits])]
            packed[open_sequences[best]].append(document)
            rooms[best] -= length
    return packed


def pack_documents(documents: list[Document], sequence_length: int) -> list[list[Document]]:
    """The documents, in their order, as packed sequences of at most `sequence_length` predictions."""
    packed = pack([len(document.tokens) - 1 for document in documents], sequence_length)
    return [[documents[index] for index in sequence] for sequence in packed]


def collate(sequences: Sequence[Sequence[Document]], length: int) -> Batch:
    """Lay packed sequences out as tensors, each int64 of shape (len(sequences), `length`).

    input_ids: the tokens. labels: the token that follows within the same document, or IGNORED where the loss does not
    count it. position_ids: the position within the document. document_ids: 0, 1, ... per document of a sequence; the
    unused rest of a sequence is a document of its own, without labels.
    """
    shape = (len(sequences), length)
    input_ids, position_ids, document_ids = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    labels = np.full(shape, IGNORED, dtype=np.int64)
    for row, documents in enumerate(sequences):
        start = 0
        for index, document in enumerate(documents):
            end = start + len(document.tokens) - 1
            input_ids[row, start:end] = document.tokens[:-1]
            labels[row, start:end] = np.where(document.trained[1:], document.tokens[1:], IGNORED)
            position_ids[row, start:end] = np.arange(end - start)
            document_ids[row, start:end] = index
            start = end
        position_ids[row, start:] = np.arange(length - start)
        document_ids[row, start:] = len(documents)
    arrays = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "document_ids": document_ids}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def trained_positions(document: Document) -> int:
    """How many predictions of a document the loss counts."""
    return int(document.trained[1:].sum())


def rank_batches(
    sequences: list[list[Document]], sequence_length: int, micro_batch: int, rank: int, world_size: int
) -> list[Batch]:
    """Rank `rank`'s equal part of packed sequences, in micro-batches. Every rank gets as many of the same sizes.

    Where the sequences do not divide, the last ranks' parts are filled up with empty sequences, which train nothing.
    """
    share = -(-len(sequences) // world_size)
    mine = sequences[rank * share : (rank + 1) * share]
    mine = mine + [[] for _ in range(share - len(mine))]
    return [collate(mine[start : start + micro_batch], sequence_length) for start in range(0, share, micro_batch)]
