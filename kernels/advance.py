"""The advance kernel: counts the step of every parameter and writes the scalars of its update, all on the device.

It runs before the step kernels and alone writes ``step``, so that a skipped step needs no host: gradient scale,
finite flags and clip coefficient are read here once. One program serves BLOCK parameters of one group.
"""

import triton
import triton.language as tl
from flashoptim_dist.kernels.layout import (
    BETA1,
    BETA2,
    CORRECTION2,
    DECAY,
    EPS,
    FACTOR,
    GAIN,
    GRADIENT_TO_DIRECTION,
    GRADIENT_TO_MOMENTUM,
    GRADIENT_TO_VARIANCE,
    INVERSE_CORRECTION2,
    KEEP,
    L2,
    MOMENTUM_TO_DIRECTION,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    ROTATION,
    SCALAR_COLUMNS,
    SKIP,
    STEP_COLUMNS,
    STEP_SIZE,
)

# Arguments that change between steps: nothing about them may be compiled in.
_CHANGING = ["found_inf_ptr", "grad_scale_ptr", "coefficient_ptr", "lr_ptr"]
_CHANGING += ["first", "last", "counts_skips", "coefficient_stride"]

_GOLDEN_ROTATION = tl.constexpr(0x9E379E9D - (1 << 32))


@triton.jit
def skip_and_factor(
    found_inf_ptr,
    grad_scale_ptr,
    coefficient_ptr,
    coefficient_stride,
    factor,
    row,
    mask,
    HAS_FOUND_INF: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_COEFFICIENT: tl.constexpr,
):
    """(skip as 0.0 or 1.0, factor on the gradients) of parameters ``row`` from device scalars.

    found_inf: non-zero skips. grad_scale: gradients are divided by it. coefficient: multiplies them; NaN or negative
        skips. It is one for all (stride 0), or there is one for each row (stride 1).
    """
    skip = tl.zeros_like(row).to(tl.float32)
    factor = skip + factor
    if HAS_FOUND_INF:
        skip = tl.where(tl.load(found_inf_ptr).to(tl.float32) != 0.0, 1.0, skip)
    if HAS_GRAD_SCALE:
        factor = tl.div_rn(factor, tl.zeros_like(factor) + tl.load(grad_scale_ptr).to(tl.float32))
    if HAS_COEFFICIENT:
        coefficient = tl.load(coefficient_ptr + row * coefficient_stride, mask=mask, other=0.0).to(tl.float32)
        skip = tl.where(coefficient >= 0.0, skip, 1.0)
        factor = factor * coefficient
    return skip, factor


@triton.jit
def _count(steps, row, mask, skip, skipped_ptr, counts_skips):
    """Count the step of parameters ``row``, unless it is skipped; return the new counts, fp32."""
    address = tl.load(steps + row * STEP_COLUMNS, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(address, mask=mask, other=0.0) + (1.0 - skip)
    tl.store(address, step, mask=mask)
    if tl.program_id(0) == 0:
        skipped = tl.max(tl.where(mask, skip, 0.0), axis=0)
        tl.store(skipped_ptr, tl.load(skipped_ptr) + (skipped * counts_skips).to(tl.int32))
    return step


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_CHANGING)
def adam_advance_kernel(
    steps,  # int64 [parameters, STEP_COLUMNS]: address of the fp32 step counter, whether the moments are fresh
    scalars,  # fp32 [parameters, SCALAR_COLUMNS], written
    skipped_ptr,  # int32 counter of skipped steps; the program that owns it adds one
    found_inf_ptr,
    grad_scale_ptr,
    coefficient_ptr,
    lr_ptr,
    lr,
    decay_per_lr,  # decoupled weight decay: the weight is multiplied by 1 - lr * decay_per_lr
    l2,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    root_one_minus_beta2,
    log_beta1_high,
    log_beta1_low,
    log_beta2_high,
    log_beta2_low,
    eps,
    factor,  # -1 to maximize, else 1
    first,
    last,  # this group's parameters are rows [first, last) of the tables
    counts_skips,
    coefficient_stride,  # 0: one coefficient for all; 1: one for each row
    HAS_FOUND_INF: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_COEFFICIENT: tl.constexpr,
    LR_IS_TENSOR: tl.constexpr,
    HAS_L2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advance the steps of one group and write its scalars.

    step_size = lr / (1 - beta1**t) and sqrt(1 - beta2**t) are computed in fp64 from log(beta), given as two fp32
    halves: 1 - beta**t loses all digits in fp32 for beta near 1 and small t.
    """
    row = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < last
    skip, factor = skip_and_factor(
        found_inf_ptr, grad_scale_ptr, coefficient_ptr, coefficient_stride, factor, row, mask,
        HAS_FOUND_INF, HAS_GRAD_SCALE, HAS_COEFFICIENT,
    )  # fmt: skip
    if LR_IS_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    step = _count(steps, row, mask, skip, skipped_ptr, counts_skips)
    t = step.to(tl.float64)
    wide = tl.zeros([BLOCK], dtype=tl.float64)
    log_beta1 = wide + log_beta1_high + log_beta1_low
    log_beta2 = wide + log_beta2_high + log_beta2_low
    # A skipped first step has t = 0; its scalars are not used, and must not divide by zero.
    safe = tl.maximum(t, 1.0)
    correction1 = 1.0 - tl.exp(safe * log_beta1)
    correction2 = tl.sqrt(1.0 - tl.exp(safe * log_beta2))
    step_size = ((wide + lr) / correction1).to(tl.float32)
    decay = (1.0 - (wide + lr) * (wide + decay_per_lr)).to(tl.float32)
    base = scalars + row * SCALAR_COLUMNS
    zero = tl.zeros([BLOCK], dtype=tl.float32)
    tl.store(base + BETA1, zero + beta1, mask=mask)
    if HAS_L2:
        tl.store(base + GRADIENT_TO_MOMENTUM, zero + one_minus_beta1, mask=mask)
        tl.store(base + GRADIENT_TO_VARIANCE, zero + root_one_minus_beta2, mask=mask)
    else:
        tl.store(base + GRADIENT_TO_MOMENTUM, zero + one_minus_beta1 * factor, mask=mask)
        tl.store(base + GRADIENT_TO_VARIANCE, zero + root_one_minus_beta2 * tl.abs(factor), mask=mask)
    tl.store(base + INVERSE_CORRECTION2, (1.0 / correction2).to(tl.float32), mask=mask)
    tl.store(base + EPS, zero + eps, mask=mask)
    tl.store(base + STEP_SIZE, step_size, mask=mask)
    tl.store(base + DECAY, zero + decay, mask=mask)
    rotation = step.to(tl.int32) * _GOLDEN_ROTATION
    tl.store(base + ROTATION, rotation.to(tl.float32, bitcast=True), mask=mask)
    tl.store(base + SKIP, zero + skip, mask=mask)
    tl.store(base + L2, zero + l2, mask=mask)
    tl.store(base + FACTOR, zero + factor, mask=mask)
    tl.store(base + BETA2, zero + beta2, mask=mask)
    tl.store(base + ONE_MINUS_BETA2, zero + one_minus_beta2, mask=mask)
    tl.store(base + CORRECTION2, correction2.to(tl.float32), mask=mask)
    tl.store(base + ONE_MINUS_BETA1, zero + one_minus_beta1, mask=mask)


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_CHANGING)
def momentum_advance_kernel(
    steps,
    scalars,  # fp32 [parameters, SCALAR_COLUMNS], written
    skipped_ptr,
    found_inf_ptr,
    grad_scale_ptr,
    coefficient_ptr,
    lr_ptr,
    lr,
    decay_per_lr,
    l2,
    keep,  # factor on the momentum: Lion's beta2, SGD's momentum
    gain,  # factor on the gradient that enters it: 1 - beta2, 1 - dampening
    fresh_gain,  # the same where the momentum holds nothing yet
    momentum_to_direction,  # Lion's beta1, SGD's momentum with Nesterov
    gradient_to_direction,  # 1 - beta1, 1 with Nesterov
    factor,
    first,
    last,
    counts_skips,
    coefficient_stride,  # 0: one coefficient for all; 1: one for each row
    HAS_FOUND_INF: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_COEFFICIENT: tl.constexpr,
    LR_IS_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advance the steps of one group of Lion or SGD and write its scalars; see ``adam_advance_kernel``."""
    row = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < last
    skip, factor = skip_and_factor(
        found_inf_ptr, grad_scale_ptr, coefficient_ptr, coefficient_stride, factor, row, mask,
        HAS_FOUND_INF, HAS_GRAD_SCALE, HAS_COEFFICIENT,
    )  # fmt: skip
    if LR_IS_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    step = _count(steps, row, mask, skip, skipped_ptr, counts_skips)
    fresh = tl.load(steps + row * STEP_COLUMNS + 1, mask=mask, other=0) != 0
    wide = tl.zeros([BLOCK], dtype=tl.float64)
    decay = (1.0 - (wide + lr) * (wide + decay_per_lr)).to(tl.float32)
    base = scalars + row * SCALAR_COLUMNS
    zero = tl.zeros([BLOCK], dtype=tl.float32)
    tl.store(base + KEEP, zero + keep, mask=mask)
    tl.store(base + GAIN, tl.where(fresh | (step <= 1.0), zero + fresh_gain, zero + gain), mask=mask)
    tl.store(base + MOMENTUM_TO_DIRECTION, zero + momentum_to_direction, mask=mask)
    tl.store(base + GRADIENT_TO_DIRECTION, zero + gradient_to_direction, mask=mask)
    tl.store(base + STEP_SIZE, zero + lr, mask=mask)
    tl.store(base + DECAY, zero + decay, mask=mask)
    rotation = step.to(tl.int32) * _GOLDEN_ROTATION
    tl.store(base + ROTATION, rotation.to(tl.float32, bitcast=True), mask=mask)
    tl.store(base + SKIP, zero + skip, mask=mask)
    tl.store(base + L2, zero + l2, mask=mask)
    tl.store(base + FACTOR, zero + factor, mask=mask)
