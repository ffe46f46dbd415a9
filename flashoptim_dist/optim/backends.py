"""Tasks, one per parameter and step, and the backend in pure torch; the Triton backend is in ``fused``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashoptim_dist.optim import reference
from flashoptim_dist.optim.rules import Hyperparameters, Rule
from flashoptim_dist.optim.state import ERROR_BITS, STEP
from flashoptim_dist.optim.update_check import counting
from flashoptim_dist.sharding import local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.records import ParameterRecord


@dataclass
class StepTask:
    """One parameter's step on this rank. ``weight`` and ``gradient`` are local tensors; ``state`` is the live state.

    ``fresh_moments``: the moments were made for this very step, so they hold nothing yet, whatever the step count.
    ``counter``: where updates too small to change the weight are counted (int64 [2]), or None.
    """

    parameter: Tensor
    record: ParameterRecord
    weight: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: int
    hyperparameters: Hyperparameters
    fresh_moments: bool
    counter: Tensor | None


def step_with_torch(tasks: Sequence[StepTask], factors: Sequence[float]) -> bool:
    """Step in pure torch, on any device, to the bits of the definition.

    Args:
        tasks: the parameters.
        factors: factor on the gradient of each; NaN leaves its parameter alone.

    Returns:
        Whether any was left alone.
    """
    steps: list[tuple[reference.ParameterStep, Rule]] = []
    for task, gradient_factor in zip(tasks, factors, strict=True):
        if math.isnan(gradient_factor):
            continue
        state, record, hyperparameters = task.state, task.record, task.hyperparameters
        state[STEP].add_(1)
        step = int(state[STEP])
        error_bits = state.get(ERROR_BITS) if ERROR_BITS in record.entries else None
        moments = tuple(
            reference.MomentTensors(
                signed=moment.signed,
                values=local_tensor(state[moment.name]),
                scale=local_tensor(state[moment.scale_name]) if moment.scale_name in record.entries else None,
            )
            for moment in record.moments
        )
        rule = hyperparameters.rule
        if task.counter is not None and float(hyperparameters.lr) != 0.0:
            rule = counting(rule, task.counter, task.weight.dtype, record.correction_bits, record.noise_key is not None)
        task_step = reference.ParameterStep(
            layout=record.layout,
            weight=task.weight,
            gradient=task.gradient,
            correction=None if error_bits is None else local_tensor(error_bits),
            moments=moments,
            scalars=hyperparameters.scalars(step, fresh=task.fresh_moments or step == 1),
            gradient_factor=-gradient_factor if hyperparameters.maximize else gradient_factor,
            noise_key=record.noise_key,
            step=step,
        )
        steps.append((task_step, rule))
    reference.step_parameters(steps)
    return len(steps) < len(tasks)
