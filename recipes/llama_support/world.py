"""The ranks of this run: process group, device, mesh, and how they agree on failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import BadInput
from .meeting import agent_keeps_store, fresh_store


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks.

    Attributes:
        mesh: holds every rank. One dimension: one set of shards. Two: shards along the second, replicas along the
            first. None for one process on a GPU, which needs no process group.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes the metrics."""
        return self.rank == 0

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Run a block that has no collective inside; if it fails on one rank it fails on all. All ranks must enter.

        A `BadInput`, or an `OSError` such as a missing file, of any rank is raised as `BadInput` on every rank: the
        lowest failing rank's message, so that all say the same. Any other exception stays itself on its own rank, and
        is a RuntimeError that quotes it on the others.
        """
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
        mine = None if failure is None else (isinstance(failure, BadInput | OSError), _one_line(failure))
        failures = [found for found in self.gather(mine) if found is not None]
        if not failures:
            return
        theirs_is_bad_input, message = failures[0]
        if failure is not None and not isinstance(failure, BadInput | OSError):
            raise failure
        if theirs_is_bad_input:
            raise BadInput(message) from failure
        raise RuntimeError(f"another rank failed: {message}")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (any picklable object) in rank order, on every rank. All ranks must call."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks of some numbers, in float64, on every rank. All ranks must call."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]


def start_world(device: str = "auto", *, replicas: int = 1, needs_mesh: bool = True) -> World:
    """Join the process group that torchrun describes, or start as a single rank without torchrun.

    A process group that is there already is used as it is. COLLECTIVE_TIMEOUT_SECONDS in the environment is how long a
    collective may wait for a rank; without it, torch's default.

    Args:
        device: "cuda" (NCCL, one GPU per local rank), "cpu" (gloo), or "auto": cuda where there is a GPU.
        replicas: copies of the whole set of shards (HSDP); must divide the number of ranks.
        needs_mesh: make a mesh for a single process on a GPU too.

    All ranks must call. Raises BadInput where this machine has fewer GPUs than processes, and for a number of replicas
    that does not divide the number of ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda":
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if processes > gpus:
            raise BadInput(
                f"{processes} processes on a machine that shows {gpus} GPUs; start as many as there are GPUs"
                " (torchrun --nproc-per-node), or use --device cpu"
            )
        torch.cuda.set_device(local_rank)
    place = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    device_id = place if kind == "cuda" else None
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % replicas:
        raise BadInput(f"--replicate {replicas} does not divide the {ranks} ranks; give a divisor")
    if ranks == 1 and kind == "cuda" and not needs_mesh:
        return World(0, 1, place, None)
    if dist.is_initialized():
        pass
    elif "RANK" in os.environ:
        given = os.environ.get("COLLECTIVE_TIMEOUT_SECONDS")
        seconds = float(given) if given else None
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            backend,
            store=fresh_store(rank, seconds) if agent_keeps_store() else None,
            rank=rank,
            world_size=ranks,
            device_id=device_id,
            timeout=None if seconds is None else timedelta(seconds=seconds),
        )
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    if replicas == 1:
        mesh = init_device_mesh(kind, (ranks,))
    else:
        mesh = init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    return World(dist.get_rank(), dist.get_world_size(), place, mesh)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, BadInput | OSError) else f"{type(error).__name__}: {text}"
