"""Reading a checkpoint into a training run, on any number of ranks and any placement."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from flashoptim_dist.checkpoint import layout
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.format_check import check_model, check_record, check_unknown, specs_for
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts, parameter_names
from flashoptim_dist.checkpoint.optimizer_state import OptimizerLoad, SavedOptimizer
from flashoptim_dist.checkpoint.pending import finish_pending
from flashoptim_dist.checkpoint.ranks import Ranks, own_ranks
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.checkpoint.run_state import ExtrasLoad, load_dataloader, load_rng, load_state
from flashoptim_dist.checkpoint.saving import recover
from flashoptim_dist.checkpoint.verify import Verify, check_files, check_manifest_exists


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
    finish_pending()
    ranks = own_ranks(process_group)
    target = local_path(path)
    load_ = _Load(target, as_parts(model), as_optimizers(optimizer), ranks)
    doing = f"loading {target}"
    ranks.on_first(doing, lambda: recover(target))
    ranks.run(doing, lambda: load_.open(verify))
    known = ranks.all_gather(doing, load_.match_model)
    ranks.run(doing, lambda: check_unknown(load_.reader, set().union(*known)))
    found = ranks.run(doing, lambda: load_.read(scheduler, dataloader, extras, rng))
    return Loaded(target, load_.record.get("world_size"), found)


class _Load:
    """The steps of one load on one rank; none of them communicates."""

    def __init__(
        self, target: Path, parts: list[nn.Module], optimizers: list[torch.optim.Optimizer], ranks: Ranks
    ) -> None:
        self.target = target
        self.parts = parts
        self.optimizers = optimizers
        self.ranks = ranks
        self.record: dict[str, Any] = {}
        self._states: list[dict[str, Any]] = []

    def open(self, verify: Verify) -> None:
        """Check the files, and whether the checkpoint's format is one that the optimizers read."""
        check_files(self.target, verify, self.ranks.rank, self.ranks.world_size)
        self.reader = SafeReader(self.target)
        if self.reader.is_object(layout.FORMAT):
            self.record = self.reader.object(layout.FORMAT)
            check_manifest_exists(self.target)
        check_record(self.record, self.target)
        self._specs = specs_for(self.record, self.optimizers)

    def match_model(self) -> set[str]:
        """Compare the model's entries with the checkpoint's; return their names."""
        self._states = [get_model_state_dict(part) for part in self.parts]
        for state in self._states:
            check_model(state, self.reader)
        return {name for state in self._states for name in state}

    def read(
        self, scheduler: Any, dataloader: Any, extras: MutableMapping[str, Any] | None, rng: bool
    ) -> dict[str, Any]:
        """Read everything, and return the extras."""
        reader = self.reader
        names = parameter_names(self.parts)
        saved = SavedOptimizer(reader, {name for all_names in names.values() for name in all_names})
        loads = [
            OptimizerLoad(reader, saved, names, optimizer, spec)
            for optimizer, spec in zip(self.optimizers, self._specs, strict=True)
        ]
        extras_load = ExtrasLoad(reader, extras)
        tensors = self._model_tensors() | extras_load.destinations()
        for one in loads:
            tensors |= one.destinations()
        with torch.no_grad():
            reader.read_tensors(tensors)
        for part, state in zip(self.parts, self._states, strict=True):
            set_model_state_dict(part, state)
        for one in loads:
            one.finish()
        load_state(reader, layout.SCHEDULER, scheduler)
        load_dataloader(reader, self.record, dataloader, self.ranks)
        found = extras_load.finish()
        if rng:
            load_rng(reader, self.record, self.ranks)
        return found

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors by key; its entries that are objects are read at once."""
        tensors: dict[str, torch.Tensor] = {}
        for state in self._states:
            for name in state:
                key = layout.key_of((layout.MODEL, name))
                if self.reader.is_object(key):
                    state[name] = self.reader.object(key)
                else:
                    tensors[key] = state[name]
        return tensors
