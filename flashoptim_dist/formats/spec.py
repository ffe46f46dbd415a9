"""The constants that define the number format "fd1", and the record of it that a checkpoint carries.

Nothing here computes; ``weights``, ``moments`` and ``rounding`` do. Change a constant and the format version changes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FORMAT_NAME = "fd1"
FORMAT_VERSION = 1

GROUP_SIZE = 32
"""Consecutive elements of one row of the global tensor that share one scale."""

MOMENTUM_LEVELS = 127
"""Largest magnitude of a momentum code (int8)."""

VARIANCE_LEVELS = 255
"""Largest variance code (uint8)."""

VARIANCE_FLOOR = 3
"""Smallest code of a variance above zero. A code c stands for sqrt(v) = s (c/255)^2, so 3 is 1.4e-4 of the largest: the
finest step of the momentum code, (1/127)^2 = 6e-5, over it stays below one half, and no quotient m/sqrt(v) explodes."""

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
