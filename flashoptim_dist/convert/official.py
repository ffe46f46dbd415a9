"""States of the official flashoptim package (0.1.4, and 0.1.3's) as fp32 values.

What it saves, beside the parameter's name or number (read from its code, Apache-2.0):

- a moment, compressed: ``<moment>::quantized`` int8 or uint8, and ``<moment>::scales`` of fp16, one for 32 consecutive
  elements of each rank's flattened shard; for a bf16 parameter the scales' bits are saved under the dtype bf16.
  Uncompressed: ``<moment>``, floating.
- ``error_bits``: of a 24-bit master weight the int8 values as numbers of the parameter's dtype (or as int8), of a
  32-bit one the int16 bits under the parameter's dtype. The group's ``master_bytewidth`` (3, 4 or 0) tells which.

Decoding, FlashOptim's Algorithms 1 to 3 (arXiv 2602.23349): momentum y = q / 127, m = s y / (2 - |y|); variance
v = (s q / 255)^2; weight w + (e / N) half an ulp of w, with N = 127 or 32767.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.convert.lazy import ChunkedTensor, ComputedTensor, LazyTensor

GROUP_SIZE = 32
QUANTIZED, SCALES = "::quantized", "::scales"
GROUP_OPTIONS = ("master_bytewidth", "quantize", "decouple_lr")
"""Options that its groups hold and that mean nothing to others."""

_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
_SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}


def decoded_moment(name: str, moment: str, state: Mapping[str, Any]) -> LazyTensor | None:
    """Return one moment of a parameter as a floating tensor; None where the state does not hold it."""
    plain = state.get(moment)
    if isinstance(plain, LazyTensor):
        return plain
    codes, scales = state.get(moment + QUANTIZED), state.get(moment + SCALES)
    if codes is None and scales is None:
        return None
    if not isinstance(codes, LazyTensor) or not isinstance(scales, LazyTensor):
        raise CheckpointFormatError(f"parameter {name!r} has {moment} without its codes or without its scales")
    if codes.dtype not in (torch.int8, torch.uint8) and not codes.dtype.is_floating_point:
        raise CheckpointFormatError(f"{codes.where} has the dtype {codes.dtype}; flashoptim's codes are 8-bit integers")
    pieces = _pieces(codes, scales)
    row = math.prod(codes.shape[1:])
    variance = moment == "exp_avg_sq"

    def rows(start: int, stop: int) -> Tensor:
        parts = []
        for first, last, first_scale in pieces:
            begin, end = max(first, start), min(last, stop)
            if begin >= end:
                continue
            flat = (begin - first) * row, (end - first) * row
            groups = flat[0] // GROUP_SIZE, -(-flat[1] // GROUP_SIZE)
            scale = _as_fp16(scales.rows(first_scale + groups[0], first_scale + groups[1])).to(torch.float32)
            of_element = scale.repeat_interleave(GROUP_SIZE)[flat[0] - groups[0] * GROUP_SIZE :][: flat[1] - flat[0]]
            code = codes.rows(begin, end).to(torch.float32).reshape(-1)
            parts.append(_decode_variance(code, of_element) if variance else _decode_momentum(code, of_element))
        value = torch.cat(parts) if len(parts) != 1 else parts[0]
        return value.reshape((stop - start, *codes.shape[1:]) if codes.shape else ())

    return ComputedTensor(codes.shape, torch.float32, codes.where, rows)


def _pieces(codes: LazyTensor, scales: LazyTensor) -> list[tuple[int, int, int]]:
    """Return (first row, last row, first scale) of each rank's shard: groups begin anew in each.

    A DCP directory keeps the shards; the scales of 0.1.4 lie in it in the order of the ranks.
    """
    whole = [(0, codes.length, 0)] if -(-codes.numel // GROUP_SIZE) == scales.numel else []
    if isinstance(codes, ChunkedTensor) and isinstance(scales, ChunkedTensor) and codes.shape:
        row = math.prod(codes.shape[1:])
        pieces, at = [], 0
        for (offsets, sizes), (_, scale_sizes) in zip(codes.boxes, scales.boxes, strict=False):
            count = -(-sizes[0] * row // GROUP_SIZE)
            if tuple(sizes[1:]) != codes.shape[1:] or math.prod(scale_sizes) != count:
                break
            pieces.append((offsets[0], offsets[0] + sizes[0], at))
            at += count
        else:
            if len(codes.boxes) == len(scales.boxes) and at == scales.numel:
                return pieces
    if not whole:
        raise CheckpointFormatError(
            f"{codes.where} has {codes.numel} codes and {scales.numel} scales: it was put together from shards whose "
            "borders are lost, and the groups can't be told. Convert the checkpoint that the training run wrote"
        )
    return whole


def _as_fp16(scales: Tensor) -> Tensor:
    return scales.view(torch.float16) if scales.dtype == torch.bfloat16 else scales.to(torch.float16)


def _decode_momentum(codes: Tensor, scales: Tensor) -> Tensor:
    y = codes / 127.0
    return y / (2.0 - y.abs()) * scales


def _decode_variance(codes: Tensor, scales: Tensor) -> Tensor:
    root = codes / 255.0 * scales
    return root * root


def error_bits(saved: Tensor, weight: Tensor, master_bytewidth: int, where: str) -> Tensor:
    """Return saved error bits as the int8 or int16 numbers that they are.

    Raises:
        CheckpointFormatError: they don't fit the weight's dtype.
    """
    width = master_bytewidth - weight.dtype.itemsize if master_bytewidth else saved.dtype.itemsize
    if saved.dtype in (torch.int8, torch.int16):
        return saved
    if width == 1 and saved.dtype == weight.dtype:
        return saved.to(torch.int8)
    if width == 2 and saved.dtype.itemsize == 2:
        return saved.view(torch.int16)
    raise CheckpointFormatError(
        f"{where} has the dtype {saved.dtype}, and belongs to a {weight.dtype} weight with a master weight of "
        f"{master_bytewidth} bytes; flashoptim writes it otherwise"
    )


def master_weight(weight: Tensor, errors: Tensor) -> Tensor:
    """Return the fp32 master weights of 16-bit weights and error bits (int8 or int16)."""
    mantissa = _MANTISSA_BITS[weight.dtype]
    exponent = torch.frexp(weight.to(torch.float32)).exponent - 1
    exponent = exponent.clamp(min=_SMALLEST_EXPONENT[weight.dtype])
    limit = 127.0 if errors.dtype == torch.int8 else 32767.0
    error = errors.to(torch.float32) / limit
    half_ulp = exponent - mantissa - 1  # down to -134: in two steps, so that no step leaves fp32's range
    first = torch.div(half_ulp, 2, rounding_mode="floor")
    return weight.to(torch.float32) + torch.ldexp(torch.ldexp(error, first), half_ulp - first)
