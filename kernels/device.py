"""Device functions of the number format: each formula once, used by every kernel.

They restate ``flashoptim_dist.formats`` (the definition) for a tile: elements [GROUPS, 32] and per-group values
[GROUPS, 1]. Where the two differ in arithmetic, they differ by rounding errors of fp32 alone, so that codes agree
within 1; hashes, noise and the weight split are integers and agree exactly.

The common case is written for the fewest instructions: no guard for non-finite numbers, overflow or a stale
correction under a zero weight. ``is_rare`` says, once a tile, whether any element needs one; the kernels then mend
the tile before encoding.
"""

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_COMPILED = tl.constexpr(not INTERPRETED)

GROUP = tl.constexpr(32)
HASH_STRIDE = tl.constexpr(0x9E3779B1 - (1 << 32))
_HASH_MULTIPLIER = tl.constexpr(0x85EBCA77)
_SIGN = tl.constexpr(-(1 << 31))
_LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)
_LARGEST_BF16_BITS = tl.constexpr(0x7F7F0000)
# The variance's lattice; see ``formats.moments``.
_FINEST_SHIFT = tl.constexpr(14)
_COARSEST_SHIFT = tl.constexpr(20)
_LARGEST_TOP = tl.constexpr(0xFDE)
_FP32_INFINITY_BITS = tl.constexpr(0x7F800000)
_FP32_NAN_BITS = tl.constexpr(0x7FC00000)
# Reciprocals of smaller scales overflow. A momentum below 2**-112 moves no weight; its codes go to 0.
_SMALLEST_DIVISOR = tl.constexpr(2.0**-112)


@triton.jit
def bits_of(x):
    """Pattern of fp32 values, as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(x):
    """fp32 values of int32 patterns."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def fast_sqrt(x):
    """Square root within 1 ulp; subnormals count as zero. One instruction where tl.sqrt takes several for
    subnormals.
    """
    if _COMPILED:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt(x)


@triton.jit
def fast_reciprocal(x):
    """1/x within 1 ulp; subnormals count as zero."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _opaque(x):
    """int32 x, as a value that the compiler knows nothing of, so that it leaves sums and products with it together."""
    if _COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def _maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_rare(weight, scale):
    """Whether a tile holds a non-finite or nearly overflowing weight, or a group whose scale overflowed (scalar).

    A non-finite gradient or moment shows in the weight; an overflowed variance in the scale [groups, 1], which the
    caller may have multiplied to lower the limit; a stale negative correction under a zero weight decodes to NaN.
    """
    if _COMPILED:
        largest = tl.reduce(tl.abs(weight), 1, _maximum_or_nan, keep_dims=True)
        largest = tl.reduce(tl.reduce(_maximum_or_nan(largest, scale), 1, _maximum_or_nan), 0, _maximum_or_nan)
    else:
        size = tl.max(bits_of(weight) & 0x7FFFFFFF, axis=1, keep_dims=True)
        largest = float_of(tl.max(tl.max(tl.maximum(size, bits_of(scale)), axis=1), axis=0))
    return not (largest < _LARGEST_BF16)


# ---------------------------------------------------------------- noise


@triton.jit
def noise_words(lane, first, rotation):
    """Noise words (int32) of elements ``lane`` after the tile's first; see ``formats.rounding``.

    ``first``: key + HASH_STRIDE * index of the tile's first element; ``rotation``: ROTATION * step; both modulo 2**32.
    """
    x = (lane * HASH_STRIDE + first).to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= _HASH_MULTIPLIER
    x ^= x >> 16
    return x.to(tl.int32, bitcast=True) + rotation


@triton.jit
def _add_byte(x, words, NUMBER: tl.constexpr):
    """int32 x plus byte 0 (the lowest) or 1 of words, a number from 0 to 255."""
    if _COMPILED:
        # A dot product of bytes with (1, 0, 0, 0) or (0, 1, 0, 0): one instruction where a mask, a shift and a sum are
        # three, and not of the unit that all the shifts and selections around it wait for.
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, 1, $2;" if NUMBER == 0 else "dp4a.u32.u32 $0, $1, 256, $2;",
            "=r,r,r",
            [words, x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return x + ((words >> (8 * NUMBER)) & 0xFF)


# ---------------------------------------------------------------- moments


@triton.jit
def momentum_scale_bits(largest):
    """Pattern (int32, low half zero) of the scale of groups whose largest |m| is given: bf16, rounded up, saturated."""
    return tl.minimum((bits_of(largest) + 0xFFFF) & -65536, _LARGEST_BF16_BITS)


@triton.jit
def bf16_of(pattern):
    """bf16 values of int32 patterns whose low half is to be dropped."""
    return (pattern >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decode_momentum(code, factor):
    """Momentum from int8 codes, times what the caller folded into ``factor``: scale * (1/127**2) * anything."""
    y = code.to(tl.float32)
    return y * tl.abs(y) * factor


@triton.jit
def variance_lattice(word):
    """(base, unit, shift) of groups from the int32 pattern of their bf16 scale: code c stands for the v of pattern
    base + c * unit, unit = 1 << shift.
    """
    shift = (word & 7) + 14
    unit = 1 << shift
    top = (word >> 3) << 19
    return tl.maximum(((top + unit - 1) & -unit) - 255 * unit, 0), unit, shift


@triton.jit
def decode_variance(code, base, unit):
    """(-v, twice the momentum's unit) from uint8 codes."""
    # The sign makes the exponent of twice the unit without an operation of its own, and goes when -v is multiplied.
    pattern = code.to(tl.int32) * _opaque(unit) + _opaque(base | _SIGN)
    twice_momentum_unit = float_of((pattern >> 1) & 0x7F800000)
    return float_of(tl.where(code == 0, 0, pattern)), twice_momentum_unit


@triton.jit
def variance_word(largest, below_smallest):
    """Pattern (int32) of the scale of groups from the largest v and from the smallest pattern above 0 less one, which
    is -1 where there is none.
    """
    top = tl.minimum((bits_of(largest) + 0x7FFFF) >> 19, _LARGEST_TOP)
    units = ((top << 5) - (below_smallest >> 14)).to(tl.float32)
    exponent = bits_of(units * (1.0 / 253.0)) >> 23
    shift = tl.minimum(tl.maximum(exponent - 112, _FINEST_SHIFT), _COARSEST_SHIFT)
    return (top << 3) + shift - _FINEST_SHIFT


@triton.jit
def encode_momentum(m, scale, words, STOCHASTIC: tl.constexpr):
    """int8 codes of momentum within its group's scale, given in fp32."""
    # Divided first: the reciprocal of a scale above 2**126 is subnormal.
    factor = fast_reciprocal(tl.maximum(scale, _SMALLEST_DIVISOR) * (1.0 / 16129.0))
    code = fast_sqrt(tl.abs(m) * factor)
    code = float_of(bits_of(code) | (bits_of(m) & _SIGN))
    if STOCHASTIC:
        # Adding 1.5 * 2**15 leaves the code in fixed point with 8 fraction bits in the low half of the pattern.
        fixed = _add_byte(bits_of(code + 49152.0), words, 1)
        return (fixed >> 8).to(tl.int8)
    else:
        return bits_of(code + 12582912.0).to(tl.int8)


@triton.jit
def encode_variance(v, base, unit, shift, words):
    """(uint8 codes, inverse of the momentum's unit) of v within its group's lattice.

    ``words``: of the elements, or one for all where codes are rounded to nearest.
    """
    noise = (words.to(tl.uint32, bitcast=True) >> (32 - shift).to(tl.uint32)).to(tl.int32, bitcast=True)
    pattern = tl.maximum(bits_of(v) + noise, base + unit)
    pattern = tl.where(v == 0.0, base, pattern)
    inverse = float_of(((pattern >> 1) & 0x3F800000) ^ 0x3F800000)
    return ((pattern - base) >> shift).to(tl.uint8), inverse


# ---------------------------------------------------------------- weights


@triton.jit
def merge_weight(p, e, BITS: tl.constexpr, GUARDED: tl.constexpr):
    """fp32 master weights of weights p (bf16, fp16, fp32) and corrections e with BITS correction bits (0: e is unused).

    Unless GUARDED, a negative correction under a zero bf16 weight decodes to NaN, and one under Inf to a number above
    the largest weight; ``is_rare`` sees both and the kernel computes the weight anew.
    """
    if BITS == 0:
        return p.to(tl.float32)
    elif p.dtype == tl.bfloat16:
        upper = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
        if GUARDED:
            size = tl.maximum((upper & 0x7FFFFFFF) + (e.to(tl.int32) << (16 - BITS)), 0)
            size = tl.where((upper & _FP32_INFINITY_BITS) == _FP32_INFINITY_BITS, upper & 0x7FFFFFFF, size)
            return float_of(size | (upper & _SIGN))
        else:
            return float_of(upper + (e.to(tl.int32) << (16 - BITS)))
    else:
        pattern = p.to(tl.int16, bitcast=True).to(tl.int32)
        extended = tl.maximum(((pattern & 0x7FFF) << BITS) + e.to(tl.int32), 0)
        if BITS == 8:
            normal = (extended << 5) + (112 << 23)
            small = extended.to(tl.float32) * (2.0**-32)
        else:
            normal = (extended >> 3) + (112 << 23)
            # What fp32 cannot hold is cut off: rounded up, it could reach the next weight.
            rounded = extended.to(tl.float32)
            cut = bits_of(rounded) - (rounded.to(tl.int32) > extended).to(tl.int32)
            small = float_of(cut) * (2.0**-40)
        size = tl.where(extended >= (1 << (10 + BITS)), normal, bits_of(small))
        value = float_of(size | ((pattern & 0x8000) << 16))
        return tl.where((pattern & 0x7C00) == 0x7C00, p.to(tl.float32), value)


@triton.jit
def contain_weight(w, BITS: tl.constexpr):
    """Bring weights of a rare tile to values that ``split_weight`` encodes as the format says.

    NaN becomes the quiet NaN, a finite value beyond the largest weight the largest; Inf stays.
    """
    size = bits_of(w) & 0x7FFFFFFF
    sign = bits_of(w) & _SIGN
    if BITS == 8:
        size = tl.where((size > 0x7F7F7F00) & (size < _FP32_INFINITY_BITS), 0x7F7F7F00, size)
    elif BITS == 16:
        size = tl.where((size > 0x7F7F7FFF) & (size < _FP32_INFINITY_BITS), 0x7F7F7FFF, size)
    size = tl.where(size > _FP32_INFINITY_BITS, _FP32_NAN_BITS, size)
    return float_of(size | sign)


@triton.jit
def split_weight(w, words, WEIGHT_DTYPE: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """(weight, int32 whose low BITS bits are the correction) of fp32 weights that ``contain_weight`` has seen if
    rare.
    """
    if tl.float32 == WEIGHT_DTYPE:
        return w, words
    elif BITS == 0 and STOCHASTIC:
        return round_weight(w, words, WEIGHT_DTYPE), words
    elif BITS == 0:
        return nearest_weight(w, WEIGHT_DTYPE), words
    elif tl.bfloat16 == WEIGHT_DTYPE:
        pattern = bits_of(w)
        if BITS == 16:
            return bf16_of(pattern + 0x8000), pattern
        else:
            if STOCHASTIC:
                pattern = _add_byte(pattern, words, 0)
            else:
                pattern += 128
            return bf16_of(pattern + 0x8000), pattern >> 8
    else:
        return split_fp16(w, words, BITS, STOCHASTIC)


@triton.jit
def nearest_weight(w, WEIGHT_DTYPE: tl.constexpr):
    """16-bit weights nearest to fp32 ones."""
    if tl.bfloat16 == WEIGHT_DTYPE and not _COMPILED:
        # Triton's interpreter truncates where the GPU rounds.
        pattern = tl.where(w == w, bits_of(w), _FP32_NAN_BITS)
        return bf16_of(pattern + 0x7FFF + ((pattern >> 16) & 1))
    else:
        return w.to(WEIGHT_DTYPE)


@triton.jit
def round_weight(w, words, WEIGHT_DTYPE: tl.constexpr):
    """16-bit weights of fp32 ones, rounded up or down by chance; finite ones stay finite. Any w."""
    noise = ((words & 0xFF) << 8) | ((words >> 8) & 0xFF)
    size = bits_of(w) & 0x7FFFFFFF
    sign = (bits_of(w) >> 16) & 0x8000
    if tl.bfloat16 == WEIGHT_DTYPE:
        pattern = tl.minimum((size + noise) >> 16, 0x7F7F)
    else:
        noise = noise >> 3
        scaled = tl.minimum(float_of(size), 2.0**-14) * (2.0**37)
        small = (bits_of(scaled + 8388608.0) & 0xFFFFFF) + noise
        normal = size - (112 << 23) + noise
        pattern = tl.minimum(tl.where(size >= (113 << 23), normal, small) >> 13, 0x7BFF)
    rounded = (pattern | sign).to(tl.int16).to(WEIGHT_DTYPE, bitcast=True)
    return tl.where(size < _FP32_INFINITY_BITS, rounded, nearest_weight(w, WEIGHT_DTYPE))


@triton.jit
def split_fp16(w, words, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """(fp16 weight, int32 correction) of fp32 weights."""
    size = bits_of(w) & 0x7FFFFFFF
    finite = size < _FP32_INFINITY_BITS
    absolute = tl.minimum(float_of(size), 2.0**-14)
    if BITS == 8:
        unit = 16
        if STOCHASTIC:
            unit = (words & 0xFF) >> 3
        normal = (size - (112 << 23) + unit) >> 5
        # |w| 2**37 < 2**23: adding 2**23 rounds to the nearest integer, half to even, into the mantissa.
        scaled = absolute * (2.0**37)
        small = ((bits_of(scaled + 8388608.0) & 0xFFFFFF) + unit) >> 5
    else:
        normal = tl.minimum(size - (112 << 23), (0x7BFF << 13) + 0x1FFF) << 3
        scaled = absolute * (2.0**40)
        small = round_half_even(scaled)
    extended = tl.where(size >= (113 << 23), normal, small)
    extended = tl.minimum(extended, (0x7BFF << BITS) + (1 << (BITS - 1)) - 1)
    rounded = (extended + (1 << (BITS - 1))) >> BITS
    correction = extended - (rounded << BITS)
    pattern = rounded | ((bits_of(w) >> 16) & 0x8000)
    pattern = tl.where(finite, pattern, (0x7C00 | ((bits_of(w) >> 16) & 0x8000)))
    pattern = tl.where(size > _FP32_INFINITY_BITS, 0x7E00 | ((bits_of(w) >> 16) & 0x8000), pattern)
    return pattern.to(tl.int16).to(tl.float16, bitcast=True), tl.where(finite, correction, 0)


@triton.jit
def round_half_even(x):
    """Nearest int32 of 0 <= x < 2**31, half to even."""
    down = x.to(tl.int32)
    rest = x - down.to(tl.float32)
    up = (rest > 0.5) | ((rest == 0.5) & ((down & 1) == 1))
    return down + up.to(tl.int32)
