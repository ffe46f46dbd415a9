"""From a task to the kernel that steps it: compile-time options, launch sizes, and the scalars of the advance
kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from flashoptim_dist.kernels import layout
from flashoptim_dist.kernels.adam import adam_kernel
from flashoptim_dist.kernels.advance import adam_advance_kernel, momentum_advance_kernel
from flashoptim_dist.kernels.device import INTERPRETED
from flashoptim_dist.kernels.momentum import momentum_kernel
from flashoptim_dist.optim.rules import AdamHyperparameters, Hyperparameters, LionHyperparameters, SgdHyperparameters

if TYPE_CHECKING:
    from flashoptim_dist.optim.backends import StepTask

SCALAR_COLUMNS: int = layout.SCALAR_COLUMNS.value
_ADVANCE_BLOCK = 128
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

KernelOptions = tuple[tuple[str, Any], ...]
"""Compile-time arguments of a kernel as sorted (name, value) pairs, with ("KERNEL", its name)."""


@dataclass(frozen=True)
class Tuning:
    """Launch sizes. ``block``: elements per block; ``warps`` per program; ``blocks_per_task``: blocks a program
    steps.
    """

    block: int
    warps: int
    blocks_per_task: int


@dataclass(frozen=True)
class AdvanceInputs:
    """Device scalars of this step: each a one-element tensor or None; see ``kernels.advance.skip_and_factor``."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    coefficient: Tensor | None = None


def compiled_options(hyper: Hyperparameters) -> tuple[Any, ...]:
    """Return what of a group's hyperparameters is compiled into its kernel; all else may change from step to step."""
    return type(hyper), hyper.l2 != 0.0, isinstance(hyper, SgdHyperparameters) and hyper.nesterov


def tuning(options: KernelOptions) -> Tuning:
    """Return the launch sizes of a kernel; measured choices, see docs/performance.md."""
    if INTERPRETED:
        return Tuning(block=256, warps=1, blocks_per_task=4)
    return Tuning(block=256, warps=1, blocks_per_task=8)


def kernel_options(task: StepTask) -> KernelOptions:
    """Return the kernel and compile-time options that a task needs."""
    record, hyper = task.record, task.hyperparameters
    compressed = bool(record.moments) and record.moments[0].scale_name in record.entries
    stochastic = record.noise_key is not None and (compressed or record.correction_bits == 8)
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
    """One launch of a plan: a kernel, its options and its tasks."""

    def __init__(self, options: KernelOptions, tasks: Tensor, general: bool) -> None:
        self.tasks = tasks
        self.constants = dict(options)
        self.kernel = {"adam": adam_kernel, "momentum": momentum_kernel}[self.constants.pop("KERNEL")]
        choice = tuning(options)
        self.constants.update(GENERAL=general, BLOCK=choice.block)
        self.warps = choice.warps
        self.grid = (tasks.shape[0],)

    def run(self, segments: Tensor, scalars: Tensor) -> None:
        """Launch. Contraction to fused multiply-adds is off, so that flat and general kernels give the same bits."""
        self.kernel[self.grid](
            segments, scalars, self.tasks, **self.constants, num_warps=self.warps, enable_fp_fusion=False
        )


def advance(
    hyper: Hyperparameters,
    steps: Tensor,
    scalars: Tensor,
    skipped: Tensor,
    first: int,
    last: int,
    counts_skips: bool,
    inputs: AdvanceInputs,
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
        inputs: device scalars of this step.
    """
    lr_is_tensor = isinstance(hyper.lr, Tensor) and hyper.lr.device == scalars.device
    none = scalars
    found_inf, grad_scale, coefficient = inputs.found_inf, inputs.grad_scale, inputs.coefficient
    lr_tensor: Any = hyper.lr if lr_is_tensor else none
    lr = 0.0 if lr_is_tensor else float(hyper.lr)
    grid = (-(-(last - first) // _ADVANCE_BLOCK),)
    flags = {
        "HAS_FOUND_INF": found_inf is not None,
        "HAS_GRAD_SCALE": grad_scale is not None,
        "HAS_COEFFICIENT": coefficient is not None,
        "LR_IS_TENSOR": lr_is_tensor,
        "BLOCK": _ADVANCE_BLOCK,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
    common = (
        steps,
        scalars,
        skipped,
        none if found_inf is None else found_inf,
        none if grad_scale is None else grad_scale,
        none if coefficient is None else coefficient,
        lr_tensor,
        lr,
        float(hyper.decay_rate),
        float(hyper.l2),
    )
    factor = -1.0 if hyper.maximize else 1.0
    tail = (factor, first, last, int(counts_skips))
    if isinstance(hyper, AdamHyperparameters):
        beta1, beta2 = hyper.beta1, hyper.beta2
        adam_advance_kernel[grid](
            *common,
            beta1,
            1.0 - beta1,
            math.sqrt(beta2),
            beta2,
            1.0 - beta2,
            math.sqrt(1.0 - beta2),
            *_two_floats(math.log(beta1) if beta1 else -1e30),
            *_two_floats(math.log(beta2) if beta2 else -1e30),
            hyper.eps,
            *tail,
            HAS_L2=hyper.l2 != 0.0,
            **flags,
        )
        return
    if isinstance(hyper, LionHyperparameters):
        values = (hyper.beta2, 1.0 - hyper.beta2, 1.0 - hyper.beta2, hyper.beta1, 1.0 - hyper.beta1)
    elif isinstance(hyper, SgdHyperparameters):
        values = (hyper.momentum, 1.0 - hyper.dampening, 1.0, hyper.momentum, 1.0)
    else:
        raise TypeError(f"no kernel for {type(hyper).__name__}")
    momentum_advance_kernel[grid](*common, *values, *tail, **flags)


def _two_floats(value: float) -> tuple[float, float]:
    """Return a double as the sum of two fp32 numbers: Triton passes floats as fp32."""
    high = float(np.float32(value))
    return high, value - high
