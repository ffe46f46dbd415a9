"""Columns of the tables that tell a kernel what to step. Host and device read the same definitions.

Segment table, int64 [segments, SEGMENT_COLUMNS]: addresses and geometry of one run of groups, in device memory. A
*flat* segment is consecutive in memory and in the global tensor, whole groups only, 16-byte aligned. A *general*
segment has rows of any length and strides: element (row, column) of its weight lies at

    (row // inner_rows) * strides[0] + (row % inner_rows) * strides[1]
    + (column // inner_columns) * strides[2] + (column % inner_columns) * strides[3]

and likewise, with strides of their own, its gradient and (rows only, strides[0:2]) its global index. States are
contiguous.

Scalar table, fp32 [parameters, SCALAR_COLUMNS]: what the update needs of a parameter at this step, written on the
device by an advance kernel. Step table, int64 [parameters, STEP_COLUMNS]: address of the step counter, whether
moments are fresh. Task table, int32 [tasks, TASK_COLUMNS]: segment, first block, number of blocks.
"""

import triton.language as tl

# Segment table. Addresses:
SEGMENT_COLUMNS = tl.constexpr(32)
WEIGHT = tl.constexpr(0)
GRADIENT = tl.constexpr(1)
CORRECTION = tl.constexpr(2)
MOMENT_0 = tl.constexpr(3)
SCALE_0 = tl.constexpr(4)
MOMENT_1 = tl.constexpr(5)
SCALE_1 = tl.constexpr(6)
# Row of the scalar table; noise word of the first element (key + HASH_STRIDE * global index, modulo 2**32):
SCALAR_ROW = tl.constexpr(7)
NOISE = tl.constexpr(8)
# Geometry of general segments:
GROUPS = tl.constexpr(9)
GROUPS_PER_ROW = tl.constexpr(10)
ROW_LENGTH = tl.constexpr(11)
INNER_ROWS = tl.constexpr(12)
INNER_COLUMNS = tl.constexpr(13)
WEIGHT_STRIDES = tl.constexpr(14)
GRADIENT_STRIDES = tl.constexpr(18)
INDEX_STRIDES = tl.constexpr(22)

# Scalar table of the Adam family.
SCALAR_COLUMNS = tl.constexpr(16)
BETA1 = tl.constexpr(0)
GRADIENT_TO_MOMENTUM = tl.constexpr(1)
GRADIENT_TO_VARIANCE = tl.constexpr(3)
INVERSE_CORRECTION2 = tl.constexpr(4)
EPS = tl.constexpr(5)
STEP_SIZE = tl.constexpr(6)
DECAY = tl.constexpr(7)
ROTATION = tl.constexpr(8)
SKIP = tl.constexpr(9)
L2 = tl.constexpr(10)
FACTOR = tl.constexpr(11)
BETA2 = tl.constexpr(12)
ONE_MINUS_BETA2 = tl.constexpr(13)
CORRECTION2 = tl.constexpr(14)
ONE_MINUS_BETA1 = tl.constexpr(15)

# Scalar table of Lion and SGD; the columns that are not here are the Adam family's.
KEEP = tl.constexpr(0)
GAIN = tl.constexpr(1)
MOMENTUM_TO_DIRECTION = tl.constexpr(2)
GRADIENT_TO_DIRECTION = tl.constexpr(3)

STEP_COLUMNS = tl.constexpr(2)
TASK_COLUMNS = tl.constexpr(3)
