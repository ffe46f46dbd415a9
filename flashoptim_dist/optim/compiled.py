"""The step of a block on CPU through torch.compile, where that pays: the definition's bits at the speed of memory.

Two kernels: the *update* decodes and applies the rule, leaving fp32 values and each group's largest in working memory;
the *store* encodes those and splits the weight. Between them the weight changes from floats to integers by lying in
memory: inside a kernel, torch.compile moves such numbers one by one. Kernels are compiled once per kind of block
(dtypes, rule, rounding) for every length; numbers that change between steps come as tensors. The C++ is built without
contraction to fused multiply-adds and without unsafe mathematics, which would change bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flashoptim_dist.formats import GROUP_SIZE, decode_momentum, decode_variance
from flashoptim_dist.formats.moments import LARGEST_MOMENTUM_SCALE, LARGEST_VARIANCE_SCALE
from flashoptim_dist.formats.rounding import momentum_noise, rotation, scramble, variance_noise, weight_noise
from flashoptim_dist.formats.spec import MOMENTUM_LEVELS, VARIANCE_FLOOR, VARIANCE_LEVELS
from flashoptim_dist.optim import eager
from flashoptim_dist.optim.blocks import Block, MomentTensors
from flashoptim_dist.optim.rules import Rule
from flashoptim_dist.optim.scratch import Scratch

Choice = Literal["auto", "compiled", "eager"]

WORTHWHILE_ELEMENTS = 20_000_000
"""In "auto", elements in one step() from which kernels are compiled; see docs/performance.md."""

_FEWEST_GROUPS = 512
_LARGEST_FLOAT = torch.finfo(torch.float32).max

_choice: Choice = "auto"
_failed = False


def cpu_backend(choice: Choice | None = None) -> Choice:
    """Set, if given, and return how this process steps CPU tensors. Results are the same bits in every case.

    Args:
        choice: "compiled": by torch.compile, which takes seconds once per kind of parameter and needs a C++ compiler.
            "eager": by torch operations. "auto", the default: compiled from 20 million elements per step on, where
            there is a C++ compiler; eager else.

    Raises:
        ValueError: another choice.
    """
    global _choice, _failed
    if choice is not None:
        if choice not in ("auto", "compiled", "eager"):
            raise ValueError(f'the CPU backend must be "auto", "compiled" or "eager", got {choice!r}')
        _choice, _failed = choice, False
    return _choice


def use_compiled(elements: int) -> bool:
    """Return whether a step of this many elements on this rank should be compiled."""
    if _failed or _choice == "eager":
        return False
    return _choice == "compiled" or (elements >= WORTHWHILE_ELEMENTS and has_compiler())


@functools.cache
def has_compiler() -> bool:
    """Return whether there is what torch.compile needs on CPU: a C++ compiler and Python's headers."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++").split()
    return bool(
        sys.platform != "win32"
        and compiler
        and shutil.which(compiler[0])
        and Path(sysconfig.get_paths()["include"], "Python.h").exists()
    )


def step_block(block: Block, rule: Rule, scratch: Scratch) -> None:
    """Update the weight, the correction and the moments of a block of CPU tensors in place.

    Blocks that no kernel takes (very short ones, ones whose length is no multiple of 32, rules that keep something) go
    through ``eager``; so does everything, after one warning, where compiling fails.
    """
    global _failed
    elements = block.weight.numel()
    fewest = _FEWEST_GROUPS if _choice == "auto" else 2
    if _failed or elements % GROUP_SIZE or elements < fewest * GROUP_SIZE or getattr(rule, "__closure__", None):
        eager.step_block(block, rule, scratch)
        return
    kind = _kind_of(block, rule)
    if kind not in _tried:
        try:
            # Here nothing is lost if compiling fails.
            _run(_empty_block_like(block), kind, scratch)
        except Exception as error:  # whatever the compiler raises
            _failed = True
            _warn(error)
            eager.step_block(block, rule, scratch)
            return
        _tried.add(kind)
    _run(block, kind, scratch)


def _warn(error: Exception) -> None:
    reason = (str(error).strip() or "no message").splitlines()[0]
    warnings.warn(
        "the CPU step could not be compiled and runs in eager mode: slower, with the same results "
        f"({type(error).__name__}: {reason}). flashoptim_dist.optim.cpu_backend('eager') silences this",
        RuntimeWarning,
        stacklevel=3,
    )


# ------------------------------------------------------------------------------------------- a block


@dataclasses.dataclass(frozen=True)
class _UpdateKind:
    """What an update kernel is compiled for. ``scalars``: the rule's, those given at run time replaced by a mark."""

    rule: Rule
    scalars: Any
    signed: tuple[bool, ...]
    compressed: bool
    gradient_dtype: torch.dtype
    scales_gradient: bool
    one_thread: bool


@dataclasses.dataclass(frozen=True)
class _StoreKind:
    """What a store kernel is compiled for. ``splits``: into bf16 and 8 bits; ``gives_noise``: for another split."""

    signed: tuple[bool, ...]
    stochastic: bool
    splits: bool
    gives_noise: bool
    one_thread: bool


_Kind = tuple[_UpdateKind, _StoreKind]
_tried: set[_Kind] = set()


def _kind_of(block: Block, rule: Rule) -> _Kind:
    signed, one_thread = tuple(moment.signed for moment in block.moments), torch.get_num_threads() == 1
    update = _UpdateKind(
        rule=rule,
        scalars=_template(block.scalars),
        signed=signed,
        compressed=block.compressed,
        gradient_dtype=torch.float32 if block.gradient.dtype == torch.float16 else block.gradient.dtype,
        scales_gradient=block.gradient_factor != 1.0,
        one_thread=one_thread,
    )
    splits = (
        block.correction is not None and block.correction.dtype == torch.int8 and block.weight.dtype == torch.bfloat16
    )
    store = _StoreKind(
        signed=signed if block.compressed else (),
        stochastic=eager.needs_noise(block),
        splits=splits,
        gives_noise=eager.corrects_stochastically(block) and not splits,
        one_thread=one_thread,
    )
    return update, store


_AT_RUN_TIME = "given at run time"


@functools.lru_cache(maxsize=64)
def _template(scalars: Any) -> Any:
    """Return scalars with a mark in place of each one that may differ in the next step."""
    given, lasting = eager.scalar_tensors(scalars), getattr(scalars, "lasting", ())
    marks = {
        field.name: getattr(scalars, field.name) if field.name in lasting else _AT_RUN_TIME
        for field in dataclasses.fields(given)
        if isinstance(getattr(given, field.name), Tensor)
    }
    return dataclasses.replace(given, **marks)


def _run(block: Block, kind: _Kind, scratch: Scratch) -> None:
    update, store = kind
    grouped = (-1, GROUP_SIZE)
    views = scratch.views(block.weight.numel(), len(block.moments))
    gradient = block.gradient
    if gradient.dtype == torch.float16:  # torch.compile does not like it beside bf16
        gradient = views.gradient.copy_(gradient)
    master = eager.load_master(block, views)
    values = [moment.values.view(grouped) for moment in block.moments]
    scales = [moment.scale.view(-1, 1) for moment in block.moments if moment.scale is not None]
    new = [value.view(grouped) for value in views.moments] if block.compressed else []
    largest = [value.view(-1, 1) for value in views.largest] if block.compressed else []
    given = eager.scalar_tensors(block.scalars)
    numbers = [
        getattr(given, field.name)
        for field in dataclasses.fields(given)
        if getattr(update.scalars, field.name) is _AT_RUN_TIME
    ]
    factor = torch.tensor(block.gradient_factor, dtype=torch.float64, device="cpu")
    _update_kernel(update)(master.view(grouped), gradient.view(grouped), factor, values, scales, new, largest, numbers)
    if not (store.signed or store.splits or store.gives_noise):
        eager.store_master(block, master, None, views)
        return
    noise, start = None, block.noise_start
    if store.stochastic and start is not None:
        if not isinstance(start, Tensor):
            start = (views.group_ramp + start).view(-1, 1)
        noise = (start, views.lanes, torch.tensor(rotation(block.step), dtype=torch.int32, device="cpu"))
    correction = block.correction.view(grouped) if store.splits and block.correction is not None else None
    bits = master.view(torch.int32).view(grouped) if store.splits else None
    words = views.words.view(grouped) if store.gives_noise else None
    _store_kernel(store)(noise, new, largest, values if store.signed else [], scales, bits, correction, words)
    if store.splits:
        block.weight.copy_(master)
    else:
        eager.store_master(block, master, views.words if store.gives_noise else None, views)


def _empty_block_like(block: Block) -> Block:
    """Return a block of 4 groups of zeros of the same kind."""
    elements = 4 * GROUP_SIZE

    def zeros(like: Tensor, count: int = elements) -> Tensor:
        return torch.zeros(count, dtype=like.dtype, device="cpu")

    return dataclasses.replace(
        block,
        weight=zeros(block.weight),
        gradient=zeros(block.gradient),
        correction=None if block.correction is None else zeros(block.correction),
        moments=tuple(
            MomentTensors(moment.signed, zeros(moment.values), None if moment.scale is None else zeros(moment.scale, 4))
            for moment in block.moments
        ),
        noise_start=None if block.noise_start is None else 0,
    )


# ------------------------------------------------------------------------------------------- kernels

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
def _update_kernel(kind: _UpdateKind) -> Callable[..., None]:
    """Return the kernel that updates ``master`` in place and gives the new moments.

    Compressed moments go to ``new``, a variance as its square root, and the largest finite magnitude of every group to
    ``largest``; others are updated in place.
    """
    rule, signed, compressed, scales_gradient = kind.rule, kind.signed, kind.compressed, kind.scales_gradient
    make_scalars = type(kind.scalars)
    fields = {field.name: getattr(kind.scalars, field.name) for field in dataclasses.fields(kind.scalars)}
    changing = [name for name, value in fields.items() if value is _AT_RUN_TIME]
    fixed = {name: value for name, value in fields.items() if value is not _AT_RUN_TIME}

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
def _store_kernel(kind: _StoreKind) -> Callable[..., None]:
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
