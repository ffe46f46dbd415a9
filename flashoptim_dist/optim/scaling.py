"""Factors on gradients and skipped steps: GradScaler's protocol, the clip coefficient, and their count.

All are device scalars, read inside the step on GPUs; elsewhere the step reads them on the host.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class GradientInputs:
    """What a step needs to know of its gradients, as tensors on any device; None where there is nothing to know.

    ``found_inf``: not zero skips the step. ``grad_scale``: gradients are divided by it. ``coefficient``: gradients are
    multiplied by it; NaN or negative skips. It has no dimension, or one with a value for each parameter of the step.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    coefficient: Tensor | None = None

    def to(self, device: torch.device) -> GradientInputs:
        """Return the same on a device, without waiting for it."""
        if self.found_inf is None and self.grad_scale is None and self.coefficient is None:
            return self

        def moved(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device, non_blocking=True)

        return GradientInputs(moved(self.found_inf), moved(self.grad_scale), moved(self.coefficient))


def read_together(tensors: Sequence[Tensor | None]) -> list[list[float]]:
    """Return the numbers of small tensors, [] for None; synchronizes once with each device that they lie on."""
    numbers: list[list[float]] = [[] for _ in tensors]
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for row, tensor in enumerate(tensors):
        if tensor is not None:
            by_device.setdefault(tensor.device, []).append((row, tensor.detach().reshape(-1)))
    for of_device in by_device.values():
        values = torch.cat([tensor.double() for _, tensor in of_device]).tolist()
        for row, tensor in of_device:
            numbers[row], values = values[: len(tensor)], values[len(tensor) :]
    return numbers


def gradient_factors(
    found_inf: Sequence[float], grad_scale: Sequence[float], coefficient: Sequence[float], parameters: int
) -> list[float]:
    """Return the factor on the gradients of each of so many parameters, NaN where it is not to be stepped.

    The arguments are the numbers of :class:`GradientInputs`, empty where there is none.
    """
    if any(found_inf):
        return [math.nan] * parameters
    scale = 1.0 / grad_scale[0] if grad_scale else 1.0
    coefficients = list(coefficient) or [1.0]
    coefficients = coefficients * parameters if len(coefficients) == 1 else coefficients
    return [scale * value if value >= 0.0 else math.nan for value in coefficients]


class GradientScaling(torch.optim.Optimizer):
    """The part of ``FlashOptimizer`` that scales gradients and skips steps; the class beside it takes the steps."""

    clip_coefficient: Tensor | None
    """Factor on all gradients in the next step, a 0-dim tensor on any device; NaN or negative skips that step. Set by
    :func:`flashoptim_dist.clip_grad_norm_`; ``step()`` and ``zero_grad()`` take it away.
    """

    _stepper: Any
    _skipped_steps: int

    def _init_scaling(self) -> None:
        # GradScaler's protocol: it leaves unscaling and the skip to step(), through the attributes grad_scale and
        # found_inf, which it makes and deletes around the call.
        self._step_supports_amp_scaling = True
        self._skipped_steps = 0
        self.clip_coefficient = None
        self._zero_grad_hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, as in torch, and with them a clip coefficient that was for them."""
        for hook in list(self._zero_grad_hooks.values()):
            hook(self)
        super().zero_grad(set_to_none)
        self.clip_coefficient = None

    def register_zero_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call a function of this optimizer before every ``zero_grad()``, until the handle is removed."""
        handle = RemovableHandle(self._zero_grad_hooks)
        self._zero_grad_hooks[handle.id] = hook
        return handle

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was not finite. Reading it synchronizes with the device."""
        return self._skipped_steps + self._stepper.skipped_steps

    def _gradient_inputs(self) -> GradientInputs:
        """Return what the next step needs to know of the gradients.

        The scale is absent after ``scaler.unscale_``, which has applied it; what it found is there all the same.
        """
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        # GradScaler gives a plain 0 where no parameter had a gradient.
        found_inf = found_inf if isinstance(found_inf, Tensor) else None
        return GradientInputs(found_inf, grad_scale, self.clip_coefficient)
