"""The step in pure torch, on any device: decode, update, encode, in chunks so that temporary memory stays bounded.

This is the definition of the step; the Triton kernels are tested against it. Elements are processed as rows of groups
(see ``formats.groups``); every operation is element-wise or a maximum over one group, so the bits do not depend on
how a tensor is cut into shards or chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats import (
    GROUP_SIZE,
    decode_momentum,
    decode_variance,
    encode_momentum,
    encode_variance,
    from_groups,
    merge,
    noise_words,
    split,
    to_groups,
)
from flashoptim_dist.formats.rounding import momentum_noise, variance_noise, weight_noise
from flashoptim_dist.optim.rules import contain_overflow
from flashoptim_dist.sharding import ShardLayout

CHUNK_ELEMENTS = 1 << 18
"""Elements per chunk: about 20 fp32 temporaries of 1 MiB stay in a core's cache; smaller chunks pay torch's call
overhead.
"""

Rule = Callable[[Tensor, Tensor, tuple[Tensor, ...], Any], tuple[Tensor, tuple[Tensor, ...]]]


@dataclass
class MomentTensors:
    """A moment of one parameter on this rank: fp32 values, or codes and scales."""

    signed: bool
    values: Tensor
    scale: Tensor | None


@dataclass
class ParameterStep:
    """All that the step of one parameter on this rank needs; tensors are local, ``gradient_factor`` scales the
    gradient.
    """

    layout: ShardLayout
    weight: Tensor
    gradient: Tensor
    correction: Tensor | None
    moments: tuple[MomentTensors, ...]
    scalars: Any
    gradient_factor: float
    noise_key: int | None
    step: int


@torch.no_grad()
def step_parameter(task: ParameterStep, rule: Rule, chunk_elements: int = CHUNK_ELEMENTS) -> None:
    """Update weight, correction and moments of one parameter in place.

    Args:
        task: local tensors of any strides; states are contiguous.
        rule: one of ``optim.rules``.
        chunk_elements: bound on the elements processed at a time.
    """
    if task.layout.numel == 0:
        return
    rows, length = task.layout.rows, task.layout.length
    starts = _RowStarts(task.layout, task.weight.device)
    if task.weight.is_contiguous() and task.gradient.is_contiguous():
        _step_rows(
            task, rule, chunk_elements, task.weight.view(rows, length), task.gradient.view(rows, length), 0, starts
        )
        return
    # Strided tensors (channels_last, a column shard) go through contiguous copies, one slice of the first dimension
    # at a time.
    per_slice = rows // task.layout.local_shape[0]
    slices = max(1, chunk_elements // (per_slice * length))
    for first in range(0, task.layout.local_shape[0], slices):
        weight = task.weight[first : first + slices]
        copy = weight.contiguous()
        gradient = task.gradient[first : first + slices].contiguous()
        _step_rows(
            task, rule, chunk_elements, copy.view(-1, length), gradient.view(-1, length), first * per_slice, starts
        )
        weight.copy_(copy)


class _RowStarts:
    """Global index of the first element of local rows; a formula where the shard is consecutive, else a tensor."""

    def __init__(self, layout: ShardLayout, device: torch.device) -> None:
        self.base, self.length, self.device = layout.index_base, layout.length, device
        self.table = None if self.base is not None else layout.row_starts(device)

    def __getitem__(self, rows: Tensor) -> Tensor:
        if self.base is None:
            assert self.table is not None
            return self.table[rows]
        return rows * self.length + self.base


def _chunks(rows: int, length: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Cut [rows, length] into blocks of at most ``limit`` elements; columns are cut only at group borders."""
    columns = max(GROUP_SIZE, min(length, limit) // GROUP_SIZE * GROUP_SIZE) if length > limit else length
    height = max(1, limit // max(columns, 1))
    for top in range(0, rows, height):
        for left in range(0, length, columns):
            yield slice(top, min(top + height, rows)), slice(left, min(left + columns, length))


def _step_rows(
    task: ParameterStep, rule: Rule, limit: int, weight: Tensor, gradient: Tensor, first_row: int, starts: _RowStarts
) -> None:
    """Update the rows [first_row, first_row + len(weight)) of the parameter, given as contiguous [rows, length]."""
    rows, length = weight.shape
    part = slice(first_row, first_row + rows)
    correction = None if task.correction is None else task.correction.view(-1, length)[part]
    codes = [moment.values.view(-1, length)[part] for moment in task.moments]
    groups = task.layout.groups_per_row
    scales = [None if m.scale is None else m.scale.view(-1, groups)[part] for m in task.moments]
    for block in _chunks(rows, length, limit):
        top, left = block
        height, width = top.stop - top.start, left.stop - left.start
        words = None
        if task.noise_key is not None:
            row = torch.arange(first_row + top.start, first_row + top.stop, device=weight.device)
            # Indices enter the hash modulo 2**32, so int32 with wrap-around holds all of them that matters.
            first = (starts[row] + left.start).to(torch.int32).unsqueeze(1)
            index = first + torch.arange(width, dtype=torch.int32, device=weight.device)
            words = noise_words(index, task.noise_key, task.step)
        master = merge(weight[block], None if correction is None else correction[block])
        update = gradient[block].to(torch.float32)
        if task.gradient_factor != 1.0:
            update = update * task.gradient_factor
        group_block = (top, slice(left.start // GROUP_SIZE, -(-left.stop // GROUP_SIZE)))
        before = tuple(
            _decode(moment.signed, code[block], None if scale is None else scale[group_block], height, width)
            for moment, code, scale in zip(task.moments, codes, scales, strict=True)
        )
        master, after = rule(master, update, before, task.scalars)
        if any(scale is not None for scale in scales):
            after = contain_overflow(after)
        for moment, value, code, scale in zip(task.moments, after, codes, scales, strict=True):
            _encode(moment.signed, value, words, code[block], None if scale is None else scale[group_block])
        if correction is None:
            weight[block].copy_(master)
        else:
            bits = correction.dtype.itemsize * 8
            noise = None if words is None else weight_noise(words)
            new_weight, new_correction = split(master, weight.dtype, bits, noise)
            weight[block].copy_(new_weight)
            correction[block].copy_(new_correction)


def _decode(signed: bool, values: Tensor, scale: Tensor | None, height: int, width: int) -> Tensor:
    if scale is None:
        return values
    decode = decode_momentum if signed else decode_variance
    return from_groups(decode(to_groups(values), scale.reshape(-1)), height, width)


def _encode(signed: bool, value: Tensor, words: Tensor | None, values: Tensor, scale: Tensor | None) -> None:
    if scale is None:
        values.copy_(value)
        return
    height, width = value.shape
    noise = None
    if words is not None:
        noise = to_groups(momentum_noise(words) if signed else variance_noise(words))
    codes, scales = (encode_momentum if signed else encode_variance)(to_groups(value), noise)
    values.copy_(from_groups(codes, height, width))
    scale.copy_(scales.view(scale.shape))
