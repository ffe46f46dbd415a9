"""Sum norms over ranks with as few collectives as there are sets of ranks, and over groups that make nothing hang."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from flashoptim_dist.sharding.process_groups import can_make_a_group, device_served

Ranks = tuple[int, ...]


@dataclass
class MeshSums:
    """Which ranks and replication belong to each bucket of squares.

    Derived from the parameters alone, those without a gradient included, so that all ranks of a mesh take part in its
    reduction. Meshes of the same ranks share one. Bucket 0 holds plain tensors, of which there may be none.
    """

    has_plain: bool = False
    meshes: list[tuple[DeviceMesh, Ranks]] = field(default_factory=list)
    """One mesh for each set of ranks, in the order of the reductions."""
    keys: dict[tuple[int, int], int] = field(default_factory=lambda: {(-1, 1): 0})
    """By the number of the mesh and how often its ranks hold the same elements: the bucket."""
    _numbers: dict[DeviceMesh, int] = field(default_factory=dict)

    def bucket(self, tensor: Tensor) -> int:
        """Return the bucket of a tensor's squares: its mesh's ranks, and on how many of them the same ones lie."""
        if not isinstance(tensor, DTensor):
            self.has_plain = True
            return 0
        mesh = tensor.device_mesh
        number = self._numbers.get(mesh)
        if number is None:
            ranks = ranks_of(mesh)
            places = [(known, other.device_type) for other, known in self.meshes]
            if (ranks, mesh.device_type) not in places:
                places.append((ranks, mesh.device_type))
                self.meshes.append((mesh, ranks))
            number = self._numbers[mesh] = places.index((ranks, mesh.device_type))
        return self.keys.setdefault((number, replicas_of(tensor)), len(self.keys))

    def total(self, sums: Tensor, infinity: bool) -> Tensor:
        """Reduce the buckets' sums over their meshes; return the sum over all, fp64, 0-dim. All ranks must call."""
        parts = sums.unbind()
        total = parts[0] if self.has_plain or not self.meshes else None
        for number, (mesh, ranks) in enumerate(self.meshes):
            # Every replica counts for its part of one, so that all ranks of the mesh get the same number, even where
            # replicas differ.
            mine = [
                parts[bucket] if infinity or replicas == 1 else parts[bucket] / replicas
                for (of_mesh, replicas), bucket in self.keys.items()
                if of_mesh == number
            ]
            value = mine[0]
            if len(mine) > 1:
                value = torch.stack(mine).max() if infinity else torch.stack(mine).sum()
            value = reduce_over(value, groups_over(mesh, ranks), infinity)
            if total is None:
                total = value
            else:
                total = torch.maximum(total, value) if infinity else total + value
        assert total is not None
        return total


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """Return all ranks of a mesh, in order; of a slice, those of the part that this rank is in."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def replicas_of(tensor: DTensor) -> int:
    """Return on how many ranks of its mesh the same elements of a tensor lie."""
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, p in enumerate(tensor.placements) if isinstance(p, Replicate))


def reduce_over(value: Tensor, groups: Sequence[dist.ProcessGroup], infinity: bool) -> Tensor:
    """All-reduce a norm's part (fp64, 0-dim, not negative) over one group after the other, on a device that the group
    serves; return it on its own. All ranks of the groups must call.
    """
    for group in groups:
        moved = value.to(device_served(group, value.device))
        if infinity:
            # NaN is lost in some backends' maximum. As integers, magnitudes are in order and NaN is above Inf.
            packed = moved.abs().view(torch.int64)
            dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
            value = packed.view(torch.float64).to(value.device)
        else:
            # Two elements: backends may add up the ranks in another order, to other bits, where they are given one.
            packed = torch.stack([moved, moved])
            dist.all_reduce(packed, op=dist.ReduceOp.SUM, group=group)
            value = packed[0].to(value.device)
    return value


# ---------------------------------------------------------------------- groups over all ranks of a mesh


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Ranks, str], dist.ProcessGroup | None]] = (
    weakref.WeakKeyDictionary()
)
"""By the default group, which all others end with: the group over some ranks, or None where none can be made."""


def groups_over(mesh: DeviceMesh, ranks: Ranks) -> list[dist.ProcessGroup]:
    """Return the groups over which a reduction, one after the other, is one over all ranks of a mesh.

    One where there is or can be one: that of the only dimension of more than one rank, the default group, a mesh that
    the program has flattened, or one made at the first call and kept. Else one for each dimension of more than one
    rank. All ranks of the mesh must call; the others need not.
    """
    wide = _wide_groups(mesh)
    default = dist.group.WORLD
    if len(wide) < 2 or default is None or not _same_backend(default, wide[0], mesh.device_type):
        return wide
    if len(ranks) == dist.get_world_size():
        return [default]
    made = _made.setdefault(default, {})
    key = ranks, mesh.device_type
    if key not in made:
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        flattened = getattr(root, "_flatten_mapping", {}).values()
        existing = [other for other in flattened if other.get_coordinate() is not None and ranks_of(other) == ranks]
        made[key] = existing[0].get_group() if existing else _make_group(ranks, wide)
    group = made[key]
    return wide if group is None else [group]


def own_groups_over(mesh: DeviceMesh, ranks: Ranks) -> list[dist.ProcessGroup]:
    """Return the same of groups that nothing else uses; those of the mesh where such a one cannot be made.

    Makes a group in each call. All ranks of the mesh must call; the others need not.
    """
    wide = _wide_groups(mesh)
    if not wide:
        return []
    group = dist.new_group(list(ranks)) if len(ranks) == dist.get_world_size() else _make_group(ranks, wide)
    return wide if group is None else [group]


def _wide_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of a mesh's dimensions of more than one rank; none where this rank is not in the mesh."""
    groups = mesh.get_all_groups() if mesh.get_coordinate() is not None else []
    return [group for group in groups if dist.get_world_size(group) > 1]


def _same_backend(default: dist.ProcessGroup, other: dist.ProcessGroup, device_type: str) -> bool:
    device = torch.device(device_type)
    if device_type not in {d.type for d in default._device_types}:
        return False
    return bool(default._get_backend(device).name() == other._get_backend(device).name())


def _make_group(ranks: Ranks, wide: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Make a group over a part of all ranks, without those outside; None where torch cannot do that.

    It cannot where the default group was given a device (``init_process_group(device_id=)``): NCCL then splits its
    communicator, in which all of its ranks take part.
    """
    default = dist.group.WORLD
    assert default is not None
    alone = (
        getattr(default, "bound_device_id", None) is None
        and dist.get_backend() != dist.Backend.MPI
        and not getattr(getattr(dist, "config", None), "use_torchcomms", False)
    )
    if not can_make_a_group(wide, possible=alone):
        return None
    return dist.new_group(list(ranks), use_local_synchronization=True)
