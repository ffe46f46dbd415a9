"""Tables for many tensors in one launch: geometry of a rank's tensors, tasks, and pointers kept current on the device.

Host code of the kernels; see ``layout`` for what the tables hold. Nothing here synchronizes with the device: a
changed pointer costs one asynchronous copy from pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flashoptim_dist.kernels import layout
from torch import Tensor

GROUP_SIZE = 32
HASH_STRIDE = 0x9E3779B1
SEGMENT_COLUMNS: int = layout.SEGMENT_COLUMNS.value
TASK_COLUMNS: int = layout.TASK_COLUMNS.value
VECTOR_BYTES = 16
_RING = 4


class GeometryError(ValueError):
    """Strides that no segment describes."""


@dataclass(frozen=True)
class Rows:
    """Rows of one tensor as a kernel walks them: geometry and element offsets of a segment."""

    rows: int
    inner_rows: int
    length: int
    inner_columns: int
    weight_offset: int
    gradient_offset: int
    state_offset: int
    index_offset: int
    weight_strides: tuple[int, int, int, int]
    gradient_strides: tuple[int, int, int, int]
    index_strides: tuple[int, int]

    @property
    def groups_per_row(self) -> int:
        """Groups in a row, a partial one included."""
        return -(-self.length // GROUP_SIZE)


def rows_of(
    sizes: Sequence[int],
    first_column_dim: int,
    weight_strides: Sequence[int],
    gradient_strides: Sequence[int],
    index_strides: Sequence[int],
) -> list[Rows]:
    """Describe a local tensor as rows (dimensions before ``first_column_dim``) of columns (the others).

    Args:
        sizes: local sizes, none zero.
        first_column_dim: number of row dimensions.
        weight_strides: element strides of the weight.
        gradient_strides: element strides of the gradient.
        index_strides: strides of the global tensor.

    Returns:
        One description, or several where rows have more than two levels of strides.

    Raises:
        GeometryError: columns have more than two levels of strides.
    """
    levels = list(zip(sizes, weight_strides, gradient_strides, index_strides))
    columns = _collapse([(size, w, g) for size, w, g, _ in levels[first_column_dim:]])
    if len(columns) > 2:
        raise GeometryError(f"columns of sizes {[c[0] for c in columns]} have more than two levels of strides")
    while len(columns) < 2:
        columns.insert(0, (1, 0, 0))
    (_, outer_w, outer_g), (inner_columns, inner_w, inner_g) = columns
    length = math.prod(c[0] for c in columns)
    rows = _collapse(levels[:first_column_dim])
    outer_levels, rows = rows[:-2], rows[-2:]
    while len(rows) < 2:
        rows.insert(0, (1, 0, 0, 0))
    outer_row, inner_row = rows
    count = outer_row[0] * inner_row[0]
    found = []
    for position in np.ndindex(*(level[0] for level in outer_levels)):
        number = 0
        for index, level in zip(position, outer_levels):
            number = number * level[0] + index
        found.append(
            Rows(
                rows=count,
                inner_rows=inner_row[0],
                length=length,
                inner_columns=inner_columns,
                weight_offset=sum(i * level[1] for i, level in zip(position, outer_levels)),
                gradient_offset=sum(i * level[2] for i, level in zip(position, outer_levels)),
                state_offset=number * count * length,
                index_offset=sum(i * level[3] for i, level in zip(position, outer_levels)),
                weight_strides=(outer_row[1], inner_row[1], outer_w, inner_w),
                gradient_strides=(outer_row[2], inner_row[2], outer_g, inner_g),
                index_strides=(outer_row[3], inner_row[3]),
            )
        )
    return found


def _collapse(levels: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Merge neighbouring dimensions that are one dimension under every stride; drop dimensions of size 1."""
    merged: list[tuple[int, ...]] = []
    for level in levels:
        if level[0] == 1:
            continue
        size = level[0]
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1:], level[1:])):
            merged[-1] = (merged[-1][0] * size, *level[1:])
        else:
            merged.append(tuple(level))
    return merged


def one_row(numel: int) -> Rows:
    """Describe ``numel`` elements that are consecutive in memory and in the global tensor."""
    return Rows(numel and 1, 1, numel, max(numel, 1), 0, 0, 0, 0, (0, 0, 0, 1), (0, 0, 0, 1), (0, 0))


class DeviceTable:
    """An int64 table on the device, refreshed from a ring of pinned copies when its host contents change."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.host = np.zeros((max(rows, 1), columns), dtype=np.int64)
        self.device = torch.zeros(max(rows, 1), columns, dtype=torch.int64, device=device)
        self._cuda = device.type == "cuda"
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def upload(self) -> None:
        """Copy the host contents to the device, in stream order.

        Raises:
            RuntimeError: while a CUDA graph is captured; a replay would read what the host holds then.
        """
        if not self._cuda:
            self.device.copy_(torch.from_numpy(self.host))
            return
        with torch.cuda.device(self.device.device):  # whose stream the copy takes, whatever device is the current one
            self._upload()

    def _upload(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a parameter, gradient or state moved while a CUDA graph is captured; run a step before it and "
                "keep gradients in place with zero_grad(set_to_none=False)"
            )
        if len(self._ring) < _RING:
            pinned = torch.empty(self.host.shape, dtype=torch.int64, pin_memory=True)
            self._ring.append((pinned, torch.cuda.Event()))
            pinned, event = self._ring[-1]
        else:
            pinned, event = self._ring[self._turn % _RING]
            self._turn += 1
            event.synchronize()  # four uploads ago: long done
        pinned.copy_(torch.from_numpy(self.host))
        self.device.copy_(pinned, non_blocking=True)
        event.record()


class TaskList:
    """Tasks of one launch: (segment, first block, number of blocks) each, kept on the device."""

    def __init__(self, blocks_per_task: int) -> None:
        self._blocks_per_task = blocks_per_task
        self._parts: list[np.ndarray] = []
        self.count = 0

    def add(self, segment: int, first_block: int, end_block: int) -> None:
        """Add the blocks [first_block, end_block) of a segment."""
        firsts = np.arange(first_block, end_block, self._blocks_per_task, dtype=np.int64)
        if not len(firsts):
            return
        if end_block >= 1 << 31:
            raise ValueError(f"a segment of {end_block} blocks is beyond the task table's 32 bits")
        part = np.empty((len(firsts), TASK_COLUMNS), dtype=np.int32)
        part[:, 0] = segment
        part[:, 1] = firsts
        part[:, 2] = np.minimum(end_block - firsts, self._blocks_per_task)
        self._parts.append(part)
        self.count += len(part)

    def to(self, device: torch.device) -> Tensor | None:
        """Return the tasks as int32 [tasks, TASK_COLUMNS] on the device, or None where there are none."""
        if not self._parts:
            return None
        table = torch.from_numpy(np.concatenate(self._parts))
        # Pinned, the copy does not make the host wait; torch keeps the memory until it is done.
        return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def fill_segment(
    row: np.ndarray, rows: Rows, *, scalar_row: int, noise: int, index_base: int, addresses: Sequence[int]
) -> None:
    """Write one row of the segment table.

    Args:
        row: int64 [SEGMENT_COLUMNS], written.
        rows: the geometry.
        scalar_row: the parameter's row of the scalar table.
        noise: the parameter's noise key.
        index_base: global index of the tensor's first local element.
        addresses: of weight, gradient, correction, moment 0, scale 0, moment 1, scale 1, offsets included.
    """
    row[0:7] = addresses
    row[layout.SCALAR_ROW.value] = scalar_row
    word = (noise + HASH_STRIDE * (index_base + rows.index_offset)) & 0xFFFFFFFF
    row[layout.NOISE.value] = word - (1 << 32) if word >= 1 << 31 else word
    row[layout.GROUPS.value] = rows.rows * rows.groups_per_row
    row[layout.GROUPS_PER_ROW.value] = rows.groups_per_row
    row[layout.ROW_LENGTH.value] = rows.length
    row[layout.INNER_ROWS.value] = rows.inner_rows
    row[layout.INNER_COLUMNS.value] = rows.inner_columns
    for column, strides in (
        (layout.WEIGHT_STRIDES, rows.weight_strides),
        (layout.GRADIENT_STRIDES, rows.gradient_strides),
        (layout.INDEX_STRIDES, rows.index_strides),
    ):
        row[column.value : column.value + len(strides)] = strides
