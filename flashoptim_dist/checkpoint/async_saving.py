"""Saving while training goes on: a copy in host memory first, then a thread that writes it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from flashoptim_dist.checkpoint import saving, snapshot
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts
from flashoptim_dist.checkpoint.pending import AsyncSave, finish_pending, set_pending
from flashoptim_dist.checkpoint.ranks import own_ranks
from flashoptim_dist.checkpoint.staging import Staging
from flashoptim_dist.sharding import local_tensor

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
        CheckpointError: the background save before this one failed. What goes wrong with this one, a state that can't
            be saved included, the handle raises on every rank.
    """
    finish_pending()
    optimizers = as_optimizers(optimizer)
    source = snapshot.Source(as_parts(model), optimizers, scheduler, dataloader, extras, rng)
    draft = saving.Draft(local_path(path), own_ranks(process_group), overwrite)
    return start(draft, source, staging_for(optimizers[0]))


def staging_for(optimizer: torch.optim.Optimizer) -> Staging:
    """Return the staging memory that lives as long as an optimizer."""
    return _stagings.setdefault(optimizer, Staging())


def start(draft: saving.Draft, source: snapshot.Source, staging: Staging) -> AsyncSave:
    """Copy the state and write it in the background.

    The call communicates with nobody, so that it waits for nobody: what goes wrong here, the other ranks hear from the
    thread, and everybody from the handle.
    """
    draft.take(source)
    copies: dict[str, torch.Tensor] = {}
    event: torch.cuda.Event | None = None
    if draft.failure is None:
        values = draft.entries.values.items()
        try:
            copies, event = staging.stage({k: local_tensor(v) for k, v in values if isinstance(v, torch.Tensor)})
        except BaseException as error:
            draft.failure = error
    ready = None if event is None else event.synchronize
    handle = AsyncSave(draft.target, lambda: saving.finish(draft, copies, ready))
    set_pending(handle)
    if draft.failure is not None and not isinstance(draft.failure, Exception):
        handle.tell()
        raise draft.failure  # KeyboardInterrupt: the loop ends here, and the other ranks don't wait
    return handle
