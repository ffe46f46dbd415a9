"""Compressed-state optimizers for PyTorch FSDP2 and DTensor."""

from flashoptim_dist._version import __version__
from flashoptim_dist.optim import FlashAdamW

__all__ = ["FlashAdamW", "__version__"]
