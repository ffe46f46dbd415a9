"""The step of a block on CPU without a compiler: the definition's bits, in few passes over memory that stays in cache.

Each pass is one torch operation into a kept buffer (``scratch``). What makes the definition slow is left out where one
cheap look at the block shows that it changes nothing: a sum of squares tells that all weights are finite and far from
overflow, a group's largest element that all moments are. A block with anything else in it goes through the definition.

Numbers come as 0-dim tensors, which cost torch half the time of a Python number per call. Codes are rounded by adding
a number so large that the sum's last bit is the unit (ties go to even, as in torch.round); the code is then in the low
bits of the sum's pattern.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashoptim_dist.formats import GROUP_SIZE, encode_momentum, merge
from flashoptim_dist.formats.exact import numpy_takes_roots, square_root
from flashoptim_dist.formats.moments import (
    LARGEST_MOMENTUM_SCALE,
    LARGEST_TOP,
    TOP_SHIFT,
    lattice,
    shift_that_spans,
)
from flashoptim_dist.formats.rounding import (
    HASH_MULTIPLIER,
    HASH_SHIFTS,
    as_int32,
    leading_bits,
    momentum_noise,
    rotation,
)
from flashoptim_dist.formats.spec import FINEST_SHIFT, MOMENTUM_LEVELS
from flashoptim_dist.formats.weights import SPLIT_DTYPES
from flashoptim_dist.optim import definition
from flashoptim_dist.optim.blocks import Block, MomentTensors, ParameterStep
from flashoptim_dist.optim.rules import Rule
from flashoptim_dist.optim.scratch import Scratch, Views


def _int32(value: int) -> Tensor:
    return torch.tensor(as_int32(value), dtype=torch.int32, device="cpu")


def _float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


_FIRST_SHIFT, _SECOND_SHIFT = map(_int32, HASH_SHIFTS)
_FIRST_MASK, _SECOND_MASK = (_int32((1 << (32 - shift)) - 1) for shift in HASH_SHIFTS)
_MULTIPLIER = _int32(HASH_MULTIPLIER)
_SIGN_BIT, _LOW_16, _LOW_8, _HALF_16, _HALF_8 = map(_int32, (0x80000000, 0xFFFF, 0xFF, 0x8000, 0x80))
_EIGHT, _SIXTEEN = _int32(8), _int32(16)
_TO_BF16_MASK, _SMALLEST_BF16 = _int32(-0x10000), _int32(0x10000)

_ONE, _EXPONENT = _int32(1), _int32(0x3F800000)
_ZERO, _SEVEN = _int32(0), _int32(7)
_TOP_SHIFT, _BELOW_TOP_UNIT = _int32(TOP_SHIFT), _int32((1 << TOP_SHIFT) - 1)
_FINEST, _TOP_IN_FINEST = _int32(FINEST_SHIFT), _int32(1 << (TOP_SHIFT - FINEST_SHIFT))

_MOMENTUM_UNIT, _MOMENTUM_LEVELS = _float32(1.0 / MOMENTUM_LEVELS), _float32(MOMENTUM_LEVELS)
# With noise, codes are rounded to 1/256 first.
_MOMENTUM_FINE, _MOMENTUM_ROUNDER = _float32(MOMENTUM_LEVELS * 256.0), _float32(1.5 * 2**23)


def step_block(block: Block, rule: Rule, scratch: Scratch) -> None:
    """Update the weight, the correction and the moments of a block of CPU tensors in place."""
    views = scratch.views(block.weight.numel(), len(block.moments))
    master = load_master(block, views)
    gradient = load_gradient(block, views)
    before = _load_moments(block, views)
    master, after = rule(master, gradient, before, scalar_tensors(block.scalars))
    words = _noise(block, views) if needs_noise(block) else None
    # The gradient's memory is used again now.
    _store_moments(block, tuple(value.clone() if value is gradient else value for value in after), words, views)
    store_master(block, master, words, views)


def needs_noise(block: Block) -> bool:
    """Return whether anything that this block stores is rounded stochastically."""
    return block.noise_start is not None and drops_bits(block)


def drops_bits(step: Block | ParameterStep) -> bool:
    """Return whether anything stored holds less than fp32: 16 bits of correction, or fp32, hold all there is."""
    correction = step.correction
    return step.compressed or (
        step.weight.dtype in SPLIT_DTYPES and (correction is None or correction.dtype == torch.int8)
    )


@lru_cache(maxsize=64)
def scalar_tensors(scalars: Any) -> Any:
    """Return a rule's scalars with 0-dim fp64 tensors for floats; 0 and 1, which switch parts of a rule off, stay."""
    changed = {
        field.name: torch.tensor(value, dtype=torch.float64, device="cpu")
        for field in dataclasses.fields(scalars)
        if isinstance(value := getattr(scalars, field.name), float) and value not in (0.0, 1.0)
    }
    return dataclasses.replace(scalars, **changed)


# ------------------------------------------------------------------------------------------- noise


def _noise(block: Block, views: Views) -> Tensor:
    words, spare, start = views.words, views.spare, block.noise_start
    if isinstance(start, Tensor):
        torch.add(start, views.lanes, out=views.words_grouped)
    else:
        assert start is not None
        torch.add(views.ramp, _int32(start), out=words)
    torch.bitwise_right_shift(words, _FIRST_SHIFT, out=spare).bitwise_and_(_FIRST_MASK)
    words.bitwise_xor_(spare).mul_(_MULTIPLIER)
    torch.bitwise_right_shift(words, _SECOND_SHIFT, out=spare).bitwise_and_(_SECOND_MASK)
    return words.bitwise_xor_(spare).add_(_rotation(block.step))


@lru_cache(maxsize=64)
def _rotation(step: int) -> Tensor:
    return _int32(rotation(step))


# ------------------------------------------------------------------------------------------- weights


def _ordinary(master: Tensor) -> bool:
    """Return whether all weights are finite and far from overflow; the sum itself is not used."""
    return float(torch.dot(master, master)) < math.inf


def load_master(block: Block, views: Views) -> Tensor:
    """Return the fp32 master weights of a block: the weight itself, or in scratch memory."""
    weight, correction = block.weight, block.correction
    if weight.dtype == torch.float32:
        return weight
    if correction is None:
        return views.master.copy_(weight)
    if weight.dtype == torch.bfloat16:
        views.master.copy_(weight)
        views.spare.copy_(correction)
        # Sign and magnitude add at once, since no ordinary weight borrows from the sign.
        views.master_bits.add_(views.spare, alpha=256 if correction.dtype == torch.int8 else 1)
        if _ordinary(views.master):
            return views.master
    return views.master.copy_(merge(weight, correction))


def load_gradient(block: Block, views: Views) -> Tensor:
    """Return the fp32 gradient: the tensor itself, or in scratch memory."""
    gradient = block.gradient
    if gradient.dtype != torch.float32:
        gradient = views.gradient.copy_(gradient)
    if block.gradient_factor == 1.0:
        return gradient
    return torch.mul(gradient, block.gradient_factor, out=views.gradient)


def store_master(block: Block, master: Tensor, words: Tensor | None, views: Views) -> None:
    """Store fp32 master weights, which are overwritten unless they are the weight itself.

    ``words``: of :func:`_noise`, of which only the low 16 bits count; overwritten.
    """
    correction = block.correction
    if correction is None and (words is None or block.weight.dtype not in SPLIT_DTYPES):
        if master is not block.weight:
            block.weight.copy_(master)
        return
    if correction is None or block.weight.dtype != torch.bfloat16 or not _ordinary(master):
        definition.store_weight(block, master, words)
        return
    bits, spare = master.view(torch.int32), views.spare
    if correction.dtype == torch.int8:
        # The correction is bits 8 to 15: what the rounded weight takes away is a multiple of 2**16.
        bits.add_(_HALF_8 if words is None else words.bitwise_and_(_LOW_8))
        correction.copy_(torch.bitwise_right_shift(bits, _EIGHT, out=spare))
    else:
        correction.copy_(bits)
    block.weight.view(torch.int16).copy_(bits.add_(_HALF_16).bitwise_right_shift_(_SIXTEEN))


# ------------------------------------------------------------------------------------------- moments


def _load_moments(block: Block, views: Views) -> tuple[Tensor, ...]:
    """Return the fp32 moments of a block: the tensors themselves, or in scratch memory."""
    if not block.compressed:
        return tuple(moment.values for moment in block.moments)
    for number, moment in enumerate(block.moments):
        if moment.signed:
            _load_momentum(moment, views, number)
    for number, moment in enumerate(block.moments):
        if not moment.signed:
            unit = _load_variance(moment, views, number)
            for other, momentum in zip(block.moments, views.moments, strict=True):
                if other.signed:
                    momentum.mul_(unit)
            if int(moment.values.amin()) == 0:
                # Comparing and selecting cost torch ten times as much as these three passes.
                some = torch.minimum(views.spare.copy_(moment.values), _ONE, out=views.spare)
                views.moments[number].view(torch.int32).mul_(some)
    return views.moments


def _load_momentum(moment: MomentTensors, views: Views, number: int) -> None:
    assert moment.scale is not None
    value = views.moments[number].copy_(moment.values)
    views.scales_grouped.copy_(moment.scale.view(-1, 1))
    value.mul_(_MOMENTUM_UNIT).mul_(torch.abs(value, out=views.spare_float))
    views.moments_grouped[number].mul_(views.scales_grouped)


def _load_variance(moment: MomentTensors, views: Views, number: int) -> Tensor:
    """Decode a variance, code 0 as if it were none; return the unit of the momentum, in scratch memory."""
    assert moment.scale is not None
    value, spare = views.moments[number], views.spare
    bits, index = value.view(torch.int32), views.index.copy_(moment.scale.view(torch.int16))
    base, _, k, _, _ = torch.index_select(_lattices(), 0, index, out=views.lattices).split(1, dim=1)
    bits.copy_(moment.values)
    bits.view(-1, GROUP_SIZE).bitwise_left_shift_(k).add_(base)
    torch.bitwise_right_shift(bits, _ONE, out=spare).bitwise_and_(_EXPONENT).add_(_EXPONENT)
    return views.spare_float


def _store_moments(block: Block, after: tuple[Tensor, ...], words: Tensor | None, views: Views) -> None:
    if not block.compressed:
        for moment, value in zip(block.moments, after, strict=True):
            if value is not moment.values:
                moment.values.copy_(value)
        return
    for moment, value in zip(block.moments, after, strict=True):
        if not moment.signed:
            if not _store_variance(moment, value, words, block.step, views):
                definition.store_moments(block, after, words)
                return
            for other, momentum in zip(block.moments, after, strict=True):
                if other.signed:
                    momentum.mul_(views.size)  # 1 / unit
    for moment, value in zip(block.moments, after, strict=True):
        if moment.signed and not _store_momentum(moment, value, words, views):
            noise = None if words is None else momentum_noise(words).view(-1, GROUP_SIZE)
            codes, scale = encode_momentum(value.view(-1, GROUP_SIZE), noise)
            assert moment.scale is not None
            moment.values.copy_(codes.view(-1))
            moment.scale.copy_(scale)


def _store_momentum(moment: MomentTensors, value: Tensor, words: Tensor | None, views: Views) -> bool:
    """Encode and store a momentum; return False, with nothing stored, where the definition must do it."""
    size, bits, spare = views.size, views.size_bits, views.spare
    torch.abs(value, out=size)
    groups = torch.amax(views.size_bits_grouped, dim=-1, out=views.groups)
    if views.groups_array.max() > LARGEST_MOMENTUM_SCALE << 16:
        return False
    groups.add_(_LOW_16).bitwise_and_(_TO_BF16_MASK)
    assert moment.scale is not None
    moment.scale.view(-1, 1).copy_(views.scales_grouped)
    # An all-zero group is divided by the smallest scale there is.
    torch.maximum(groups, _SMALLEST_BF16, out=groups)
    views.size_grouped.div_(views.scales_grouped)
    if numpy_takes_roots():
        np.sqrt(views.size_array, out=views.size_array)
    else:
        square_root(size, out=size)
    size.mul_(_MOMENTUM_LEVELS if words is None else _MOMENTUM_FINE)
    bits.bitwise_or_(torch.bitwise_and(value.view(torch.int32), _SIGN_BIT, out=spare))
    size.add_(_MOMENTUM_ROUNDER)
    if words is None:
        moment.values.copy_(bits)
        return True
    # (256 * code + noise) / 256, all times 256: the 8 bits below the noise change nothing.
    torch.bitwise_and(words, _LOW_16, out=spare)
    moment.values.copy_(spare.add_(bits, alpha=256).bitwise_right_shift_(_SIXTEEN))
    return True


def _store_variance(moment: MomentTensors, value: Tensor, words: Tensor | None, step: int, views: Views) -> bool:
    """Encode and store a variance, and leave the inverse of the momentum's unit in ``size``; return False, with
    nothing stored, where the definition must do it.
    """
    grouped = (-1, GROUP_SIZE)
    bits, spare, rounded = value.view(torch.int32).view(grouped), views.spare.view(grouped), views.size_bits_grouped
    largest = torch.amax(bits, dim=-1, out=views.groups)
    highest = views.groups_array.max()
    smallest = torch.amin(bits, dim=-1, out=views.smallest)
    least = views.smallest_array.min()
    # A NaN can have its sign set.
    if least < 0 or highest > LARGEST_TOP << TOP_SHIFT:
        return False
    if least == 0:
        # The smallest above zero: one less, as an unsigned number, 0 is the largest.
        torch.sub(bits, _ONE, out=spare).bitwise_xor_(_SIGN_BIT)
        torch.amin(spare, dim=-1, out=smallest).bitwise_xor_(_SIGN_BIT).add_(_ONE)
    # What top_of, shift_that_spans and pack do, in few calls.
    top = largest.add_(_BELOW_TOP_UNIT).bitwise_right_shift_(_TOP_SHIFT)
    units = torch.mul(top, _TOP_IN_FINEST, out=views.index).sub_(smallest.sub_(_ONE).bitwise_right_shift_(_FINEST))
    if least == 0:
        torch.maximum(units, _ZERO, out=units)
    pattern = torch.index_select(_shifts(), 0, units, out=views.base).add_(top, alpha=8)
    assert moment.scale is not None
    moment.scale.view(torch.int16).copy_(pattern)
    base, lowest, k, mask, rest = torch.index_select(_lattices(), 0, pattern, out=views.lattices).split(1, dim=1)
    if words is None:
        added = torch.index_select(_added_to_all(step), 0, pattern.bitwise_and_(_SEVEN), out=views.smallest)
        torch.add(bits, added.unsqueeze(1), out=rounded)
    else:
        torch.bitwise_right_shift(words.view(grouped), rest, out=spare).bitwise_and_(mask)
        torch.add(bits, spare, out=rounded)
    torch.maximum(rounded, lowest, out=rounded)
    torch.sub(rounded, base, out=spare)
    if least == 0:
        spare.mul_(torch.minimum(bits, _ONE, out=bits))
        torch.add(spare, base, out=rounded)
    moment.values.copy_(spare.bitwise_right_shift_(k).view(-1))
    torch.sub(_EXPONENT, rounded.bitwise_right_shift_(_ONE).bitwise_and_(_EXPONENT), out=rounded)
    return True


# ------------------------------------------------------------------------------------------- tables


@lru_cache(maxsize=64)
def _added_to_all(step: int) -> Tensor:
    """Return what a step that rounds to nearest adds to a variance's pattern, int32 [8], by k - FINEST_SHIFT."""
    shifts = torch.arange(FINEST_SHIFT, FINEST_SHIFT + 8, dtype=torch.int32, device="cpu")
    return leading_bits(_rotation(step), shifts)


@lru_cache(maxsize=1)
def _shifts() -> Tensor:
    """Return k - FINEST_SHIFT, int32, by the units between a group's top and its smallest number above zero."""
    most = LARGEST_TOP << (TOP_SHIFT - FINEST_SHIFT)
    units = torch.arange(most + 1, dtype=torch.int32, device="cpu")
    top = torch.tensor(LARGEST_TOP, dtype=torch.int32, device="cpu")
    return shift_that_spans(top, ((most - units) << FINEST_SHIFT) + 1) - FINEST_SHIFT


@lru_cache(maxsize=1)
def _lattices() -> Tensor:
    """Return what :func:`lattice` says of every pattern of a scale, int32 [32768, 5]: base, pattern of code 1, k,
    2**k - 1, 32 - k.
    """
    patterns = torch.arange(1 << 15, dtype=torch.int32, device="cpu").to(torch.int16)
    base, shift = lattice(patterns.view(torch.bfloat16))
    unit = 1 << shift
    return torch.stack((base, base + unit, shift, unit - 1, 32 - shift), dim=1)
