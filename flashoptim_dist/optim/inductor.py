"""The kernels of the compiled CPU step, through torch.compile.

The *update* decodes and applies the rule, leaving fp32 values in working memory; the *store* encodes the momentum and
splits the weight. A variance is integers to its code: one more kernel decodes its patterns before the update, one
encodes them after it. Between kernels numbers change from floats to integers by lying in memory: inside one,
torch.compile moves such numbers one by one. Numbers that change between steps come as tensors. The C++ is built without
contraction to fused multiply-adds and without unsafe mathematics, which would change bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats import decode_momentum
from flashoptim_dist.formats.moments import (
    LARGEST_MOMENTUM_SCALE,
    TOP_SHIFT,
    lattice_of,
    shift_that_spans,
    top_of,
)
from flashoptim_dist.formats.rounding import leading_bits, momentum_noise, scramble, weight_noise
from flashoptim_dist.formats.spec import COARSEST_SHIFT, FINEST_SHIFT, MOMENTUM_LEVELS
from flashoptim_dist.optim.rules import Rule

AT_RUN_TIME = "given at run time"
_LARGEST_FLOAT = torch.finfo(torch.float32).max
_INFINITY = 0x7F800000
_EXPONENT = 0x3F800000


@dataclasses.dataclass(frozen=True)
class UpdateKind:
    """What an update kernel is compiled for. In ``scalars``, those given at run time are :data:`AT_RUN_TIME`."""

    rule: Rule
    scalars: Any
    signed: tuple[bool, ...]
    compressed: bool
    gradient_dtype: torch.dtype
    scales_gradient: bool
    one_thread: bool


@dataclasses.dataclass(frozen=True)
class StoreKind:
    """What a store kernel is compiled for. ``splits``: into bf16 and 8 bits; ``gives_noise``: for another split.

    ``momenta``: how many momenta it encodes; ``scaled``: in the unit that a variance gives.
    """

    momenta: int
    scaled: bool
    stochastic: bool
    splits: bool
    gives_noise: bool
    one_thread: bool


_numbers = itertools.count()


def _compile(function: Callable[..., None], one_thread: bool) -> Callable[..., None]:
    """Compile a function of tensors, and lists of them, whose 2-dim ones have a first dimension of any length."""
    # torch.compile keeps what it compiled by code object, and only so many for each.
    function.__code__ = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    options: dict[str, Any] = {
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.dynamic_threads": not one_thread,
    }
    compiled = torch.compile(function, fullgraph=True, options=options)
    called = False

    def call(*arguments: Any) -> None:
        nonlocal called
        if not called:
            for leaf in torch.utils._pytree.tree_leaves(arguments):
                if isinstance(leaf, Tensor) and leaf.ndim == 2:
                    torch._dynamo.mark_dynamic(leaf, 0)
            called = True
        compiled(*arguments)

    return call


@functools.cache
def update_kernel(kind: UpdateKind) -> Callable[..., None]:
    """Return the kernel that updates ``master`` in place and gives the new moments.

    Compressed moments go to ``new``, and the largest finite variance of every group and its smallest above 0 to
    ``extremes``; others are updated in place. ``values`` and ``scales`` are the momenta's then; a variance comes
    decoded, in ``new``, with the momentum's ``unit``.
    """
    rule, signed, compressed, scales_gradient = kind.rule, kind.signed, kind.compressed, kind.scales_gradient
    make_scalars = type(kind.scalars)
    fields = {field.name: getattr(kind.scalars, field.name) for field in dataclasses.fields(kind.scalars)}
    changing = [name for name, value in fields.items() if value is AT_RUN_TIME]
    fixed = {name: value for name, value in fields.items() if value is not AT_RUN_TIME}

    def update(
        master: Tensor,
        gradient: Tensor,
        factor: Tensor,
        values: list[Tensor],
        scales: list[Tensor],
        new: list[Tensor],
        unit: Tensor | None,
        extremes: tuple[Tensor, Tensor] | None,
        numbers: list[Tensor],
    ) -> None:
        scalars = make_scalars(**fixed, **dict(zip(changing, numbers)))
        gradient = gradient.to(torch.float32)
        if scales_gradient:
            gradient = gradient * factor
        before = values
        if compressed:
            momenta = iter(zip(values, scales))
            before = list(new)
            for i in range(len(signed)):
                if signed[i]:
                    codes, scale = next(momenta)
                    value = decode_momentum(codes, scale.squeeze(1))
                    before[i] = value if unit is None else value * unit
        weight, after = rule(master, gradient, tuple(before), scalars)
        master.copy_(weight)
        if compressed and len(after) == 2:
            # What contain_overflow does, in a form that the compiler vectorizes.
            after = (torch.where(after[1] <= _LARGEST_FLOAT, after[0], 0.0), after[1])
        for i in range(len(signed)):
            if not compressed:
                values[i].copy_(after[i])
                continue
            if not signed[i]:
                assert extremes is not None
                value = after[i]
                extremes[0].copy_(torch.where(value <= _LARGEST_FLOAT, value, 0.0).amax(dim=-1, keepdim=True))
                extremes[1].copy_(torch.where(value > 0.0, value, torch.inf).amin(dim=-1, keepdim=True))
            new[i].copy_(after[i])

    return _compile(update, kind.one_thread)


@functools.cache
def load_variance_kernel(one_thread: bool) -> Callable[..., None]:
    """Return the kernel that decodes a variance's codes to ``bits``, fp32 patterns, and the momentum's unit to
    ``unit``, as fp32 patterns too. ``scale``: the patterns of the scales, int16 [G, 1].
    """

    def load_variance(codes: Tensor, scale: Tensor, bits: Tensor, unit: Tensor) -> None:
        word = scale.to(torch.int32)
        base, shift = lattice_of(word >> 3, (word & 7) + FINEST_SHIFT)
        code = codes.to(torch.int32)
        pattern = base + code * (1 << shift)
        bits.copy_(torch.where(code == 0, 0, pattern))
        unit.copy_(((pattern >> 1) & _EXPONENT) + _EXPONENT)

    return _compile(load_variance, one_thread)


@functools.cache
def store_variance_kernel(stochastic: bool, one_thread: bool) -> Callable[..., None]:
    """Return the kernel that encodes a variance, given as its patterns ``bits``, and leaves the inverse of the
    momentum's unit in their place, as fp32 patterns. ``scale`` receives patterns, int16 [G, 1].
    """

    def store_variance(
        noise: tuple[Tensor, Tensor] | None,
        rotation: Tensor,
        bits: Tensor,
        extremes: tuple[Tensor, Tensor],
        codes: Tensor,
        scale: Tensor,
    ) -> None:
        largest, smallest = extremes
        top = top_of(largest)
        shift = shift_that_spans(top, smallest)
        base, _ = lattice_of(top, shift)
        if noise is None:
            added = leading_bits(rotation, shift)
        else:
            # Shifts by one number for all, and products with powers of two, are what the compiler vectorizes.
            words = scramble(noise[0] + noise[1], rotation)
            leading = (words >> (32 - COARSEST_SHIFT)) & ((1 << COARSEST_SHIFT) - 1)
            added = (leading.to(torch.float32) * _power_of_two(shift - COARSEST_SHIFT)).to(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        known = torch.where(magnitude < _INFINITY, magnitude, _INFINITY)
        known = torch.minimum(known, top << TOP_SHIFT)
        rounded = torch.maximum(known + added, base + (1 << shift))
        rounded = torch.where(known == 0, base, rounded)
        code = ((rounded - base) >> FINEST_SHIFT).to(torch.float32) * _power_of_two(FINEST_SHIFT - shift)
        codes.copy_(code.to(torch.int32))
        scale.copy_((top << 3) + (shift - FINEST_SHIFT))
        bits.copy_(_EXPONENT - ((rounded >> 1) & _EXPONENT))

    return _compile(store_variance, one_thread)


@functools.cache
def store_kernel(kind: StoreKind) -> Callable[..., None]:
    """Return the kernel that encodes the momenta that the update left, times ``inverse`` of their unit, and splits
    ``bits``, the patterns of the master weights.

    In ``bits`` it leaves fp32 patterns that are bf16 values. ``words`` receives what ``eager.store_master`` needs of
    the noise.
    """
    momenta, scaled = kind.momenta, kind.scaled

    def store(
        noise: tuple[Tensor, Tensor] | None,
        rotation: Tensor,
        new: list[Tensor],
        inverse: Tensor | None,
        values: list[Tensor],
        scales: list[Tensor],
        bits: Tensor | None,
        correction: Tensor | None,
        words: Tensor | None,
    ) -> None:
        hashed = None if noise is None else scramble(noise[0] + noise[1], rotation)
        for i in range(momenta):
            momentum = new[i]
            if scaled:
                assert inverse is not None
                momentum = momentum * inverse
            codes, scale = _encode_momentum(momentum, hashed)
            values[i].copy_(codes)
            scales[i].copy_(scale)
        if bits is not None:
            assert correction is not None
            weight, lower = _split(bits, 0x80 if hashed is None else weight_noise(hashed))
            bits.copy_(weight)
            correction.copy_(lower)
        if words is not None:
            assert hashed is not None
            words.copy_(hashed & 0xFFFF)

    return _compile(store, kind.one_thread)


# The functions of ``formats`` without going to and fro between floats and integers per element.


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return fp32 2**exponent of int32."""
    return ((exponent + 127) << 23).view(torch.float32)


def _encode_momentum(momentum: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    size = momentum.abs()
    largest = torch.where(size <= _LARGEST_FLOAT, size, 0.0).amax(dim=-1, keepdim=True)
    pattern = ((largest.view(torch.int32) + 0xFFFF) & -0x10000).clamp(max=LARGEST_MOMENTUM_SCALE << 16)
    scale = pattern.view(torch.float32)
    size = torch.where(size == size, size, 0.0)
    code = torch.sqrt(size / torch.where(scale > 0, scale, 1.0)) * MOMENTUM_LEVELS
    code = torch.copysign(torch.where(code <= MOMENTUM_LEVELS, code, float(MOMENTUM_LEVELS)), momentum)
    if words is None:
        return torch.round(code).to(torch.int8), scale.to(torch.bfloat16)
    fixed = torch.round(code * 256.0).to(torch.int32)
    return ((fixed + momentum_noise(words)) >> 8).to(torch.int8), scale.to(torch.bfloat16)


def _split(bits: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    """Split patterns of fp32 weights into patterns that are bf16 values, and the 8 bits of correction below."""
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    extended = ((magnitude + noise) >> 8).clamp(max=0x7F7F7F)
    rounded = (extended + 0x80) >> 8
    weight = torch.where(finite, (rounded << 16) | (bits & -0x80000000), bits)
    return weight, torch.where(finite, extended - (rounded << 8), 0).to(torch.int8)
