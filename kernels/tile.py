"""Where the elements of a tile lie: offsets and masks of flat and general segments (see ``layout``)."""

import triton
import triton.language as tl
from flashoptim_dist.kernels.device import GROUP, HASH_STRIDE
from flashoptim_dist.kernels.layout import (
    GROUPS,
    GROUPS_PER_ROW,
    INDEX_STRIDES,
    INNER_COLUMNS,
    INNER_ROWS,
    NOISE,
    ROW_LENGTH,
)


@triton.jit
def segment_pointer(segment, column, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Pointer to ``dtype`` from an address of the segment table."""
    return tl.multiple_of(tl.load(segment + column).to(tl.pointer_type(dtype)), ALIGNMENT)


@triton.jit
def group_positions(segment, block, GROUPS_PER_BLOCK: tl.constexpr):
    """(row, column of the first element, number of valid elements, index) of a general segment's groups, int64
    [groups, 1].

    Groups past the segment's end have no valid element.
    """
    index = block.to(tl.int64) * GROUPS_PER_BLOCK + tl.arange(0, GROUPS_PER_BLOCK)[:, None]
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
