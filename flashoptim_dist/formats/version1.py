"""What version 1 of the number format stored, to read it: momentum coded as now, but Adam's in no unit, and the
variance companded: s = largest sqrt(v) of the group, rounded up to bf16; sqrt(v) = s (code/255)^2, uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashoptim_dist.formats.moments import decode_momentum

SMALLEST_VARIANCE_CODE = 3
"""Of a variance above zero."""

_LEVELS = 255


def decode_moments(stored: Sequence[tuple[Tensor, Tensor]], signed: Sequence[bool]) -> list[Tensor]:
    """Return the fp32 moments [..., 32] of codes and scales in version 1; as ``moments.decode_moments`` else."""
    return [
        (decode_momentum if is_signed else decode_variance)(codes, scales)
        for (codes, scales), is_signed in zip(stored, signed, strict=True)
    ]


def decode_variance(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 variance [..., 32] of uint8 codes [..., 32] and bf16 scales [...] of sqrt(v)."""
    y = codes.to(torch.float32) * (1.0 / _LEVELS)
    root = y * y * scales.to(torch.float32).unsqueeze(-1)
    return root * root
