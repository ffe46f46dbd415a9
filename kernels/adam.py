"""The Adam family's step: decode, update, encode, for many tensors in one launch.

Bytes per element with a bf16 weight, 24-bit master and bf16 gradient: 7.125 read, 5.125 written. The update is
``optim.rules.adam_update`` with constants folded together: the gradient's factor with (1 - beta1) and sqrt(1 -
beta2), the decay rates with the scales of a group.
"""

import triton
import triton.language as tl
from flashoptim_dist.kernels.device import (
    GROUP,
    HASH_STRIDE,
    bf16_of,
    bits_of,
    contain_weight,
    decode_momentum,
    decode_variance,
    encode_momentum,
    encode_variance,
    fast_reciprocal,
    fast_sqrt,
    float_of,
    is_rare,
    merge_weight,
    momentum_scale_bits,
    noise_words,
    split_weight,
    variance_lattice,
    variance_word,
)
from flashoptim_dist.kernels.layout import (
    BETA1,
    BETA2,
    CORRECTION,
    CORRECTION2,
    DECAY,
    EPS,
    FACTOR,
    GRADIENT,
    GRADIENT_STRIDES,
    GRADIENT_TO_MOMENTUM,
    GRADIENT_TO_VARIANCE,
    INVERSE_CORRECTION2,
    L2,
    MOMENT_0,
    MOMENT_1,
    NOISE,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    ROTATION,
    ROW_LENGTH,
    SCALAR_COLUMNS,
    SCALAR_ROW,
    SCALE_0,
    SCALE_1,
    SEGMENT_COLUMNS,
    SKIP,
    STEP_SIZE,
    TASK_COLUMNS,
    WEIGHT,
    WEIGHT_STRIDES,
)
from flashoptim_dist.kernels.tile import general_noise, group_positions, locate_group, segment_pointer, strided_offsets

_INFINITY = tl.constexpr(float("inf"))
# Tiles with v of 2**102 and more are rare. A gradient whose square overflows makes it 2**128 (1 - beta2).
_RARITY = tl.constexpr(2.0**26)


@triton.jit
def _compressed_update(
    p,
    g,
    e,
    m,
    ms,
    v,
    vs,
    beta1,
    to_momentum,
    beta2,
    to_variance,
    inverse_correction2,
    eps,
    step_size,
    decay,
    l2,
    factor,
    BITS: tl.constexpr,
    HAS_L2: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """(weight, momentum, variance, pattern of the variance's scale), fp32 and int32, from what is stored and the
    gradient.

    GUARDED is for tiles that are rare: it reads stale corrections right, keeps elements that are not finite out of
    the scales (momentum 0, variance the group's largest), freezes elements whose squared gradient overflows, and
    brings weights into the range that ``split_weight`` encodes.
    """
    w = merge_weight(p, e, BITS, GUARDED)
    if HAS_L2:
        g = g * factor + w * l2
    if GUARDED:
        # The product, not v, decides: v may be finite where it is not.
        square = g * g if HAS_L2 else (g * factor) * (g * factor)
    base, unit, _ = variance_lattice(vs)
    negative_v, twice_momentum_unit = decode_variance(v, base, unit)
    m = decode_momentum(m, ms * (beta1 * (0.5 / 16129.0))) * twice_momentum_unit
    m = tl.fma(g, to_momentum + tl.zeros_like(g), m)
    g = g * to_variance
    v = tl.fma(g, g, negative_v * -beta2)
    if GUARDED:
        v = tl.where(square == _INFINITY, _INFINITY, v)
    root = fast_sqrt(v)
    denominator = tl.fma(root, inverse_correction2 + tl.zeros_like(root), eps + tl.zeros_like(root))
    w = tl.fma(m * -step_size, fast_reciprocal(denominator), w * decay)
    if GUARDED:
        # A negative v marks an element that is not finite, so that no mask has to live on.
        v = tl.where((tl.abs(m) < _INFINITY) & (v < _INFINITY), v, -1.0)
        m = tl.where(v >= 0.0, m, 0.0)
        w = contain_weight(w, BITS)
    largest = tl.max(v, axis=1, keep_dims=True)
    if GUARDED:
        largest = tl.maximum(largest, 0.0)
    below_smallest = tl.min((bits_of(v) - 1).to(tl.uint32, bitcast=True), axis=1, keep_dims=True)
    word = variance_word(largest, below_smallest.to(tl.int32, bitcast=True))
    if GUARDED:
        top = float_of((word >> 3) << 19)
        v = tl.where(v >= 0.0, tl.minimum(v, top), top)
    return w, m, v, word


@triton.jit
def _pointers(
    segment,
    WEIGHT_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GENERAL: tl.constexpr,
):
    """Pointers to weight, gradient, correction, momentum, its scales, variance and its scales of a segment."""
    wide: tl.constexpr = 4 if GENERAL else 16
    narrow: tl.constexpr = 1 if GENERAL else 16
    weight_alignment: tl.constexpr = (WEIGHT_DTYPE.primitive_bitwidth // 8) if GENERAL else 16
    gradient_alignment: tl.constexpr = (GRADIENT_DTYPE.primitive_bitwidth // 8) if GENERAL else 16
    p_ptr = segment_pointer(segment, WEIGHT, WEIGHT_DTYPE, weight_alignment)
    g_ptr = segment_pointer(segment, GRADIENT, GRADIENT_DTYPE, gradient_alignment)
    correction_dtype: tl.constexpr = tl.int16 if BITS == 16 else tl.int8
    e_ptr = segment_pointer(segment, CORRECTION, correction_dtype, (BITS // 8) if GENERAL and BITS else narrow)
    m_dtype: tl.constexpr = tl.int8 if QUANTIZED else tl.float32
    v_dtype: tl.constexpr = tl.uint8 if QUANTIZED else tl.float32
    m_ptr = segment_pointer(segment, MOMENT_0, m_dtype, narrow if QUANTIZED else wide)
    v_ptr = segment_pointer(segment, MOMENT_1, v_dtype, narrow if QUANTIZED else wide)
    ms_ptr = segment_pointer(segment, SCALE_0, tl.bfloat16, 2)
    vs_ptr = segment_pointer(segment, SCALE_1, tl.int16, 2)  # the pattern of a bf16
    return p_ptr, g_ptr, e_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr


@triton.jit
def _scalars(row_of_scalars):
    """The scalars of ``_compressed_update``, in its order."""
    beta1 = tl.load(row_of_scalars + BETA1)
    to_momentum = tl.load(row_of_scalars + GRADIENT_TO_MOMENTUM)
    beta2 = tl.load(row_of_scalars + BETA2)
    to_variance = tl.load(row_of_scalars + GRADIENT_TO_VARIANCE)
    inverse_correction2 = tl.load(row_of_scalars + INVERSE_CORRECTION2)
    eps = tl.load(row_of_scalars + EPS)
    step_size = tl.load(row_of_scalars + STEP_SIZE)
    decay = tl.load(row_of_scalars + DECAY)
    l2 = tl.load(row_of_scalars + L2)
    factor = tl.load(row_of_scalars + FACTOR)
    return beta1, to_momentum, beta2, to_variance, inverse_correction2, eps, step_size, decay, l2, factor


@triton.jit
def _step_rare_group(
    segment,
    row_of_scalars,
    index,
    rotation,
    WEIGHT_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_L2: tl.constexpr,
    GENERAL: tl.constexpr,
):
    """Step one group of a tile that is rare. All is loaded anew, so that the common path keeps nothing for it."""
    p_ptr, g_ptr, e_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr = _pointers(
        segment, WEIGHT_DTYPE, GRADIENT_DTYPE, BITS, True, GENERAL
    )
    beta1, to_momentum, beta2, to_variance, inverse_correction2, eps, step_size, decay, l2, factor = _scalars(
        row_of_scalars
    )
    p_offset, g_offset, offset, mask, exists, first_noise = locate_group(segment, index, GENERAL)
    group = index + tl.zeros([1, 1], dtype=tl.int64)
    g = tl.load(g_ptr + g_offset, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(p_ptr + p_offset, mask=mask, other=0.0)
    e = p
    if BITS > 0:
        e = tl.load(e_ptr + offset, mask=mask, other=0)
    m = tl.load(m_ptr + offset, mask=mask, other=0)
    v = tl.load(v_ptr + offset, mask=mask, other=0)
    ms = tl.load(ms_ptr + group, mask=exists, other=0.0).to(tl.float32)
    vs = tl.load(vs_ptr + group, mask=exists, other=0).to(tl.int32)
    w, m, v, word = _compressed_update(
        p, g, e, m, ms, v, vs, beta1, to_momentum, beta2, to_variance, inverse_correction2, eps, step_size,
        decay, l2, factor, BITS, HAS_L2, True,
    )  # fmt: skip
    lane = tl.arange(0, GROUP)[None, :]
    words = lane
    if STOCHASTIC:
        words = noise_words(lane, first_noise, rotation)
    base, unit, shift = variance_lattice(word)
    v_code, inverse = encode_variance(v, base, unit, shift, words if STOCHASTIC else rotation)
    m = m * inverse
    m_scale_bits = momentum_scale_bits(tl.max(tl.abs(m), axis=1, keep_dims=True))
    p_new, correction = split_weight(w, words, WEIGHT_DTYPE, BITS, STOCHASTIC)
    tl.store(ms_ptr + group, bf16_of(m_scale_bits), mask=exists)
    tl.store(vs_ptr + group, word.to(tl.int16), mask=exists)
    tl.store(m_ptr + offset, encode_momentum(m, float_of(m_scale_bits), words, STOCHASTIC), mask=mask)
    tl.store(v_ptr + offset, v_code, mask=mask)
    tl.store(p_ptr + p_offset, p_new, mask=mask)
    if BITS > 0:
        tl.store(e_ptr + offset, correction.to(tl.int16 if BITS == 16 else tl.int8), mask=mask)


@triton.jit
def adam_kernel(
    segments,  # int64 [segments, SEGMENT_COLUMNS]
    scalars,  # fp32 [parameters, SCALAR_COLUMNS]
    tasks,  # int32 [programs, TASK_COLUMNS]
    WEIGHT_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    BITS: tl.constexpr,  # correction bits: 8, 16 or 0
    QUANTIZED: tl.constexpr,  # moments are codes and scales, else fp32
    STOCHASTIC: tl.constexpr,
    HAS_L2: tl.constexpr,
    GENERAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step the blocks of one task: a block is BLOCK elements of a flat segment, BLOCK // 32 groups of a general one."""
    task = tasks + tl.program_id(0) * TASK_COLUMNS
    segment = segments + tl.load(task).to(tl.int64) * SEGMENT_COLUMNS
    first_block = tl.load(task + 1)
    blocks = tl.load(task + 2)
    row_of_scalars = scalars + tl.load(segment + SCALAR_ROW) * SCALAR_COLUMNS
    if tl.load(row_of_scalars + SKIP) != 0.0:
        return
    p_ptr, g_ptr, e_ptr, m_ptr, ms_ptr, v_ptr, vs_ptr = _pointers(
        segment, WEIGHT_DTYPE, GRADIENT_DTYPE, BITS, QUANTIZED, GENERAL
    )
    correction_dtype: tl.constexpr = tl.int16 if BITS == 16 else tl.int8
    noise = tl.load(segment + NOISE).to(tl.int32)

    beta1, to_momentum, beta2, to_variance, inverse_correction2, eps, step_size, decay, l2, factor = _scalars(
        row_of_scalars
    )
    rotation = tl.load(row_of_scalars + ROTATION).to(tl.int32, bitcast=True)

    groups: tl.constexpr = BLOCK // GROUP
    for number in range(blocks):
        block = first_block + number
        # Locate.
        if GENERAL:
            row, column, valid, group = group_positions(segment, block.to(tl.int64) * groups, groups)
            lane = tl.arange(0, GROUP)[None, :]
            mask = lane < valid
            group_mask = valid > 0
            p_offset = strided_offsets(segment, row, column + lane, WEIGHT_STRIDES)
            g_offset = strided_offsets(segment, row, column + lane, GRADIENT_STRIDES)
            offset = row * tl.load(segment + ROW_LENGTH) + column + lane
            noise_of_block = general_noise(segment, row, column)
        else:
            start = block.to(tl.int64) * BLOCK
            lane = tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            mask = None
            group_mask = None
            group = start // GROUP + tl.arange(0, groups)[:, None]
            offset = start + lane
            p_offset = offset
            g_offset = offset
            noise_of_block = noise + start.to(tl.int32) * HASH_STRIDE

        # Load.
        g = tl.load(g_ptr + g_offset, mask=mask, other=0.0 if GENERAL else None).to(tl.float32)
        p = tl.load(p_ptr + p_offset, mask=mask, other=0.0 if GENERAL else None)
        e = p
        if BITS > 0:
            e = tl.load(e_ptr + offset, mask=mask, other=0 if GENERAL else None)
        m = tl.load(m_ptr + offset, mask=mask, other=0 if GENERAL else None)
        v = tl.load(v_ptr + offset, mask=mask, other=0 if GENERAL else None)
        words = lane
        if STOCHASTIC:
            words = noise_words(lane, noise_of_block, rotation)

        # Update, encode and store.
        if QUANTIZED:
            ms = tl.load(ms_ptr + group, mask=group_mask, other=0.0 if GENERAL else None).to(tl.float32)
            vs = tl.load(vs_ptr + group, mask=group_mask, other=0 if GENERAL else None).to(tl.int32)
            w, m, v, word = _compressed_update(
                p, g, e, m, ms, v, vs, beta1, to_momentum, beta2, to_variance, inverse_correction2, eps, step_size,
                decay, l2, factor, BITS, HAS_L2, False,
            )  # fmt: skip
            if is_rare(w, float_of(word << 16) * _RARITY):
                for position in range(groups):
                    _step_rare_group(
                        segment, row_of_scalars, block.to(tl.int64) * groups + position, rotation,
                        WEIGHT_DTYPE, GRADIENT_DTYPE, BITS, STOCHASTIC, HAS_L2, GENERAL,
                    )  # fmt: skip
            else:
                base, unit, shift = variance_lattice(word)
                v_code, inverse = encode_variance(v, base, unit, shift, words if STOCHASTIC else rotation)
                m = m * inverse
                m_scale_bits = momentum_scale_bits(tl.max(tl.abs(m), axis=1, keep_dims=True))
                tl.store(ms_ptr + group, bf16_of(m_scale_bits), mask=group_mask)
                tl.store(vs_ptr + group, word.to(tl.int16), mask=group_mask)
                m_code = encode_momentum(m, float_of(m_scale_bits), words, STOCHASTIC)
                tl.store(m_ptr + offset, m_code, mask=mask)
                tl.store(v_ptr + offset, v_code, mask=mask)
                p_new, correction = split_weight(w, words, WEIGHT_DTYPE, BITS, STOCHASTIC)
                tl.store(p_ptr + p_offset, p_new, mask=mask)
                if BITS > 0:
                    tl.store(e_ptr + offset, correction.to(correction_dtype), mask=mask)
        else:
            w = merge_weight(p, e, BITS, True)
            g = g * factor
            if HAS_L2:
                g = g + w * l2
            m = m * beta1 + g * tl.load(row_of_scalars + ONE_MINUS_BETA1)
            v = v * tl.load(row_of_scalars + BETA2) + g * g * tl.load(row_of_scalars + ONE_MINUS_BETA2)
            denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(row_of_scalars + CORRECTION2) + tl.zeros_like(v)) + eps
            w = w * decay - tl.div_rn(m, denominator) * step_size
            tl.store(m_ptr + offset, m, mask=mask)
            tl.store(v_ptr + offset, v, mask=mask)
            if BITS > 0:
                w = contain_weight(w, BITS)
            p_new, correction = split_weight(w, words, WEIGHT_DTYPE, BITS, STOCHASTIC)
            tl.store(p_ptr + p_offset, p_new, mask=mask)
            if BITS > 0:
                tl.store(e_ptr + offset, correction.to(correction_dtype), mask=mask)
