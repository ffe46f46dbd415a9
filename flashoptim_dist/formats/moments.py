"""Companded 8-bit moments: a code per element and a bf16 scale per group of 32.

Momentum (signed; Adam's m, Lion, SGD): s = largest finite |m| of the group, rounded up to bf16;
    code = R(127 sign(m) sqrt(|m|/s)), int8;  decode: y = code/127, m = s y |y|.
Variance (Adam's v): s = largest finite sqrt(v) of the group, rounded up to bf16;
    code = R(255 sqrt(sqrt(v)/s)), uint8, and at least 3 wherever v > 0;  decode: sqrt(v) = s (code/255)^2.

These are companding functions in the sense of FlashOptim (arXiv 2602.23349, Algorithms 2 and 3) with other curves:
finer near zero, where the small members of a group live. R is in ``rounding``. Encoding and decoding use the same
stored scale; the largest code decodes to exactly the scale. An all-zero group has scale 0 and codes 0. An Inf or NaN
element is left out of the scale, so it hurts itself only: an Inf becomes the largest code, a NaN momentum 0, a NaN
variance 255.

All functions work on groups: tensors [..., 32] with scales [...].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashoptim_dist.formats.exact import square_root
from flashoptim_dist.formats.rounding import round_momentum, round_variance
from flashoptim_dist.formats.spec import MOMENTUM_LEVELS, VARIANCE_FLOOR, VARIANCE_LEVELS

LARGEST_MOMENTUM_SCALE = 0x7F7F
"""Pattern of the largest bf16."""

LARGEST_VARIANCE_SCALE = 0x5F7F
"""Pattern of the largest bf16 whose square is finite in fp32: a finite variance must not decode to Inf."""


def round_up_to_bf16(value: Tensor, largest: int = LARGEST_MOMENTUM_SCALE) -> Tensor:
    """Return the smallest bf16 not below each finite fp32 value >= 0, saturated at the bf16 of pattern ``largest``."""
    pattern = value.contiguous().view(torch.int32)
    pattern = ((pattern + 0xFFFF) >> 16).clamp_(max=largest)
    return pattern.to(torch.int16).view(torch.bfloat16)


def group_scale(size: Tensor, largest_scale: int = LARGEST_MOMENTUM_SCALE) -> Tensor:
    """Return the bf16 scale [...] of groups [..., 32] of fp32 magnitudes: the largest finite one, rounded up.

    A group without a finite element has scale 0; scales saturate at the bf16 of pattern ``largest_scale``.
    """
    # Patterns of magnitudes order like integers; this offset sends Inf and NaN, and only them, below zero.
    offset = 0x00800000
    largest = (size.view(torch.int32) + offset).amax(dim=-1).clamp_(min=offset).sub_(offset)
    return round_up_to_bf16(largest.view(torch.float32), largest_scale)


def encode_momentum(momentum: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode groups of momentum.

    Args:
        momentum: fp32 [..., 32].
        noise: int32 in [0, 255] of the same shape for stochastic rounding; None rounds half to even.

    Returns:
        (codes int8 [..., 32], scales bf16 [...]).
    """
    size = momentum.abs()
    scale = group_scale(size)
    divisor = scale.to(torch.float32).unsqueeze(-1)
    ratio = size / torch.where(divisor > 0, divisor, 1.0)
    code = square_root(ratio) * MOMENTUM_LEVELS
    code = torch.copysign(code, momentum).clamp_(-MOMENTUM_LEVELS, MOMENTUM_LEVELS).nan_to_num_(nan=0.0)
    code = round_momentum(code, noise).clamp_(-MOMENTUM_LEVELS, MOMENTUM_LEVELS)
    return code.to(torch.int8), scale


def decode_momentum(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 momentum [..., 32] of int8 codes [..., 32] and bf16 scales [...]."""
    y = codes.to(torch.float32) * (1.0 / MOMENTUM_LEVELS)
    return y * y.abs() * scales.to(torch.float32).unsqueeze(-1)


def encode_variance(variance: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode groups of variance (second moments, >= 0).

    Args:
        variance: fp32 [..., 32].
        noise: int32 in [0, 65535] of the same shape for stochastic rounding; None rounds half to even.

    Returns:
        (codes uint8 [..., 32], scales bf16 [...] of sqrt(v)).
    """
    root = square_root(variance)
    scale = group_scale(root, LARGEST_VARIANCE_SCALE)
    divisor = scale.to(torch.float32).unsqueeze(-1)
    ratio = root / torch.where(divisor > 0, divisor, 1.0)
    code = (square_root(ratio) * VARIANCE_LEVELS).nan_to_num_(nan=VARIANCE_LEVELS).clamp_(max=VARIANCE_LEVELS)
    # An exact integer is its own rounding, so the floor may come first.
    code = torch.where(variance == 0, 0.0, code.clamp_(min=VARIANCE_FLOOR))
    return round_variance(code, noise).to(torch.uint8), scale


def decode_variance(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 variance [..., 32] of uint8 codes [..., 32] and bf16 scales [...] of sqrt(v)."""
    y = codes.to(torch.float32) * (1.0 / VARIANCE_LEVELS)
    root = y * y * scales.to(torch.float32).unsqueeze(-1)
    return root * root
