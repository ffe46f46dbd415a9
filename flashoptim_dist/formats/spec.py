"""The constants that define the number format "fd1", and the record of it that a checkpoint carries.

Nothing here computes; ``weights``, ``moments`` and ``rounding`` do. Change a constant and the format version changes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FORMAT_NAME = "fd1"
FORMAT_VERSION = 2

GROUP_SIZE = 32
"""Consecutive elements of one row of the global tensor that share one scale."""

MOMENTUM_LEVELS = 127
"""Largest magnitude of a momentum code (int8)."""

FINEST_SHIFT, COARSEST_SHIFT = 14, 20
"""Bits of an fp32 pattern that a variance code drops, at least and at most: 9 to 3 mantissa bits stay. The coarsest
reaches over 31 octaves of v, a factor of 50,000 between the gradients of a group; a still coarser one would follow
elements whose gradient stopped long ago down to nothing, at the cost of their mates' precision."""

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[str, ...] = ("nearest", "stochastic")
MASTER_WEIGHT_BITS: tuple[int | None, ...] = (24, 32, None)


@dataclass(frozen=True)
class FormatSpec:
    """What a reader must know to interpret saved state: the format and the choices of the optimizer."""

    optimizer: str
    master_weight_bits: int | None
    quantize: bool
    rounding: str
    seed: int
    name: str = FORMAT_NAME
    version: int = FORMAT_VERSION
    group_size: int = GROUP_SIZE

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable copy."""
        return asdict(self)
