"""Files that are on disk when a call returns: fsync of contents and of the directory entry."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from flashoptim_dist.checkpoint import layout
from flashoptim_dist.checkpoint.errors import CheckpointError, DamagedCheckpointError


def sync_directory(directory: Path) -> None:
    """Write a directory's entries (new files, renames) to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, data: bytes) -> None:
    """Replace a file's contents at once: a reader sees the old or the new ones, also after a power cut.

    Raises:
        CheckpointError: it can't be written; the old contents are still there.
    """
    temporary = file.with_name(f".{file.name}.new")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
        sync_directory(file.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{file} can't be written: {error.strerror or error}") from error


def read_small(file: Path) -> bytes:
    """Return a file's contents.

    Raises:
        DamagedCheckpointError: it is missing or can't be read; also where it is no regular file, which might never end.
    """
    size_of(file)
    try:
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error


def size_of(file: Path) -> int:
    """Return a file's size in bytes.

    Raises:
        DamagedCheckpointError: it is missing or no regular file (a link to one counts as one).
    """
    try:
        status = file.stat()
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise unreadable(file, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(f"{file} is no regular file")
    return status.st_size


def unreadable(file: Path, error: OSError) -> DamagedCheckpointError:
    """Return the error for a file that the system could not read."""
    return DamagedCheckpointError(f"{file} can't be read: {error.strerror or error}")


def hide(directory: Path) -> Path:
    """Take a directory's name away and return its new, hidden one. Of several processes that try, one succeeds.

    Raises:
        OSError: it is not there (any more), or can't be renamed.
    """
    hidden = layout.deleting_path(directory, uuid.uuid4().hex[:12])
    if hidden != directory:
        os.rename(directory, hidden)
    return hidden


def remove_tree(directory: Path) -> None:
    """Delete a directory that is no longer needed; what can't be deleted stays, under a hidden name.

    It loses its name first: whoever else is about to give it a better one, a second run that saves into the same folder
    by accident, finds it gone instead of half deleted.
    """
    try:
        hidden = hide(directory)
    except FileNotFoundError:
        return
    except OSError:  # a full disk may have no room for the longer name
        hidden = directory
    shutil.rmtree(hidden, ignore_errors=True)


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
    if os.path.islink(text):  # else the link, and not the folder, would be renamed
        return Path(os.path.realpath(text))
    return Path(os.path.abspath(text))
