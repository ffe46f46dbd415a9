"""The state of one parameter: its entries, their names on disk, shapes and dtypes, and how they are made.

Entries are plain tensors or DTensors (whenever the parameter is one) under the names they have on disk. Nothing here
depends on device or backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats import correction_dtype
from flashoptim_dist.sharding import ShardLayout, like_parameter, local_tensor

STEP = "step"
ERROR_BITS = "error_bits"
SCALE_SUFFIX = "_scale"


@dataclass(frozen=True)
class MomentSpec:
    """A moment an optimizer keeps: its name on disk, and whether it is signed (momentum) or not (variance)."""

    name: str
    signed: bool

    @property
    def scale_name(self) -> str:
        """Name of its scales on disk."""
        return self.name + SCALE_SUFFIX

    @property
    def code_dtype(self) -> torch.dtype:
        """dtype of its codes."""
        return torch.int8 if self.signed else torch.uint8


@dataclass(frozen=True)
class EntrySpec:
    """dtype and global and local shape of one state entry.

    ``offloaded``: it lies in pinned host memory where the parameter lies on a CUDA device.
    """

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offloaded: bool = False


def entry_specs(
    layout: ShardLayout,
    moments: tuple[MomentSpec, ...],
    *,
    quantize: bool,
    correction_bits: int,
    offload: bool = False,
) -> dict[str, EntrySpec]:
    """Return the tensor entries of a parameter's state (all but ``step``), by name on disk."""
    specs: dict[str, EntrySpec] = {}
    compressed = quantize and layout.quantized
    shapes, scale_shapes = (
        (layout.global_shape, layout.local_shape),
        (layout.scale_global_shape, layout.scale_local_shape),
    )
    for moment in moments:
        specs[moment.name] = EntrySpec(moment.code_dtype if compressed else torch.float32, *shapes, offload)
        if compressed:
            specs[moment.scale_name] = EntrySpec(torch.bfloat16, *scale_shapes, offload)
    if correction_bits:
        specs[ERROR_BITS] = EntrySpec(correction_dtype(correction_bits), *shapes, offload)
    return specs


def new_entry(spec: EntrySpec, parameter: Tensor) -> Tensor:
    """Return a zero entry, a DTensor whenever the parameter is one: on the device of the parameter's local tensor, or
    in pinned host memory where it is offloaded from a CUDA device.
    """
    device = local_tensor(parameter).device
    if spec.offloaded and device.type == "cuda":
        local = torch.zeros(spec.local_shape, dtype=spec.dtype, pin_memory=True)
    else:
        local = torch.zeros(spec.local_shape, dtype=spec.dtype, device=device)
    return like_parameter(local, parameter, spec.global_shape)


def new_step(parameter: Tensor) -> Tensor:
    """Return a step counter at 0: fp32 and 0-dim, as torch's optimizers keep it, beside the parameter's local
    tensor.
    """
    return torch.zeros((), dtype=torch.float32, device=local_tensor(parameter).device)


def new_state(specs: Mapping[str, EntrySpec], parameter: Tensor) -> dict[str, Any]:
    """Return the state before any step: all zero, which decodes to zero moments and to the 16-bit weights
    themselves.
    """
    state: dict[str, Any] = {STEP: new_step(parameter)}
    for name, spec in specs.items():
        state[name] = new_entry(spec, parameter)
    return state


def bytes_per_entry(specs: Mapping[str, EntrySpec]) -> dict[str, int]:
    """Return the local bytes of each entry."""
    return {name: math.prod(spec.local_shape) * spec.dtype.itemsize for name, spec in specs.items()}
