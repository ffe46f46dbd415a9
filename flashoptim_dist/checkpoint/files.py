"""Files that are on disk when a call returns: fsync of contents and of the directory entry."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from flashoptim_dist.checkpoint.errors import CheckpointError


def sync_directory(directory: Path) -> None:
    """Write a directory's entries (new files, renames) to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, data: bytes) -> None:
    """Replace a file's contents at once: a reader sees the old or the new ones, also after a power cut."""
    temporary = file.with_name(f".{file.name}.new")
    with open(temporary, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
    sync_directory(file.parent)


def remove_tree(directory: Path) -> None:
    """Delete a directory that is no longer needed; what can't be deleted stays, under its hidden name."""
    shutil.rmtree(directory, ignore_errors=True)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a checkpoint.

    Raises:
        CheckpointError: it is a URL. Renaming a directory is what makes a checkpoint appear at once.
    """
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointError(
            f"{text} is a URL: checkpoints are written to a local or mounted folder, copy them from there"
        )
    return Path(os.path.abspath(text))
