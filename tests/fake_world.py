"""Worlds of any size in one process: torch's fake process group, which knows ranks and meshes and sends nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

AXES = ("axis0", "axis1", "axis2")


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a world of this size."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks_of_mesh(sizes: Sequence[int], only: Iterable[int] | None = None) -> Iterator[DeviceMesh]:
    """Be each rank of a CPU mesh of these sizes in turn (or some of them); yield the mesh."""
    world_size = int(torch.Size(sizes).numel())
    for rank in range(world_size) if only is None else only:
        with fake_rank(rank, world_size):
            yield init_device_mesh("cpu", tuple(sizes), mesh_dim_names=AXES[: len(sizes)])


def placed(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor that every rank has, as torch itself cuts it; nothing is sent."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)
