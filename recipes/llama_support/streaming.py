"""Training steps from rows that are read, encoded and packed as they are needed, the same for any number of ranks.

A global batch of B sequences has B lanes. All epochs, each in an order of its own, make one endless row of places; lane
b takes the places b, b + B, b + 2 B, ... and packs what it finds there into one sequence per step. A lane depends on
nothing but the data and its own state, so it does not matter which rank, or which process of a rank, it is worked on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .encode import Document, EncodingReport, encode_batch
from .errors import BadInput
from .interrupts import SIGNALS
from .packing import StepBatches, rank_batches, trained_positions
from .rows import Row
from .shards import ShardedRows
from .shuffle import Shuffled
from .world import World

POOL = 32
"""Encoded rows that a lane chooses from when it fills a sequence."""

_MOST_LEFT_OUT_IN_A_ROW = 100_000
_COUNTS = ("used", "truncated", "too_long", "without_target")
_EPOCH_FACTOR = 1_000_003
LaneState = list[int]
"""The lane's next place, then the places of the rows in its pool, in order."""


@dataclass(frozen=True)
class Source:
    """What is needed to turn a place into a document.

    Attributes:
        rows: all rows.
        tokenizer: as `encode_rows` takes it.
        context, long_rows: as `encode_rows` takes them.
        seed: of the order.
        threshold: rows with a smaller digest are validation rows and left out.
        vocabulary: tokens have to be below it.
    """

    rows: ShardedRows
    tokenizer: Any
    context: int
    long_rows: str
    seed: int
    threshold: int
    vocabulary: int

    def number(self, place: int) -> int:
        """The row at a place."""
        epoch, within = divmod(place, len(self.rows))
        return _order(len(self.rows), self.seed * _EPOCH_FACTOR + epoch)[within]

    def encode(self, numbers: list[int], report: EncodingReport) -> list[Document | None]:
        """The documents of some rows, None for those that cannot be used; `report` counts on.

        Raises BadInput, with file and line, for a row that the model's chat template or vocabulary does not allow.
        """
        rows = [self.rows.row(number) for number in numbers]
        try:
            documents = encode_batch(rows, self.tokenizer, self.context, self.long_rows, report)
        except BadInput:
            self._name_bad_row(numbers, rows)
            raise
        for number, document in zip(numbers, documents):
            if document is not None and int(document.tokens.max()) >= self.vocabulary:
                largest = int(document.tokens.max())
                raise BadInput(
                    f"{self.rows.origin(number)}: the tokenizer gives token {largest}"
                    f" ({self.tokenizer.convert_ids_to_tokens(largest)!r}), and the model has {self.vocabulary}"
                    " embeddings; the two are of different models"
                )
        return documents

    def _name_bad_row(self, numbers: list[int], rows: list[Row]) -> None:
        """Raise the BadInput of the first row that cannot be encoded by itself, under its file and line."""
        for number, row in zip(numbers, rows):
            try:
                encode_batch([row], self.tokenizer, self.context, self.long_rows, EncodingReport())
            except BadInput as error:
                raise BadInput(str(error).replace(row.origin, self.rows.origin(number), 1)) from error


@functools.lru_cache(maxsize=8)
def _order(count: int, seed: int) -> Shuffled:
    return Shuffled(count, seed)


class Lane:
    """One sequence per step, packed from the lane's own places."""

    def __init__(self, source: Source, stride: int, state: LaneState) -> None:
        """Go on from `state`; `stride` is the number of lanes."""
        self._source = source
        self._stride = stride
        self._next = state[0]
        self._to_restore = state[1:]
        self._pool: list[tuple[int, Document]] = []

    def state(self) -> LaneState:
        """Where the lane stands. Equal states go on equally."""
        return [self._next, *self._to_restore, *(place for place, _ in self._pool)]

    def wants(self) -> list[int]:
        """Places whose documents the lane has to be given, in this order, before it can pack; empty: none."""
        if self._to_restore:
            return self._to_restore
        return [self._next + self._stride * index for index in range(POOL - len(self._pool))]

    def give(self, places: list[int], documents: list[Document | None]) -> None:
        """Take the documents of all that the lane wants."""
        self._pool += [(place, document) for place, document in zip(places, documents) if document is not None]
        if self._to_restore:
            self._to_restore = []
        else:
            self._next += self._stride * len(places)

    def pack(self) -> list[Document]:
        """The next sequence: the oldest document of the pool, then again and again the longest that still fits."""
        chosen = [self._pool.pop(0)]
        room = self._source.context - _length(chosen[0][1])
        while True:
            fitting = [index for index, (_, document) in enumerate(self._pool) if _length(document) <= room]
            if not fitting:
                return [document for _, document in chosen]
            longest = max(fitting, key=lambda index: (_length(self._pool[index][1]), -index))
            chosen.append(self._pool.pop(longest))
            room -= _length(chosen[-1][1])


def _length(document: Document) -> int:
    return len(document.tokens) - 1


@dataclass
class Part:
    """What some lanes of a rank give to one step.

    Attributes:
        sequences: one per lane.
        states: of the lanes after the step.
        counts: rows that were used, truncated, too long and without target, for this part of the step.
        failure: why there is no more; empty: nothing is wrong.
    """

    sequences: list[list[Document]] = field(default_factory=list)
    states: list[LaneState] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * len(_COUNTS))
    failure: str = ""


class LaneParts(IterableDataset[Part]):
    """An endless stream of the parts of some lanes; each worker of a loader has an equal share of the lanes."""

    def __init__(self, source: Source, stride: int, states: list[LaneState]) -> None:
        super().__init__()
        self._source = source
        self._stride = stride
        self._states = states

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        share = -(-len(self._states) // workers)
        states = self._states[worker * share : (worker + 1) * share]
        lanes = [Lane(self._source, self._stride, state) for state in states]
        try:
            self._fill(lanes, restoring=True)
            while True:
                counts = self._fill(lanes)
                sequences = [lane.pack() for lane in lanes]
                yield Part(sequences, [lane.state() for lane in lanes], counts)
        except BadInput as error:
            # As a value: what a worker raises comes out of the loader wrapped in a traceback.
            yield Part(failure=str(error))
        except OSError as error:
            yield Part(failure=f"cannot read on in the data ({error}); see that it is where it was, and start again")

    def _fill(self, lanes: list[Lane], restoring: bool = False) -> list[int]:
        """Fill the lanes' pools, all lanes in one go; returns how many rows became what."""
        report = EncodingReport()
        left_out = 0
        waiting = [lane for lane in lanes if lane.state()[1:]] if restoring else lanes
        while waiting:
            wanted = [lane.wants() for lane in waiting]
            places = [place for each in wanted for place in each]
            numbers = [self._source.number(place) for place in places]
            training = [n for n in numbers if self._source.rows.digest(n) >= self._source.threshold]
            documents = iter(self._source.encode(training, report))
            given = [
                next(documents) if self._source.rows.digest(n) >= self._source.threshold else None for n in numbers
            ]
            found = iter(given)
            for lane, each in zip(waiting, wanted):
                lane.give(each, [next(found) for _ in each])
            left_out = 0 if any(document is not None for document in given) else left_out + len(places)
            if left_out > min(4 * len(self._source.rows) + 1000, _MOST_LEFT_OUT_IN_A_ROW):
                raise BadInput(
                    f"none of the last {left_out} rows can be used ({report}); raise --sequence-length (now"
                    f" {self._source.context}), use --long-rows truncate, or give other data"
                )
            waiting = [] if restoring else [lane for lane in waiting if lane.wants()]
        return [getattr(report, name) for name in _COUNTS]


class StreamedSteps:
    """A rank's training steps, and the data loader of a checkpoint: its state is that of all lanes, on every rank."""

    def __init__(
        self,
        source: Source,
        *,
        fingerprint: str,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        workers: int,
    ) -> None:
        """Begin at the first place.

        Args:
            source: of the documents.
            fingerprint: of all that the documents and their order depend on.
            global_batch: sequences per step, over all ranks.
            micro_batch: most sequences per forward pass.
            rank: of the caller.
            world_size: number of ranks.
            workers: processes that read, encode and pack; 0: this one does.
        """
        self._source = source
        self.fingerprint = fingerprint
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._world_size = world_size
        share = -(-global_batch // world_size)
        self._first = min(rank * share, global_batch)
        self._mine = min(share, global_batch - self._first)
        self._share = share
        self._workers = min(workers, self._mine)
        self._states: list[LaneState] = [[lane] for lane in range(global_batch)]
        self._counts = [0] * len(_COUNTS)

    @property
    def dataset(self) -> StreamedSteps:
        """Itself, which has the fingerprint."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The lanes' states after the last step that was taken, equal on all ranks."""
        return {"lanes": self._states, "counts": self._counts, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a state of the same data, of any number of ranks and workers. Raises BadInput for another's."""
        if "lanes" not in state or state["fingerprint"] != self.fingerprint:
            raise BadInput(
                "the checkpoint's position is one in other data (rows, tokenizer, --sequence-length, --long-rows,"
                " --validation-fraction or --seed have changed); give the same as before"
            )
        if len(state["lanes"]) != self._global_batch:
            raise BadInput(
                f"--global-batch is {self._global_batch}, and the checkpoint's streamed data is read in"
                f" {len(state['lanes'])} lanes, one per sequence of a step; give --global-batch {len(state['lanes'])}"
            )
        self._states = [list(lane) for lane in state["lanes"]]
        self._counts = list(state["counts"])

    def __str__(self) -> str:
        """What became of the rows so far, over all ranks and starts."""
        report = EncodingReport(**dict(zip(_COUNTS, self._counts)))
        places = sum(state[0] // self._global_batch for state in self._states)
        return f"{report} so far, epoch {places / len(self._source.rows):.2f}"

    def steps(self, world: World) -> Iterator[StepBatches]:
        """Endless steps from the present state on. All ranks must take them together: they agree on each.

        Raises BadInput, on every rank, for a row that cannot be used or a shard that has changed.
        """
        with _closed_in_the_end(self._parts()) as parts:
            while True:
                failure: Exception | None = None
                part = Part()
                try:
                    part = next(parts)
                    failure = BadInput(part.failure) if part.failure else None
                except Exception as error:  # a worker that was killed: the other ranks have to know
                    failure = error
                trained = self._agree(world, part, failure)
                sequences = part.sequences + [[] for _ in range(self._share - len(part.sequences))]
                batches = rank_batches(sequences, self._source.context, self._micro_batch, 0, 1)
                yield StepBatches(batches, trained_tokens=trained)

    def _parts(self) -> Generator[Part, None, None]:
        """This rank's part of each step, put together from its workers'."""
        if self._mine == 0:
            while True:
                yield Part()
        states = self._states[self._first : self._first + self._mine]
        loader = DataLoader(
            LaneParts(self._source, self._global_batch, states),
            batch_size=None,
            num_workers=self._workers,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # its own: drawing a seed must not shift the global one
        )
        with _signals_wait():
            items = iter(loader)
        try:
            while True:
                whole = Part()
                for _ in range(max(1, self._workers)):
                    part = next(items)
                    whole.sequences += part.sequences
                    whole.states += part.states
                    whole.counts = [a + b for a, b in zip(whole.counts, part.counts)]
                    whole.failure = whole.failure or part.failure
                    if whole.failure:
                        break
                yield whole
        finally:
            # Not left to the collection of `items`: an error keeps it in its traceback, and then Python would wait in
            # the end for workers that are deaf to its SIGTERM.
            if self._workers:
                items._shutdown_workers()  # type: ignore[attr-defined]

    def _agree(self, world: World, part: Part, failure: Exception | None) -> int:
        """Let all ranks know all lanes' states, or that there is no step; returns the trained tokens of all ranks."""
        width = 1 + POOL
        head = 2 + len(_COUNTS)
        table = torch.zeros(head + self._global_batch * width, dtype=torch.int64)
        table[0] = failure is not None
        table[1] = sum(trained_positions(document) for sequence in part.sequences for document in sequence)
        table[2:head] = torch.tensor(part.counts)
        lanes = table[head:].view(self._global_batch, width)
        for number, state in enumerate(part.states, start=self._first):
            lanes[number, : len(state)] = torch.tensor(state) + 1  # 0: nothing there
        if world.size > 1:
            on_device = table.to(world.device)
            dist.all_reduce(on_device)  # each lane is of one rank, and zero elsewhere: the sum is the collection
            table = on_device.cpu()
            lanes = table[head:].view(self._global_batch, width)
        if table[0]:
            with world.all_or_none():
                if failure is not None:
                    raise failure
        self._counts = [a + b for a, b in zip(self._counts, table[2:head].tolist())]
        self._states = [[place - 1 for place in lane if place] for lane in lanes.tolist()]
        return int(table[1])


@contextlib.contextmanager
def _closed_in_the_end(parts: Generator[Part, None, None]) -> Iterator[Iterator[Part]]:
    """Close `parts`, and with it the workers, after the block, or where Python ends before that.

    At its end Python waits for workers that nobody has told to stop; an error keeps them where its traceback is kept.
    """
    atexit.register(parts.close)  # runs before multiprocessing's own, which was registered first
    try:
        yield parts
    finally:
        parts.close()
        atexit.unregister(parts.close)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Processes that are started in the block get no SIGTERM or SIGINT before they have seen to them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(_: int) -> None:
    # The rank answers signals, by saving: its workers have to go on until the step under way is done, whoever else is
    # told to end, and how often.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_rank, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with_rank() -> None:
    # The loader's own watch over the rank looks only between two parts, and not while a full queue is waited for.
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)
