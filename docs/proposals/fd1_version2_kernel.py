"""Triton functions for the proposed format version 2; see fd1_version2.py for the definition, docs/numerics.md for why.

Not used by the library. They were compiled for sm_90 (triton 3.6) inside an earlier form of ``kernels/adam.py``, before
its rare path went group by group, and have not been run on a card. Interpreted, ``variance_word``, ``encode_variance``
and ``decode_variance`` gave the bits of fd1_version2.py over 3 steps of 8,192 elements. ``compressed_update`` stands
where that kernel's update of compressed moments stood; after it, the kernel encodes so:

    lowest, shift = variance_grid(word)
    v_code, u = encode_variance(v, lowest, shift, words if STOCHASTIC else rotation)
    m = m * inverse_momentum_unit(u, shift)
    m_scale_bits = round_up_to_bf16(tl.max(tl.abs(m), axis=1, keep_dims=True))

and stores ``word`` as the variance's scale (int16 loads and stores of a bf16 tensor). A tile is rare, and computed
again with GUARDED, where ``is_rare(w, float_of(word << 16))``.
"""

import triton
import triton.language as tl
from flashoptim_dist.kernels.device import bits_of, decode_momentum, fast_reciprocal, fast_sqrt, float_of, merge_weight

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def variance_grid(word):
    """(lowest unit, shift) of groups from the int32 pattern of their bf16 scale: a code c stands for v of pattern
    (lowest + c) << shift.
    """
    shift = (word & 7) + 14
    return ((((word >> 3) << 19) + (1 << shift) - 1) >> shift) - 255, shift


@triton.jit
def decode_variance(code, lowest, shift, GUARDED: tl.constexpr):
    """(v, unit index) of uint8 codes. Unless GUARDED, a code under the smallest fp32 (a group below 2**-95) gives NaN
    later.
    """
    u = code.to(tl.int32) + lowest
    if GUARDED:
        u = tl.maximum(u, 0)
    u = tl.where(code == 0, 0, u)
    return float_of(u << shift), u


@triton.jit
def momentum_unit(u, shift):
    """Power of two near sqrt(v), from the unit index of v."""
    return float_of(((u >> (24 - shift)) + 64) << 23)


@triton.jit
def inverse_momentum_unit(u, shift):
    """1 / momentum_unit, exact."""
    return float_of((190 - (u >> (24 - shift))) << 23)


@triton.jit
def _shift_for(units, limit: tl.constexpr):
    """14 + the exponent of 2 above units * limit; units are exact in fp32, so torch and Triton agree."""
    return (bits_of(units * limit) >> 23) - 112


@triton.jit
def variance_word(largest, below_smallest, word):
    """New int32 pattern of the scale from the largest pattern, the smallest above 0 less one (uint32), and the old
    pattern.
    """
    top = (largest + 0x7FFFF) >> 19
    span = (top << 5) - (tl.minimum(below_smallest, 0x7F800000).to(tl.int32) >> 14)
    units = float_of(tl.maximum(span, 0) + 0x4B000000) - 8388608.0
    fits = tl.maximum(_shift_for(units, 1.0 / 253.0), 14)
    roomy = _shift_for(units, 1.125 / 253.0)
    shift = tl.minimum(tl.maximum(tl.minimum((word & 7) + 14, roomy), fits), 21)
    return tl.where(largest > 0, (top << 3) + (shift - 14), 0)


@triton.jit
def encode_variance(v, lowest, shift, words):
    """(uint8 codes, unit index) of finite v >= 0. ``words``: noise words, a scalar one for nearest rounding."""
    pattern = bits_of(v)
    r = (words.to(tl.uint32, bitcast=True) >> (32 - shift).to(tl.uint32)).to(tl.int32, bitcast=True)
    u = tl.maximum((pattern + r) >> shift, lowest + 1)
    u = tl.where(pattern == 0, 0, u)
    code = tl.where(pattern == 0, 0, u - lowest)
    return code.to(tl.uint8), u


@triton.jit
def compressed_update(
    p, g, e, m, ms, v, vs, beta1, to_momentum, beta2, to_variance, inverse_correction2, eps, step_size, decay, l2,
    factor, BITS: tl.constexpr, HAS_L2: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """Update a tile [groups, 32] from codes: weight bits p, gradient g, correction e, codes m and v; scales ms (fp32)
    and vs (int32 pattern), [groups, 1].

    Returns (w, m, v, word): new fp32 master weight, momentum and variance, and the variance's new scale. The caller
    contains w where GUARDED, as version 1's kernel does.
    """
    w = merge_weight(p, e, BITS, GUARDED or HAS_L2)
    if HAS_L2:
        g = g * factor + w * l2
    lowest, shift = variance_grid(vs)
    v, u = decode_variance(v, lowest, shift, GUARDED)
    old = decode_momentum(m, ms * (beta1 * (1.0 / 16129.0))) * momentum_unit(u, shift)
    m = tl.fma(g, to_momentum + tl.zeros_like(g), old)
    g = g * to_variance
    v = tl.fma(g, g, v * beta2)
    root = fast_sqrt(v)
    denominator = tl.fma(root, inverse_correction2 + tl.zeros_like(root), eps + tl.zeros_like(root))
    w = tl.fma(m * -step_size, fast_reciprocal(denominator), w * decay)
    finite = (tl.abs(m) < _INFINITY) & (v < _INFINITY)
    if GUARDED:
        v = tl.where(finite, v, 0.0)
        m = tl.where(finite, m, 0.0)
    pattern = bits_of(v)
    largest = tl.max(pattern, axis=1, keep_dims=True)
    below_smallest = tl.min((pattern - 1).to(tl.uint32, bitcast=True), axis=1, keep_dims=True)
    word = variance_word(largest, below_smallest, vs)
    if GUARDED:
        v = tl.where(finite, v, float_of((word >> 3) << 19))
    return w, m, v, word
