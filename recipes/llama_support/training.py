"""The arithmetic of a step: loss, gradient, schedule, validation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import flashoptim_dist as fod

from .attention import attention_arguments
from .config import Config
from .data import Batch, StepBatches
from .interrupts import Interrupts
from .packing import IGNORED
from .world import World


def summed_loss(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Cross-entropy summed over the labels of a packed batch: fp32, 0-dim, differentiable.

    Attention stays within each document. Under FSDP all ranks must call.
    """
    loss: Tensor = model(
        input_ids=batch["input_ids"].to(device, non_blocking=True),
        position_ids=batch["position_ids"].to(device, non_blocking=True),
        loss_labels=batch["labels"].to(device, non_blocking=True),
        use_cache=False,
        **attention_arguments(batch, device),
    )
    return loss


def accumulate_gradient(
    model: nn.Module,
    step: StepBatches,
    world: World,
    interrupts: Interrupts | None = None,
    release: fod.GradientRelease | None = None,
) -> float:
    """Add the gradient of the global batch's mean loss to the parameters; returns that loss. All ranks must call.

    Each label of the global batch weighs the same, wherever it lies: the sum of the losses is divided by the number of
    labels over all ranks and micro-batches. FSDP averages over ranks, hence the factor `world.size`. With the sum of
    the losses the ranks learn whether one of them was asked to end: `interrupts.agreed`.

    Each micro-batch is reduced into the sharded gradient: the whole model's gradients never exist unsharded, and the
    sum is the same with `release`, which steps the parameters during the last micro-batch's backward pass.
    """
    scale = world.size / max(1, step.trained_tokens)
    total = torch.zeros((), device=world.device)
    for index, batch in enumerate(step.micro_batches):
        is_last = index == len(step.micro_batches) - 1
        loss = summed_loss(model, batch, world.device)
        with contextlib.nullcontext() if release is None or is_last else release.accumulate():
            (loss * scale).backward()
        total += loss.detach()
    asked = interrupts is not None and interrupts.asked
    total_of_all, asked_ranks = world.sum(total.item(), asked)
    if interrupts is not None:
        interrupts.agreed = asked_ranks > 0
    return total_of_all / max(1, step.trained_tokens)


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterable[Batch], world: World) -> float:
    """Mean loss per label over all ranks' validation batches. All ranks must call, with equally many batches."""
    model.eval()
    total, labels = 0.0, 0
    for batch in batches:
        total += summed_loss(model, batch, world.device).item()
        labels += int((batch["labels"] != IGNORED).sum())
    model.train()
    total_of_all, labels_of_all = world.sum(total, labels)
    return total_of_all / max(1.0, labels_of_all)


def clip_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, largest_norm: float) -> Tensor:
    """Clip the gradients so that their global norm is at most `largest_norm` (0: leave them); returns the norm before.

    The norm is 0-dim, on the device, the same on all ranks. FlashAdamW only reads the gradients here, and applies the
    coefficient inside its step. All ranks must call.
    """
    largest = largest_norm if largest_norm > 0 else math.inf
    if isinstance(optimizer, fod.FlashAdamW):
        return fod.clip_grad_norm_(optimizer, largest)
    norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def take_step(
    optimizer: torch.optim.Optimizer, norm: Tensor | None, release: fod.GradientRelease | None = None
) -> float:
    """Apply the update unless its gradient is not finite; returns the gradient's norm.

    Args:
        optimizer: steps, or ends the update of which `release` has taken most steps already.
        norm: what `clip_gradients` returned; None with `release`, which takes the norm by itself.
        release: gradient release, where it is on. Of a gradient that is not finite it leaves out the first layer where
            that shows and all that follow in the backward pass.
    """
    if isinstance(optimizer, fod.FlashAdamW):
        optimizer.step()  # skips by itself, on all ranks, what is not finite
        norm = norm if release is None else release.gradient_norm
        assert norm is not None
        return float(norm)
    assert norm is not None
    if math.isfinite(norm):
        optimizer.step()
    return float(norm)


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of a schedule's `step`-th step, counted from 1: linear warm-up, then a cosine.

    Warm-up step k has k / warmup_steps of the peak, so that no step is lost to a rate of 0; the last step ends the
    cosine at min_lr_ratio.
    """
    warmup = min(config.warmup_steps, config.steps)
    if step <= warmup:
        return config.peak_lr * step / warmup
    progress = min(1.0, (step - warmup) / (config.steps - warmup))
    low = config.min_lr_ratio
    return config.peak_lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Config, step: int) -> float:
    """Set and return the learning rate of a schedule's `step`-th step. A function of the step, it needs no state."""
    lr = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
