"""The arithmetic of a step: loss, gradient, schedule, validation."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

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
    model: nn.Module, step: StepBatches, world: World, interrupts: Interrupts | None = None
) -> float:
    """Add the gradient of the global batch's mean loss to the parameters; returns that loss. All ranks must call.

    Each label of the global batch weighs the same, wherever it lies: the sum of the losses is divided by the number of
    labels over all ranks and micro-batches. FSDP averages over ranks, hence the factor `world.size`. With the sum of
    the losses the ranks learn whether one of them was asked to end: `interrupts.agreed`.
    """
    scale = world.size / max(1, step.trained_tokens)
    total = torch.zeros((), device=world.device)
    for index, batch in enumerate(step.micro_batches):
        if isinstance(model, FSDPModule):
            # Gradients of the micro-batches add up unsharded, in the reduction's fp32, and are reduced once.
            model.set_requires_gradient_sync(index == len(step.micro_batches) - 1)
        loss = summed_loss(model, batch, world.device)
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


def clip_gradients(model: nn.Module, largest_norm: float) -> float:
    """Scale the gradients so that their global norm is at most `largest_norm` (0: leave them); returns the norm before.

    All ranks must call.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), largest_norm if largest_norm > 0 else math.inf)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


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
