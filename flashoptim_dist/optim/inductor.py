"""The two kernels of the compiled CPU step, through torch.compile.

The *update* decodes and applies the rule, leaving fp32 values and each group's largest in working memory; the *store*
encodes those and splits the weight. Between them the weight changes from floats to integers by lying in memory: inside
a kernel, torch.compile moves such numbers one by one. Numbers that change between steps come as tensors. The C++ is
built without contraction to fused multiply-adds and without unsafe mathematics, which would change bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats import decode_momentum, decode_variance
from flashoptim_dist.formats.moments import LARGEST_MOMENTUM_SCALE, LARGEST_VARIANCE_SCALE
from flashoptim_dist.formats.rounding import momentum_noise, scramble, variance_noise, weight_noise
from flashoptim_dist.formats.spec import MOMENTUM_LEVELS, VARIANCE_FLOOR, VARIANCE_LEVELS
from flashoptim_dist.optim.rules import Rule

AT_RUN_TIME = "given at run time"
_LARGEST_FLOAT = torch.finfo(torch.float32).max


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
    """What a store kernel is compiled for. ``splits``: into bf16 and 8 bits; ``gives_noise``: for another split."""

    signed: tuple[bool, ...]
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

    Compressed moments go to ``new``, a variance as its square root, and the largest finite magnitude of every group to
    ``largest``; others are updated in place.
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
        largest: list[Tensor],
        numbers: list[Tensor],
    ) -> None:
        scalars = make_scalars(**fixed, **dict(zip(changing, numbers)))
        gradient = gradient.to(torch.float32)
        if scales_gradient:
            gradient = gradient * factor
        before = values
        if compressed:
            before = [
                (decode_momentum if is_signed else decode_variance)(value, scale.squeeze(1))
                for value, scale, is_signed in zip(values, scales, signed)
            ]
        weight, after = rule(master, gradient, tuple(before), scalars)
        master.copy_(weight)
        if compressed and len(after) == 2:
            # What contain_overflow does, in a form that the compiler vectorizes.
            after = (torch.where(after[1] <= _LARGEST_FLOAT, after[0], 0.0), after[1])
        for i in range(len(values)):
            if not compressed:
                values[i].copy_(after[i])
                continue
            value = after[i] if signed[i] else torch.sqrt(after[i])
            size = value.abs() if signed[i] else value
            largest[i].copy_(torch.where(size <= _LARGEST_FLOAT, size, 0.0).amax(dim=-1, keepdim=True))
            new[i].copy_(value)

    return _compile(update, kind.one_thread)


@functools.cache
def store_kernel(kind: StoreKind) -> Callable[..., None]:
    """Return the kernel that encodes what the update left, and splits ``bits``, the patterns of the master weights.

    In ``bits`` it leaves fp32 patterns that are bf16 values. ``words`` receives what ``eager.store_master`` needs of
    the noise.
    """
    signed = kind.signed

    def store(
        noise: tuple[Tensor, Tensor, Tensor] | None,
        new: list[Tensor],
        largest: list[Tensor],
        values: list[Tensor],
        scales: list[Tensor],
        bits: Tensor | None,
        correction: Tensor | None,
        words: Tensor | None,
    ) -> None:
        hashed = None if noise is None else scramble(noise[0] + noise[1], noise[2])
        for i in range(len(values)):
            codes, scale = (_encode_momentum if signed[i] else _encode_root)(new[i], largest[i], hashed)
            values[i].copy_(codes)
            scales[i].copy_(scale)
        if bits is not None:
            assert correction is not None
            weight, lower = _split(bits, 0x80 if hashed is None else weight_noise(hashed))
            bits.copy_(weight)
            correction.copy_(lower)
        if words is not None:
            assert hashed is not None
            words.copy_(weight_noise(hashed))

    return _compile(store, kind.one_thread)


# The functions of ``formats`` without going to and fro between floats and integers per element.


def _scale(largest: Tensor, limit: int) -> Tensor:
    """Round the largest magnitude of groups [G, 1] up to a bf16 of pattern ``limit`` at most; fp32."""
    return ((largest.view(torch.int32) + 0xFFFF) & -0x10000).clamp(max=limit << 16).view(torch.float32)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def _encode_momentum(momentum: Tensor, largest: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    scale = _scale(largest, LARGEST_MOMENTUM_SCALE)
    size = momentum.abs()
    size = torch.where(size == size, size, 0.0)
    code = torch.sqrt(size / _divisor(scale)) * MOMENTUM_LEVELS
    code = torch.copysign(torch.where(code <= MOMENTUM_LEVELS, code, float(MOMENTUM_LEVELS)), momentum)
    if words is None:
        return torch.round(code).to(torch.int8), scale.to(torch.bfloat16)
    fixed = torch.round(code * 256.0).to(torch.int32)
    return ((fixed + momentum_noise(words)) >> 8).to(torch.int8), scale.to(torch.bfloat16)


def _encode_root(root: Tensor, largest: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encode a variance given as its square root."""
    scale = _scale(largest, LARGEST_VARIANCE_SCALE)
    code = torch.sqrt(root / _divisor(scale)) * VARIANCE_LEVELS
    code = torch.where(code <= VARIANCE_LEVELS, code, float(VARIANCE_LEVELS))
    code = torch.where(code >= VARIANCE_FLOOR, code, float(VARIANCE_FLOOR))
    code = torch.where(root == 0, 0.0, code)
    if words is None:
        return torch.round(code).to(torch.uint8), scale.to(torch.bfloat16)
    fixed = torch.round(code * 32768.0).to(torch.int32)
    return ((fixed + fixed + variance_noise(words)) >> 16).to(torch.uint8), scale.to(torch.bfloat16)


def _split(bits: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    """Split patterns of fp32 weights into patterns that are bf16 values, and the 8 bits of correction below."""
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    extended = ((magnitude + noise) >> 8).clamp(max=0x7F7F7F)
    rounded = (extended + 0x80) >> 8
    weight = torch.where(finite, (rounded << 16) | (bits & -0x80000000), bits)
    return weight, torch.where(finite, extended - (rounded << 8), 0).to(torch.int8)
