"""Saving: a snapshot of the run is written to a hidden folder, which gets its name when all of it is on disk."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from flashoptim_dist.checkpoint import layout, snapshot
from flashoptim_dist.checkpoint.errors import CheckpointError
from flashoptim_dist.checkpoint.files import local_path, remove_tree, sync_directory
from flashoptim_dist.checkpoint.manifest import FileRecord, check_sizes, write_manifest
from flashoptim_dist.checkpoint.names import ModelParts, Optimizers, as_optimizers, as_parts
from flashoptim_dist.checkpoint.pending import finish_pending
from flashoptim_dist.checkpoint.planners import SnapshotPlanner
from flashoptim_dist.checkpoint.ranks import Ranks, own_ranks
from flashoptim_dist.checkpoint.writer import CheckedWriter


@dataclass
class Job:
    """One save: what is decided before the first byte is written."""

    target: Path
    staging: Path
    ranks: Ranks
    overwrite: bool
    entries: snapshot.Entries
    aliases: dict[str, str]
    """Second names of tied weights, and the entries that hold them."""
    published: Callable[[], None] | None = None
    """Called on the first rank once the checkpoint stands under its name."""
    doing: str = field(init=False)

    def __post_init__(self) -> None:
        """Name the job for error messages."""
        self.doing = f"saving {self.target}"

    def planner(self) -> SnapshotPlanner:
        """Return a planner of the entries; it holds this rank's tensors, live ones."""
        return SnapshotPlanner(self.entries.values, self.entries.paths, self.ranks.is_first)


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
        CheckpointError: on every rank, with the file and the reason; also where a background save failed before.
    """
    finish_pending()
    source = snapshot.Source(as_parts(model), as_optimizers(optimizer), scheduler, dataloader, extras, rng)
    draft = Draft(local_path(path), own_ranks(process_group), overwrite)
    draft.take(source)
    finish(draft)
    return draft.target


@dataclass
class Draft:
    """This rank's part of a save before the ranks have spoken to each other."""

    target: Path
    ranks: Ranks
    overwrite: bool
    before: Callable[[], None] | None = None
    """Called on the first rank before anything is written."""
    published: Callable[[], None] | None = None
    """Called on the first rank once the checkpoint stands under its name."""
    entries: snapshot.Entries = field(default_factory=snapshot.Entries)
    failure: BaseException | None = None
    """What went wrong on this rank so far; the others hear of it when the ranks first speak."""
    _collected: snapshot.Collected | None = None

    def take(self, source: snapshot.Source) -> None:
        """Collect the state as it is now: live tensors, copies of everything else. No communication."""
        try:
            self._collected = snapshot.collect(source, self.entries, self.ranks.rank)
        except BaseException as error:
            self.failure = error

    def collected(self) -> snapshot.Collected:
        """Return what the first rank needs to know, or raise what went wrong."""
        if self.failure is not None:
            raise self.failure
        assert self._collected is not None
        return self._collected


def finish(
    draft: Draft, copies: Mapping[str, torch.Tensor] | None = None, ready: Callable[[], None] | None = None
) -> None:
    """Write a draft and let it appear (all ranks must call, from any thread).

    Args:
        draft: this rank's part.
        copies: what to write instead of the live tensors, by entry.
        ready: waits until the copies are complete.
    """
    job = prepare(draft)

    def planner() -> SnapshotPlanner:
        planner = job.planner()
        if copies is not None:
            planner.use(copies)
        if ready is not None:
            ready()
        return planner

    write(job, planner)


def prepare(draft: Draft) -> Job:
    """Join what all ranks have, and make the staging folder (all ranks must call)."""
    ranks, target = draft.ranks, draft.target
    doing = f"saving {target}"
    collected = ranks.gather(doing, draft.collected)

    def begin() -> str:
        if draft.before is not None:
            draft.before()
        snapshot.add_common(draft.entries, collected, ranks.world_size)
        return make_staging(target, draft.overwrite)

    staging = target.with_name(ranks.on_first(doing, begin))
    aliases = {alias: key for rank in collected for alias, key in rank.aliases.items()}
    return Job(target, staging, ranks, draft.overwrite, draft.entries, aliases, draft.published)


def write(job: Job, planner_of: Callable[[], SnapshotPlanner]) -> None:
    """Write a prepared save and let it appear (all ranks must call, from any thread).

    Args:
        job: from :func:`prepare`.
        planner_of: returns the planner, or raises what went wrong on this rank since then.
    """
    try:
        _write(job, planner_of)
    except BaseException:
        if job.ranks.is_first:
            remove_tree(job.staging)
        raise


def _write(job: Job, planner_of: Callable[[], SnapshotPlanner]) -> None:
    ranks, doing = job.ranks, job.doing
    writer = CheckedWriter(job.staging)
    writer.set_up_storage_writer(ranks.is_first, rank=ranks.rank)
    planner: SnapshotPlanner | None = None
    metadata: Metadata | None = None

    def local_plan() -> SavePlan:
        nonlocal planner
        planner = planner_of()
        return planner.create_local_plan()

    local_plans = ranks.gather(doing, local_plan)
    assert planner is not None
    snapshot_planner = planner

    def global_plan() -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = snapshot_planner.create_global_plan(local_plans)
        return plans

    plan = ranks.scatter(doing, global_plan)

    def write_data() -> tuple[list[WriteResult], dict[str, FileRecord]]:
        results = writer.write_data(snapshot_planner.finish_plan(plan), snapshot_planner).wait()
        sync_directory(job.staging)
        return results, writer.records

    written = ranks.gather(doing, write_data)

    def appear() -> None:
        assert metadata is not None
        results = [result for rank_results, _ in written for result in rank_results]
        _add_aliases(metadata, results, job.aliases)
        writer.finish(metadata, [results])
        records = {name: record for _, files in written for name, record in files.items()} | writer.records
        check_sizes(job.staging, records, records)
        write_manifest(job.staging, records)
        take_place(job.staging, job.target, job.overwrite)
        if job.published is not None:
            job.published()

    ranks.run(doing, lambda: appear() if ranks.is_first else None)


def _add_aliases(metadata: Metadata, results: list[WriteResult], aliases: Mapping[str, str]) -> None:
    """Let the second name of a tied weight refer to the bytes of the first."""
    for alias, key in aliases.items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
        beside = metadata.planner_data[key][:-1]  # torchtitan has its model's entries at the top
        metadata.planner_data[alias] = (*beside, alias.removeprefix(f"{layout.key_of(beside)}." if beside else ""))
        results += [
            replace(result, index=replace(result.index, fqn=alias)) for result in results if result.index.fqn == key
        ]


def make_staging(target: Path, overwrite: bool) -> str:
    """Make the hidden folder in which something for ``target`` is written, and return its name (one rank only).

    What earlier writers of the same target left when they were killed is cleared away.

    Raises:
        CheckpointError: the target is there already (with ``overwrite``: and is no checkpoint), or nothing can be
            written beside it.
    """
    try:
        recover(target)
        if target.exists() and any(target.iterdir()):
            if not overwrite:
                raise CheckpointError(f"{target} exists: choose another folder, or pass overwrite=True")
            if not layout.may_be_replaced(target):
                raise CheckpointError(
                    f"{target} holds something else than a checkpoint, and is not replaced: choose another folder, or "
                    "delete it yourself"
                )
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in layout.leftovers(target):
            remove_tree(leftover)
        staging = layout.staging_path(target, uuid.uuid4().hex[:12])
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"{error.filename or target.parent} can't be written: {error.strerror}") from error
    return staging.name


def take_place(staging: Path, target: Path, overwrite: bool) -> None:
    """Give the staging folder its name; an older one of that name steps aside, and goes afterwards (one rank only)."""
    sync_directory(staging)
    replaced = layout.replaced_path(target)
    if target.exists():
        if any(target.iterdir()):
            if not overwrite:
                raise CheckpointError(f"{target} appeared while it was being saved")
            remove_tree(replaced)
            os.rename(target, replaced)
        else:
            target.rmdir()
    try:
        os.rename(staging, target)
    except OSError:
        recover(target)
        raise
    sync_directory(target.parent)
    if replaced.exists():
        remove_tree(replaced)


def recover(target: Path) -> None:
    """Give a checkpoint its name back that stepped aside for a new one which then never came (one rank only)."""
    replaced = layout.replaced_path(target)
    if replaced.is_dir() and not target.exists():
        warnings.warn(f"{target} is restored: the save that was to replace it did not finish", stacklevel=2)
        os.rename(replaced, target)
        sync_directory(target.parent)
