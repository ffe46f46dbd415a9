"""Kinds of parameters and of steps for the tests of the CPU step, and their comparison bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flashoptim_dist.formats import (
    correction_bits,
    correction_dtype,
    noise_key,
)
from flashoptim_dist.optim import compiled
from flashoptim_dist.optim.reference import MomentTensors, ParameterStep, Rule
from flashoptim_dist.optim.rules import (
    LionScalars,
    SgdScalars,
    adam_scalars,
    adam_update,
    lion_update,
    sgd_update,
)
from flashoptim_dist.sharding import shard_layout

needs_compiler = pytest.mark.skipif(not compiled.has_compiler(), reason="Numba is not installed")


@dataclass(frozen=True)
class Kind:
    """A parameter and how it is stepped. ``special``: the part of weights and gradients that are Inf, NaN or huge."""

    name: str
    weight: torch.dtype = torch.bfloat16
    gradient: torch.dtype = torch.bfloat16
    master_weight_bits: int | None = 24
    rule: str = "adamw"
    stochastic: bool = True
    quantize: bool = True
    factor: float = 1.0
    special: float = 0.0

    def __str__(self) -> str:
        return self.name

    def arithmetic(self, step: int) -> tuple[Any, Rule]:
        """Scalars, another learning rate each step, and the rule."""
        lr = 1e-3 / step
        if self.rule == "lion":
            return LionScalars(lr=lr, beta1=0.9, beta2=0.99, decay=1 - 0.1 * lr), lion_update
        if self.rule in ("sgd", "plain sgd"):
            momentum = 0.9 if self.rule == "sgd" else 0.0
            gain = 1.0 if step == 1 else 0.7
            return SgdScalars(lr=lr, momentum=momentum, gain=gain, nesterov=True, decay=1.0, l2=0.01), sgd_update
        decay, l2 = (1 - 0.1 * lr, 0.0) if self.rule == "adamw" else (1.0, 0.1)
        return adam_scalars(lr=lr, betas=(0.9, 0.999), eps=1e-8, decay=decay, l2=l2, step=step), adam_update

    @property
    def signed(self) -> tuple[bool, ...]:
        """Which moments there are."""
        return {"lion": (True,), "sgd": (True,), "plain sgd": ()}.get(self.rule, (True, False))

    def task(self, shape: tuple[int, ...], seed: int, *, strided: bool = False) -> ParameterStep:
        """A parameter with random state of this kind, before its first step here."""
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> Tensor:
            return torch.randn(shape, generator=generator) * scale

        def sprinkle(tensor: Tensor) -> Tensor:
            values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-39, 3.3e38, -1e30])
            chosen = torch.rand(shape, generator=generator) < self.special
            return torch.where(chosen, values[torch.randint(0, len(values), shape, generator=generator)], tensor)

        weight = sprinkle(normal(0.02)).to(self.weight)
        spread = 10.0 ** (torch.rand(shape, generator=generator) * 6 - 7)
        gradient = sprinkle(normal(1.0) * spread).to(self.gradient)
        layout = shard_layout(weight, "p")
        bits = correction_bits(self.weight, self.master_weight_bits)
        correction = None
        if bits:
            half = 1 << (bits - 1)
            correction = torch.randint(-half, half, shape, generator=generator).to(correction_dtype(bits))
        moments = []
        for signed in self.signed:
            if not (self.quantize and layout.quantized):
                value = normal(1e-3)
                moments.append(MomentTensors(signed, value if signed else value * value, None))
                continue
            codes = torch.randint(*((-127, 128) if signed else (1, 256)), shape, generator=generator)
            codes[torch.rand(shape, generator=generator) < 0.1] = 0
            scale = (10.0 ** (torch.rand(layout.scale_local_shape, generator=generator) * 6 - 8)).to(torch.bfloat16)
            if not signed:
                scale.view(torch.int16).bitwise_and_(~1)  # of the three lowest bits, no variance has all
            scale.view(-1)[::7] = 0.0
            moments.append(MomentTensors(signed, codes.to(torch.int8 if signed else torch.uint8), scale))
        if strided:
            weight, gradient = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (weight, gradient))
        return ParameterStep(
            layout=layout,
            weight=weight,
            gradient=gradient,
            correction=correction,
            moments=tuple(moments),
            scalars=None,
            gradient_factor=self.factor,
            noise_key=noise_key(5, seed) if self.stochastic else None,
            step=0,
        )

    def advance(self, task: ParameterStep) -> tuple[ParameterStep, Rule]:
        """Set a task to its next step, with another gradient."""
        task.step += 1
        task.scalars, rule = self.arithmetic(task.step)
        task.gradient = task.gradient.roll(1, 0) if task.gradient.ndim else task.gradient
        return task, rule


KINDS = [
    Kind("adamw"),
    Kind("adamw-nearest-special", stochastic=False, special=0.01),
    Kind("adamw-special", special=0.01, factor=-0.5),
    Kind("adam-l2-32-bits", rule="adam", master_weight_bits=32, gradient=torch.float32),
    Kind("adamw-fp16", weight=torch.float16, gradient=torch.float16, special=0.01),
    Kind("adamw-fp32", weight=torch.float32, gradient=torch.float32),
    Kind("adamw-no-correction", master_weight_bits=None),
    Kind("adamw-fp16-no-correction", weight=torch.float16, master_weight_bits=None, quantize=False, special=0.01),
    Kind("lion-no-correction", rule="lion", master_weight_bits=None, special=0.01),
    Kind("adamw-unquantized", quantize=False),
    Kind("lion", rule="lion", special=0.01),
    Kind("sgd", rule="sgd", stochastic=False),
    Kind("plain-sgd", rule="plain sgd"),
]
SHAPES = [(), (1,), (33,), (3, 2), (1, 33), (40, 96), (33, 50), (16, 8, 3, 3), (3, 20, 37)]


def copy_of(task: ParameterStep) -> ParameterStep:
    moments = (
        MomentTensors(m.signed, m.values.clone(), None if m.scale is None else m.scale.clone()) for m in task.moments
    )
    return ParameterStep(
        **{
            **vars(task),
            "weight": task.weight.clone(),
            "correction": None if task.correction is None else task.correction.clone(),
            "moments": tuple(moments),
        }
    )


def stored(task: ParameterStep) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"weight": task.weight}
    if task.correction is not None:
        tensors["correction"] = task.correction
    for number, moment in enumerate(task.moments):
        tensors[f"moment {number}"] = moment.values
        if moment.scale is not None:
            tensors[f"scale {number}"] = moment.scale
    return tensors


def assert_same(actual: ParameterStep, expected: ParameterStep, where: str) -> None:
    """Compare bits; only which NaN a NaN is may differ, since processors propagate either operand's."""
    for (name, one), other in zip(stored(actual).items(), stored(expected).values(), strict=True):
        if one.is_floating_point():
            integer = torch.int16 if one.itemsize == 2 else torch.int32
            one, other = (torch.where(t.isnan(), -1, t.contiguous().view(integer)) for t in (one, other))
        assert torch.equal(one, other), f"{where}: {name}: {int((one != other).sum())} of {one.numel()} differ"
