"""The stream of training steps and the validation batches, the same for every number of ranks."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from .config import Config
from .encode import Document, EncodingReport, encode_rows
from .errors import BadInput
from .packing import Batch, StepBatches, pack_documents, rank_batches, trained_positions
from .rows import read_jsonl, read_rows, split_rows
from .shards import is_sharded
from .streamed_data import (
    ShardList,
    check_shards_unchanged,
    first_difference,
    open_rows,
    stream,
    validation_documents,
)
from .streaming import Source, StreamedSteps
from .world import World

# torchdata 0.11 sets a telemetry flag that torch 2.13 is about to drop.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


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


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        loader: for checkpoints; `steps` gives its steps.
        validation: this rank's batches.
        sample: a validation row to continue.
        fingerprint: of all that the steps depend on.
        summary: a line that says what there is.
        shards: of streamed data: name, bytes, rows and content of each.
    """

    loader: StatefulDataLoader | StreamedSteps
    validation: list[Batch]
    sample: Document
    fingerprint: str
    summary: str
    shards: ShardList = field(default_factory=list)

    def steps(self, world: World) -> Iterator[StepBatches]:
        """Endless steps from where the loader stands. All ranks must take them together."""
        return self.loader.steps(world) if isinstance(self.loader, StreamedSteps) else iter(self.loader)

    def progress(self) -> str:
        """Of streamed data, what became of the rows so far; else nothing, since `summary` says it."""
        return str(self.loader) if isinstance(self.loader, StreamedSteps) else ""


def load_data(config: Config, tokenizer: Any, vocabulary: int, rank: int, world_size: int) -> Data:
    """Read, split, encode and pack what the config names, for a model of `vocabulary` embeddings.

    A folder or a pattern is only indexed; its rows are read as they are needed. Raises BadInput; no collective inside.
    """
    if is_sharded(config.data):
        return _load_streamed(config, tokenizer, vocabulary, rank, world_size)
    rows, validation_rows = read_rows(config.data), None
    length = config.sequence_length
    if config.validation_data is None:
        rows, validation_rows = split_rows(rows, config.validation_fraction)
    training, report = encode_rows(rows, tokenizer, length, config.long_rows)
    if validation_rows is not None:
        validation, validation_report = encode_rows(validation_rows, tokenizer, length, config.long_rows)
    else:
        validation, validation_report = _validation_data(config, tokenizer, vocabulary, rank)
    _check_vocabulary(config, tokenizer, vocabulary, training + validation)
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
    batches, count = _validation_batches(config, validation, rank, world_size)
    summary = (
        f"training: {report}, {tokens:,} tokens; validation: {validation_report}, {count} packed sequences of {length}"
    )
    return Data(loader, batches, validation[0], steps.fingerprint, summary)


def _load_streamed(config: Config, tokenizer: Any, vocabulary: int, rank: int, world_size: int) -> Data:
    steps, rows, source = stream(config, tokenizer, vocabulary, rank, world_size)
    check_shards_unchanged(config, rows, rank)
    if config.validation_data is None:
        validation, report = validation_documents(source, source.threshold, config.validation_sequences)
    else:
        validation, report = _validation_data(config, tokenizer, vocabulary, rank)
    _check_vocabulary(config, tokenizer, vocabulary, validation)
    batches, count = _validation_batches(config, validation, rank, world_size)
    training = len(rows) - rows.count_below(source.threshold)
    summary = (
        f"training: {training:,} rows in {len(rows.shards)} files, streamed; validation: {report}, {count} packed"
        f" sequences of {config.sequence_length}"
    )
    shards = [shard.description for shard in rows.shards]
    return Data(steps, batches, validation[0], steps.fingerprint, summary, shards)


def _validation_data(
    config: Config, tokenizer: Any, vocabulary: int, rank: int
) -> tuple[list[Document], EncodingReport]:
    """The documents of `--validation-data`, of a folder or pattern as many as are needed."""
    assert config.validation_data is not None
    length = config.sequence_length
    if not is_sharded(config.validation_data):
        return encode_rows(read_jsonl(Path(config.validation_data)), tokenizer, length, config.long_rows)
    rows = open_rows(config.validation_data, rank)
    source = Source(rows, tokenizer, length, config.long_rows, config.seed, 0, vocabulary)
    return validation_documents(source, 2**64, config.validation_sequences)


def _check_vocabulary(config: Config, tokenizer: Any, vocabulary: int, documents: list[Document]) -> None:
    largest = max(int(document.tokens.max()) for document in documents)
    if largest >= vocabulary:
        raise BadInput(
            f"the tokenizer of {config.model} gives token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), and"
            f" its model has {vocabulary} embeddings; the two are of different models"
        )


def _validation_batches(
    config: Config, documents: list[Document], rank: int, world_size: int
) -> tuple[list[Batch], int]:
    """This rank's batches, and the number of packed sequences of all ranks."""
    sequences = pack_documents(documents, config.sequence_length)[: config.validation_sequences or None]
    return rank_batches(sequences, config.sequence_length, config.micro_batch, rank, world_size), len(sequences)


def check_same_data(data: Data, world: World) -> None:
    """Raise BadInput where ranks have read different data. All ranks must call."""
    found = world.gather(data.fingerprint)
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            shards = world.gather(data.shards)
            difference = first_difference(shards[0], shards[rank])
            raise BadInput(
                f"ranks 0 and {rank} have read different data{f': on rank {rank} {difference}' if difference else ''};"
                " give all machines the same files, the same Python (--data stdlib) and the same transformers"
            )


def _fingerprint(documents: list[Document], sequence_length: int, seed: int) -> str:
    digest = hashlib.sha256(f"{sequence_length} {seed} {len(documents)}".encode())
    for document in documents:
        digest.update(len(document.tokens).to_bytes(8, "little"))
        digest.update(document.tokens.tobytes())
        digest.update(document.trained.tobytes())
    return digest.hexdigest()[:16]
