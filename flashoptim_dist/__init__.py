"""Compressed-state optimizers for PyTorch FSDP2 and DTensor."""

from flashoptim_dist._version import __version__

__all__ = ["__version__"]
