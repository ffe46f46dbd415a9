"""The family's update rules in fp64, restated from their papers, and what one rounding to the format may change.

Independent of the library: nothing here calls its rules, encoders or decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Moments = dict[str, Tensor]

EXPLICIT_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}


def adam(
    weight: Tensor, gradient: Tensor, moments: Moments, step: int, o: Mapping[str, Any], decoupled: bool
) -> Tensor:
    """Adam (arXiv 1412.6980, Algorithm 1), AdamW (arXiv 1711.05101, Algorithm 2); moments change in place."""
    decay, (beta1, beta2) = o["weight_decay"], o["betas"]
    if not decoupled:
        gradient = gradient + decay * weight
    moments["exp_avg"] = beta1 * moments["exp_avg"] + (1 - beta1) * gradient
    moments["exp_avg_sq"] = beta2 * moments["exp_avg_sq"] + (1 - beta2) * gradient**2
    corrected = moments["exp_avg"] / (1 - beta1**step)
    root = (moments["exp_avg_sq"] / (1 - beta2**step)).sqrt()
    return weight - o["lr"] * (corrected / (root + o["eps"]) + (decay * weight if decoupled else 0.0))


def lion(weight: Tensor, gradient: Tensor, moments: Moments, o: Mapping[str, Any]) -> Tensor:
    """Lion (arXiv 2302.06675, Algorithm 2)."""
    beta1, beta2 = o["betas"]
    momentum = moments["exp_avg"]
    moments["exp_avg"] = beta2 * momentum + (1 - beta2) * gradient
    direction = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
    return weight - o["lr"] * (direction + o["weight_decay"] * weight)


def sgd(weight: Tensor, gradient: Tensor, moments: Moments, step: int, o: Mapping[str, Any], decoupled: bool) -> Tensor:
    """SGD as torch documents it: the first step is not dampened, and the learning rate stays out of the momentum."""
    if not decoupled:
        gradient = gradient + o["weight_decay"] * weight
    direction = gradient
    if o["momentum"]:
        gain = 1.0 if step == 1 else 1.0 - o["dampening"]
        moments["momentum_buffer"] = o["momentum"] * moments["momentum_buffer"] + gain * gradient
        momentum = moments["momentum_buffer"]
        direction = gradient + o["momentum"] * momentum if o["nesterov"] else momentum
    return weight - o["lr"] * (direction + (o["weight_decay"] * weight if decoupled else 0.0))


def grouped(tensor: Tensor) -> Tensor:
    """[groups, 32] of a state's codes or values, rows (last dimension, or all but the first) padded with zeros."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] >= 32 else tensor.reshape(tensor.shape[0], -1)
    padding = -rows.shape[1] % 32
    return torch.nn.functional.pad(rows, (0, padding)).reshape(-1, 32)


def ungrouped(groups: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`grouped`: the values in the shape of ``like``."""
    flat = like.shape[-1] < 32
    rows, length = (like.shape[0], like[0].numel()) if flat else (like.numel() // like.shape[-1], like.shape[-1])
    return groups.reshape(rows, -1)[:, :length].reshape(like.shape)


def patterns(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 patterns [groups, 32] that a variance's codes stand for, code 0's included, and units 2^k [groups, 1]."""
    word = scale.reshape(-1, 1).view(torch.int16).long()
    unit = 1 << (14 + word % 8)
    last = -(-((word >> 3) << 19) // unit)
    return ((last - 255).clamp(min=0) + grouped(codes).long()) * unit, unit


def momentum_units(state: Mapping[str, Tensor]) -> Tensor | float:
    """Adam's unit of m, fp64 [groups, 32]: 2 to half the exponent bits of v, rounded down. 1 for the others."""
    if "exp_avg_sq" not in state:
        return 1.0
    held, _ = patterns(state["exp_avg_sq"], state["exp_avg_sq_scale"])
    return torch.exp2(((held >> 23) // 2).double())


def decoded(state: Mapping[str, Tensor], name: str) -> Tensor:
    """fp64 moment of a compressed state, [groups, 32]: s w y |y| with y = code / 127, or the pattern's value."""
    codes, scale = state[name], state[f"{name}_scale"]
    if name == "exp_avg_sq":
        held, _ = patterns(codes, scale)
        return torch.where(grouped(codes) == 0, 0, held).int().view(torch.float32).double()
    y = grouped(codes).double() / 127
    return scale.double().reshape(-1, 1) * momentum_units(state) * y * y.abs()


def moment_bound(state: Mapping[str, Tensor], name: str, exact: Tensor, unit: float) -> Tensor:
    """[groups, 32]: how far a decoded moment may lie from its exact value [groups, 32].

    Momentum: the code is the exact one, y = sqrt(|x| / s), plus at most ``unit`` codes (1/2 to nearest, 1 at random),
    so that s y^2 moves by at most s (2 y d + d^2), d = unit / 127; times the unit of m. Variance: the pattern moves by
    less than 2^k under either rounding, k as stored: 2^k units in the last place of the larger of the two; or it is
    lifted to the smallest that a code above 0 stands for.
    """
    if name == "exp_avg_sq":
        held, unit_of_pattern = patterns(state[name], state[f"{name}_scale"])
        ones = torch.ones_like(state[name])
        floor, _ = patterns(ones, state[f"{name}_scale"])
        value, least = (p.int().view(torch.float32).double() for p in (held, floor))
        last_place = torch.exp2(torch.floor(torch.log2(torch.maximum(value, exact).clamp(min=2.0**-126))) - 23)
        return torch.maximum(unit_of_pattern * last_place, least * (exact > 0))
    s = state[f"{name}_scale"].double().reshape(-1, 1) * momentum_units(state)
    delta = unit / 127
    y = (exact.abs() / s.clamp(min=1e-300)).sqrt().clamp(max=1.0)
    return s * (2 * y * delta + delta**2)


def weight_bound(weight: Tensor, dtype: torch.dtype, correction_bits: int, unit: float) -> Tensor:
    """``unit`` ulps of a weight of ``dtype`` that is ``correction_bits`` longer, not finer than fp32's."""
    finest = min(EXPLICIT_BITS[dtype] + correction_bits, 23)
    exponent = torch.floor(torch.log2(weight.abs().clamp(min=2.0 ** SMALLEST_EXPONENT[dtype])))
    return unit * torch.exp2(exponent - finest)
