"""The step of a block on CPU through torch.compile, where that pays: the definition's bits at the speed of memory.

The compiled part decodes, updates and encodes; weights are merged and split by ``eager``, because torch.compile moves a
number from float to integer registers one by one. It compiles once per kind of block (dtypes, rule, rounding) for every
length, and no number that changes between steps compiles again. Its C++ is built without contraction to fused
multiply-adds and without unsafe mathematics, which would change bits.
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
from flashoptim_dist.formats.rounding import (
    momentum_noise,
    rotation,
    round_momentum,
    round_variance,
    scramble,
    variance_noise,
    weight_noise,
)
from flashoptim_dist.formats.spec import MOMENTUM_LEVELS, VARIANCE_FLOOR, VARIANCE_LEVELS
from flashoptim_dist.optim import eager
from flashoptim_dist.optim.blocks import Block
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
    elements = block.weight.numel()
    fewest = _FEWEST_GROUPS if _choice == "auto" else 2
    if _failed or elements % GROUP_SIZE or elements < fewest * GROUP_SIZE or getattr(rule, "__closure__", None):
        eager.step_block(block, rule, scratch)
        return
    views = scratch.views(elements, len(block.moments))
    master = eager.load_master(block, views)
    if block.gradient.dtype == torch.float16:  # torch.compile does not like it beside bf16 scales
        block = dataclasses.replace(block, gradient=views.gradient.copy_(block.gradient))
    kind = _kind_of(block, rule)
    arguments = _arguments(block, master, views)
    try:
        _kernel(kind)(*arguments)
    except Exception as error:  # whatever the compiler raises
        _give_up(error)
        eager.step_block(block, rule, scratch)
        return
    eager.store_master(block, master, views.words if kind.gives_noise else None, views)


def _give_up(error: Exception) -> None:
    global _failed
    _failed = True
    reason = (str(error).strip() or "no message").splitlines()[0]
    warnings.warn(
        "the CPU step could not be compiled and runs in eager mode: slower, with the same results "
        f"({type(error).__name__}: {reason}). flashoptim_dist.optim.cpu_backend('eager') silences this",
        RuntimeWarning,
        stacklevel=2,
    )


# ------------------------------------------------------------------------------------------- kernels


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a kernel is compiled for. ``scalars``: the rule's, floats that may change replaced by NaN."""

    rule: Rule
    scalars: Any
    signed: tuple[bool, ...]
    compressed: bool
    gradient_dtype: torch.dtype
    scales_gradient: bool
    stochastic: bool
    gives_noise: bool
    one_thread: bool


def _kind_of(block: Block, rule: Rule) -> _Kind:
    return _Kind(
        rule=rule,
        scalars=_template(block.scalars),
        signed=tuple(moment.signed for moment in block.moments),
        compressed=block.compressed,
        gradient_dtype=block.gradient.dtype,
        scales_gradient=block.gradient_factor != 1.0,
        stochastic=eager.needs_noise(block),
        gives_noise=eager.corrects_stochastically(block),
        one_thread=torch.get_num_threads() == 1,
    )


_MARK = "given at run time"


@functools.lru_cache(maxsize=64)
def _template(scalars: Any) -> Any:
    given = eager.scalar_tensors(scalars)
    fields = dataclasses.fields(given)
    return dataclasses.replace(
        given, **{field.name: _MARK for field in fields if isinstance(getattr(given, field.name), Tensor)}
    )


def _arguments(block: Block, master: Tensor, views: Any) -> list[Any]:
    groups = (-1, GROUP_SIZE)
    given = eager.scalar_tensors(block.scalars)
    values = [getattr(given, field.name) for field in dataclasses.fields(given)]
    noise = None
    if eager.needs_noise(block):
        start = block.noise_start
        if isinstance(start, int):
            start = (views.ramp[::GROUP_SIZE] + start).view(-1, 1)
        noise = (start, views.lanes, torch.tensor(rotation(block.step), dtype=torch.int32), views.words.view(groups))
    return [
        master.view(groups),
        block.gradient.view(groups),
        torch.tensor(block.gradient_factor, dtype=torch.float64),
        noise,
        [moment.values.view(groups) for moment in block.moments],
        [None if moment.scale is None else moment.scale.view(-1, 1) for moment in block.moments],
        [value for value in values if isinstance(value, Tensor)],
    ]


_names = itertools.count()


@functools.cache
def _kernel(kind: _Kind) -> Callable[..., None]:
    rule, signed, compressed, gives_noise = kind.rule, kind.signed, kind.compressed, kind.gives_noise
    scales_gradient, make_scalars = kind.scales_gradient, type(kind.scalars)
    fields = {field.name: getattr(kind.scalars, field.name) for field in dataclasses.fields(kind.scalars)}
    changing = [name for name, value in fields.items() if value is _MARK]
    fixed = {name: value for name, value in fields.items() if value is not _MARK}

    def step(
        master: Tensor,
        gradient: Tensor,
        factor: Tensor,
        noise: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        values: list[Tensor],
        scales: list[Tensor | None],
        numbers: list[Tensor],
    ) -> None:
        scalars = make_scalars(**fixed, **dict(zip(changing, numbers)))
        gradient = gradient.to(torch.float32)
        if scales_gradient:
            gradient = gradient * factor
        before = [
            value if scale is None else (decode_momentum if is_signed else decode_variance)(value, scale.squeeze(1))
            for value, scale, is_signed in zip(values, scales, signed)
        ]
        weight, after = rule(master, gradient, tuple(before), scalars)
        if compressed and len(after) == 2:
            # What contain_overflow does, in a form that the compiler vectorizes.
            after = (torch.where(after[1].abs() <= _LARGEST_FLOAT, after[0], 0.0), after[1])
        words = None
        if noise is not None:
            start, lanes, added, given = noise
            words = scramble(start + lanes, added)
            if gives_noise:
                given.copy_(weight_noise(words))
        master.copy_(weight)
        for value, scale, is_signed, new in zip(values, scales, signed, after):
            if scale is None:
                value.copy_(new)
                continue
            codes, new_scale = (_encode_momentum if is_signed else _encode_variance)(new, words)
            value.copy_(codes)
            scale.copy_(new_scale)

    # torch.compile keeps what it compiled by code object, at most some of them for each.
    step.__code__ = step.__code__.replace(co_name=f"step_{next(_names)}")
    options: dict[str, Any] = {
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.dynamic_threads": not kind.one_thread,
    }
    compiled = torch.compile(step, fullgraph=True, options=options)
    marked = False

    def call(*arguments: Any) -> None:
        nonlocal marked
        if not marked:
            _mark_lengths(arguments)
        compiled(*arguments)
        marked = True

    return call


def _mark_lengths(arguments: tuple[Any, ...]) -> None:
    master, gradient, _, noise, values, scales, _ = arguments
    of_length = [master, gradient, *values, *(scale for scale in scales if scale is not None)]
    if noise is not None:
        of_length += [noise[0], noise[3]]
    for tensor in of_length:
        torch._dynamo.mark_dynamic(tensor, 0)


# ------------------------------------------------------------------------------------------- encoding
# The functions of formats.moments without going to and fro between floats and integers per element.


def _group_scale(size: Tensor, largest: int) -> Tensor:
    """Return the scale of groups [..., 32] as fp32 [..., 1]."""
    greatest = torch.where(size <= _LARGEST_FLOAT, size, 0.0).amax(dim=-1, keepdim=True)
    pattern = ((greatest.view(torch.int32) + 0xFFFF) & -0x10000).clamp(max=largest << 16)
    return pattern.view(torch.float32)


def _encode_momentum(momentum: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    size = momentum.abs()
    scale = _group_scale(size, LARGEST_MOMENTUM_SCALE)
    code = torch.sqrt(size / torch.where(scale > 0, scale, 1.0)) * MOMENTUM_LEVELS
    code = torch.copysign(code, momentum).clamp(-MOMENTUM_LEVELS, MOMENTUM_LEVELS)
    code = torch.where(code == code, code, 0.0)
    code = round_momentum(code, None if words is None else momentum_noise(words))
    return code.clamp(-MOMENTUM_LEVELS, MOMENTUM_LEVELS).to(torch.int8), scale.to(torch.bfloat16)


def _encode_variance(variance: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    root = torch.sqrt(variance)
    scale = _group_scale(root, LARGEST_VARIANCE_SCALE)
    code = torch.sqrt(root / torch.where(scale > 0, scale, 1.0)) * VARIANCE_LEVELS
    code = torch.where(code == code, code, float(VARIANCE_LEVELS)).clamp(max=VARIANCE_LEVELS)
    code = torch.where(variance == 0, 0.0, code.clamp(min=VARIANCE_FLOOR))
    code = round_variance(code, None if words is None else variance_noise(words))
    return code.to(torch.uint8), scale.to(torch.bfloat16)
