"""Companded 8-bit moments: a code per element and a 16-bit scale per group of 32.

Momentum (signed; Adam's m, Lion, SGD), x in units of its own: s = largest finite |x| of the group, rounded up to bf16;
    code = R(127 sign(x) sqrt(|x|/s)), int8;  decode: y = code/127, x = s y |y|.
    The curve is finer near zero, where the small members of a group live; R is in ``rounding``.

Variance (Adam's v): an integer code of the fp32 pattern P of v, which is ordered like v and piecewise linear in log2 v.
    A group has a lattice of patterns, the multiples of 2^k, k in 14 to 20 (9 to 3 mantissa bits), of which its 255
    codes name those that end at T 2^19, just above the largest P:
        u = (P + r) >> k,  U = ceil(T 2^19 / 2^k),  code = u - max(U - 255, 0), uint8, at least 1;  v = 0 has code 0.
    Decode: P = (max(U - 255, 0) + code) << k, and 0 for code 0. r is random, so that the decoded value is unbiased (it
    is linear in P between powers of two), or half a unit where fp32 states are loaded.
    T is the smallest that fits; k the smallest with which the codes reach from T down to the smallest v > 0 of the
    group, as far as 31 octaves; what is smaller becomes code 1. The lattice does not depend on T, so that a new
    largest element moves no other. T and k are stored as the pattern of a bf16 number: T << 3 | k - 14.

Adam's m is stored in units of w = 2^floor(E/2), where E is the biased exponent of the decoded v (of code 0: of the
    lattice's end); 2^-63 w is the power of two next to sqrt(v). So x = m / w is of one size in a whole group, however
    different the gradients of its members are. Multiplying by w is exact. Lion and SGD have no v, and x = m.

The first is a companding function in the sense of FlashOptim (arXiv 2602.23349, Algorithm 2); the second takes the
place of its Algorithm 3. An all-zero group has scale 0 and codes 0. An Inf or NaN element is left out of the scale, so
it hurts itself only: an infinite momentum becomes the largest code, a NaN 0, a variance that is not finite the
group's largest.

All functions work on groups: tensors [..., 32] with scales [...].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashoptim_dist.formats.exact import square_root
from flashoptim_dist.formats.rounding import leading_bits, momentum_noise, round_momentum
from flashoptim_dist.formats.spec import COARSEST_SHIFT, FINEST_SHIFT, MOMENTUM_LEVELS

LARGEST_MOMENTUM_SCALE = 0x7F7F
"""Pattern of the largest bf16."""

TOP_SHIFT = 19
"""A top T stands for the pattern T << 19, a sixteenth of an octave."""

LARGEST_TOP = 0xFDE
"""Pattern 0x7EF00000, so v = 1.6e38: decoded by any k it stays below 2^127, where the momentum's unit ends."""

SPAN = 253
"""Units of 2^k that a group's codes reach, at least, from its top to its smallest v > 0, whatever is added to round."""

_INFINITY = 0x7F800000
_EXPONENT = 0x3F800000


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


# ------------------------------------------------------------------------------------------- momentum


def encode_momentum(
    momentum: Tensor, noise: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Encode groups of momentum.

    Args:
        momentum: fp32 [..., 32]; Adam's divided by its unit.
        noise: int32 in [0, 255] of the same shape for stochastic rounding; None rounds half to even.
        scale: bf16 [...] to take instead of the largest magnitude.

    Returns:
        (codes int8 [..., 32], scales bf16 [...]).
    """
    size = momentum.abs()
    if scale is None:
        scale = group_scale(size)
    divisor = scale.to(torch.float32).unsqueeze(-1)
    ratio = size / torch.where(divisor > 0, divisor, 1.0)
    code = square_root(ratio) * MOMENTUM_LEVELS
    code = torch.copysign(code, momentum).clamp_(-MOMENTUM_LEVELS, MOMENTUM_LEVELS).nan_to_num_(nan=0.0)
    code = round_momentum(code, noise).clamp_(-MOMENTUM_LEVELS, MOMENTUM_LEVELS)
    return code.to(torch.int8), scale


def encode_known_momentum(momentum: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups of momentum to nearest, and back to the very codes that it was decoded from, if it was.

    Stochastic rounding may leave a group without a code of 127; the largest magnitude is not the scale then.

    Args:
        momentum: fp32 [..., 32].

    Returns:
        (codes int8 [..., 32], scales bf16 [...]).
    """
    codes, scales = encode_momentum(momentum)
    known = (decode_momentum(codes, scales) == momentum).all(-1)
    largest = torch.where(torch.isfinite(momentum), momentum, 0.0).abs().amax(-1)
    y = torch.tensor(MOMENTUM_LEVELS - 1, dtype=torch.float32, device=momentum.device) * (1.0 / MOMENTUM_LEVELS)
    other_scales = (largest / (y * y)).to(torch.bfloat16)
    other_codes, _ = encode_momentum(momentum, scale=other_scales)
    fits = (decode_momentum(other_codes, other_scales) == momentum).all(-1) & ~known
    return torch.where(fits.unsqueeze(-1), other_codes, codes), torch.where(fits, other_scales, scales)


def decode_momentum(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 momentum [..., 32] of int8 codes [..., 32] and bf16 scales [...]; Adam's in its unit."""
    y = codes.to(torch.float32) * (1.0 / MOMENTUM_LEVELS)
    return y * y.abs() * scales.to(torch.float32).unsqueeze(-1)


# ------------------------------------------------------------------------------------------- variance


def pack(top: Tensor, shift: Tensor) -> Tensor:
    """Return the bf16 scales of tops T and shifts k (int32)."""
    return ((top << 3) + (shift - FINEST_SHIFT)).to(torch.int16).view(torch.bfloat16)


def are_variance_scales(scales: Tensor) -> Tensor:
    """Return which bf16 numbers are scales that a variance can have: T and k in their ranges, and 0 for T = 0 alone."""
    word = scales.contiguous().view(torch.int16)
    fits = (word >= 0) & (word >> 3 <= LARGEST_TOP) & (word & 7 <= COARSEST_SHIFT - FINEST_SHIFT)
    return fits & ((word == 0) | (word >> 3 > 0))


def lattice(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return (base, k), int32 [...], of bf16 scales: code c stands for the pattern base + (c << k)."""
    word = scales.contiguous().view(torch.int16).to(torch.int32)
    return lattice_of(word >> 3, (word & 7) + FINEST_SHIFT)


def lattice_of(top: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same of tops T and shifts k."""
    unit = 1 << shift
    last = ((top << TOP_SHIFT) + (unit - 1)) & -unit
    return (last - 255 * unit).clamp(min=0), shift


def shift_that_spans(top: Tensor, smallest: Tensor) -> Tensor:
    """Return k, int32, of groups with top T whose smallest pattern above 0 is given (Inf's where there is none)."""
    # Integers below 2**17 are exact in fp32, so one product decides, the same everywhere.
    units = (top << (TOP_SHIFT - FINEST_SHIFT)) - ((smallest - 1) >> FINEST_SHIFT)
    exponent = (units.to(torch.float32) * (1.0 / SPAN)).view(torch.int32) >> 23
    return (exponent - (126 - FINEST_SHIFT)).clamp(FINEST_SHIFT, COARSEST_SHIFT)


def encode_variance(variance: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode groups of variance (second moments, >= 0).

    Args:
        variance: fp32 [..., 32].
        words: int32 noise words that broadcast to it: one per element, or, for rounding="nearest", one for all. A true
            rounding to nearest would let moving averages stall. None rounds to nearest, as states are loaded: then
            what was decoded from codes keeps its value, and k may be finer than a step's.

    Returns:
        (codes uint8 [..., 32], scales bf16 [...]).
    """
    pattern = variance.contiguous().view(torch.int32) & 0x7FFFFFFF
    finite = pattern < _INFINITY
    largest = torch.where(finite, pattern, 0).amax(-1)
    smallest = torch.where(finite & (pattern > 0), pattern, _INFINITY).amin(-1)
    if words is None:
        top, shift = _nearest_lattice(largest, smallest)
        added = ((1 << shift) >> 1).unsqueeze(-1)
    else:
        top = top_of(largest)
        shift = shift_that_spans(top, smallest)
        added = leading_bits(words, shift.unsqueeze(-1))
    base, k = (value.unsqueeze(-1) for value in lattice_of(top, shift))
    known = torch.minimum(torch.where(finite, pattern, _INFINITY), (top << TOP_SHIFT).unsqueeze(-1))
    rounded = torch.maximum(known + added, base + (1 << k))
    codes = torch.where(known == 0, 0, (rounded - base) >> k)
    return codes.to(torch.uint8), pack(top, shift)


def top_of(largest: Tensor) -> Tensor:
    """Return T of groups whose largest finite pattern is given."""
    return ((largest + ((1 << TOP_SHIFT) - 1)) >> TOP_SHIFT).clamp(max=LARGEST_TOP)


def _nearest_lattice(largest: Tensor, smallest: Tensor) -> tuple[Tensor, Tensor]:
    """Return (T, k) for rounding to nearest: the finest k with which all fits, and T of what is rounded."""
    top = shift = torch.zeros_like(largest)
    for k in range(COARSEST_SHIFT, FINEST_SHIFT - 1, -1):
        half = 1 << (k - 1)
        last = torch.where(largest > 0, ((largest + half) >> k).clamp(min=1), 0)
        first = ((smallest + half) >> k).clamp(min=1)
        new_top = top_of(last << k)
        reach = ((new_top << TOP_SHIFT) + ((1 << k) - 1)) >> k
        fits = (reach - first <= 254) | (k == COARSEST_SHIFT)
        top, shift = torch.where(fits, new_top, top), torch.where(fits, k, shift)
    return top, shift


def decode_variance(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 variance [..., 32] of uint8 codes [..., 32] and bf16 scales [...]."""
    return torch.where(codes == 0, 0, _patterns(codes, scales)).view(torch.float32)


def momentum_unit(codes: Tensor, scales: Tensor, *, inverse: bool = False) -> Tensor:
    """Return the unit w of Adam's momentum, or 1/w: fp32 powers of two [..., 32], of a variance's codes and scales."""
    exponent = (_patterns(codes, scales) >> 1) & _EXPONENT
    return (_EXPONENT - exponent if inverse else _EXPONENT + exponent).view(torch.float32)


def _patterns(codes: Tensor, scales: Tensor) -> Tensor:
    base, shift = lattice(scales)
    return base.unsqueeze(-1) + (codes.to(torch.int32) << shift.unsqueeze(-1))


# ------------------------------------------------------------------------------------------- all moments of a parameter


def decode_moments(stored: Sequence[tuple[Tensor, Tensor]], signed: Sequence[bool]) -> list[Tensor]:
    """Return the fp32 moments [..., 32] of one parameter's groups: ``stored`` holds codes and scales of each.

    ``signed``: whether each is a momentum; beside a variance a momentum is in its unit.
    """
    unit = None
    for (codes, scales), is_signed in zip(stored, signed, strict=True):
        unit = unit if is_signed else momentum_unit(codes, scales)
    values = []
    for (codes, scales), is_signed in zip(stored, signed, strict=True):
        value = (decode_momentum if is_signed else decode_variance)(codes, scales)
        values.append(value * unit if is_signed and unit is not None else value)
    return values


def encode_moments(
    values: Sequence[Tensor], signed: Sequence[bool], words: Tensor | None = None, rotation: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Encode all moments of one parameter's groups.

    Args:
        values: fp32 [..., 32] each.
        signed: whether each is a momentum.
        words: int32 noise words of the elements; None rounds to nearest.
        rotation: what the step adds to every word, for a step that rounds to nearest. None, without ``words``, where
            states are loaded: what was decoded from codes then keeps its values (a momentum under a variance of 0
            excepted, which has the unit of the lattice's end).

    Returns:
        Codes and scales of each.
    """
    loads = words is None and rotation is None
    inverse, stored = None, {}
    for number, (value, is_signed) in enumerate(zip(values, signed, strict=True)):
        if not is_signed:
            common = words if words is not None or rotation is None else value.new_tensor(rotation, dtype=torch.int32)
            stored[number] = encode_variance(value, common)
            inverse = momentum_unit(*stored[number], inverse=True)
    noise = None if words is None else momentum_noise(words)
    for number, (value, is_signed) in enumerate(zip(values, signed, strict=True)):
        if is_signed:
            x = value if inverse is None else value * inverse
            stored[number] = encode_known_momentum(x) if loads else encode_momentum(x, noise)
    return [stored[number] for number in range(len(values))]
