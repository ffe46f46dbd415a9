"""Where the elements of a tile lie: offsets and masks of flat and general segments (see ``layout``)."""

import triton
import triton.language as tl
from flashoptim_dist.kernels.device import GROUP, HASH_STRIDE
from flashoptim_dist.kernels.layout import (
    GRADIENT_STRIDES,
    GROUPS,
    GROUPS_PER_ROW,
    INDEX_STRIDES,
    INNER_COLUMNS,
    INNER_ROWS,
    NOISE,
    ROW_LENGTH,
    WEIGHT_STRIDES,
)


@triton.jit
def segment_pointer(segment, column, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointer to ``dtype`` from an address of the segment table."""
    return tl.multiple_of(tl.load(segment + column).to(tl.pointer_type(dtype)), ALIGNMENT)


@triton.jit
def group_positions(segment, first, GROUPS_OF_TILE: tl.constexpr):
    """(row, column of the first element, number of valid elements, index) of groups of a general segment, int64
    [groups, 1], from group ``first`` (int64) on.

    Groups past the segment's end have no valid element.
    """
    index = first + tl.arange(0, GROUPS_OF_TILE)[:, None]
    per_row = tl.load(segment + GROUPS_PER_ROW)
    row = index // per_row
    column = (index - row * per_row) * GROUP
    valid = tl.minimum(tl.load(segment + ROW_LENGTH) - column, GROUP)
    valid = tl.where(index < tl.load(segment + GROUPS), valid, 0)
    return row, column, valid, index


@triton.jit
def strided_offsets(segment, row, column, STRIDES: tl.constexpr):
    """Offsets (elements, int64) of (row, column) under the four strides at a column of the segment table."""
    inner_rows = tl.load(segment + INNER_ROWS)
    inner_columns = tl.load(segment + INNER_COLUMNS)
    outer_row = row // inner_rows
    outer_column = column // inner_columns
    offset = outer_row * tl.load(segment + STRIDES)
    offset += (row - outer_row * inner_rows) * tl.load(segment + STRIDES + 1)
    offset += outer_column * tl.load(segment + STRIDES + 2)
    return offset + (column - outer_column * inner_columns) * tl.load(segment + STRIDES + 3)


@triton.jit
def general_noise(segment, row, column):
    """Noise word (int32 [groups, 1]) of the first element of a general segment's groups, before the lane is added."""
    inner_rows = tl.load(segment + INNER_ROWS)
    outer_row = row // inner_rows
    index = outer_row * tl.load(segment + INDEX_STRIDES)
    index += (row - outer_row * inner_rows) * tl.load(segment + INDEX_STRIDES + 1) + column
    return tl.load(segment + NOISE).to(tl.int32) + index.to(tl.int32) * HASH_STRIDE


@triton.jit
def locate_group(segment, index, GENERAL: tl.constexpr):
    """(offset in the weight, in the gradient, in the states, mask, whether it exists, noise word of the first element)
    of group ``index`` (int64): a tile [1, 32] of any segment, for the few that the common path cannot step.
    """
    lane = tl.arange(0, GROUP)[None, :]
    if GENERAL:
        row, column, valid, _ = group_positions(segment, index, 1)
        p_offset = strided_offsets(segment, row, column + lane, WEIGHT_STRIDES)
        g_offset = strided_offsets(segment, row, column + lane, GRADIENT_STRIDES)
        offset = row * tl.load(segment + ROW_LENGTH) + column + lane
        return p_offset, g_offset, offset, lane < valid, valid > 0, general_noise(segment, row, column)
    else:
        offset = index * GROUP + lane
        noise = tl.load(segment + NOISE) + index * GROUP * HASH_STRIDE
        exists = tl.full([1, 1], True, tl.int1)
        return offset, offset, offset, lane < GROUP, exists, noise.to(tl.int32)
