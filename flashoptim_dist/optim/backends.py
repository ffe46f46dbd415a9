"""Tasks, one per parameter and step, and the backend in pure torch; the Triton backend is in ``fused``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashoptim_dist.optim import reference
from flashoptim_dist.optim.rules import Hyperparameters, Rule
from flashoptim_dist.optim.scaling import GradientInputs, gradient_factors, read_together
from flashoptim_dist.optim.state import ERROR_BITS, STEP
from flashoptim_dist.optim.update_check import counting
from flashoptim_dist.optim.watch import check_state
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


def step_with_torch(tasks: Sequence[StepTask], inputs: GradientInputs) -> bool:
    """Step in pure torch, on any device, to the bits of the definition.

    Synchronizes once with the device: step counts, learning rates and what is known of the gradients are read together.

    Args:
        tasks: the parameters, all on one device.
        inputs: factors on their gradients; NaN leaves a parameter alone.

    Returns:
        Whether any was left alone.

    Raises:
        RuntimeError: state that does not fit its parameter, named. Nothing was stepped.
    """
    for task in tasks:
        check_state(task, contiguous=False)
    counts, hyperparameters_of, factors = _read(tasks, inputs)
    stepped = [row for row, factor in enumerate(factors) if not math.isnan(factor)]
    steps: list[tuple[reference.ParameterStep, Rule]] = []
    for row in stepped:
        task, step = tasks[row], counts[row] + 1
        state, record, hyperparameters = task.state, task.record, hyperparameters_of[row]
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
        if task.counter is not None and hyperparameters.lr != 0.0:
            rule = counting(rule, task.counter, task.weight.dtype, record.correction_bits, record.noise_key is not None)
        task_step = reference.ParameterStep(
            layout=record.layout,
            weight=task.weight,
            gradient=task.gradient,
            correction=None if error_bits is None else local_tensor(error_bits),
            moments=moments,
            scalars=hyperparameters.scalars(step, fresh=task.fresh_moments or step == 1),
            gradient_factor=-factors[row] if hyperparameters.maximize else factors[row],
            noise_key=record.noise_key,
            step=step,
        )
        steps.append((task_step, rule))
    if stepped:
        torch._foreach_add_([tasks[row].state[STEP] for row in stepped], 1)
    reference.step_parameters(steps)
    return len(steps) < len(tasks)


def _read(tasks: Sequence[StepTask], inputs: GradientInputs) -> tuple[list[int], list[Hyperparameters], list[float]]:
    """Return, per task, the steps so far, the hyperparameters with a float learning rate, and the gradient's factor."""
    groups = {task.group: task.hyperparameters for task in tasks}
    rates = {group: hyper.lr for group, hyper in groups.items() if isinstance(hyper.lr, Tensor)}
    step_counts = torch.stack([task.state[STEP] for task in tasks])
    counts, found_inf, grad_scale, coefficient, *numbers = read_together(
        [step_counts, inputs.found_inf, inputs.grad_scale, inputs.coefficient, *rates.values()]
    )
    for group, (rate,) in zip(rates, numbers, strict=True):
        groups[group] = replace(groups[group], lr=rate)
    factors = gradient_factors(found_inf, grad_scale, coefficient, len(tasks))
    return [int(count) for count in counts], [groups[task.group] for task in tasks], factors
