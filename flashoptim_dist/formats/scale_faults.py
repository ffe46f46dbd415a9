"""Whether scales are ones that the number format has: others decode to anything, or to an error in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashoptim_dist.formats.moments import are_variance_scales
from flashoptim_dist.formats.spec import FORMAT_VERSION

NEVER_WRITTEN = f"has scales that number format version {FORMAT_VERSION} never writes"
"""Said of a variance's scales; those of version 1, read as if they were of this version, are such."""

_FAULTS = ("", "has scales that are negative or not finite", NEVER_WRITTEN)


def find_fault(scales: Tensor, signed: bool, version: int) -> Tensor:
    """Look for what is wrong with a moment's scales, without waiting for their device; ``read_faults`` tells.

    Args:
        scales: bf16, any shape, on any device; no DTensor.
        signed: whether they are a momentum's; else a variance's.
        version: of the number format.

    Returns:
        int8, of no dimension, on the device of the scales.
    """
    fault = (~torch.isfinite(scales) | (scales < 0)).any().to(torch.int8)
    if signed or version != FORMAT_VERSION:
        return fault
    return torch.where(fault == 0, (~are_variance_scales(scales)).any().to(torch.int8) * 2, fault)


def read_faults(found: Sequence[Tensor]) -> list[str]:
    """Return what ``find_fault`` found, each as the end of a sentence; empty where nothing is wrong.

    All results that are on one device are read by one transfer, which waits for it.
    """
    by_device: dict[torch.device, list[int]] = {}
    for position, fault in enumerate(found):
        by_device.setdefault(fault.device, []).append(position)
    faults = [""] * len(found)
    for positions in by_device.values():
        numbers = torch.stack([found[position] for position in positions]).tolist()
        for position, number in zip(positions, numbers, strict=True):
            faults[position] = _FAULTS[number]
    return faults
