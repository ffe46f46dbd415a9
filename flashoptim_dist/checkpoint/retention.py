"""Which checkpoints of a folder stay, and what a killed process left behind."""

from __future__ import annotations

import os
from pathlib import Path

from flashoptim_dist.checkpoint import layout
from flashoptim_dist.checkpoint.files import remove_tree, sync_directory


def read_latest(directory: Path) -> int | None:
    """Return the step that ``latest`` names, None where there is none."""
    try:
        name = (directory / layout.LATEST).read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return layout.step_of(name)


def steps_to_drop(steps: list[int], newest: int, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return which steps to delete after ``newest`` was saved; that one always stays."""
    if keep_last is None:
        return []
    kept = set(sorted(steps)[-keep_last:]) | {newest}
    if keep_every is not None:
        kept |= {step for step in steps if step % keep_every == 0}
    return [step for step in sorted(steps) if step not in kept]


def prune(directory: Path, newest: int, keep_last: int | None, keep_every: int | None) -> None:
    """Delete the checkpoints that are not kept. Each loses its name first, so that none is ever seen half deleted."""
    for step in steps_to_drop(layout.steps_in(directory), newest, keep_last, keep_every):
        target = directory / layout.step_name(step)
        doomed = target.with_name(f".{target.name}.deleting")
        remove_tree(doomed)
        os.rename(target, doomed)
        sync_directory(directory)
        remove_tree(doomed)


def recover(directory: Path) -> None:
    """Give a checkpoint its name back that was moved aside for a new one which then never came."""
    if not directory.is_dir():
        return
    for replaced in sorted(directory.glob(".step-*.replaced")):
        target = directory / replaced.name.removeprefix(".").removesuffix(".replaced")
        if layout.step_of(target.name) is not None and not target.exists():
            os.rename(replaced, target)
            sync_directory(directory)
