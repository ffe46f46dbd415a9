"""The update rules: pure fp32 functions of weight, gradient and moments. One definition each; the Triton kernels
restate them.

A rule gets tensors of one shape and the scalars of one parameter as plain floats, and returns new tensors. It knows
nothing of formats, sharding or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamScalars:
    """Scalars of one Adam or AdamW step of one parameter.

    ``decay``: factor on the weight (decoupled decay; 1 - lr * weight_decay). ``l2``: weight decay added to the
    gradient. ``step_size``: lr / (1 - beta1**step). ``correction2``: sqrt(1 - beta2**step).
    """

    beta1: float
    beta2: float
    eps: float
    decay: float
    l2: float
    step_size: float
    correction2: float


def adam_scalars(
    *, lr: float, betas: tuple[float, float], eps: float, decay: float, l2: float, step: int
) -> AdamScalars:
    """Return the scalars of step number ``step`` (1 for the first), computed in double precision."""
    beta1, beta2 = betas
    return AdamScalars(
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        decay=decay,
        l2=l2,
        step_size=lr / (1.0 - beta1**step),
        correction2=(1.0 - beta2**step) ** 0.5,
    )


def adam_update(
    weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: AdamScalars
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One step of Adam (Kingma and Ba, arXiv 1412.6980) with L2 decay, or of AdamW (Loshchilov and Hutter, arXiv
    1711.05101).

    Written without fused multiply-adds (lerp, addcmul, addcdiv), whose vector tails would make bits depend on the
    shard.
    """
    momentum, variance = moments
    if scalars.l2:
        gradient = gradient + weight * scalars.l2
    momentum = momentum * scalars.beta1 + gradient * (1.0 - scalars.beta1)
    variance = variance * scalars.beta2 + gradient * gradient * (1.0 - scalars.beta2)
    denominator = torch.sqrt(variance) / scalars.correction2 + scalars.eps
    if scalars.decay != 1.0:
        weight = weight * scalars.decay
    weight = weight - momentum / denominator * scalars.step_size
    return weight, (momentum, variance)


def contain_overflow(moments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Drop the momentum of elements whose variance overflowed fp32 (a gradient beyond 1e19), before they are encoded.

    Encoded, such a variance becomes the largest of its group; the momentum over it would make the element explode.
    Exact Adam freezes the element instead, and so does this.
    """
    if len(moments) != 2:
        return moments
    momentum, variance = moments
    return torch.where(torch.isfinite(variance), momentum, 0.0), variance
