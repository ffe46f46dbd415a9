"""The step of a block on CPU through a compiled kernel: the definition's bits, in one pass over memory.

The kernels are in ``native``; Numba compiles one per kind of block (dtypes, rule, rounding), in some seconds, and keeps
them on disk. A block's groups are shared out among as many threads as torch has.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

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

Kernel = Callable[..., None]

Choice = Literal["auto", "compiled", "eager"]

WORTHWHILE_ELEMENTS = 1_000_000
"""In "auto", elements in one step() from which kernels are compiled; see docs/performance.md."""

WORTHWHILE_IN_ALL = 100_000_000
"""In "auto", elements over all steps of this process from which they are: by then the eager step took as long."""

_FEWEST_GROUPS_PER_THREAD = 1024
_SHARES_PER_THREAD = 16
_MOST_STARTS = 1 << 17

_choice: Choice = "auto"
_failed = False
_stepped = 0


def cpu_backend(choice: Choice | None = None) -> Choice:
    """Set, if given, and return how this process steps CPU tensors. Results are the same bits in every case.

    Args:
        choice: "compiled": by kernels that Numba compiles, which takes seconds once per kind of parameter and machine.
            "eager": by torch operations, four to eight times slower. "auto", the default: compiled from a million
            elements in one step on, or a hundred million in all steps, where Numba is installed; eager else.

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
    global _stepped
    _stepped += elements
    if _failed or _choice == "eager":
        return False
    worthwhile = elements >= WORTHWHILE_ELEMENTS or _stepped >= WORTHWHILE_IN_ALL
    return _choice == "compiled" or (worthwhile and has_compiler())


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
    correction = None if task.correction is None else task.correction.dtype
    nesterov = rule is sgd_update and task.scalars.nesterov
    rounds = task.noise_key is not None and eager.drops_bits(task)
    try:
        return _kernel(
            rule,
            bool(task.moments),
            task.weight.dtype,
            correction,
            task.gradient.dtype,
            task.compressed,
            rounds,
            nesterov,
        )
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


# ------------------------------------------------------------------------------------------- kernels and numbers


_RULES: tuple[Rule, ...] = (adam_update, lion_update, sgd_update)


@functools.cache
def _kernel(
    rule: Rule,
    has_moments: bool,
    weight: torch.dtype,
    correction: torch.dtype | None,
    gradient: torch.dtype,
    compressed: bool,
    stochastic: bool,
    nesterov: bool,
) -> Kernel:
    from flashoptim_dist.optim import native

    dtypes = {torch.float32: native.FP32, torch.bfloat16: native.BF16, torch.float16: native.FP16}
    if rule is sgd_update:
        number = native.SGD if has_moments else native.PLAIN_SGD
    else:
        number = native.ADAM if rule is adam_update else native.LION
    bits = 0 if correction is None else correction.itemsize * 8
    kind = native.Kind(number, dtypes[weight], bits, dtypes[gradient], compressed, stochastic, nesterov)
    return native.step_kernel(kind)


def _numbers(scalars: Any, factor: float) -> np.ndarray[Any, Any]:
    return _numbers_of(scalars, factor, math.copysign(1.0, factor))  # 0.0 and -0.0 are one key


@functools.lru_cache(maxsize=256)
def _numbers_of(scalars: Any, factor: float, sign: float) -> np.ndarray[Any, Any]:
    """Return a rule's numbers in the order that the kernels know: factor on the gradient, decay, L2, whether there is
    any L2, and the rule's own.
    """
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
    l2 = getattr(scalars, "l2", 0.0)
    with np.errstate(over="ignore", under="ignore"):
        return np.array((factor, scalars.decay, l2, l2 != 0.0, *own)).astype(np.float32)


# ------------------------------------------------------------------------------------------- shares


class Shares:
    """Groups of parameters that wait to be stepped, all at once, by as many threads as torch has."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Kernel, int, int, tuple[Any, ...]]] = []
        self._kept: list[Tensor] = []

    def add(self, task: ParameterStep, kernel: Kernel) -> None:
        """Add a parameter that lies, and stays, in memory row after row (``blocks.is_flat``, ``is_addressable``)."""
        # What autograd has saved of them no longer holds, as after any operation in place.
        torch.autograd.graph.increment_version([tensor for tensor in task.stored if not tensor.is_inference()])
        layout = task.layout
        length = layout.length if task.compressed else layout.numel
        groups_per_row = -(-length // GROUP_SIZE)
        groups = layout.numel // length * groups_per_row
        common = (length, groups_per_row, *self._addresses(task))
        numbers, added = _numbers(task.scalars, task.gradient_factor), rotation(task.step)
        if task.noise_key is None or layout.index_base is not None:
            start = flat_noise_start(task, 0, slice(0, groups))
            self._pieces.append((kernel, 0, groups, (*common, 0, 0, start or 0, added, numbers)))
            return
        # Elements are not consecutive in the global tensor: every group's hash input takes memory, for some at a time.
        for first in range(0, groups, _MOST_STARTS):
            last = min(first + _MOST_STARTS, groups)
            starts = flat_noise_start(task, 0, slice(first, last))
            assert isinstance(starts, Tensor)
            self._kept.append(starts)
            self._pieces.append((kernel, first, last, (*common, starts.data_ptr(), first, 0, added, numbers)))
            self.run()

    def add_block(self, block: Block, kernel: Kernel) -> None:
        """Add a block of whole groups."""
        starts, address, start = block.noise_start, 0, 0
        if isinstance(starts, Tensor):
            self._kept.append(starts)
            address = starts.data_ptr()
        elif starts is not None:
            start = starts
        numbers, added = _numbers(block.scalars, block.gradient_factor), rotation(block.step)
        arguments = (GROUP_SIZE, 1, *self._addresses(block), address, 0, start, added, numbers)
        self._pieces.append((kernel, 0, block.weight.numel() // GROUP_SIZE, arguments))

    @staticmethod
    def _addresses(step: ParameterStep | Block) -> list[int]:
        correction = 0 if step.correction is None else step.correction.data_ptr()
        found = [step.weight.data_ptr(), correction, step.gradient.data_ptr()]
        for moment in step.moments:
            found += [moment.values.data_ptr(), 0 if moment.scale is None else moment.scale.data_ptr()]
        return found + [0] * (7 - len(found))

    def run(self) -> None:
        """Step all that was added, in this thread and others."""
        pieces, self._pieces = self._pieces, []
        groups = sum(last - first for _, first, last, _ in pieces)
        threads = max(1, min(torch.get_num_threads(), groups // _FEWEST_GROUPS_PER_THREAD))
        # More shares than threads: one that lost its core to another program holds up little.
        size = max(_FEWEST_GROUPS_PER_THREAD, groups // (threads * _SHARES_PER_THREAD)) if threads > 1 else groups
        shares = iter(
            [
                (kernel, start, min(start + size, last), arguments)
                for kernel, first, last, arguments in pieces
                for start in range(first, last, size)
            ]
        )

        def work() -> None:
            for kernel, first, last, arguments in shares:  # taking the next is atomic
                kernel(first, last, *arguments)

        others: list[concurrent.futures.Future[None]] = []
        try:
            # At the end of the interpreter, or of what the system allows, there are no threads: this one does it all.
            with contextlib.suppress(RuntimeError):
                for _ in range(threads - 1):
                    others.append(_pool(torch.get_num_threads() - 1, os.getpid()).submit(work))
            work()
        finally:
            _end(others, shares)
        for other in others:
            other.result()
        self._kept.clear()


def _end(others: list[concurrent.futures.Future[None]], shares: Iterator[Any]) -> None:
    """Wait until no other thread writes any more; after an exception, such as the user's interrupt, without new shares.

    No further interrupt ends the wait: what is written may be freed after it.
    """
    interrupted: BaseException | None = None
    for _ in shares:
        pass
    while True:
        try:
            concurrent.futures.wait(others)
            break
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> concurrent.futures.ThreadPoolExecutor:
    """Return this process's threads: after a fork there are none of the old ones."""
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="flashoptim-step")
