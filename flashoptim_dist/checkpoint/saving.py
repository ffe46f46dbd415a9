"""Saving: a snapshot of the run is written to a hidden folder, which gets its name when all of it is on disk."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from flashoptim_dist.checkpoint import layout, snapshot
from flashoptim_dist.checkpoint.errors import CheckpointError
from flashoptim_dist.checkpoint.files import local_path, remove_tree, sync_directory
from flashoptim_dist.checkpoint.manifest import FileRecord, check_sizes, write_manifest
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts
from flashoptim_dist.checkpoint.planners import SnapshotPlanner
from flashoptim_dist.checkpoint.ranks import Ranks, own_ranks
from flashoptim_dist.checkpoint.writer import CheckedWriter


@dataclass
class PreparedSave:
    """A save whose data is decided and whose staging folder exists."""

    target: Path
    staging: Path
    writer: CheckedWriter
    planner: SnapshotPlanner
    local_plans: list[SavePlan]
    ranks: Ranks
    overwrite: bool


def save(
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
) -> Path:
    """Save a training run to the folder ``path``, a normal DCP directory (all ranks must call).

    When the call returns, the checkpoint is on disk. Until then, and if anything fails or is killed, ``path`` does not
    exist, or is the older checkpoint as it was.

    Args:
        path: a folder all ranks see; its parents are made.
        model: the module, or the list of this rank's parts of it (pipeline stages).
        optimizer: one or several; parameters are saved by name.
        scheduler: an object with ``state_dict``, or a list of them; the same on all ranks.
        dataloader: an object with ``state_dict``, each rank's own.
        extras: anything else by name: tensors, DTensors, numbers, strings, containers, or objects with ``state_dict``.
            Except DTensors they are the same on all ranks.
        rng: whether to save the random states of Python, numpy and torch.
        overwrite: whether to replace a checkpoint that is there.
        process_group: the ranks that save; default all.

    Returns:
        The folder.

    Raises:
        CheckpointError: on every rank, with the file and the reason.
    """
    source = snapshot.Source(as_parts(model), as_optimizers(optimizer), scheduler, dataloader, extras, rng)
    prepared = prepare(local_path(path), source, own_ranks(process_group), overwrite)
    write(prepared)
    return prepared.target


def prepare(target: Path, source: snapshot.Source, ranks: Ranks, overwrite: bool) -> PreparedSave:
    """Collect the entries, agree on them, and make the staging folder (all ranks must call)."""
    doing = f"saving {target}"
    entries = snapshot.Entries()
    coordinator = ranks.rank == 0

    def collect() -> tuple[str | None, list[dict[str, Any]], dict[str, str | None]]:
        groups = snapshot.collect_tensors(source, entries)
        digests = snapshot.collect_rank_objects(source, entries, ranks.rank)
        snapshot.collect_extras(source, entries, common=coordinator)
        return (_make_staging(target, overwrite) if coordinator else None), groups, digests

    gathered = ranks.together(doing, collect)
    staging = target.with_name(str(gathered[0][0]))

    writer = CheckedWriter(staging)
    planner: SnapshotPlanner | None = None

    def plan() -> SavePlan:
        nonlocal planner
        if coordinator:
            groups = _joined_groups([groups for _, groups, _ in gathered])
            record = snapshot.record_of(source, [digests for _, _, digests in gathered], ranks.world_size)
            snapshot.collect_common_objects(source, entries, groups, record)
        planner = SnapshotPlanner(entries.values, entries.paths, coordinator)
        writer.set_up_storage_writer(coordinator, rank=ranks.rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    local_plans = _or_remove(staging, ranks, lambda: ranks.together(doing, plan))
    assert planner is not None
    return PreparedSave(target, staging, writer, planner, local_plans, ranks, overwrite)


def write(prepared: PreparedSave, publish: Callable[[], None] | None = None) -> None:
    """Write a prepared save and let it appear (all ranks must call, from any thread).

    Args:
        prepared: from :func:`prepare`.
        publish: called on the first rank once the checkpoint is complete under its name.
    """
    _or_remove(prepared.staging, prepared.ranks, lambda: _write(prepared, publish))


def _write(prepared: PreparedSave, publish: Callable[[], None] | None) -> None:
    ranks, planner, writer, staging = prepared.ranks, prepared.planner, prepared.writer, prepared.staging
    doing = f"saving {prepared.target}"
    coordinator = ranks.rank == 0
    metadata: Any = None

    def global_plan() -> list[SavePlan] | None:
        nonlocal metadata
        if not coordinator:
            return None
        plans, metadata = planner.create_global_plan(prepared.local_plans)
        return writer.prepare_global_plan(plans)

    plans = ranks.together(doing, global_plan)[0] or []

    def write_data() -> tuple[Any, dict[str, FileRecord]]:
        results = writer.write_data(planner.finish_plan(plans[ranks.rank]), planner).wait()
        sync_directory(staging)
        return results, writer.records

    written = ranks.together(doing, write_data)

    def appear() -> None:
        if not coordinator:
            return
        writer.finish(metadata, [results for results, _ in written])
        records = {name: record for _, files in written for name, record in files.items()} | writer.records
        check_sizes(staging, records, records)
        write_manifest(staging, records)
        _take_place(staging, prepared.target, prepared.overwrite)
        if publish is not None:
            publish()

    ranks.together(doing, appear)


def _make_staging(target: Path, overwrite: bool) -> str:
    if target.exists() and not overwrite and any(target.iterdir()):
        raise CheckpointError(f"{target} exists: choose another folder, or pass overwrite=True")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in layout.staging_leftovers(target):
            remove_tree(leftover)
        staging = layout.staging_path(target, uuid.uuid4().hex[:12])
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"{error.filename or target.parent} can't be written: {error.strerror}") from error
    return staging.name


def _take_place(staging: Path, target: Path, overwrite: bool) -> None:
    sync_directory(staging)
    replaced = layout.replaced_path(target)
    if target.exists():
        if any(target.iterdir()):
            if not overwrite:
                raise CheckpointError(f"{target} appeared while it was being saved")
            if replaced.exists():
                shutil.rmtree(replaced)
            os.rename(target, replaced)
        else:
            target.rmdir()
    os.rename(staging, target)
    sync_directory(target.parent)
    if replaced.exists():
        remove_tree(replaced)


def _joined_groups(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the groups of all ranks: those of rank 0, then what only other ranks (pipeline stages) hold."""
    joined = list(by_rank[0])
    seen = [group["params"] for group in joined]
    for groups in by_rank[1:]:
        for group in groups:
            if group["params"] not in seen:
                joined.append(group)
                seen.append(group["params"])
    return joined


def _or_remove(staging: Path, ranks: Ranks, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except BaseException:
        if ranks.rank == 0:
            remove_tree(staging)
        raise
