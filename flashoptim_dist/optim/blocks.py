"""Cutting parameters into blocks: flat, contiguous pieces of bounded size, in whole groups of 32.

A block is a view where memory allows it. Elsewhere (rows that do not end on a group, strided tensors) it is a copy,
rows padded with zeros to whole groups, written back after the step; many small parameters share one such copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats import GROUP_SIZE
from flashoptim_dist.formats.rounding import HASH_STRIDE, as_int32
from flashoptim_dist.sharding import ShardLayout


@dataclass
class MomentTensors:
    """A moment of one parameter on this rank: fp32 values, or codes and scales."""

    signed: bool
    values: Tensor
    scale: Tensor | None


@dataclass
class ParameterStep:
    """All that the step of one parameter on this rank needs.

    Tensors are local; the weight and the gradient may have any strides, states are contiguous. ``gradient_factor``
    scales the gradient. ``scalars`` is what the rule takes, a frozen dataclass.
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

    @property
    def compressed(self) -> bool:
        """Whether any moment is stored as codes and scales."""
        return any(moment.scale is not None for moment in self.moments)

    @property
    def stored(self) -> list[Tensor]:
        """What the step writes: weight, correction, moments and their scales."""
        of_moments = (tensor for moment in self.moments for tensor in (moment.values, moment.scale))
        return [tensor for tensor in (self.weight, self.correction, *of_moments) if tensor is not None]


@dataclass
class Block:
    """Elements of one or more parameters of one kind, as flat contiguous tensors of one length.

    The length is a multiple of 32, and scales are [length / 32]; without compressed moments it may be anything.
    ``noise_start`` gives the inputs of the noise's hash, index * HASH_STRIDE + key: an int, that of the first element
    where all are consecutive in the global tensor; an int32 tensor [length / 32, 1], that of every group's first
    element; None rounds to nearest.
    """

    weight: Tensor
    gradient: Tensor
    correction: Tensor | None
    moments: tuple[MomentTensors, ...]
    scalars: Any
    gradient_factor: float
    noise_start: int | Tensor | None
    step: int

    @property
    def compressed(self) -> bool:
        """Whether any moment is stored as codes and scales."""
        return any(moment.scale is not None for moment in self.moments)


class Staging:
    """Buffers that blocks are copied into, kept for the next block."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, role: str, like: Tensor, elements: int) -> Tensor:
        """Return a flat tensor with the dtype and device of ``like``; its content is undefined."""
        key = (role, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < elements:
            buffer = torch.empty(elements, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:elements]


def blocks(task: ParameterStep, limit: int, staging: Staging, *, copied: bool = False) -> Iterator[Block]:
    """Cut a parameter into blocks of at most ``limit`` elements (but at least one group).

    ``copied``: none may be a view.
    Each block must be stepped before the next one is asked for; copies are written back then.
    """
    if task.layout.numel == 0:
        return
    if not copied and is_flat(task) and has_whole_groups(task):
        yield from _flat_blocks(task, limit)
    else:
        yield from staged_blocks(((task, box) for box in _boxes(task, limit)), limit, staging)


def boxes_of_small(task: ParameterStep, limit: int) -> list[_Box] | None:
    """Return how a parameter of at most ``limit`` elements, padding included, is staged with others; None if larger."""
    if task.layout.numel > limit:
        return None
    boxes = list(_boxes(task, limit))
    return boxes if sum(box.elements for box in boxes) <= limit else None


# ------------------------------------------------------------------------------------------- views


def is_flat(task: ParameterStep) -> bool:
    """Return whether memory order is row after row."""
    contiguous = task.weight.is_contiguous() and task.gradient.is_contiguous()
    return contiguous and (task.compressed or task.layout.index_base is not None)


def is_addressable(task: ParameterStep) -> bool:
    """Return whether every tensor is what lies at its address, contiguous: plain, and not to be negated when read.

    Raises:
        RuntimeError: a tensor whose memory was freed or cut; torch itself would read there.
    """
    found = True
    for tensor in (task.gradient, *task.stored):
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            found = False  # an AsyncCollectiveTensor, for one, is not there yet
            continue
        if tensor.layout is not torch.strided or tensor._is_zerotensor():
            found = False
            continue
        contiguous = tensor.is_contiguous()
        end = tensor.storage_offset() + (tensor.numel() if contiguous else 1)
        if tensor.untyped_storage().nbytes() < end * tensor.itemsize:
            raise RuntimeError(
                f"a tensor of parameter {task.layout.name!r}, {tuple(tensor.shape)} of {tensor.dtype}, has lost its "
                f"memory: its storage holds {tensor.untyped_storage().nbytes()} bytes. Was it freed by resize_?"
            )
        found = found and contiguous and not tensor.is_neg()
    return found


def has_whole_groups(task: ParameterStep) -> bool:
    """Return whether no row ends within a group whose elements share a scale."""
    return not task.compressed or task.layout.length % GROUP_SIZE == 0


def _flat_blocks(task: ParameterStep, limit: int) -> Iterator[Block]:
    layout = task.layout
    weight, gradient = task.weight.view(-1), task.gradient.view(-1)
    correction = None if task.correction is None else task.correction.view(-1)
    values = [moment.values.view(-1) for moment in task.moments]
    scales = [None if moment.scale is None else moment.scale.view(-1) for moment in task.moments]
    size = max(GROUP_SIZE, limit // GROUP_SIZE * GROUP_SIZE)
    for first in range(0, layout.numel, size):
        last = min(first + size, layout.numel)
        groups = slice(first // GROUP_SIZE, -(-last // GROUP_SIZE))
        yield Block(
            weight=weight[first:last],
            gradient=gradient[first:last],
            correction=None if correction is None else correction[first:last],
            moments=tuple(
                MomentTensors(moment.signed, value[first:last], None if scale is None else scale[groups])
                for moment, value, scale in zip(task.moments, values, scales, strict=True)
            ),
            scalars=task.scalars,
            gradient_factor=task.gradient_factor,
            noise_start=flat_noise_start(task, first, groups),
            step=task.step,
        )


def flat_noise_start(task: ParameterStep, first: int, groups: slice) -> int | Tensor | None:
    """Return a block's ``noise_start``: of element ``first``, where all are consecutive, else of some groups."""
    if task.noise_key is None:
        return None
    layout = task.layout
    if layout.index_base is not None:
        return as_int32((layout.index_base + first) * HASH_STRIDE + task.noise_key)
    group = torch.arange(groups.start, groups.stop, device=task.weight.device)
    row, column = group // layout.groups_per_row, group % layout.groups_per_row
    strides = _global_strides(layout)
    index = column * GROUP_SIZE + sum(offset * stride for offset, stride in zip(layout.offset, strides, strict=True))
    for dim in reversed(range(1 if layout.flattened else len(strides) - 1)):
        index += row % layout.local_shape[dim] * strides[dim]
        row = row // layout.local_shape[dim]
    return _hash_inputs(index, task.noise_key)


def _hash_inputs(index: Tensor, key: int) -> Tensor:
    # Indices enter the hash modulo 2**32, which is what int32 with wrap-around keeps of them.
    return (index.to(torch.int32) * as_int32(HASH_STRIDE) + key).view(-1, 1)


def _global_strides(layout: ShardLayout) -> list[int]:
    return [math.prod(layout.global_shape[dim + 1 :]) for dim in range(len(layout.global_shape))]


# ------------------------------------------------------------------------------------------- copies


@dataclass(frozen=True)
class _Box:
    """A box of a local tensor: whole rows, or one piece of a row that starts on a group.

    ``row_dim`` is the first of the dimensions that make a row.
    """

    slices: tuple[slice, ...]
    row_dim: int

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def rows(self) -> int:
        return math.prod(self.extents[: self.row_dim])

    @property
    def width(self) -> int:
        return math.prod(self.extents[self.row_dim :])

    @property
    def padded_width(self) -> int:
        return -(-self.width // GROUP_SIZE) * GROUP_SIZE

    @property
    def elements(self) -> int:
        """Elements of its copy, padding included."""
        return self.rows * self.padded_width

    def inside(self, flat: Tensor) -> Tensor:
        """View the box's elements in a copy [elements]."""
        rows = flat.view(*self.extents[: self.row_dim], self.padded_width)[..., : self.width]
        return rows.view(self.extents)

    def scales_inside(self, flat: Tensor) -> Tensor:
        """View the box's scales in a copy [elements / 32]."""
        return flat.view(*self.extents[: self.row_dim], self.padded_width // GROUP_SIZE)

    def of_scales(self, scale: Tensor, inner: int) -> Tensor:
        """Return the part of a scale tensor that belongs to this box; ``inner``: elements per step of ``row_dim``."""
        first = self.slices[self.row_dim].start * inner // GROUP_SIZE
        return scale[(*self.slices[: self.row_dim], slice(first, first + self.padded_width // GROUP_SIZE))]


def _local_shape(layout: ShardLayout) -> tuple[int, ...]:
    return layout.local_shape or (1,)


def _row_dim(task: ParameterStep, limit: int) -> int:
    """Return the first dimension of a row: by the format's rule, or, uncompressed, for the longest run of indices."""
    layout, shape = task.layout, _local_shape(task.layout)
    if task.compressed:
        return 1 if layout.flattened else len(shape) - 1
    dim = len(shape) - 1
    while dim and shape[dim] == layout.global_shape[dim] and math.prod(shape[dim:]) <= limit:
        dim -= 1
    return dim


def _boxes(task: ParameterStep, limit: int) -> Iterator[_Box]:
    """Cut a local tensor into boxes of at most ``limit`` elements, padding included, or of one group if that is
    more.
    """
    shape, row_dim = _local_shape(task.layout), _row_dim(task, limit)
    inner = math.prod(shape[row_dim + 1 :])
    sizes = list(shape)
    # A piece of a row starts on a group; this many steps of the row's first dimension are whole groups.
    unit = GROUP_SIZE // math.gcd(inner, GROUP_SIZE)
    sizes[row_dim] = shape[row_dim]
    if inner * shape[row_dim] > limit:
        sizes[row_dim] = min(shape[row_dim], max(unit, limit // inner // unit * unit))
    rows = max(1, limit // (-(-inner * sizes[row_dim] // GROUP_SIZE) * GROUP_SIZE))
    if sizes[row_dim] < shape[row_dim]:
        rows = 1
    for dim in reversed(range(row_dim)):
        sizes[dim] = min(shape[dim], rows)
        rows = max(1, rows // shape[dim]) if sizes[dim] == shape[dim] else 1
    cuts = [[slice(a, min(a + s, n)) for a in range(0, n, s)] for n, s in zip(shape, sizes, strict=True)]
    for slices in itertools.product(*cuts):
        yield _Box(slices, row_dim)


def _box_noise_start(task: ParameterStep, box: _Box, device: torch.device) -> Tensor | None:
    if task.noise_key is None:
        return None
    index = torch.arange(0, box.padded_width, GROUP_SIZE, device=device)
    strides = _global_strides(task.layout) or [1]
    offsets = task.layout.offset or (0,)
    for dim in reversed(range(box.row_dim)):
        position = torch.arange(box.slices[dim].start, box.slices[dim].stop, device=device) + offsets[dim]
        index = (position * strides[dim]).unsqueeze(1) + index.reshape(1, -1)
        index = index.reshape(-1)
    for dim in range(box.row_dim, len(box.slices)):
        index = index + (box.slices[dim].start + offsets[dim]) * strides[dim]
    return _hash_inputs(index, task.noise_key)


def staged_blocks(pieces: Iterable[tuple[ParameterStep, _Box]], limit: int, staging: Staging) -> Iterator[Block]:
    """Copy boxes of parameters of one kind into blocks of at most ``limit`` elements, and write them back after."""
    held: list[tuple[ParameterStep, _Box]] = []
    elements = 0
    for task, box in pieces:
        if held and elements + box.elements > limit:
            yield from _staged_block(held, elements, staging)
            held, elements = [], 0
        held.append((task, box))
        elements += box.elements
    if held:
        yield from _staged_block(held, elements, staging)


def _staged_block(pieces: Sequence[tuple[ParameterStep, _Box]], elements: int, staging: Staging) -> Iterator[Block]:
    like = pieces[0][0]

    def take(role: str, tensor: Tensor, per: int = 1) -> Tensor:
        return staging.take(role, tensor, elements // per)

    weight, gradient = take("weight", like.weight), take("gradient", like.gradient)
    correction = None if like.correction is None else take("correction", like.correction)
    moments = tuple(
        MomentTensors(
            moment.signed,
            take(f"values {number}", moment.values),
            None if moment.scale is None else take(f"scale {number}", moment.scale, GROUP_SIZE),
        )
        for number, moment in enumerate(like.moments)
    )
    if any(box.padded_width != box.width for _, box in pieces):
        # Zeros in the padding keep it out of every group's scale: a rule leaves moments of zeros at zero.
        for tensor in (weight, gradient, correction, *(moment.values for moment in moments)):
            if tensor is not None:
                tensor.zero_()
    stored: list[Tensor] = []
    copies: list[Tensor] = []
    starts: list[Tensor | None] = []
    first = 0
    for task, box in pieces:
        last = first + box.elements
        inner = math.prod(_local_shape(task.layout)[box.row_dim + 1 :])
        box.inside(gradient[first:last]).copy_(_part(task.gradient, box))
        stored.append(_part(task.weight, box))
        copies.append(box.inside(weight[first:last]))
        if correction is not None and task.correction is not None:
            stored.append(_part(task.correction, box))
            copies.append(box.inside(correction[first:last]))
        for moment, of_task in zip(moments, task.moments, strict=True):
            stored.append(_part(of_task.values, box))
            copies.append(box.inside(moment.values[first:last]))
            if moment.scale is not None and of_task.scale is not None:
                stored.append(box.of_scales(of_task.scale, inner))
                copies.append(box.scales_inside(moment.scale[first // GROUP_SIZE : last // GROUP_SIZE]))
        starts.append(_box_noise_start(task, box, weight.device))
        first = last
    for copy, tensor in zip(copies, stored, strict=True):
        copy.copy_(tensor)
    known = [start for start in starts if start is not None]
    yield Block(
        weight=weight,
        gradient=gradient,
        correction=correction,
        moments=moments,
        scalars=like.scalars,
        gradient_factor=like.gradient_factor,
        noise_start=torch.cat(known) if known else None,
        step=like.step,
    )
    for copy, tensor in zip(copies, stored, strict=True):
        tensor.copy_(copy)


def _part(tensor: Tensor, box: _Box) -> Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor[box.slices]
