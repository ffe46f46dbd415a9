"""Comparing a checkpoint's files with its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flashoptim_dist.checkpoint.errors import CheckpointError, DamagedCheckpointError
from flashoptim_dist.checkpoint.layout import MANIFEST, METADATA
from flashoptim_dist.checkpoint.manifest import check_contents, check_sizes, read_manifest

Verify = Literal["size", "full"]


def check_files(directory: Path, verify: Verify, rank: int = 0, world_size: int = 1) -> None:
    """Check this rank's share of a checkpoint's files.

    Sizes of all files and the contents of ``.metadata`` are always checked; with ``verify="full"`` the ranks share out
    the contents of the others. Where there is no manifest (plain DCP wrote the directory) nothing can be compared.

    Raises:
        DamagedCheckpointError: a file differs; it is named.
        ValueError: ``verify`` is neither "size" nor "full".
    """
    if verify not in ("size", "full"):
        raise ValueError(f"verify={verify!r} must be 'size' or 'full'")
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint: {directory} does not exist")
    files = read_manifest(directory)
    if files is None:
        return
    check_sizes(directory, files, files)
    names = sorted(files, key=lambda name: (-files[name].size, name))
    mine = set(names[rank::world_size]) if verify == "full" else set()
    check_contents(directory, files, sorted(mine | ({METADATA} & set(files))))


def check_manifest_exists(directory: Path) -> None:
    """Refuse a directory that this library wrote and that has lost its manifest.

    Raises:
        DamagedCheckpointError: there is none.
    """
    if not (directory / MANIFEST).is_file():
        raise DamagedCheckpointError(f"{directory / MANIFEST} is missing")
