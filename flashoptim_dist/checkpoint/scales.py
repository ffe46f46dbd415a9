"""Whether scales are ones that the number format has: others decode to anything, or to an error in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from flashoptim_dist.formats import FORMAT_VERSION, are_variance_scales


def fault_of_scales(scales: Tensor, signed: bool, version: int) -> str:
    """Return what is wrong with a moment's scales, as the end of a sentence; empty where nothing is.

    Args:
        scales: bf16, any shape, on any device; no DTensor.
        signed: whether they are a momentum's; else a variance's.
        version: of the number format.
    """
    if not bool(torch.isfinite(scales.to(torch.float32)).all()) or bool((scales < 0).any()):
        return "has scales that are negative or not finite"
    if not signed and version == FORMAT_VERSION and not bool(are_variance_scales(scales).all()):
        return f"has scales that number format version {FORMAT_VERSION} never writes"
    return ""
