"""The stream of training steps and the validation batches, the same for every number of ranks."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from .config import Config
from .encode import Document, encode_rows
from .errors import BadInput
from .packing import collate, pack, trained_positions
from .rows import read_jsonl, read_rows, split_rows
from .world import World

# torchdata 0.11 sets a telemetry flag that torch 2.13 is about to drop.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class StepBatches:
    """What one rank sees of one optimizer step.

    Attributes:
        micro_batches: this rank's slice of the global batch, as `packing.collate` lays it out. Every rank has as many.
        trained_tokens: predictions that the loss counts in the whole global batch, over all ranks.
    """

    micro_batches: list[Batch]
    trained_tokens: int


class TrainingSteps(IterableDataset[StepBatches]):
    """An endless stream of optimizer steps over documents packed anew, in another order, each epoch.

    The order of the packed sequences depends on the documents, the sequence length and the seed alone; rank r of W
    takes the r-th part of each global batch. A global batch goes on in the next epoch where one ends. So the position,
    which is all the state there is, means the same on every number of ranks.
    """

    def __init__(
        self,
        documents: list[Document],
        *,
        sequence_length: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__()
        self._documents = documents
        self._sequence_length = sequence_length
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0
        self._next_sequence = 0
        self._packed: tuple[int, list[list[Document]]] | None = None
        self.fingerprint = _fingerprint(documents, sequence_length, seed)

    def __iter__(self) -> Iterator[StepBatches]:
        while True:
            sequences = self._take(self._global_batch)
            trained = sum(trained_positions(document) for sequence in sequences for document in sequence)
            mine = rank_batches(sequences, self._sequence_length, self._micro_batch, self._rank, self._world_size)
            yield StepBatches(mine, trained)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next step, equal on all ranks."""
        return {"epoch": self._epoch, "next_sequence": self._next_sequence, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position of the same data. Raises BadInput for a position in other data."""
        if state["fingerprint"] != self.fingerprint:
            raise BadInput(
                "the checkpoint's position is one in other data (rows, tokenizer, --sequence-length or --seed have"
                " changed); give the same as before, or another --output"
            )
        self._epoch, self._next_sequence = int(state["epoch"]), int(state["next_sequence"])

    def _take(self, count: int) -> list[list[Document]]:
        taken: list[list[Document]] = []
        while len(taken) < count:
            sequences = self._epoch_sequences()
            end = min(self._next_sequence + count - len(taken), len(sequences))
            taken += sequences[self._next_sequence : end]
            self._next_sequence = end
            if end == len(sequences):
                self._epoch, self._next_sequence = self._epoch + 1, 0
        return taken

    def _epoch_sequences(self) -> list[list[Document]]:
        if self._packed is None or self._packed[0] != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
            order = torch.randperm(len(self._documents), generator=generator).tolist()
            self._packed = (self._epoch, pack_documents([self._documents[i] for i in order], self._sequence_length))
        return self._packed[1]


def pack_documents(documents: list[Document], sequence_length: int) -> list[list[Document]]:
    """The documents, in their order, as packed sequences of at most `sequence_length` predictions."""
    packed = pack([len(document.tokens) - 1 for document in documents], sequence_length)
    return [[documents[index] for index in sequence] for sequence in packed]


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


@dataclass(frozen=True)
class Data:
    """The data of a run: a loader of `StepBatches`, this rank's validation batches, a validation row to continue."""

    loader: StatefulDataLoader
    validation: list[Batch]
    sample: Document
    fingerprint: str
    summary: str


def load_data(config: Config, tokenizer: Any, vocabulary: int, rank: int, world_size: int) -> Data:
    """Read, split, encode and pack what the config names, for a model of `vocabulary` embeddings.

    Raises BadInput; no collective inside.
    """
    if config.validation_data is None:
        training_rows, validation_rows = split_rows(read_rows(config.data), config.validation_fraction)
    else:
        training_rows, validation_rows = read_rows(config.data), read_jsonl(Path(config.validation_data))
    length = config.sequence_length
    training, report = encode_rows(training_rows, tokenizer, length, config.long_rows)
    validation, validation_report = encode_rows(validation_rows, tokenizer, length, config.long_rows)
    largest = max(int(document.tokens.max()) for document in training + validation)
    if largest >= vocabulary:
        raise BadInput(
            f"the tokenizer of {config.model} gives token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), and"
            f" its model has {vocabulary} embeddings; the two are of different models"
        )
    validation_sequences = pack_documents(validation, length)[: config.validation_sequences or None]
    steps = TrainingSteps(
        training,
        sequence_length=length,
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )
    # batch_size=None: a step is collated by the dataset, which knows the whole global batch. A generator of its own:
    # the loader draws a number when it starts, which must not shift the global generator between runs.
    loader = StatefulDataLoader(steps, batch_size=None, num_workers=0, generator=torch.Generator())
    tokens = sum(len(document.tokens) for document in training)
    summary = (
        f"training: {report}, {tokens:,} tokens; validation: {validation_report},"
        f" {len(validation_sequences)} packed sequences of {length}"
    )
    validation_batches = rank_batches(validation_sequences, length, config.micro_batch, rank, world_size)
    return Data(loader, validation_batches, validation[0], steps.fingerprint, summary)


def check_same_data(data: Data, world: World) -> None:
    """Raise BadInput where ranks have read different data. All ranks must call."""
    found = world.gather(data.fingerprint)
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            raise BadInput(
                f"ranks 0 and {rank} have read different data; give all machines the same files, the same Python"
                " (--data stdlib) and the same transformers"
            )


def _fingerprint(documents: list[Document], sequence_length: int, seed: int) -> str:
    digest = hashlib.sha256(f"{sequence_length} {seed} {len(documents)}".encode())
    for document in documents:
        digest.update(len(document.tokens).to_bytes(8, "little"))
        digest.update(document.tokens.tobytes())
        digest.update(document.trained.tobytes())
    return digest.hexdigest()[:16]
