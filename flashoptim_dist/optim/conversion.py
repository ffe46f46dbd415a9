"""One state entry into another form: a rank's part of a whole tensor, moments between fp32 and codes, corrections
between widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from flashoptim_dist.formats import decode_moments, encode_moments, from_groups, to_groups
from flashoptim_dist.sharding import ShardLayout, local_tensor


def local_part(
    value: Any, parameter: Tensor, global_shape: Sequence[int], local_shape: Sequence[int], label: str
) -> Tensor:
    """Return this rank's part of a value that is placed like a parameter.

    A whole tensor is sliced without communication, so every rank must hold the same; a DTensor of other placements is
    redistributed, for which all ranks must call. A tensor of the local shape is taken as it is.

    Raises:
        ValueError: no tensor, or of another shape; ``label`` begins the message.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{label} is no tensor but {type(value).__name__}")
    shape = tuple(value.shape)
    if isinstance(value, DTensor):
        if shape == tuple(global_shape):
            if not isinstance(parameter, DTensor):
                return value.full_tensor()
            if value.device_mesh != parameter.device_mesh:
                value = _slice(value.full_tensor(), parameter)
            elif value.placements != parameter.placements:
                value = value.redistribute(parameter.device_mesh, parameter.placements)
            return local_tensor(value)
    elif shape == tuple(global_shape) and isinstance(parameter, DTensor):
        return local_tensor(_slice(value, parameter))
    elif shape == tuple(local_shape):
        return value
    raise ValueError(f"{label} has shape {shape} and needs {tuple(global_shape)}; it is of another model")


def _slice(value: Tensor, parameter: DTensor) -> DTensor:
    device = local_tensor(parameter).device
    return distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def quantize(values: Sequence[Tensor], signed: Sequence[bool], layout: ShardLayout) -> list[tuple[Tensor, Tensor]]:
    """Encode this rank's part of all moments of a parameter to nearest; codes and bf16 scales in their local shapes.

    ``signed``: whether each is a momentum. Values that were decoded from codes stay as they are.
    """
    rows = [value.to(torch.float32).reshape(layout.rows, layout.length) for value in values]
    return [
        (
            from_groups(codes, layout.rows, layout.length).reshape(layout.local_shape),
            scales.reshape(layout.scale_local_shape),
        )
        for codes, scales in encode_moments([to_groups(row) for row in rows], signed)
    ]


def dequantize(
    stored: Sequence[tuple[Tensor, Tensor]],
    signed: Sequence[bool],
    layout: ShardLayout,
    decode: Callable[..., Sequence[Tensor]] = decode_moments,
) -> list[Tensor]:
    """Decode this rank's part of all moments of a parameter, codes and scales, to fp32 in their local shapes.

    ``decode``: of the version of the number format that they are in.
    """
    grouped = [(to_groups(codes.reshape(layout.rows, layout.length)), scales.reshape(-1)) for codes, scales in stored]
    return [
        from_groups(groups, layout.rows, layout.length).reshape(layout.local_shape)
        for groups in decode(grouped, signed)
    ]


def convert_correction(correction: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a correction in another width: int8 gains 8 zero bits, int16 is rounded to its upper 8."""
    if correction.dtype == dtype:
        return correction
    if dtype == torch.int16:
        return correction.to(torch.int16) << 8
    return ((correction.to(torch.int32) + 128) >> 8).clamp(-128, 127).to(torch.int8)
