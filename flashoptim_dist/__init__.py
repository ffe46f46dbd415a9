"""Compressed-state optimizers for PyTorch FSDP2 and DTensor."""

from flashoptim_dist._version import __version__
from flashoptim_dist.optim import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW

__all__ = ["FlashAdam", "FlashAdamW", "FlashLion", "FlashSGD", "FlashSGDW", "__version__"]
