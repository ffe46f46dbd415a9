"""Saving while training goes on: a copy in host memory first, then a thread that writes it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashoptim_dist.checkpoint import saving, snapshot
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts
from flashoptim_dist.checkpoint.pending import AsyncSave, finish_pending, set_pending
from flashoptim_dist.checkpoint.planners import SnapshotPlanner
from flashoptim_dist.checkpoint.ranks import own_ranks
from flashoptim_dist.checkpoint.staging import Staging

_stagings: weakref.WeakKeyDictionary[torch.optim.Optimizer, Staging] = weakref.WeakKeyDictionary()


def async_save(
    path: str | os.PathLike[str],
    model: ModelParts,
    optimizer: Optimizers,
    *,
    scheduler: Any = None,
    dataloader: Any = None,
    extras: Mapping[str, Any] | None = None,
    rng: bool = True,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> AsyncSave:
    """Save a training run while it goes on (all ranks must call).

    What lands on disk is the state at the call. The call returns when that is copied to host memory (from a GPU: when
    the copy is enqueued; what is enqueued later sees it done). The memory, one copy of this rank's state, is kept for
    the next save, as long as the (first) optimizer lives.

    Arguments as for :func:`save`. The next ``save``, ``async_save`` or ``load`` waits for this one, and raises its
    error if it failed; the process group must live until then.

    Returns:
        A handle; ``result()`` waits until the checkpoint is on disk and raises if it failed.

    Raises:
        CheckpointError: on every rank; also where the background save before this one failed.
    """
    finish_pending()
    optimizers = as_optimizers(optimizer)
    source = snapshot.Source(as_parts(model), optimizers, scheduler, dataloader, extras, rng)
    job = saving.prepare(local_path(path), source, own_ranks(process_group), overwrite)
    return start(job, staging_for(optimizers[0]))


def staging_for(optimizer: torch.optim.Optimizer) -> Staging:
    """Return the staging memory that lives as long as an optimizer."""
    return _stagings.setdefault(optimizer, Staging())


def start(job: saving.Job, staging: Staging) -> AsyncSave:
    """Copy a prepared save's tensors and write them in the background. No communication before the thread does."""
    planner_of: Callable[[], SnapshotPlanner]
    try:
        planner = job.planner()
        event = staging.stage(planner)
    except Exception as error:
        failure = error

        def planner_of() -> SnapshotPlanner:
            raise failure  # in the thread, where the other ranks hear of it
    else:

        def planner_of() -> SnapshotPlanner:
            if event is not None:
                event.synchronize()
            return planner

    handle = AsyncSave(job.target, lambda: saving.write(job, planner_of))
    set_pending(handle)
    return handle
