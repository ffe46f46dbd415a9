"""The optimizers in fp64, from their papers: what the compressed ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

OptimizerName = Literal["FlashAdamW", "FlashAdam", "FlashLion", "FlashSGD", "FlashSGDW"]

BETA1 = 0.9
EPS = 1e-15
"""So small that gradients of 1e-9 are not hidden by it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An optimizer with its hyperparameters; the learning rate is 1.

    ``beta2``: decay rate of Adam's variance, of Lion's stored momentum, of SGD's momentum. Weights are ``weight``
    before every step, which only a ``weight_decay`` notices.
    """

    optimizer: OptimizerName = "FlashAdamW"
    beta2: float
    weight: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the optimizer's constructor."""
        common: dict[str, Any] = {"lr": 1.0, "weight_decay": self.weight_decay}
        if self.optimizer.startswith("FlashSGD"):
            return {**common, "momentum": self.beta2, "nesterov": self.nesterov}
        betas = {"betas": (BETA1, self.beta2)}
        return {**common, **betas} if self.optimizer == "FlashLion" else {**common, **betas, "eps": EPS}

    def exact(self, shape: Sequence[int]) -> Exact:
        """Return the same optimizer in fp64."""
        kind = {"FlashLion": ExactLion, "FlashSGD": ExactSgd, "FlashSGDW": ExactSgd}.get(self.optimizer, ExactAdam)
        return kind(self, shape)


OTHERS = (
    Setting(optimizer="FlashAdam", beta2=0.999, weight=2.0**-20, weight_decay=0.1),
    Setting(optimizer="FlashLion", beta2=0.99, weight=2.0**-20, weight_decay=0.1),
    Setting(optimizer="FlashSGD", beta2=0.9, weight=2.0**-20, weight_decay=0.1),
    Setting(optimizer="FlashSGDW", beta2=0.9, weight=2.0**-20, weight_decay=0.1, nesterov=True),
)
"""The rest of the family. Decay adds 1e-7 to gradients (L2) or updates, which those of 1e-7 and 1e-9 show."""


class Exact:
    """The base: weight decay, and a momentum in fp64."""

    def __init__(self, setting: Setting, shape: Sequence[int]) -> None:
        decay = setting.weight_decay * setting.weight
        decoupled = setting.optimizer.endswith("W") or setting.optimizer == "FlashLion"
        self.setting = setting
        self.l2, self.decay = (0.0, decay) if decoupled else (decay, 0.0)
        self.momentum = torch.zeros(*shape, dtype=torch.float64)

    def step(self, gradient: Tensor) -> Tensor:
        """Return the update, weight before minus weight after, in units of lr."""
        return self.update(gradient.double() + self.l2) + self.decay

    def update(self, gradient: Tensor) -> Tensor:
        """Return the update without decoupled decay."""
        raise NotImplementedError

    def root(self) -> Tensor | None:
        """Return sqrt(v), or None for an optimizer without a variance."""
        return None


class ExactAdam(Exact):
    """Adam (Kingma and Ba, arXiv 1412.6980, Algorithm 1); AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    def __init__(self, setting: Setting, shape: Sequence[int]) -> None:
        super().__init__(setting, shape)
        self.step_count = 0
        self.variance = torch.zeros_like(self.momentum)

    def update(self, gradient: Tensor) -> Tensor:
        """See the base."""
        beta2 = self.setting.beta2
        self.step_count += 1
        self.momentum.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        self.variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (self.variance / (1 - beta2**self.step_count)).sqrt_().add_(EPS)
        return self.momentum / (1 - BETA1**self.step_count) / root

    def root(self) -> Tensor:
        """See the base."""
        return self.variance.sqrt()


class ExactLion(Exact):
    """Lion (Chen et al., arXiv 2302.06675, Algorithm 2)."""

    def update(self, gradient: Tensor) -> Tensor:
        """See the base."""
        direction = torch.sign(BETA1 * self.momentum + (1 - BETA1) * gradient)
        self.momentum.mul_(self.setting.beta2).add_(gradient, alpha=1 - self.setting.beta2)
        return direction


class ExactSgd(Exact):
    """SGD with momentum as torch defines it (the learning rate outside of the momentum)."""

    def update(self, gradient: Tensor) -> Tensor:
        """See the base."""
        self.momentum.mul_(self.setting.beta2).add_(gradient)
        if self.setting.nesterov:
            return gradient + self.setting.beta2 * self.momentum
        return self.momentum.clone()
