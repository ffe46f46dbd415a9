"""Checkpoints: sharded, compressed as the state is in memory, loadable on any number of ranks, never half there."""

from flashoptim_dist.checkpoint.async_saving import async_save
from flashoptim_dist.checkpoint.checkpointer import Checkpointer
from flashoptim_dist.checkpoint.errors import (
    CheckpointError,
    CheckpointFormatError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
)
from flashoptim_dist.checkpoint.loading import Loaded, load
from flashoptim_dist.checkpoint.pending import AsyncSave
from flashoptim_dist.checkpoint.saving import save

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "CheckpointFormatError",
    "Checkpointer",
    "DamagedCheckpointError",
    "Loaded",
    "UnsafeCheckpointError",
    "async_save",
    "load",
    "save",
]
