"""What saving and loading raise."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Every rank raises it, with the same message."""


class DamagedCheckpointError(CheckpointError):
    """A file of the checkpoint is missing, or is not as it was written; the message names it."""


class CheckpointFormatError(CheckpointError):
    """The checkpoint is whole, but of another number format, optimizer or model than it is loaded into."""


class UnsafeCheckpointError(CheckpointError):
    """A file of the checkpoint asks for code or classes that no checkpoint needs; nothing of it was run."""
