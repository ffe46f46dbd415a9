"""The two optimizers that the recipe puts side by side, and gradient release."""

from __future__ import annotations

import torch
from torch import nn

import flashoptim_dist as fod

from .config import Config


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """FlashAdamW or torch's AdamW over a sharded model, with weight decay on matrices only."""
    named = list(model.named_parameters())
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    others = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.optimizer == "flash_adamw":
        return fod.FlashAdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps, seed=config.seed)
    # Its fastest form on a GPU; elsewhere what torch chooses.
    fused = True if named[0][1].is_cuda else None
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps, fused=fused)


def release_gradients(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> fod.GradientRelease | None:
    """Switch gradient release on, with clipping and finite checks, for `--gradient-release`. All ranks must call."""
    if not config.gradient_release:
        return None
    assert isinstance(optimizer, fod.FlashAdamW)
    return fod.enable_gradient_release(
        model, optimizer, clip_global_norm=config.clip_norm if config.clip_norm > 0 else None, skip_nonfinite=True
    )
