"""Groups: which elements of a tensor share a scale, decided from the global shape alone.

A row is the last dimension, or, where that is shorter than a group (convolutions), all dimensions after the first. A
group is 32 consecutive elements of one row of the global tensor; the row's last group may be partial. Groups never
cross a row, so any sharding of the other dimensions sees the same groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashoptim_dist.formats.spec import GROUP_SIZE


def rows_are_flattened(shape: Sequence[int]) -> bool:
    """Return whether a row is all dimensions after the first (True) or the last dimension (False)."""
    return len(shape) > 2 and shape[-1] < GROUP_SIZE


def row_length(shape: Sequence[int]) -> int:
    """Return the number of elements in a row of a tensor of this global shape (1 for a scalar)."""
    if not shape:
        return 1
    return math.prod(shape[1:]) if rows_are_flattened(shape) else shape[-1]


def is_quantized_shape(shape: Sequence[int]) -> bool:
    """Return whether moments of a parameter of this *global* shape are compressed: ndim >= 2 and rows of 32 or more."""
    return len(shape) >= 2 and row_length(shape) >= GROUP_SIZE


def groups_per_row(shape: Sequence[int]) -> int:
    """Return the number of groups in a row, the partial one included."""
    return -(-row_length(shape) // GROUP_SIZE)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales: the parameter's, its last (or flattened) dimension replaced by groups per row."""
    leading = shape[:1] if rows_are_flattened(shape) else shape[:-1]
    return (*leading, groups_per_row(shape))


def to_rows(tensor: Tensor) -> Tensor:
    """View (or copy, if strided) a tensor as [rows, row length]; local shards of a sharded tensor keep its row rule.

    The caller passes local shards reshaped already where the local shape would decide otherwise.
    """
    length = row_length(tensor.shape)
    return tensor.reshape(-1, length) if tensor.numel() else tensor.reshape(0, length)


def to_groups(rows: Tensor) -> Tensor:
    """Cut rows [R, n] into groups [R * ceil(n/32), 32], the last group of each row padded with zeros."""
    count, length = rows.shape
    padding = -length % GROUP_SIZE
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    return rows.reshape(count * ((length + padding) // GROUP_SIZE), GROUP_SIZE)


def from_groups(groups: Tensor, count: int, length: int) -> Tensor:
    """Undo :func:`to_groups`: return rows [count, length], the padding dropped."""
    padded = length + -length % GROUP_SIZE
    return groups.reshape(count, padded)[:, :length]
