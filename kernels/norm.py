"""Norms of many tensors in one launch: sums of squares, or largest magnitudes, per bucket of tensors.

The order of a tensor's elements does not matter here, so a segment is a run of memory: int64 [segments,
NORM_COLUMNS], address, elements, code of the dtype. Tasks are those of the step kernels (see ``layout``). Results are
fp64: each program leaves one number, and ``norm_finish_kernel`` adds up those of a bucket, in order, so that the same
gradients always give the same bits.
"""

import triton
import triton.language as tl
from flashoptim_dist.kernels.layout import TASK_COLUMNS

NORM_COLUMNS = tl.constexpr(3)
BFLOAT16 = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Squares of elements beyond 2**+-50 come near the ends of fp32; such a task is added up in fp64.
_LARGE = tl.constexpr(0x58800000)  # pattern of 2**50
_SMALL = tl.constexpr(2.0**-90)


@triton.jit
def _load(address, start, elements, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements from ``start`` (int64) on, of ``elements`` at an address, as fp32; zero past the end."""
    offset = start + tl.arange(0, BLOCK)
    pointer = address.to(tl.pointer_type(DTYPE))
    if start + BLOCK <= elements:
        # Only segments that begin on 16 bytes have as many elements.
        values = tl.load(tl.multiple_of(pointer, 16) + offset).to(tl.float32)
    else:
        values = tl.load(pointer + offset, mask=offset < elements, other=0.0).to(tl.float32)
    return values


@triton.jit
def _task_norm(segment, first, blocks, DTYPE: tl.constexpr, INFINITY_NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of squares of a task's blocks, or the largest magnitude; fp64, NaN or Inf where an element is."""
    address = tl.load(segment)
    elements = tl.load(segment + 1)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for number in range(blocks):
        values = _load(address, (first + number).to(tl.int64) * BLOCK, elements, DTYPE, BLOCK)
        # As integers, magnitudes are in order and NaN is above Inf.
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & _MAGNITUDE)
        if not INFINITY_NORM:
            squares += values * values
    top = tl.max(largest, axis=0)
    if INFINITY_NORM:
        return top.to(tl.float32, bitcast=True).to(tl.float64)
    else:
        total = tl.sum(squares.to(tl.float64), axis=0)
        if (top >= _LARGE) | ((total < _SMALL) & (top > 0)):
            wide = tl.zeros([BLOCK], dtype=tl.float64)
            for number in range(blocks):
                start = (first + number).to(tl.int64) * BLOCK
                values = _load(address, start, elements, DTYPE, BLOCK).to(tl.float64)
                wide += values * values
            total = tl.sum(wide, axis=0)
        return total


@triton.jit
def norm_kernel(
    segments,  # int64 [segments, NORM_COLUMNS]
    tasks,  # int32 [programs, TASK_COLUMNS]
    partials,  # fp64 [programs], written
    INFINITY_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of squares, or the largest magnitude, of one task."""
    program = tl.program_id(0)
    task = tasks + program * TASK_COLUMNS
    segment = segments + tl.load(task).to(tl.int64) * NORM_COLUMNS
    first = tl.load(task + 1)
    blocks = tl.load(task + 2)
    code = tl.load(segment + 2)
    if code == BFLOAT16:
        tl.store(partials + program, _task_norm(segment, first, blocks, tl.bfloat16, INFINITY_NORM, BLOCK))
    elif code == FLOAT16:
        tl.store(partials + program, _task_norm(segment, first, blocks, tl.float16, INFINITY_NORM, BLOCK))
    else:
        tl.store(partials + program, _task_norm(segment, first, blocks, tl.float32, INFINITY_NORM, BLOCK))


@triton.jit
def norm_finish_kernel(
    partials,  # fp64 [programs]
    ranges,  # int32 [buckets, 2]: first and one past the last of a bucket's partial results
    results,  # fp64 [buckets], written
    INFINITY_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the partial results of one bucket, or take the largest."""
    bucket = tl.program_id(0)
    first = tl.load(ranges + 2 * bucket)
    last = tl.load(ranges + 2 * bucket + 1)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        values = tl.load(partials + index, mask=index < last, other=0.0)
        if INFINITY_NORM:
            # None is negative: as integers they are in order, NaN above Inf.
            bits = tl.maximum(total.to(tl.int64, bitcast=True), values.to(tl.int64, bitcast=True))
            total = bits.to(tl.float64, bitcast=True)
        else:
            total += values
    if INFINITY_NORM:
        top = tl.max(total.to(tl.int64, bitcast=True), axis=0)
        tl.store(results + bucket, top.to(tl.float64, bitcast=True))
    else:
        tl.store(results + bucket, tl.sum(total, axis=0))
