"""Lion's and SGD's step: decode, update, encode, for many tensors in one launch.

The updates are ``optim.rules.lion_update`` and ``sgd_update``. Bytes per element with a bf16 weight, 24-bit master
and bf16
gradient: 6.0625 read, 4.0625 written; without momentum 5 and 3.
"""

import triton
import triton.language as tl
from flashoptim_dist.kernels.device import (
    GROUP,
    HASH_STRIDE,
    bf16_of,
    contain_weight,
    decode_momentum,
    encode_momentum,
    float_of,
    is_rare,
    merge_weight,
    momentum_scale_bits,
    noise_words,
    split_weight,
)
from flashoptim_dist.kernels.layout import (
    CORRECTION,
    DECAY,
    FACTOR,
    GAIN,
    GRADIENT,
    GRADIENT_STRIDES,
    GRADIENT_TO_DIRECTION,
    KEEP,
    L2,
    MOMENT_0,
    MOMENTUM_TO_DIRECTION,
    NOISE,
    ROTATION,
    ROW_LENGTH,
    SCALAR_COLUMNS,
    SCALAR_ROW,
    SCALE_0,
    SEGMENT_COLUMNS,
    SKIP,
    STEP_SIZE,
    TASK_COLUMNS,
    WEIGHT,
    WEIGHT_STRIDES,
)
from flashoptim_dist.kernels.tile import general_noise, group_positions, locate_group, segment_pointer, strided_offsets

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _update(
    p,
    g,
    e,
    m,
    ms,
    keep,
    gain,
    momentum_to_direction,
    gradient_to_direction,
    step_size,
    decay,
    l2,
    factor,
    BITS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LION: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_L2: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """(weight, momentum, its scale before rounding), fp32; GUARDED as in the Adam kernel."""
    w = merge_weight(p, e, BITS, GUARDED)
    g = g * factor
    if HAS_L2:
        g = g + w * l2
    if HAS_MOMENTUM:
        if QUANTIZED:
            m = decode_momentum(m, ms * (1.0 / 16129.0))
        if LION:
            direction = m * momentum_to_direction + g * gradient_to_direction
            # sign(x), and 0 of NaN, as torch has it; where a tile may be rare, NaN stays, for that is how it shows.
            keeps_nan: tl.constexpr = not GUARDED and (BITS > 0 or QUANTIZED)
            size = tl.where(direction == 0.0, direction, 1.0)
            size = tl.where(direction != direction, direction if keeps_nan else 0.0, size)
            direction = tl.where(direction < 0.0, -size, size)
        m = m * keep + g * gain
        if not LION:
            if NESTEROV:
                direction = g + m * momentum_to_direction
            else:
                direction = m
    else:
        direction = g
        m = g
    w = w * decay - direction * step_size
    if GUARDED:
        w = contain_weight(w, BITS)
    if GUARDED and HAS_MOMENTUM and QUANTIZED:
        # What is not finite stays out of the scale: Inf becomes the largest of its group, NaN 0.
        scale = tl.max(tl.where(tl.abs(m) < _INFINITY, tl.abs(m), 0.0), axis=1, keep_dims=True)
        largest = float_of(momentum_scale_bits(scale))
        m = tl.where(m == m, tl.minimum(tl.maximum(m, -largest), largest), 0.0)
    else:
        scale = tl.max(tl.abs(m), axis=1, keep_dims=True)
    return w, m, scale


@triton.jit
def _pointers(
    segment,
    WEIGHT_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GENERAL: tl.constexpr,
):
    """Pointers to weight, gradient, correction, momentum and its scales of a segment."""
    wide: tl.constexpr = 4 if GENERAL else 16
    narrow: tl.constexpr = 1 if GENERAL else 16
    weight_alignment: tl.constexpr = (WEIGHT_DTYPE.primitive_bitwidth // 8) if GENERAL else 16
    gradient_alignment: tl.constexpr = (GRADIENT_DTYPE.primitive_bitwidth // 8) if GENERAL else 16
    p_ptr = segment_pointer(segment, WEIGHT, WEIGHT_DTYPE, weight_alignment)
    g_ptr = segment_pointer(segment, GRADIENT, GRADIENT_DTYPE, gradient_alignment)
    correction_dtype: tl.constexpr = tl.int16 if BITS == 16 else tl.int8
    e_ptr = segment_pointer(segment, CORRECTION, correction_dtype, (BITS // 8) if GENERAL and BITS else narrow)
    m_dtype: tl.constexpr = tl.int8 if QUANTIZED else tl.float32
    m_ptr = segment_pointer(segment, MOMENT_0, m_dtype, narrow if QUANTIZED else wide)
    ms_ptr = segment_pointer(segment, SCALE_0, tl.bfloat16, 2)
    return p_ptr, g_ptr, e_ptr, m_ptr, ms_ptr


@triton.jit
def _scalars(row_of_scalars):
    """The scalars of ``_update``, in its order."""
    keep = tl.load(row_of_scalars + KEEP)
    gain = tl.load(row_of_scalars + GAIN)
    momentum_to_direction = tl.load(row_of_scalars + MOMENTUM_TO_DIRECTION)
    gradient_to_direction = tl.load(row_of_scalars + GRADIENT_TO_DIRECTION)
    step_size = tl.load(row_of_scalars + STEP_SIZE)
    decay = tl.load(row_of_scalars + DECAY)
    l2 = tl.load(row_of_scalars + L2)
    factor = tl.load(row_of_scalars + FACTOR)
    return keep, gain, momentum_to_direction, gradient_to_direction, step_size, decay, l2, factor


@triton.jit
def _step_rare_group(
    segment,
    row_of_scalars,
    index,
    rotation,
    WEIGHT_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LION: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_L2: tl.constexpr,
    GENERAL: tl.constexpr,
):
    """Step one group of a tile that is rare; see ``adam._step_rare_group``."""
    compressed: tl.constexpr = QUANTIZED and HAS_MOMENTUM
    p_ptr, g_ptr, e_ptr, m_ptr, ms_ptr = _pointers(segment, WEIGHT_DTYPE, GRADIENT_DTYPE, BITS, QUANTIZED, GENERAL)
    keep, gain, momentum_to_direction, gradient_to_direction, step_size, decay, l2, factor = _scalars(row_of_scalars)
    p_offset, g_offset, offset, mask, exists, first_noise = locate_group(segment, index, GENERAL)
    group = index + tl.zeros([1, 1], dtype=tl.int64)
    g = tl.load(g_ptr + g_offset, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(p_ptr + p_offset, mask=mask, other=0.0)
    e = p
    if BITS > 0:
        e = tl.load(e_ptr + offset, mask=mask, other=0)
    m = g
    ms = rotation
    if HAS_MOMENTUM:
        m = tl.load(m_ptr + offset, mask=mask, other=0)
    if compressed:
        ms = tl.load(ms_ptr + group, mask=exists, other=0.0).to(tl.float32)
    w, m, m_scale = _update(
        p, g, e, m, ms, keep, gain, momentum_to_direction, gradient_to_direction, step_size, decay, l2, factor,
        BITS, HAS_MOMENTUM, QUANTIZED, LION, NESTEROV, HAS_L2, True,
    )  # fmt: skip
    lane = tl.arange(0, GROUP)[None, :]
    words = lane
    if STOCHASTIC:
        words = noise_words(lane, first_noise, rotation)
    p_new, correction = split_weight(w, words, WEIGHT_DTYPE, BITS, STOCHASTIC)
    if compressed:
        scale_bits = momentum_scale_bits(m_scale)
        tl.store(ms_ptr + group, bf16_of(scale_bits), mask=exists)
        tl.store(m_ptr + offset, encode_momentum(m, float_of(scale_bits), words, STOCHASTIC), mask=mask)
    elif HAS_MOMENTUM:
        tl.store(m_ptr + offset, m, mask=mask)
    tl.store(p_ptr + p_offset, p_new, mask=mask)
    if BITS > 0:
        tl.store(e_ptr + offset, correction.to(tl.int16 if BITS == 16 else tl.int8), mask=mask)


@triton.jit
def momentum_kernel(
    segments,  # int64 [segments, SEGMENT_COLUMNS]
    scalars,  # fp32 [parameters, SCALAR_COLUMNS]
    tasks,  # int32 [programs, TASK_COLUMNS]
    WEIGHT_DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LION: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_L2: tl.constexpr,
    GENERAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step the blocks of one task; see ``adam.adam_kernel``."""
    task = tasks + tl.program_id(0) * TASK_COLUMNS
    segment = segments + tl.load(task).to(tl.int64) * SEGMENT_COLUMNS
    first_block = tl.load(task + 1)
    blocks = tl.load(task + 2)
    row_of_scalars = scalars + tl.load(segment + SCALAR_ROW) * SCALAR_COLUMNS
    if tl.load(row_of_scalars + SKIP) != 0.0:
        return
    p_ptr, g_ptr, e_ptr, m_ptr, ms_ptr = _pointers(segment, WEIGHT_DTYPE, GRADIENT_DTYPE, BITS, QUANTIZED, GENERAL)
    correction_dtype: tl.constexpr = tl.int16 if BITS == 16 else tl.int8
    noise = tl.load(segment + NOISE).to(tl.int32)

    keep, gain, momentum_to_direction, gradient_to_direction, step_size, decay, l2, factor = _scalars(row_of_scalars)
    rotation = tl.load(row_of_scalars + ROTATION).to(tl.int32, bitcast=True)

    groups: tl.constexpr = BLOCK // GROUP
    compressed: tl.constexpr = QUANTIZED and HAS_MOMENTUM
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
        m = g
        ms = rotation
        if HAS_MOMENTUM:
            m = tl.load(m_ptr + offset, mask=mask, other=0 if GENERAL else None)
        if compressed:
            ms = tl.load(ms_ptr + group, mask=group_mask, other=0.0 if GENERAL else None).to(tl.float32)
        words = lane
        if STOCHASTIC:
            words = noise_words(lane, noise_of_block, rotation)

        # Update, encode and store. A tile without a correction or codes needs no mending.
        plain: tl.constexpr = BITS == 0 and not compressed
        w, m_new, m_scale = _update(
            p, g, e, m, ms, keep, gain, momentum_to_direction, gradient_to_direction, step_size, decay, l2, factor,
            BITS, HAS_MOMENTUM, QUANTIZED, LION, NESTEROV, HAS_L2, False,
        )  # fmt: skip
        if not plain and is_rare(w, m_scale):
            for position in range(groups):
                _step_rare_group(
                    segment, row_of_scalars, block.to(tl.int64) * groups + position, rotation, WEIGHT_DTYPE,
                    GRADIENT_DTYPE, BITS, HAS_MOMENTUM, QUANTIZED, STOCHASTIC, LION, NESTEROV, HAS_L2, GENERAL,
                )  # fmt: skip
        else:
            if compressed:
                scale_bits = momentum_scale_bits(m_scale)
                tl.store(ms_ptr + group, bf16_of(scale_bits), mask=group_mask)
                tl.store(m_ptr + offset, encode_momentum(m_new, float_of(scale_bits), words, STOCHASTIC), mask=mask)
            elif HAS_MOMENTUM:
                tl.store(m_ptr + offset, m_new, mask=mask)
            p_new, correction = split_weight(w, words, WEIGHT_DTYPE, BITS, STOCHASTIC)
            tl.store(p_ptr + p_offset, p_new, mask=mask)
            if BITS > 0:
                tl.store(e_ptr + offset, correction.to(correction_dtype), mask=mask)
