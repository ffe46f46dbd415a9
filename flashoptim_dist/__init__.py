"""Compressed-state optimizers for PyTorch FSDP2 and DTensor."""

from flashoptim_dist._version import __version__
from flashoptim_dist.casting import cast_model
from flashoptim_dist.clipping import clip_grad_norm_
from flashoptim_dist.memory import memory_report
from flashoptim_dist.optim import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashoptim_dist.release import GradientRelease, enable_gradient_release
from flashoptim_dist.sharding.fsdp import shard_model

__all__ = [
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashSGD",
    "FlashSGDW",
    "GradientRelease",
    "__version__",
    "cast_model",
    "clip_grad_norm_",
    "enable_gradient_release",
    "memory_report",
    "shard_model",
]
