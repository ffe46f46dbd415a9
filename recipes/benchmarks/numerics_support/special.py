"""Single experiments beside the families: drift of master weights, zero gradients, gradients not finite."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashoptim_dist import FlashAdamW
from flashoptim_dist.formats import Rounding

from .exact import BETA1, EPS, Setting
from .measure import ours

SHAPE = (64, 128)
"""8,192 elements."""


@dataclass(frozen=True)
class Special:
    """A figure and what it is to stay within: ``value`` <= ``bound``."""

    what: str
    label: str
    beta2: float
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the bound holds; NaN does not."""
        return self.value <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable copy."""
        return {**asdict(self), "holds": self.holds}


def drift(steps: int, beta2: float, device: str) -> list[Special]:
    """bf16 weights near 1 with 24-bit masters under a gradient that never changes, stochastic rounding.

    Adam's update is then lr in every step. The value is how far the mean movement of 8,192 weights is from it,
    relative; for lr 1e-5 and 1e-6 and for either sign of the gradient.
    """
    generator = torch.Generator().manual_seed(0)
    cases = [(lr, sign) for lr in (1e-5, 1e-6) for sign in (1.0, -1.0)]
    parameters = [nn.Parameter((1.0 + torch.rand(SHAPE, generator=generator) / 8).bfloat16().to(device)) for _ in cases]
    groups = [
        {"params": [(f"weight.{n}", parameter)], "lr": lr}
        for n, (parameter, (lr, _)) in enumerate(zip(parameters, cases, strict=True))
    ]
    optimizer = FlashAdamW(groups, betas=(BETA1, beta2), eps=EPS, weight_decay=0.0, rounding="stochastic")
    start = [optimizer.master_weight(parameter).double() for parameter in parameters]
    for parameter, (_, sign) in zip(parameters, cases, strict=True):
        parameter.grad = torch.full_like(parameter, 0.01 * sign)
    for _ in range(steps):
        optimizer.step()
    results = []
    for parameter, before, (lr, sign) in zip(parameters, start, cases, strict=True):
        moved = (optimizer.master_weight(parameter).double() - before).mean().item()
        what = f"drift of masters, lr/weight {lr:g}, gradient {'above' if sign > 0 else 'below'} 0"
        off = abs(moved / (-sign * lr * steps) - 1.0)
        results.append(Special(what, "stochastic", beta2, off, 0.02 if lr == 1e-5 else 0.05))
    return results


def zero_gradients(steps: int, rounding: Rounding, beta2: float, device: str) -> list[Special]:
    """Weights whose gradient is always zero: without decay no bit moves; with it they follow the exact decay.

    Values: weights (with their corrections) that moved; the mean relative distance from exact decay, for which one
    rounding of a 24-bit weight a step, 2**-15, averages out over 8,192 weights to less than its hundredth.
    """
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    still, shrinking = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    lr, decay = 1e-2, 0.1
    groups = [
        {"params": [("still", still)], "weight_decay": 0.0},
        {"params": [("shrinking", shrinking)], "weight_decay": decay},
    ]
    optimizer = FlashAdamW(groups, lr=lr, betas=(BETA1, beta2), eps=EPS, rounding=rounding)
    for parameter in (still, shrinking):
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(steps):
        optimizer.step()
    moved = int((optimizer.master_weight(still) != weight.float()).sum())
    exact = weight.double().abs().sum() * (1.0 - lr * decay) ** steps
    off = abs(float(optimizer.master_weight(shrinking).double().abs().sum() / exact) - 1.0)
    return [
        Special("zero gradients: weights that moved", rounding, beta2, float(moved), 0.0),
        Special("zero gradients: distance from exact decay", rounding, beta2, off, 2.0**-15 * max(1.0, steps / 100)),
    ]


def odd_gradient(
    value: float, steps: int, rounding: Rounding, beta2: float, format_error: float, device: str
) -> list[Special]:
    """One gradient of Inf, NaN or 1e6 in the middle of a run, against the same run without it.

    Values: elements of other groups with any other update, ever; for Inf and NaN how far the group mates' next update
    is off, relative, to be below the format's own error for Gaussian gradients; for 1e6 the mates' largest later
    update over the largest without it (a NaN counts as infinite).
    """
    at = steps // 2
    with_it, without = (
        _updates(value, at, steps, rounding, beta2, device),
        _updates(0.0, at, steps, rounding, beta2, device),
    )
    group, mates = torch.zeros(SHAPE, dtype=torch.bool), torch.zeros(SHAPE, dtype=torch.bool)
    group[3, 32:64] = True
    mates[3, 32:64] = True
    mates[3, 37] = False
    others = int((with_it[:, ~group] != without[:, ~group]).any(dim=0).sum())
    name = f"one gradient of {value:g}"
    results = [Special(f"{name}: other groups' elements changed", rounding, beta2, float(others), 0.0)]
    a, b = with_it[at:, mates].double(), without[at:, mates].double()
    if math.isfinite(value):
        largest = (a.abs().amax() / b.abs().amax()).item() if bool(torch.isfinite(a).all()) else math.inf
        return [*results, Special(f"{name}: mates' largest update / without", rounding, beta2, largest, 2.5)]
    off = ((a[0] - b[0]).norm() / b[0].norm()).item()
    return [*results, Special(f"{name}: change of mates' next update", rounding, beta2, off, format_error)]


def _updates(value: float, at: int, steps: int, rounding: Rounding, beta2: float, device: str) -> Tensor:
    """Updates [steps, ...] under Gaussian gradients, one of which is ``value`` (0: as it was) in step ``at``."""
    generator = torch.Generator().manual_seed(2)
    subject = ours(Setting(beta2=beta2), SHAPE, rounding, device)
    updates = []
    for step in range(1, steps + 1):
        gradient = torch.randn(SHAPE, generator=generator) * 1e-2
        if step == at and value != 0.0:
            gradient[3, 37] = value
        updates.append(subject.step(gradient).clone())
    return torch.stack(updates)
