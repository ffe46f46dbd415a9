"""Version 2 of the number format, proposed: the variance as a shared-exponent minifloat in integers, the momentum
relative to it. Not used by the library; docs/numerics.md ("Next format version") says why and what it takes.

    python docs/proposals/fd1_version2.py     # round trips and errors of fresh encodings

Variance (Adam's v). With P the fp32 pattern of v (31 bits, ordered like v, piecewise linear in log2 v), a group of 32
    stores T, the top: the largest finite P / 2^19, rounded up (so every P <= T << 19), and a shift k in 14..21, as one
    positive bf16 of pattern (T << 3) | (k - 14): a number just above the largest v, whose three last mantissa bits are
    k. Then code = 255 - (U - u), at least 1, uint8, with u = (P + r) >> k and U = ceil((T << 19) / 2^k); code 0 is
    v = 0, exactly. Decode: P = (U - 255 + code) << k.
r is half a unit, or the k leading bits of the noise word. The lattice of u does not depend on the group, so a new top
moves no code; only a coarser k rounds again. k is the finest that takes the group's smallest v > 0 (253 units of 2^k
span top to smallest), kept from the step before while it fits and until a finer one fits with an eighth to spare.

Momentum in Adam: m / unit(v), coded as in version 1 (127 sign(x) sqrt(|x|/s)), where unit(v) is the power of two
nearest to the decoded new sqrt(v): fp32 pattern ((P >> 24) + 64) << 23, inverse (254 - ((P >> 24) + 64)) << 23. Where
code(v) = 0, m is 0. Lion and SGD: unchanged (unit 1).

rounding="stochastic": r from the element's own noise word. rounding="nearest": weight and m to nearest, r from
step * ROTATION alone, one scalar per step (true nearest averages stall). Loading fp32 states: half a unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOP_SHIFT = 19
FINEST, COARSEST = 14, 21
LARGEST_TOP = 0xFEF
"""T << 3 | 7 stays below the pattern of Inf."""

SPAN = 253
"""Units of 2^k between a group's top and its smallest v > 0."""

INFINITY = 0x7F800000


def _shift_for(units: Tensor, limit: float) -> Tensor:
    """14 + the exponent of 2 just above units * limit. Units are integers below 2^17, so one fp32 product decides."""
    return ((units.to(torch.float32) * limit).view(torch.int32) >> 23) - 112


def pack(top: Tensor, shift: Tensor) -> Tensor:
    """The stored scale, bf16, of tops and shifts (int32); 0 for a group without v > 0."""
    word = torch.where(top > 0, (top << 3) | (shift - FINEST), 0)
    return word.to(torch.int16).view(torch.bfloat16)


def unpack(scales: Tensor) -> tuple[Tensor, Tensor]:
    """(tops, shifts), int32, of stored scales."""
    word = scales.view(torch.int16).to(torch.int32)
    return word >> 3, (word & 7) + FINEST


def _top_unit(top: Tensor, shift: Tensor) -> Tensor:
    return ((top << TOP_SHIFT) + ((1 << shift) - 1)) >> shift


def encode_variance(
    variance: Tensor, words: Tensor | None = None, previous: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Encode groups of variance.

    Args:
        variance: fp32 [..., 32], >= 0; Inf and NaN hurt themselves only.
        words: int32 noise words that broadcast to it (a scalar, step * ROTATION, for rounding="nearest"); None: half a
            unit.
        previous: the scales that the groups had, for the hysteresis of k; None for a fresh state.

    Returns:
        (codes uint8 [..., 32], scales bf16 [...]).
    """
    pattern = variance.contiguous().view(torch.int32)
    finite = pattern < INFINITY
    largest = torch.where(finite, pattern, 0).amax(-1)
    smallest = torch.where(finite & (pattern > 0), pattern, INFINITY).amin(-1)
    top = torch.where(largest > 0, (largest + (1 << TOP_SHIFT) - 1) >> TOP_SHIFT, 0).clamp(max=LARGEST_TOP)
    units = ((top << (TOP_SHIFT - FINEST)) - (smallest >> FINEST)).clamp(min=0)
    fits = _shift_for(units, 1 / SPAN).clamp(min=FINEST)
    roomy = _shift_for(units, 1.125 / SPAN)
    shift = unpack(previous)[1] if previous is not None else torch.full_like(units, FINEST)
    shift = torch.maximum(torch.minimum(shift, roomy), fits).clamp(max=COARSEST)
    k = shift.unsqueeze(-1)
    if words is None:
        r = 1 << (k - 1)
    else:
        r = (words >> (32 - k)) & ((1 << k) - 1)  # a logical shift: the word's k leading bits
    unit = (torch.where(finite, pattern, 0) + r) >> k
    code = (255 - (_top_unit(top, shift).unsqueeze(-1) - unit)).clamp_(1, 255)
    code = torch.where(finite, code, 255)
    code = torch.where(pattern == 0, 0, code)
    code = torch.where(top.unsqueeze(-1) > 0, code, 0)
    return code.to(torch.uint8), pack(top, shift)


def decode_variance(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 variance [..., 32] of uint8 codes [..., 32] and bf16 scales [...]."""
    top, shift = unpack(scales)
    unit = (_top_unit(top, shift) - 255).unsqueeze(-1) + codes.to(torch.int32)
    pattern = unit.clamp(min=0) << shift.unsqueeze(-1)
    return torch.where(codes == 0, 0, pattern).view(torch.float32)


def momentum_unit(variance: Tensor) -> tuple[Tensor, Tensor]:
    """(unit, 1 / unit) of decoded variance: powers of two, unit within a factor sqrt(2) of sqrt(v)."""
    field = (variance.view(torch.int32) >> 24) + 64
    return (field << 23).view(torch.float32), ((254 - field) << 23).view(torch.float32)


def main() -> None:
    """Print the error of a fresh encoding, and how much of it stays itself when it is encoded again."""
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 1.0, 2.0):
        scale = torch.exp(torch.randn(4096, 32, generator=generator) * spread) * 1e-2
        variance = (torch.randn(4096, 32, generator=generator) * scale) ** 2
        codes, scales = encode_variance(variance)
        decoded = decode_variance(codes, scales)
        again, same = encode_variance(decoded, previous=scales)
        # The top, and with it the codes, may be others; the values may not.
        kept = (decode_variance(again, same) == decoded).float().mean()
        off = (decoded / variance).sqrt().sub_(1.0)
        unit, inverse = momentum_unit(decoded)
        assert torch.equal(unit * inverse, torch.ones_like(unit))
        error = off.square().mean().sqrt()
        print(f"lognormal spread {spread:g}: sqrt(v) off by {error:.4f} rms; encoded again: {kept:.2%} same")


if __name__ == "__main__":
    main()
