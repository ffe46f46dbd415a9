"""The update rules: fp32 functions of weight, gradient and moments. One definition each; the kernels, Triton's
and the CPU's, restate them.

A rule gets tensors of one shape and the scalars of one parameter. It overwrites the weight and the moments, never the
gradient: new tensors of a block's size would cost a CPU as much again, in page faults. The scalars are floats, or
0-dim fp64 tensors for those that are neither 0 nor 1, which cost a CPU half the time of numbers: a rule compares them
through :func:`differs` alone. It knows nothing of formats, sharding or devices.
All are written without fused multiply-adds (lerp, addcmul, addcdiv), whose vector tails would make bits depend on the
shard.

Two records per rule: the *hyperparameters* of a group, as the user set them (the learning rate may be a tensor), and
the *scalars* of one step of one parameter, computed from them in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats.exact import square_root
from flashoptim_dist.optim.checks import check_one_number

Rule = Callable[[Tensor, Tensor, tuple[Tensor, ...], Any], tuple[Tensor, tuple[Tensor, ...]]]
"""(weight, gradient, moments, scalars) -> (new weight, new moments), fp32, of one shape, in the memory of the old."""


def differs(scalar: float | Tensor, neutral: float) -> bool:
    """Return whether a scalar is not ``neutral``, which is 0 or 1. A tensor never is: these two come as floats."""
    return isinstance(scalar, Tensor) or scalar != neutral


@dataclass(frozen=True)
class Hyperparameters:
    """What every rule has, per group.

    ``decay_rate``: the weight is multiplied by 1 - lr * decay_rate (decoupled decay). ``l2``: weight decay added to
    the gradient. ``maximize``: the gradient is negated first. ``lr`` may be a 0-dim tensor on any device.
    """

    lr: float | Tensor
    decay_rate: float
    l2: float
    maximize: bool

    def __post_init__(self) -> None:
        check_one_number(self.lr, "a group's lr")

    @property
    def rule(self) -> Rule:
        """The update rule."""
        raise NotImplementedError

    @property
    def decay(self) -> float:
        """Factor on the weight. Reading it synchronizes where ``lr`` is a tensor on a GPU."""
        return 1.0 - float(self.lr) * self.decay_rate

    def scalars(self, step: int, fresh: bool) -> Any:
        """Return the scalars of step number ``step`` (1 for the first).

        ``fresh``: the moments hold nothing yet (the first step, or momentum was switched on after it).
        """
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------- Adam


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
    """
    momentum, variance = moments
    if differs(scalars.l2, 0.0):
        gradient = gradient + weight * scalars.l2
    spare = gradient * (1.0 - scalars.beta1)
    momentum.mul_(scalars.beta1).add_(spare)
    torch.mul(gradient, gradient, out=spare).mul_(1.0 - scalars.beta2)
    variance.mul_(scalars.beta2).add_(spare)
    square_root(variance, out=spare).div_(scalars.correction2).add_(scalars.eps)
    torch.div(momentum, spare, out=spare).mul_(scalars.step_size)
    if differs(scalars.decay, 1.0):
        weight.mul_(scalars.decay)
    return weight.sub_(spare), (momentum, variance)


@dataclass(frozen=True)
class AdamHyperparameters(Hyperparameters):
    """Of Adam and AdamW."""

    beta1: float
    beta2: float
    eps: float

    @property
    def rule(self) -> Rule:
        """See the base."""
        return adam_update

    def scalars(self, step: int, fresh: bool) -> AdamScalars:
        """See the base."""
        return adam_scalars(
            lr=float(self.lr), betas=(self.beta1, self.beta2), eps=self.eps, decay=self.decay, l2=self.l2, step=step
        )


# ---------------------------------------------------------------------------------------------- Lion


@dataclass(frozen=True)
class LionScalars:
    """Scalars of one Lion step. ``decay``: factor on the weight (1 - lr * weight_decay)."""

    lr: float
    beta1: float
    beta2: float
    decay: float


def lion_update(
    weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: LionScalars
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One step of Lion (Chen et al., arXiv 2302.06675, Algorithm 2): the sign of an interpolated momentum."""
    (momentum,) = moments
    spare = gradient * (1.0 - scalars.beta1)
    direction = (momentum * scalars.beta1).add_(spare).sign_()
    momentum.mul_(scalars.beta2).add_(torch.mul(gradient, 1.0 - scalars.beta2, out=spare))
    if differs(scalars.decay, 1.0):
        weight.mul_(scalars.decay)
    return weight.sub_(direction.mul_(scalars.lr)), (momentum,)


@dataclass(frozen=True)
class LionHyperparameters(Hyperparameters):
    """Of Lion."""

    beta1: float
    beta2: float

    @property
    def rule(self) -> Rule:
        """See the base."""
        return lion_update

    def scalars(self, step: int, fresh: bool) -> LionScalars:
        """See the base."""
        return LionScalars(lr=float(self.lr), beta1=self.beta1, beta2=self.beta2, decay=self.decay)


# ---------------------------------------------------------------------------------------------- SGD


@dataclass(frozen=True)
class SgdScalars:
    """Scalars of one SGD step.

    ``gain``: factor on the gradient that enters the momentum (1 - dampening; 1 where the momentum is fresh, as in
    torch). ``decay``: factor on the weight. ``l2``: weight decay added to the gradient.
    """

    lr: float
    momentum: float
    gain: float
    nesterov: bool
    decay: float
    l2: float


def sgd_update(
    weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: SgdScalars
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One step of SGD as torch defines it (the learning rate outside the momentum); without moments, plain SGD."""
    if differs(scalars.l2, 0.0):
        gradient = gradient + weight * scalars.l2
    direction = gradient
    if moments:
        (momentum,) = moments
        spare = gradient * scalars.gain
        momentum.mul_(scalars.momentum).add_(spare)
        direction = torch.mul(momentum, scalars.momentum, out=spare).add_(gradient) if scalars.nesterov else momentum
    if differs(scalars.decay, 1.0):
        weight.mul_(scalars.decay)
    return weight.sub_(direction * scalars.lr), moments


@dataclass(frozen=True)
class SgdHyperparameters(Hyperparameters):
    """Of SGD with L2 or decoupled decay."""

    momentum: float
    dampening: float
    nesterov: bool

    @property
    def rule(self) -> Rule:
        """See the base."""
        return sgd_update

    def scalars(self, step: int, fresh: bool) -> SgdScalars:
        """See the base."""
        return SgdScalars(
            lr=float(self.lr),
            momentum=self.momentum,
            gain=1.0 if fresh else 1.0 - self.dampening,
            nesterov=self.nesterov,
            decay=self.decay,
            l2=self.l2,
        )


def contain_overflow(moments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Drop the momentum of elements whose variance overflowed fp32 (a gradient beyond 1e19), before they are encoded.

    Encoded, such a variance becomes the largest of its group; the momentum over it would make the element explode.
    Exact Adam freezes the element instead, and so does this.
    """
    if len(moments) != 2:
        return moments
    momentum, variance = moments
    return torch.where(torch.isfinite(variance), momentum, 0.0), variance
