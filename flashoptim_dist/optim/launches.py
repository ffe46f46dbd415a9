"""From a task to the kernel that steps it: compile-time options, launch sizes, and the scalars of the advance
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from flashoptim_dist.kernels import layout
from flashoptim_dist.kernels.adam import adam_kernel
from flashoptim_dist.kernels.advance import adam_advance_kernel, momentum_advance_kernel
from flashoptim_dist.kernels.device import INTERPRETED
from flashoptim_dist.kernels.launching import Launcher
from flashoptim_dist.kernels.momentum import momentum_kernel
from flashoptim_dist.optim.rules import AdamHyperparameters, Hyperparameters, LionHyperparameters, SgdHyperparameters
from flashoptim_dist.optim.scaling import GradientInputs

if TYPE_CHECKING:
    from flashoptim_dist.optim.backends import StepTask

SCALAR_COLUMNS: int = layout.SCALAR_COLUMNS.value
_ADVANCE_BLOCK = 128
_SMALL_BUCKET, _LARGE_BUCKET = 1 << 25, 1 << 27
_MANY_BYTES_PER_CYCLE = 16
"""Of a multiprocessor: 13 on an H100, 18 on an H200."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_STEP_LAUNCHERS = {"adam": Launcher(adam_kernel), "momentum": Launcher(momentum_kernel)}
_ADAM_ADVANCE, _MOMENTUM_ADVANCE = Launcher(adam_advance_kernel), Launcher(momentum_advance_kernel)

KernelOptions = tuple[tuple[str, Any], ...]
"""Compile-time arguments of a kernel as sorted (name, value) pairs, with ("KERNEL", its name)."""


@dataclass(frozen=True)
class Tuning:
    """Launch sizes. ``block``: elements per block; ``warps`` per program; ``blocks_per_task``: blocks a program steps;
    ``registers``: most per thread of a kernel for flat segments, None to leave it to the compiler.
    """

    block: int
    warps: int
    blocks_per_task: int
    registers: int | None = None


def compiled_options(hyper: Hyperparameters) -> tuple[Any, ...]:
    """Return what of a group's hyperparameters is compiled into its kernel; all else may change from step to step."""
    if isinstance(hyper, SgdHyperparameters):
        return type(hyper), hyper.l2 != 0.0, hyper.nesterov, hyper.momentum != 0.0
    return type(hyper), hyper.l2 != 0.0


def tuning(elements: int, options: KernelOptions, device: torch.device) -> Tuning:
    """Return the launch sizes for a bucket of so many elements; measured, see docs/performance.md."""
    if INTERPRETED:
        return Tuning(block=256, warps=1, blocks_per_task=4)
    values = dict(options)
    # With noise the compiler takes up to 96, at two thirds of the occupancy, where this many do without a spill.
    noisy = values["STOCHASTIC"] and values["QUANTIZED"] and values["KERNEL"] == "adam"
    registers = 64 if noisy and values["WEIGHT_DTYPE"] == tl.bfloat16 and values["BITS"] else None
    if elements < _SMALL_BUCKET:
        return Tuning(block=512, warps=2, blocks_per_task=1, registers=registers)
    if elements >= _LARGE_BUCKET and values["STOCHASTIC"] and _is_short_of_instructions(device):
        # Twice the elements per thread: half the work per group, at half the occupancy.
        return Tuning(block=512, warps=1, blocks_per_task=8)
    return Tuning(block=512, warps=2, blocks_per_task=4, registers=registers)


@lru_cache
def _is_short_of_instructions(device: torch.device) -> bool:
    """Return whether memory brings elements faster than the cores take them: on an H200, and not on an H100."""
    if device.type != "cuda":
        return False
    card = torch.cuda.get_device_properties(device)
    # Clocks in kHz; two transfers a clock. Torch knows them from 2.9 on.
    memory_bytes = 2 * getattr(card, "memory_clock_rate", 0) * getattr(card, "memory_bus_width", 0) / 8
    cycles = card.multi_processor_count * getattr(card, "clock_rate", 0)
    return memory_bytes > _MANY_BYTES_PER_CYCLE * cycles


def kernel_options(task: StepTask) -> KernelOptions:
    """Return the kernel and compile-time options that a task needs."""
    record, hyper = task.record, task.hyperparameters
    compressed = bool(record.moments) and record.moments[0].scale_name in record.entries
    # 16 bits of correction hold all there is of a weight; so does fp32.
    rounds_weight = record.correction_bits < 16 and task.weight.dtype != torch.float32
    stochastic = record.noise_key is not None and (compressed or rounds_weight)
    options: dict[str, Any] = {
        "WEIGHT_DTYPE": _DTYPES[task.weight.dtype],
        "GRADIENT_DTYPE": _DTYPES[task.gradient.dtype],
        "BITS": record.correction_bits,
        "QUANTIZED": compressed,
        "STOCHASTIC": stochastic,
        "HAS_L2": hyper.l2 != 0.0,
    }
    if isinstance(hyper, AdamHyperparameters):
        options["KERNEL"] = "adam"
    else:
        options["KERNEL"] = "momentum"
        options["HAS_MOMENTUM"] = bool(record.moments)
        options["LION"] = isinstance(hyper, LionHyperparameters)
        options["NESTEROV"] = isinstance(hyper, SgdHyperparameters) and hyper.nesterov
    return tuple(sorted(options.items()))


class KernelLaunch:
    """One launch of a plan: a kernel, its options and its tasks, over the plan's tables."""

    def __init__(
        self,
        options: KernelOptions,
        choice: Tuning,
        segments: Tensor,
        scalars: Tensor,
        tasks: Tensor,
        general: bool,
    ) -> None:
        values = dict(options)
        self._launcher = _STEP_LAUNCHERS[values.pop("KERNEL")]
        values.update(GENERAL=general, BLOCK=choice.block)
        names = [name for name in self._launcher.constants if name in values]
        self._constants = {name: values[name] for name in names}
        self._sizes = (choice.warps, None if general else choice.registers)
        self._grid = (tasks.shape[0],)
        self._arguments = (segments, scalars, tasks)
        self._key = (tasks.device, *self._sizes, *((name, str(value)) for name, value in self._constants.items()))
        self._prepared: Callable[[], None] | None = None

    def run(self) -> None:
        """Launch."""
        if self._prepared is not None:
            self._prepared()
            return
        self._launcher(self._key, self._grid, self._arguments, self._constants, *self._sizes)
        self._prepared = self._launcher.prepared(self._key, self._grid, self._arguments, self._constants)


def advance(
    hyper: Hyperparameters,
    steps: Tensor,
    scalars: Tensor,
    skipped: Tensor,
    first: int,
    last: int,
    counts_skips: bool,
    inputs: GradientInputs,
) -> None:
    """Launch the advance kernel of one group.

    Args:
        hyper: of the group.
        steps: step table of the plan.
        scalars: scalar table of the plan.
        skipped: int32 counter on the device.
        first: first of the group's rows of the tables.
        last: one past its last.
        counts_skips: whether this group's launch counts a skipped step (one of an optimizer's does).
        inputs: of this step, on the device; a coefficient for each parameter is in the order of the rows.
    """
    lr_is_tensor = isinstance(hyper.lr, Tensor) and hyper.lr.device == scalars.device
    found_inf, grad_scale, coefficient = inputs.found_inf, inputs.grad_scale, inputs.coefficient
    lr_tensor = hyper.lr if isinstance(hyper.lr, Tensor) and lr_is_tensor else None
    lr = 0.0 if lr_is_tensor else float(hyper.lr)
    grid = (-(-(last - first) // _ADVANCE_BLOCK),)
    constants: dict[str, Any] = {
        "HAS_FOUND_INF": found_inf is not None,
        "HAS_GRAD_SCALE": grad_scale is not None,
        "HAS_COEFFICIENT": coefficient is not None,
        "LR_IS_TENSOR": lr_is_tensor,
    }
    # None is no argument of the compiled kernel: each pointer costs the host 2 us a launch.
    pointers = (found_inf, grad_scale, coefficient, lr_tensor)
    common = (steps, scalars, skipped, *pointers, lr, float(hyper.decay_rate), float(hyper.l2))
    per_parameter = int(coefficient is not None and coefficient.numel() > 1)
    tail = (-1.0 if hyper.maximize else 1.0, first, last, int(counts_skips), per_parameter)
    if isinstance(hyper, AdamHyperparameters):
        launcher, values = _ADAM_ADVANCE, _adam_values(hyper)
        constants["HAS_L2"] = hyper.l2 != 0.0
    else:
        launcher, values = _MOMENTUM_ADVANCE, _momentum_values(hyper)
    constants["BLOCK"] = _ADVANCE_BLOCK
    key = (scalars.device, *constants.values(), *(None if tensor is None else tensor.dtype for tensor in pointers))
    launcher(key, grid, (*common, *values, *tail), constants, 4)


@lru_cache(maxsize=256)
def _adam_constants(beta1: float, beta2: float) -> tuple[float, ...]:
    return (
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2),
        *_two_floats(math.log(beta1) if beta1 else -1e30),
        *_two_floats(math.log(beta2) if beta2 else -1e30),
    )


def _adam_values(hyper: AdamHyperparameters) -> tuple[float, ...]:
    return (*_adam_constants(hyper.beta1, hyper.beta2), hyper.eps)


def _momentum_values(hyper: Hyperparameters) -> tuple[float, ...]:
    if isinstance(hyper, LionHyperparameters):
        return (hyper.beta2, 1.0 - hyper.beta2, 1.0 - hyper.beta2, hyper.beta1, 1.0 - hyper.beta1)
    if isinstance(hyper, SgdHyperparameters):
        return (hyper.momentum, 1.0 - hyper.dampening, 1.0, hyper.momentum, 1.0)
    raise TypeError(f"no kernel for {type(hyper).__name__}")


def _two_floats(value: float) -> tuple[float, float]:
    """Return a double as the sum of two fp32 numbers: Triton passes floats as fp32."""
    high = float(np.float32(value))
    return high, value - high
