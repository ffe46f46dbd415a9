"""Choosing and keeping the Triton plans of one optimizer; see ``fused`` for what a plan is."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashoptim_dist.optim.backends import StepTask, step_with_torch

if TYPE_CHECKING:
    from flashoptim_dist.optim.base import FlashOptimizer
    from flashoptim_dist.optim.fused import Plan

_FEW_TASKS = 32
_FIRST_WAVE = 100_000_000
"""Elements that keep an H100 busy for 0.4 ms."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def takes_kernels(device: torch.device, fused: bool | None) -> bool:
    """Return whether tasks of a device go to the Triton kernels; ``fused`` is the optimizer's argument.

    CPU tensors do so only under Triton's interpreter (TRITON_INTERPRET=1) and with fused=True, for tests.

    Raises:
        RuntimeError: fused=True on a CUDA device without Triton.
    """
    if fused is False:
        return False
    if device.type == "cpu":
        return bool(fused) and _HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda":
        return False
    if not _HAS_TRITON:
        if fused:
            raise RuntimeError("fused=True needs Triton, which is not installed: pip install 'triton>=3.6'")
        return False
    return True


def _waves(tasks: Sequence[StepTask]) -> list[list[StepTask]]:
    """Cut tasks into a small first plan of the largest tensors and a second of all others.

    Looking at 300 parameters takes the host 0.2 ms, in which the device would idle; the few tensors of the first plan
    are looked at in no time and keep the device busy meanwhile.
    """
    total = sum(task.record.layout.numel for task in tasks)
    if len(tasks) < _FEW_TASKS:
        return [list(tasks)]
    by_size = sorted(range(len(tasks)), key=lambda row: -tasks[row].record.layout.numel)
    first: set[int] = set()
    elements = 0
    while elements < min(_FIRST_WAVE, total // 2):
        row = by_size[len(first)]
        first.add(row)
        elements += tasks[row].record.layout.numel
    waves = [[task for row, task in enumerate(tasks) if (row in first) is wanted] for wanted in (True, False)]
    return [wave for wave in waves if wave]


class FusedStepper:
    """The plans of one optimizer, one per device, for the parameters that had a gradient in the last step."""

    def __init__(self, optimizer: FlashOptimizer) -> None:
        self._optimizer = optimizer
        self._plans: list[Plan] = []
        self._groups: list[list[int]] = []
        self._idle: list[Tensor] = []
        self._kept = False
        self._state: Any = None
        self._states = 0
        self._partial = False
        self._skipped: dict[torch.device, Tensor] = {}

    @property
    def skipped_steps(self) -> int:
        """Steps that the devices skipped. Reading it synchronizes."""
        return max((int(counter) for counter in self._skipped.values()), default=0)

    def forget(self) -> None:
        """Drop the plans: parameters, state or options changed."""
        self.settle()
        self._plans, self._groups, self._idle = [], [], []
        self._kept = self._partial = False

    def settle(self) -> None:
        """Bring the records up to date with the last steps, before something reads them."""
        for plan in self._plans:
            plan.settle()

    def step_as_before(self) -> set[Tensor] | None:
        """Step by the plans of the last step, as far as they hold.

        Returns:
            The parameters that were stepped; None where those are all that have a gradient.
        """
        optimizer = self._optimizer
        if (
            not self._kept
            or optimizer.state is not self._state
            or len(self._state) != self._states
            or any(parameter.grad is not None for parameter in self._idle)
        ):
            return set()
        hyper = [optimizer._hyperparameters(index) for index in range(len(optimizer.param_groups))]
        stepped: list[Plan] = []
        for plan, groups in zip(self._plans, self._groups, strict=True):
            chosen = [hyper[index] for index in groups]
            if plan.is_current(chosen):
                # At once: the device works on the first plan while the host looks at the parameters of the next.
                self._run(plan, chosen)
                stepped.append(plan)
        if len(stepped) == len(self._plans):
            return None
        self.forget()
        return {parameter for plan in stepped for parameter in plan.parameters}

    def step(self, device: torch.device, tasks: Sequence[StepTask]) -> None:
        """Plan and step the tasks of a device."""
        from flashoptim_dist.kernels.tables import GeometryError
        from flashoptim_dist.optim.fused import Plan

        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int32, device=device)
        counting = not any(plan.device == device for plan in self._plans)
        try:
            plans = [Plan(wave, self._skipped[device], counting and n == 0) for n, wave in enumerate(_waves(tasks))]
        except GeometryError:
            # Strides beyond what the kernels describe (five dimensions, none adjacent): the definition takes them.
            factor, skip = self._optimizer._amp_factor()
            if not skip:
                step_with_torch(tasks, factor)
            self._partial = True
            return
        for plan in plans:
            self._plans.append(plan)
            self._groups.append(plan.groups)
            self._run(plan, plan.hyperparameters)

    def keep(self) -> None:
        """Let the next step go by these plans: all parameters with a gradient are in them."""
        planned = {parameter for plan in self._plans for parameter in plan.parameters}
        # Frozen ones too: they may be unfrozen.
        self._idle = [parameter for parameter, _, _, _ in self._optimizer._named() if parameter not in planned]
        self._state, self._states = self._optimizer.state, len(self._optimizer.state)
        self._kept = bool(self._plans) and not self._partial

    def _run(self, plan: Plan, hyperparameters: Sequence[Any]) -> None:
        from flashoptim_dist.optim.launches import AdvanceInputs

        optimizer = self._optimizer

        def on_device(name: str) -> Tensor | None:
            value = getattr(optimizer, name, None)
            return value.to(plan.device, non_blocking=True) if isinstance(value, Tensor) else None

        inputs = AdvanceInputs(on_device("found_inf"), on_device("grad_scale"), on_device("clip_coefficient"))
        if plan.device.type == "cuda" and plan.device.index != torch.cuda.current_device():
            # Triton launches on the current device, wherever the tensors are.
            with torch.cuda.device(plan.device):
                plan.run(hyperparameters, inputs)
        else:
            plan.run(hyperparameters, inputs)
        plan.note_weights()
