"""Where a rank's part of a parameter lies in the global tensor, and the group grid on it.

A parameter is a plain tensor or a DTensor of any placements. Everything here follows from the global shape, the mesh
and the placements; nothing communicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Replicate

from flashoptim_dist.formats import (
    GROUP_SIZE,
    groups_per_row,
    is_quantized_shape,
    rows_are_flattened,
    scale_shape,
)


class ShardingError(ValueError):
    """A placement that the number format cannot follow; the message names the parameter and the way out."""


@dataclass(frozen=True)
class ShardLayout:
    """A rank's part of one parameter, seen as rows.

    The local tensor is a box of the global one. Its rows are its last dimension, or all dimensions after the first
    where ``flattened``. ``row_starts()[r] + j`` is the global linear index of element j of local row r.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]
    quantized: bool
    flattened: bool
    scale_global_shape: tuple[int, ...]
    scale_local_shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of local elements."""
        return math.prod(self.local_shape)

    @property
    def length(self) -> int:
        """Number of local elements in a row."""
        if not self.local_shape:
            return 1
        return math.prod(self.local_shape[1:]) if self.flattened else self.local_shape[-1]

    @property
    def rows(self) -> int:
        """Number of local rows."""
        return self.numel // self.length if self.numel else 0

    @property
    def groups_per_row(self) -> int:
        """Number of groups in a local row, a partial one included."""
        return -(-self.length // GROUP_SIZE)

    @property
    def index_base(self) -> int | None:
        """Global index of the first local element where local elements are consecutive globally, else None."""
        if self.numel == 0:
            return 0
        if self.local_shape[1:] != self.global_shape[1:]:
            return None
        return self.offset[0] * math.prod(self.global_shape[1:]) if self.global_shape else 0

    def row_starts(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the global linear index of each local row's first element: int64 [rows]."""
        if not self.global_shape:
            return torch.zeros(1, dtype=torch.int64, device=device)
        if self.numel == 0:
            return torch.zeros(0, dtype=torch.int64, device=device)
        strides = [math.prod(self.global_shape[d + 1 :]) for d in range(len(self.global_shape))]
        first_column_dim = 1 if self.flattened else len(self.global_shape) - 1
        starts = torch.zeros((), dtype=torch.int64, device=device)
        for dim, stride in enumerate(strides):
            if dim < first_column_dim:
                position = torch.arange(self.local_shape[dim], dtype=torch.int64, device=device) + self.offset[dim]
                starts = starts.unsqueeze(-1) + position * stride
            else:
                starts = starts + self.offset[dim] * stride
        return starts.reshape(-1)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor (no communication, no autograd), or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_layout(parameter: Tensor, name: str, *, quantize: bool = True) -> ShardLayout:
    """Return the layout of this rank's part of a parameter.

    Args:
        parameter: plain tensor or DTensor.
        name: how errors call it.
        quantize: False if its moments stay in fp32 whatever its shape; rows may then be cut anywhere.

    Raises:
        ShardingError: a Partial placement; a sharded row whose cuts do not fall on groups; a layout that is no box.
    """
    shape = tuple(parameter.shape)
    quantized = quantize and is_quantized_shape(shape)
    flattened = quantized and rows_are_flattened(shape)
    scales = scale_shape(shape) if quantized else ()
    if not isinstance(parameter, DTensor):
        return ShardLayout(name, shape, shape, (0,) * len(shape), quantized, flattened, scales, scales)
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    if any(isinstance(placement, Partial) for placement in placements):
        raise ShardingError(
            f"parameter {name!r} {shape} has a Partial placement {placements}: redistribute it to Shard or Replicate"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        empty = tuple(parameter._local_tensor.shape)  # what torch holds there, (0,) for every shape
        return ShardLayout(name, shape, empty, (0,) * len(empty), quantized, flattened, scales, (0,) * len(scales))
    mesh_shape = tuple(mesh.shape)
    if quantized:
        problem = _row_cut_problem(shape, mesh_shape, placements)
        if problem:
            raise ShardingError(
                f"parameter {name!r} {shape} with placements {placements} on a mesh of {mesh_shape}: {problem}. Shard "
                f"another dimension, pad the row so that every cut falls on a multiple of {GROUP_SIZE}, or pass "
                "quantize=False"
            )
    local_shape, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
    actual = tuple(parameter._local_tensor.shape)
    if actual != tuple(local_shape) and math.prod(actual) + math.prod(local_shape) > 0:
        raise ShardingError(
            f"parameter {name!r} {shape} with placements {placements} on a mesh of {mesh_shape}: this rank holds "
            f"{actual} where the placements say {tuple(local_shape)}. Make it with distribute_tensor or fully_shard"
        )
    if math.prod(local_shape) and not _is_box(shape, mesh_shape, tuple(coordinate), placements):
        raise ShardingError(
            f"parameter {name!r} {shape} with placements {placements} on a mesh of {mesh_shape}: this rank's elements "
            "are not one block of the global tensor (an uneven strided shard). Make the sharded dimension divisible by "
            "the mesh size"
        )
    scale_local: tuple[int, ...] = ()
    if quantized:
        scale_local, _ = _compute_local_shape_and_global_offset(scales, mesh_shape, list(coordinate), placements)
    return ShardLayout(name, shape, tuple(local_shape), tuple(offset), quantized, flattened, scales, tuple(scale_local))


def like_parameter(local: Tensor, parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Wrap a rank's part of a state as a DTensor with the parameter's mesh and placements (plain for a plain
    parameter).

    Shape and stride are stated explicitly, so that uneven and empty shards get the right global shape. The local
    tensor stays on its device, also where the mesh is of another kind (offloaded to the host). No communication.
    """
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size(shape)
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    mesh, placements = parameter.device_mesh, parameter.placements
    if local.device.type in (mesh.device_type, "meta"):
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    # from_local would move it to the mesh's device, as FSDP2's own parameters under CPUOffloadPolicy are not.
    form = DTensor.from_local(local.to("meta"), mesh, placements, run_check=False, shape=shape, stride=stride)
    return DTensor(local, form._spec, requires_grad=False)


def shards_dim(placement: Any, dim: int) -> bool:
    """Return whether a placement (Shard or a strided shard, which is no Shard subclass everywhere) cuts ``dim``."""
    return not isinstance(placement, Replicate) and getattr(placement, "dim", None) == dim


@lru_cache(maxsize=4096)
def _row_cut_problem(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> str | None:
    """Say what is wrong with the cuts through rows, for any rank; None where all of them fall on groups."""
    flattened = rows_are_flattened(shape)
    first = 1 if flattened else len(shape) - 1
    cutting = [i for i, p in enumerate(placements) if any(shards_dim(p, d) for d in range(first, len(shape)))]
    if flattened and any(not shards_dim(placements[i], 1) for i in cutting):
        # Not on a mesh of one rank either: the scales, of 2 dimensions, could not have the parameter's placements.
        return "the short last dimensions of a convolution cannot be sharded"
    cutting = [i for i in cutting if mesh_shape[i] > 1]
    if not cutting:
        return None
    inner = math.prod(shape[2:]) if flattened else 1
    scale_dims = (shape[0], groups_per_row(shape)) if flattened else (*shape[:-1], groups_per_row(shape))
    for position in itertools.product(*(range(mesh_shape[i]) for i in cutting)):
        coordinate = [0] * len(mesh_shape)
        for i, c in zip(cutting, position, strict=True):
            coordinate[i] = c
        local, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, coordinate, placements)
        if local[first] == 0:
            start = None
        else:
            start, end = offset[first] * inner, (offset[first] + local[first]) * inner
            last = shape[first] * inner
            if start % GROUP_SIZE or (end % GROUP_SIZE and end != last):
                return (
                    f"a rank would hold columns {start} to {end} of rows of {last}, which cuts a group of {GROUP_SIZE}"
                )
        groups, group_offset = _compute_local_shape_and_global_offset(scale_dims, mesh_shape, coordinate, placements)
        held = 0 if start is None else -(-local[first] * inner // GROUP_SIZE)
        if groups[first] != held or (start is not None and held and group_offset[first] * GROUP_SIZE != start):
            return f"the {groups_per_row(shape)} scales of a row of {shape[first] * inner} would be cut elsewhere"
    return None


@lru_cache(maxsize=4096)
def _is_box(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> bool:
    """Return whether the elements that strided shards give a rank are consecutive in every dimension."""
    for dim, size in enumerate(shape):
        cuts = [i for i, p in enumerate(placements) if shards_dim(p, dim)]
        if not any(hasattr(placements[i], "split_factor") for i in cuts):
            continue
        held = torch.arange(size).reshape([1] * dim + [size])
        # A strided shard stands left of the shard that it was applied after: torch cuts right to left there. The public
        # functions cut in mesh order over the reordered pieces; splitting the index itself shows what a rank gets.
        for i in cuts:
            pieces, _ = placements[i]._split_tensor(held, mesh_shape[i], with_padding=False, contiguous=True)
            held = pieces[coordinate[i]]
        held = held.reshape(-1)
        if held.numel() and int(held[-1] - held[0]) + 1 != held.numel():
            return False
    return True
