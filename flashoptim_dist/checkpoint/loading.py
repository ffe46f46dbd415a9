"""Reading a checkpoint into a training run, on any number of ranks and any placement."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from flashoptim_dist.checkpoint import layout
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.format_check import check_model, check_optimizers, check_record, check_unknown
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts, parameter_names
from flashoptim_dist.checkpoint.optimizer_state import OptimizerLoad
from flashoptim_dist.checkpoint.planners import InPlacePlanner
from flashoptim_dist.checkpoint.ranks import own_ranks
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.checkpoint.run_state import ExtrasLoad, load_dataloader, load_rng, load_state
from flashoptim_dist.checkpoint.verify import Verify, check_files


@dataclass(frozen=True)
class Loaded:
    """What a load found."""

    path: Path
    world_size: int | None
    """Ranks that saved; None for a directory that plain DCP wrote."""
    extras: dict[str, Any]


def load(
    path: str | os.PathLike[str],
    model: ModelParts,
    optimizer: Optimizers,
    *,
    scheduler: Any = None,
    dataloader: Any = None,
    extras: MutableMapping[str, Any] | None = None,
    verify: Verify = "size",
    rng: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint into a training run (all ranks must call).

    World size, mesh, placements, the order of parameter groups and the grouping itself may differ from those at the
    save: parameters and their states are matched by name. Group options are taken from the checkpoint where all
    parameters of a group agree on them there. Tensors are read in place, so model and optimizer are undefined after an
    error in reading.

    Args:
        path: a folder written by :func:`save`, or by plain ``torch.distributed.checkpoint.save`` of
            ``{"model": ..., "optimizer": ...}`` with torch's state dictionaries, nested or flattened.
        model: the module, or the list of this rank's parts of it.
        optimizer: one or several.
        scheduler: as at the save; None leaves it out.
        dataloader: as at the save; None leaves it out. Each rank gets its own state back. On another number of ranks
            that is possible only where all ranks had the same one; otherwise it is an error.
        extras: filled with the saved extras. Values that are tensors or have ``load_state_dict`` are loaded in place.
        verify: ``"size"`` compares every file's size with the manifest; ``"full"`` also reads all of them, shared out
            over the ranks, and compares their checksums.
        rng: whether to restore the random states. On another number of ranks every rank gets a new, repeatable stream,
            unless all ranks had the same one.
        process_group: the ranks that load; default all.

    Raises:
        CheckpointError: no checkpoint is there.
        DamagedCheckpointError: a file is missing or damaged; it is named.
        CheckpointFormatError: another format version, optimizer or model.
        UnsafeCheckpointError: a file asks for classes that no checkpoint needs.
    """
    ranks = own_ranks(process_group)
    target = local_path(path)
    doing = f"loading {target}"
    parts, optimizers = as_parts(model), as_optimizers(optimizer)
    reader: SafeReader | None = None
    record: dict[str, Any] = {}

    def open_checkpoint() -> None:
        nonlocal reader, record
        check_files(target, verify, ranks.rank, ranks.world_size)
        reader = SafeReader(target)
        record = reader.object(layout.FORMAT) if reader.is_object(layout.FORMAT) else {}
        check_record(record)
        check_optimizers(record, optimizers)

    ranks.together(doing, open_checkpoint)
    assert reader is not None
    opened = reader
    tensors: dict[str, Any] = {}
    model_states: list[dict[str, Any]] = []
    optimizer_load = OptimizerLoad(opened, parameter_names(parts), optimizers)

    def match() -> set[str]:
        for part in parts:
            state = get_model_state_dict(part)
            model_states.append(state)
            check_model(state, opened)
        return {name for state in model_states for name in state}

    known = set().union(*ranks.together(doing, match))

    def read() -> None:
        check_unknown(opened, known)
        for state in model_states:
            for name in state:
                key = f"{layout.MODEL}.{name}"
                if opened.is_object(key):
                    state[name] = opened.object(key)
                else:
                    tensors[key] = state[name]
        tensors.update(optimizer_load.destinations())
        extras_load = ExtrasLoad(opened, extras)
        tensors.update(extras_load.destinations())
        planner = InPlacePlanner()
        planner.set_up_planner(tensors, opened.metadata, True)
        with torch.no_grad():
            opened.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        for part, state in zip(parts, model_states, strict=True):
            set_model_state_dict(part, state)
        optimizer_load.finish()
        load_state(opened, layout.SCHEDULER, scheduler)
        load_dataloader(opened, record, dataloader, ranks)
        found.update(extras_load.finish())
        if rng:
            load_rng(opened, record, ranks)

    found: dict[str, Any] = {}
    ranks.together(doing, read)
    return Loaded(target, record.get("world_size"), found)
