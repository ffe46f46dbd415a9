"""Tensors that stay on disk: read in blocks of rows, so that no model and no whole checkpoint is ever in memory.

Rows are slices along the first dimension. A group of the number format never crosses it, so a block of a parameter
has the same groups as the parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.checkpoint.errors import CheckpointFormatError, DamagedCheckpointError

BLOCK_ELEMENTS = 1 << 16
"""Elements that are read and computed at once; a row may have more. Larger blocks are slower: they leave the cache."""

CHUNK_ELEMENTS = 1 << 19
"""Elements of a chunk of a DCP directory, unless a tensor would then have more than ``CHUNKS_PER_TENSOR``: each is an
entry of the metadata."""

CHUNKS_PER_TENSOR = 16


class LazyTensor:
    """A tensor of known shape and dtype that is read when it is asked for.

    ``where`` says in errors where it lies; ``identity`` is equal for two tensors that are the same bytes on disk.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, where: str, identity: Hashable | None = None) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.where = where
        self.identity = identity

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.numel * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Number of rows; a scalar is one."""
        return self.shape[0] if self.shape else 1

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop``, contiguous, on the CPU; of a scalar, the scalar."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """Return all of it."""
        return self.rows(0, self.length)


class FileTensor(LazyTensor):
    """A contiguous tensor whose bytes lie in a file."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, file: Path, offset: int, where: str) -> None:
        super().__init__(shape, dtype, where, (file, offset))
        self.file = file
        self.offset = offset

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows, read from the file.

        Raises:
            DamagedCheckpointError: the file ends too early.
        """
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        result = torch.empty(shape, dtype=self.dtype)
        if result.numel() == 0:
            return result
        target = bytes_of(result)
        try:
            with open(self.file, "rb", buffering=0) as stream:
                stream.seek(self.offset + start * (self.nbytes // self.length))
                done = 0
                while done < len(target):
                    count = stream.readinto(target[done:])  # a single call reads 2 GiB at most
                    if not count:
                        raise DamagedCheckpointError(f"{self.where} is cut short: {self.file} ends before it does")
                    done += count
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.file} is missing") from None
        return result


class MemoryTensor(LazyTensor):
    """A tensor that is in memory already, such as a step counter."""

    def __init__(self, value: Tensor, where: str) -> None:
        super().__init__(value.shape, value.dtype, where)
        self._value = value

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows."""
        return (self._value[start:stop] if self.shape else self._value).contiguous()


class ComputedTensor(LazyTensor):
    """A tensor whose rows are computed from others."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, where: str, compute: Callable[[int, int], Tensor]
    ) -> None:
        super().__init__(shape, dtype, where)
        self._compute = compute

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows."""
        return self._compute(start, stop).contiguous()


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


class ChunkedTensor(LazyTensor):
    """A tensor that lies on disk in boxes, as the ranks of a training run wrote it."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        where: str,
        boxes: Sequence[Box],
        open_chunk: Callable[[Box], LazyTensor],
        identity: Hashable | None = None,
    ) -> None:
        """Make it of boxes that cover it; a chunk is opened when rows of it are first read."""
        super().__init__(shape, dtype, where, identity)
        self.boxes = sorted(boxes)
        self._open_chunk = open_chunk
        self._opened: dict[Box, LazyTensor] = {}

    def chunk(self, box: Box) -> LazyTensor:
        """Return one chunk."""
        if box in self._opened:
            return self._opened[box]
        chunk = self._open_chunk(box)
        if isinstance(chunk, FileTensor):  # what is in memory must not stay there
            self._opened[box] = chunk
        return chunk

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows, put together from the chunks that hold some.

        Raises:
            DamagedCheckpointError: the chunks don't cover them.
        """
        if not self.shape:
            if not self.boxes:
                raise DamagedCheckpointError(f"{self.where} is not whole: nothing of it is there")
            return self.chunk(self.boxes[0]).rows(0, 1)
        result: Tensor | None = None
        filled = 0
        for offsets, sizes in self.boxes:
            first, last = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if first >= last or not math.prod(sizes):
                continue
            part = self.chunk((offsets, sizes)).rows(first - offsets[0], last - offsets[0])
            if (first, last) == (start, stop) and sizes[1:] == self.shape[1:]:
                return part
            if result is None:
                result = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
            target = result[first - start : last - start]
            for dim in range(1, len(self.shape)):
                target = target.narrow(dim, offsets[dim], sizes[dim])
            target.copy_(part)
            filled += part.numel()
        if result is None:
            result = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        if filled != result.numel():
            raise DamagedCheckpointError(f"{self.where} is not whole: its chunks hold {filled} of {result.numel()}")
        return result


def blocks(shape: Sequence[int], start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """Return the blocks of rows, as (start, stop), in which a tensor of this shape (or some rows) is worked through."""
    stop = (shape[0] if shape else 1) if stop is None else stop
    return _cut(start, stop, -(-math.prod(shape[1:]) * (stop - start) // BLOCK_ELEMENTS))


def chunks(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return the blocks of rows, as (start, stop), that a tensor of this shape is written in to a DCP directory."""
    count = min(CHUNKS_PER_TENSOR, -(-math.prod(shape) // CHUNK_ELEMENTS))
    return _cut(0, shape[0] if shape else 1, count)


def _cut(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    count = max(1, min(count, stop - start))
    edges = [start + (stop - start) * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def in_blocks(tensor: LazyTensor) -> Iterator[Tensor]:
    """Yield a tensor block by block."""
    for start, stop in blocks(tensor.shape):
        yield tensor.rows(start, stop)


def cast(values: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Return values in another dtype, rounded to nearest.

    Raises:
        CheckpointFormatError: a finite one would become infinite; ``where`` is named.
    """
    result = values.to(dtype)
    if dtype != values.dtype and bool((torch.isinf(result) & torch.isfinite(values)).any()):
        raise CheckpointFormatError(
            f"{where} has elements beyond the range of {str(dtype).removeprefix('torch.')}, which would become "
            "infinite: choose bf16 or fp32"
        )
    return result


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def same_contents(left: LazyTensor, right: LazyTensor) -> bool:
    """Return whether two tensors are bit-equal; reads both, up to the first difference."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.identity is not None and left.identity == right.identity:
        return True
    return all(bytes_of(left.rows(*block)) == bytes_of(right.rows(*block)) for block in blocks(left.shape))
