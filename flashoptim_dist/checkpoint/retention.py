"""Which checkpoints of a folder stay, and what a killed process left behind."""

from __future__ import annotations

import warnings
from pathlib import Path

from flashoptim_dist.checkpoint import layout
from flashoptim_dist.checkpoint.files import hide, remove_tree, sync_directory


def read_latest(directory: Path) -> int | None:
    """Return the step that ``latest`` names, None where there is none."""
    try:
        name = (directory / layout.LATEST).read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return layout.step_of(name)


def steps_to_drop(steps: list[int], newest: int, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return which steps to delete after ``newest`` was saved.

    Steps after ``newest`` are those of a run that was taken up again from an earlier one; they stay until they are
    replaced.
    """
    if keep_last is None:
        return []
    past = sorted(step for step in steps if step <= newest)
    kept = {*past[-keep_last:], newest}
    return [step for step in past if step not in kept and not (keep_every is not None and step % keep_every == 0)]


def prune(directory: Path, newest: int, keep_last: int | None, keep_every: int | None) -> None:
    """Delete the checkpoints that are not kept. Each loses its name first, so that none is ever seen half deleted."""
    for step in steps_to_drop(layout.steps_in(directory), newest, keep_last, keep_every):
        target = directory / layout.step_name(step)
        try:
            hidden = hide(target)
            sync_directory(directory)
        except OSError as error:
            warnings.warn(f"{target} can't be deleted: {error.strerror}", stacklevel=2)
            continue
        remove_tree(hidden)


def clean(directory: Path) -> None:
    """Delete what killed saves and deletions left. Only where no other process saves into the folder."""
    for pattern in (".step-*.saving-*", ".step-*.deleting*"):
        for leftover in directory.glob(pattern):
            remove_tree(leftover)
