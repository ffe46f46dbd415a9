"""The step of a block on CPU through a compiled kernel: the definition's bits, in one pass over memory.

The kernels are in ``native``; Numba compiles one per kind of block (dtypes, rule, rounding), in some seconds, and keeps
them on disk. A block's groups are shared out among as many threads as torch has.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from flashoptim_dist.formats import GROUP_SIZE
from flashoptim_dist.formats.rounding import rotation
from flashoptim_dist.optim import eager
from flashoptim_dist.optim.blocks import Block, ParameterStep, flat_noise_start
from flashoptim_dist.optim.rules import (
    AdamScalars,
    LionScalars,
    Rule,
    SgdScalars,
    adam_update,
    lion_update,
    sgd_update,
)

if TYPE_CHECKING:
    from flashoptim_dist.optim.native import Kind

Kernel = Callable[..., None]

Choice = Literal["auto", "compiled", "eager"]

WORTHWHILE_ELEMENTS = 1_000_000
"""In "auto", elements in one step() from which kernels are compiled; see docs/performance.md."""

_FEWEST_GROUPS_PER_THREAD = 1024
_SHARES_PER_THREAD = 4
_MOST_STARTS = 1 << 17

_choice: Choice = "auto"
_failed = False


def cpu_backend(choice: Choice | None = None) -> Choice:
    """Set, if given, and return how this process steps CPU tensors. Results are the same bits in every case.

    Args:
        choice: "compiled": by kernels that Numba compiles, which takes seconds once per kind of parameter and machine.
            "eager": by torch operations, three to seven times slower. "auto", the default: compiled from a million
            elements per step on, where Numba is installed; eager else.

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
    """Return whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def kernel_for(task: ParameterStep, rule: Rule) -> Kernel | None:
    """Return the kernel that steps a parameter on CPU, compiled; None if there is none: for rules that keep something,
    and for all, after one warning, where compiling fails.
    """
    global _failed
    if _failed or rule not in _RULES:
        return None
    try:
        return _kernel_of(_kind_of(task, rule))
    except Exception as error:  # whatever the compiler raises
        _failed = True
        _warn(error)
        return None


def _warn(error: Exception) -> None:
    reason = (str(error).strip() or "no message").splitlines()[0]
    warnings.warn(
        "the CPU step could not be compiled and runs in eager mode: slower, with the same results "
        f"({type(error).__name__}: {reason}). flashoptim_dist.optim.cpu_backend('eager') silences this",
        RuntimeWarning,
        stacklevel=4,
    )


# ------------------------------------------------------------------------------------------- kinds and numbers


_RULES: tuple[Rule, ...] = (adam_update, lion_update, sgd_update)
_NONE = np.empty(0, np.int8)


def _kind_of(task: ParameterStep, rule: Rule) -> Kind:
    from flashoptim_dist.optim import native

    dtypes = {torch.float32: native.FP32, torch.bfloat16: native.BF16, torch.float16: native.FP16}
    if rule is sgd_update:
        number = native.SGD if task.moments else native.PLAIN_SGD
    else:
        number = native.ADAM if rule is adam_update else native.LION
    rounds_weight = eager.drops_bits(task.weight, task.correction)
    return native.Kind(
        rule=number,
        weight=dtypes[task.weight.dtype],
        bits=0 if task.correction is None else task.correction.dtype.itemsize * 8,
        gradient=dtypes[task.gradient.dtype],
        compressed=task.compressed,
        stochastic=task.noise_key is not None and (task.compressed or rounds_weight),
        nesterov=rule is sgd_update and task.scalars.nesterov,
    )


def _row_length(task: ParameterStep) -> int:
    """Return the elements of a row that groups do not cross."""
    return task.layout.length if task.compressed else task.layout.numel


@functools.cache
def _kernel_of(kind: Kind) -> Kernel:
    from flashoptim_dist.optim import native

    kernel = native.step_kernel(kind)
    none, pattern = np.int8, np.int16
    number = (np.float32, pattern, pattern)
    momentum, variance = (np.int8, np.uint8) if kind.compressed else (np.float32, np.float32)
    scale = pattern if kind.compressed else none
    has_momentum, has_variance = kind.rule != native.PLAIN_SGD, kind.rule == native.ADAM
    dtypes = (
        number[kind.weight],
        pattern if kind.bits == 16 else np.int8,
        number[kind.gradient],
        *((momentum, scale) if has_momentum else (none, none)),
        *((variance, scale) if has_variance else (none, none)),
        np.int32,
    )
    # A call without work compiles: nothing is lost if that fails.
    numbers = np.zeros(10, np.float32)
    kernel(0, 0, 1, 1, *(np.empty(0, dtype) for dtype in dtypes), 0, np.int32(0), numbers)
    return kernel


@functools.lru_cache(maxsize=256)
def _numbers(scalars: Any, factor: float) -> np.ndarray[Any, Any]:
    """Return a rule's numbers in the order that the kernels know: factor on the gradient, decay, L2, and its own."""
    own: tuple[float, ...]
    if isinstance(scalars, AdamScalars):
        beta1, beta2 = scalars.beta1, scalars.beta2
        own = (scalars.step_size, beta1, 1.0 - beta1, beta2, 1.0 - beta2, scalars.correction2, scalars.eps)
    elif isinstance(scalars, LionScalars):
        beta1, beta2 = scalars.beta1, scalars.beta2
        own = (scalars.lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2)
    else:
        assert isinstance(scalars, SgdScalars)
        own = (scalars.lr, scalars.momentum, scalars.gain)
    return np.array((factor, scalars.decay, getattr(scalars, "l2", 0.0), *own), np.float32)


# ------------------------------------------------------------------------------------------- arrays and threads


def _array(tensor: Tensor | None) -> np.ndarray[Any, Any]:
    """Return a tensor's memory; numbers of 16 bits as int16."""
    if tensor is None:
        return _NONE
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.view(torch.int16)
    return tensor.resolve_neg().view(-1).numpy()


def step_parameter(task: ParameterStep, kernel: Kernel) -> None:
    """Update a parameter that lies in memory row after row (``blocks.is_flat``)."""
    arrays = _arrays(task)
    length = _row_length(task)
    groups_per_row = -(-length // GROUP_SIZE)
    groups = task.layout.numel // length * groups_per_row
    numbers = _numbers(task.scalars, task.gradient_factor)
    # Where elements are not consecutive in the global tensor, every group's hash input takes memory.
    size = groups if task.noise_key is None or task.layout.index_base is not None else _MOST_STARTS
    for first in range(0, groups, size):
        last = min(first + size, groups)
        start = flat_noise_start(task, 0, slice(first, last))
        _share_out(kernel, first, last, length, groups_per_row, *arrays, *_noise(start, first, task.step), numbers)


def step_block(block: Block, kernel: Kernel) -> None:
    """Update a block of whole groups."""
    groups = block.weight.numel() // GROUP_SIZE
    numbers = _numbers(block.scalars, block.gradient_factor)
    noise = _noise(block.noise_start, 0, block.step)
    _share_out(kernel, 0, groups, GROUP_SIZE, 1, *_arrays(block), *noise, numbers)


def _arrays(step: ParameterStep | Block) -> list[np.ndarray[Any, Any]]:
    of_moments = [array for moment in step.moments for array in (_array(moment.values), _array(moment.scale))]
    arrays = [_array(step.weight), _array(step.correction), _array(step.gradient), *of_moments]
    return arrays + [_NONE] * (7 - len(arrays))


def _noise(start: int | Tensor | None, first: int, step: int) -> tuple[np.ndarray[Any, Any], int, np.int32]:
    if isinstance(start, Tensor):
        return _array(start), first, np.int32(rotation(step))
    return np.array([start or 0], np.int32), -1, np.int32(rotation(step))


def _share_out(kernel: Kernel, first: int, last: int, *arguments: Any) -> None:
    """Call a kernel for the groups from ``first`` to ``last``, some at a time, in this thread and others: more shares
    than threads, so that a thread that lost its core to another program holds up little.
    """
    threads = min(torch.get_num_threads(), (last - first) // _FEWEST_GROUPS_PER_THREAD)
    if threads <= 1:
        kernel(first, last, *arguments)
        return
    size = max(_FEWEST_GROUPS_PER_THREAD, -(-(last - first) // (threads * _SHARES_PER_THREAD)))
    shares = iter(range(first, last, size))  # taking the next is atomic

    def work() -> None:
        for start in shares:
            kernel(start, min(start + size, last), *arguments)

    pool = _pool(torch.get_num_threads() - 1, os.getpid())
    others = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for other in others:
            other.result()


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> concurrent.futures.ThreadPoolExecutor:
    """Return this process's threads: after a fork there are none of the old ones."""
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="flashoptim-step")
