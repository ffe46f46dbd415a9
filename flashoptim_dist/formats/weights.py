"""Weight split: an fp32 master weight as a 16-bit weight and an integer correction, in integer arithmetic.

With the 31 magnitude bits M of the fp32 value and the sign apart, and b correction bits (8 or 16):

    T = (M + r) >> (16 - b)        r: half a unit (nearest) or random bits (stochastic)
    t = (T + 2**(b-1)) >> b        magnitude bits of the bf16 weight: the nearest one, ties away from zero
    c = T - (t << b)               the correction, in [-2**(b-1), 2**(b-1) - 1]

Decoding is a shift and an addition. The scheme is the ULP-scaled correction of FlashOptim (arXiv 2602.23349,
Algorithm 1) written in integers: no float arithmetic, hence exact and the identity on re-encoding for every value,
zero of either sign, subnormals, ties and binade edges included. 16 + b bits of the fp32 pattern survive; b = 16 is
lossless.

A 16-bit weight without correction (b = 0) is rounded stochastically in the same way, with 16 random bits, or converted
to nearest as torch does.

fp16 weights use the fp16 pattern extended by b mantissa bits in the same way (exponents rebiased, fp16 subnormals as
multiples of 2**(-24-b)). A finite value saturates below Inf; a non-finite weight has correction 0; where a stale
negative correction lies under a zero weight, the decoded magnitude is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FP32_INFINITY = 0x7F800000
_FP16_REBIAS = 112 << 23
_FP16_SMALLEST_NORMAL = 2.0**-14

CORRECTION_DTYPES = {8: torch.int8, 16: torch.int16}
"""Storage of a correction by its number of bits."""

_LARGEST = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF}

SPLIT_DTYPES = (torch.bfloat16, torch.float16)
"""Weight dtypes that take a correction; fp32 weights need none."""


def correction_bits(dtype: torch.dtype, master_weight_bits: int | None) -> int:
    """Return how many correction bits a weight of ``dtype`` gets: master_weight_bits - 16, or 0 where it needs none."""
    if master_weight_bits is None or dtype not in SPLIT_DTYPES:
        return 0
    return master_weight_bits - 16


def correction_dtype(bits: int) -> torch.dtype:
    """Return the integer dtype that stores a correction of 8 or 16 bits."""
    return CORRECTION_DTYPES[bits]


def split(
    master: Tensor, dtype: torch.dtype, bits: int, noise: Tensor | None = None, *, stochastic: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Split fp32 master weights into 16-bit weights and corrections.

    Args:
        master: fp32, any shape.
        dtype: torch.bfloat16 or torch.float16.
        bits: 8 or 16 correction bits.
        noise: int32 in [0, 255], same shape, for stochastic rounding of the last kept bit; None rounds to nearest.
        stochastic: must agree with ``noise`` when given; kept for callers that state their intent.

    Returns:
        (weight of ``dtype``, correction int8 or int16), same shape as ``master``.
    """
    if stochastic is not None and stochastic != (noise is not None):
        raise ValueError("stochastic=True needs noise and stochastic=False takes none")
    pattern = master.contiguous().view(torch.int32)
    finite = (pattern & 0x7FFFFFFF) < _FP32_INFINITY
    half = 1 << (bits - 1)
    extended = _extend(master, dtype, bits, noise, 8).clamp(max=(_LARGEST[dtype] << bits) + half - 1)
    rounded = (extended + half) >> bits
    correction = extended - (rounded << bits)
    weight = (rounded | ((pattern >> 16) & 0x8000)).to(torch.int16).view(dtype)
    weight = torch.where(finite, weight, master.to(dtype))
    return weight, torch.where(finite, correction, 0).to(correction_dtype(bits))


def round_stochastically(master: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round fp32 values to 16-bit weights that have no correction, up or down by chance: right in the mean.

    Args:
        master: fp32, any shape. Finite values stay finite.
        dtype: torch.bfloat16 or torch.float16.
        noise: int32 in [0, 65535], same shape.
    """
    pattern = master.contiguous().view(torch.int32)
    finite = (pattern & 0x7FFFFFFF) < _FP32_INFINITY
    rounded = _extend(master, dtype, 0, noise, 16).clamp(max=_LARGEST[dtype])
    weight = (rounded | ((pattern >> 16) & 0x8000)).to(torch.int16).view(dtype)
    return torch.where(finite, weight, master.to(dtype))


def merge(weight: Tensor, correction: Tensor | None) -> Tensor:
    """Return the fp32 master weights of 16-bit weights and their corrections (None: the weights alone)."""
    if correction is None or weight.dtype not in SPLIT_DTYPES:
        return weight.to(torch.float32)
    bits = 8 if correction.dtype == torch.int8 else 16
    pattern = weight.contiguous().view(torch.int16).to(torch.int32)
    extended = (((pattern & 0x7FFF) << bits) + correction.to(torch.int32)).clamp_(min=0)
    if weight.dtype == torch.bfloat16:
        magnitude = extended << (16 - bits)
    else:
        magnitude = _magnitude_of_fp16(extended, bits)
    value = (magnitude | ((pattern & 0x8000) << 16)).view(torch.float32)
    return torch.where(torch.isfinite(weight), value, weight.to(torch.float32))


def _extend(master: Tensor, dtype: torch.dtype, bits: int, noise: Tensor | None, noise_bits: int) -> Tensor:
    """Return T, int32: magnitude bits of ``dtype`` and ``bits`` more; ``noise`` has ``noise_bits``."""
    magnitude = master.contiguous().view(torch.int32) & 0x7FFFFFFF
    dropped = (16 if dtype == torch.bfloat16 else 13) - bits
    unit: Tensor | int = 0
    if dropped > 0:
        unit = 1 << (dropped - 1) if noise is None else noise >> (noise_bits - dropped)
    if dtype == torch.bfloat16:
        # The addition may carry a finite pattern into Inf's; the caller's clamp takes it back.
        return (magnitude + unit) >> dropped
    small_size = master.abs().clamp(max=_FP16_SMALLEST_NORMAL)
    if dropped <= 0:
        normal = (magnitude - _FP16_REBIAS).clamp(max=(0x7BFF << 13) + 0x1FFF) << -dropped
        small = torch.round(small_size * 2.0 ** (24 + bits)).to(torch.int32)
    else:
        normal = (magnitude - _FP16_REBIAS + unit) >> dropped
        small = (torch.round(small_size * 2.0 ** (24 + bits + dropped)).to(torch.int32) + unit) >> dropped
    return torch.where(master.abs() >= _FP16_SMALLEST_NORMAL, normal, small)


def _magnitude_of_fp16(extended: Tensor, bits: int) -> Tensor:
    shift = 13 - bits
    normal = (extended << shift if shift >= 0 else extended >> -shift) + _FP16_REBIAS
    # What fp32 cannot hold is cut off, here as above: rounded up, it could reach the next weight.
    rounded = extended.to(torch.float32)
    cut = (rounded.view(torch.int32) - (rounded.to(torch.int32) > extended).to(torch.int32)).view(torch.float32)
    small = (cut * 2.0 ** (-24 - bits)).view(torch.int32)
    return torch.where(extended >= 1 << (10 + bits), normal, small)
