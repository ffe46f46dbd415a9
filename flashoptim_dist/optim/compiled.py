"""The step of a block on CPU through torch.compile, where that pays: the definition's bits at the speed of memory.

The kernel is in ``inductor``. It is compiled once per kind of block (dtypes, rule, rounding) for every length, and
no number that changes between steps compiles them again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flashoptim_dist.formats import GROUP_SIZE
from flashoptim_dist.formats.rounding import rotation
from flashoptim_dist.optim import eager
from flashoptim_dist.optim.blocks import Block, MomentTensors
from flashoptim_dist.optim.inductor import AT_RUN_TIME, UpdateKind, update_kernel
from flashoptim_dist.optim.rules import Rule
from flashoptim_dist.optim.scratch import Scratch

Choice = Literal["auto", "compiled", "eager"]

WORTHWHILE_ELEMENTS = 20_000_000
"""In "auto", elements in one step() from which kernels are compiled; see docs/performance.md."""

_FEWEST_GROUPS = 512

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


_tried: set[UpdateKind] = set()


def _kind_of(block: Block, rule: Rule) -> UpdateKind:
    splits = (
        block.correction is not None and block.correction.dtype == torch.int8 and block.weight.dtype == torch.bfloat16
    )
    return UpdateKind(
        rule=rule,
        scalars=_template(block.scalars),
        signed=tuple(moment.signed for moment in block.moments),
        compressed=block.compressed,
        gradient_dtype=torch.float32 if block.gradient.dtype == torch.float16 else block.gradient.dtype,
        scales_gradient=block.gradient_factor != 1.0,
        stochastic=eager.needs_noise(block),
        splits=splits,
        gives_noise=eager.rounds_weights_stochastically(block) and not splits,
        one_thread=torch.get_num_threads() == 1,
    )


@functools.lru_cache(maxsize=64)
def _template(scalars: Any) -> Any:
    """Return scalars with a mark in place of each one that may differ in the next step."""
    given, lasting = eager.scalar_tensors(scalars), getattr(scalars, "lasting", ())
    marks = {
        field.name: getattr(scalars, field.name) if field.name in lasting else AT_RUN_TIME
        for field in dataclasses.fields(given)
        if isinstance(getattr(given, field.name), Tensor)
    }
    return dataclasses.replace(given, **marks)


def _run(block: Block, kind: UpdateKind, scratch: Scratch) -> None:
    grouped = (-1, GROUP_SIZE)
    views = scratch.views(block.weight.numel(), len(block.moments))
    gradient = block.gradient
    if gradient.dtype == torch.float16:  # torch.compile does not like it beside bf16
        gradient = views.gradient.copy_(gradient)
    weight = block.weight if kind.splits else eager.load_master(block, views)
    correction = block.correction.view(grouped) if kind.splits and block.correction is not None else None
    given = eager.scalar_tensors(block.scalars)
    numbers = [
        getattr(given, field.name)
        for field in dataclasses.fields(given)
        if getattr(kind.scalars, field.name) is AT_RUN_TIME
    ]
    noise, start = None, block.noise_start
    if kind.stochastic and start is not None:
        if not isinstance(start, Tensor):
            start = (views.group_ramp + start).view(-1, 1)
        noise = (start, views.lanes)
    update_kernel(kind)(
        weight.view(grouped),
        correction,
        gradient.view(grouped),
        torch.tensor(block.gradient_factor, dtype=torch.float64, device="cpu"),
        [moment.values.view(grouped) for moment in block.moments],
        [moment.scale.view(-1, 1) for moment in block.moments if moment.scale is not None],
        noise,
        torch.tensor(rotation(block.step), dtype=torch.int32, device="cpu"),
        views.words.view(grouped) if kind.gives_noise else None,
        numbers,
    )
    if not kind.splits:
        eager.store_master(block, weight, views.words if kind.gives_noise else None, views)


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
