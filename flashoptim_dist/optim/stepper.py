"""Choosing and keeping the Triton plans of one optimizer; see ``fused`` for what a plan is."""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashoptim_dist.optim.backends import StepTask, step_with_torch
from flashoptim_dist.optim.scaling import GradientInputs
from flashoptim_dist.sharding import local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.base import FlashOptimizer
    from flashoptim_dist.optim.fused import Plan
    from flashoptim_dist.optim.offload import Staging

_FEW_TASKS = 32
_FIRST_WAVE = 200_000_000
"""Elements that keep an H100 busy for 0.8 ms."""
_ELEMENTS_PER_MICROSECOND = 240_000
_LOOK_MICROSECONDS, _LAUNCH_MICROSECONDS = 0.6, 50.0
"""Host time to look at one parameter, and to launch a plan's kernels."""

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
    """Cut tasks into a first plan of the largest tensors and a second of all others; a small model is one plan.

    Looking at 300 parameters takes the host 0.2 ms, in which the device would idle; the few tensors of the first plan
    are looked at in no time and keep the device busy meanwhile. So it takes half of a model, up to a size that is
    enough in any case, and of small models as much more as that takes.
    """
    if len(tasks) < _FEW_TASKS:
        return [list(tasks)]
    sizes = [task.record.layout.numel for task in tasks]
    by_size = sorted(range(len(tasks)), key=lambda row: -sizes[row])
    enough = min(_FIRST_WAVE, sum(sizes) // 2)
    first: set[int] = set()
    elements = 0
    for row in by_size:
        meanwhile = _LOOK_MICROSECONDS * (len(tasks) - len(first)) + _LAUNCH_MICROSECONDS
        if elements >= max(enough, meanwhile * _ELEMENTS_PER_MICROSECOND):
            break
        first.add(row)
        elements += sizes[row]
    waves = [[task for row, task in enumerate(tasks) if (row in first) is wanted] for wanted in (True, False)]
    return [wave for wave in waves if wave]


class Subset:
    """Some of an optimizer's parameters that are stepped together, apart from the others: those of a layer.

    Args:
        parameters: in the optimizer's order.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters: tuple[Tensor, ...] = tuple(parameters)
        self._members = frozenset(self.parameters)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._members


class _Plans:
    """The plans of one optimizer, or of a subset of its parameters, for those that had a gradient in the last step."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.groups: list[list[int]] = []
        self.idle: list[Tensor] = []
        self.kept = False
        self.partial = False
        self.state: Any = None
        self.changes = 0
        self.members: list[list[Tensor]] = []
        self.places: list[tuple[int, int, Tensor]] = []

    def keep_members(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Remember which parameters the groups hold, and at which places the first plan's are."""
        self.members = [list(group["params"]) for group in param_groups]
        first = set(self.plans[0].parameters) if self.plans else set()
        self.places = [
            (index, row, parameter)
            for index, members in enumerate(self.members)
            for row, parameter in enumerate(members)
            if parameter in first
        ]

    def hold(self, param_groups: Sequence[dict[str, Any]], whole: bool) -> bool:
        """Return whether no other parameter has a gradient and, for a whole step, the groups hold the very parameters
        that they held; users edit the lists in place.
        """
        if any(parameter.grad is not None for parameter in self.idle):
            return False
        members = self.members
        return not whole or (
            len(members) == len(param_groups)
            and all(
                len(old) == len(group["params"]) and all(map(operator.is_, old, group["params"]))
                for old, group in zip(members, param_groups, strict=True)
            )
        )

    def hold_first(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether the groups hold the parameters of the first plan where they were."""
        lists = [group["params"] for group in param_groups]
        try:
            return all(lists[index][row] is parameter for index, row, parameter in self.places)
        except IndexError:
            return False


class FusedStepper:
    """The plans of one optimizer, and those of subsets of its parameters that are stepped apart."""

    def __init__(self, optimizer: FlashOptimizer) -> None:
        self._optimizer = optimizer
        self._of: dict[Subset | None, _Plans] = {}
        self._skipped: dict[torch.device, Tensor] = {}
        self._staging: dict[torch.device, Staging] = {}
        self._counted: set[torch.device] = set()  # where this step's skip is counted already

    @property
    def plans(self) -> list[Plan]:
        """The plans of whole steps."""
        return self._of[None].plans if None in self._of else []

    @property
    def skipped_steps(self) -> int:
        """Steps that the devices skipped. Reading it synchronizes."""
        return max((int(counter) for counter in self._skipped.values()), default=0)

    def skip_counter(self, device: torch.device) -> Tensor:
        """Return the int32 counter of skipped steps on a device; whoever skips a step on purpose may add to it."""
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.int32, device=device)
        return self._skipped[device]

    def forget(self) -> None:
        """Drop all plans: parameters, state or options changed."""
        self.settle()
        self._of, self._staging = {}, {}

    def forget_plans_of(self, subset: Subset | None) -> None:
        """Drop the plans of a subset (None: of whole steps)."""
        self.settle()
        self._of.pop(subset, None)

    def settle(self) -> None:
        """Bring records, and states in host memory, up to date with the last steps, before something reads them."""
        for staging in self._staging.values():
            staging.synchronize()
        for plans in self._of.values():
            for plan in plans.plans:
                plan.settle()

    def step_as_before(self, inputs: GradientInputs, subset: Subset | None = None) -> set[Tensor] | None:
        """Step by the plans of the last step, as far as they hold.

        Returns:
            The parameters that were stepped; None where those are all that have a gradient.
        """
        optimizer, plans = self._optimizer, self._of.get(subset)
        self._counted = set()
        if (
            plans is None
            or not plans.kept
            or optimizer.state is not plans.state
            or plans.changes != plans.state.changes
        ):
            return set()
        hyper = [optimizer._hyperparameters(index) for index in range(len(optimizer.param_groups))]
        stepped: list[Plan] = []
        for number, (plan, groups) in enumerate(zip(plans.plans, plans.groups, strict=True)):
            # Looking at all parameters takes time, so it waits for the first of several plans to be launched.
            if number == 0 and len(plans.plans) > 1:
                held = subset is not None or plans.hold_first(optimizer.param_groups)
            elif number <= 1:
                held = plans.hold(optimizer.param_groups, whole=subset is None)
            if not held:
                break
            chosen = [hyper[index] for index in groups]
            if plan.is_current(chosen):
                # At once: the device works on the first plan while the host looks at the parameters of the next.
                self._run(plan, chosen, inputs)
                stepped.append(plan)
                if plan.counts_skips:
                    self._counted.add(plan.device)
        if len(stepped) == len(plans.plans):
            return None
        self.forget_plans_of(subset)
        return {parameter for plan in stepped for parameter in plan.parameters}

    def step(
        self, device: torch.device, tasks: Sequence[StepTask], inputs: GradientInputs, subset: Subset | None = None
    ) -> None:
        """Plan and step the tasks of a device. Those of a subset take one plan, in their order, and count no skip."""
        from flashoptim_dist.kernels.tables import GeometryError

        if self._optimizer._options["offload_states"]:
            self._make_staging(device)
        kept = self._of.setdefault(subset, _Plans())
        # In a step that a plan of the last one has begun, that one has counted, and the next step plans anew.
        kept.partial |= device in self._counted
        counting = subset is None and device not in self._counted | {plan.device for plan in kept.plans}
        counter = self.skip_counter(device)
        try:
            plans = self._new_plans(device, tasks, counter, counting, whole=subset is None)
        except GeometryError:
            if self._optimizer._options["offload_states"]:
                raise
            # Strides beyond what the kernels describe (five dimensions, none adjacent): the definition takes them.
            if step_with_torch(tasks, inputs) and counting:
                counter += 1
            kept.partial = True
            return
        for plan in plans:
            kept.plans.append(plan)
            kept.groups.append(plan.groups)
            self._run(plan, plan.hyperparameters, inputs)

    def _new_plans(
        self, device: torch.device, tasks: Sequence[StepTask], counter: Tensor, counting: bool, whole: bool
    ) -> Sequence[Plan]:
        from flashoptim_dist.optim.fused import Plan

        if not self._optimizer._options["offload_states"]:
            waves = _waves(tasks) if whole else [list(tasks)]
            return [Plan(wave, counter, counting and number == 0) for number, wave in enumerate(waves)]
        from flashoptim_dist.optim.offload import StagedPlan

        staging = self._staging[device]
        chunks = staging.chunks(tasks)
        return [StagedPlan(chunk, counter, counting and n == 0, staging) for n, chunk in enumerate(chunks)]

    def _make_staging(self, device: torch.device) -> None:
        from flashoptim_dist.optim.offload import Staging

        if device not in self._staging:
            parameters = [p for p, _, _, _ in self._optimizer._named() if local_tensor(p).device == device]
            records = [self._optimizer._record(parameter) for parameter in parameters]
            self._staging[device] = Staging(records, device)

    def keep(self, subset: Subset | None = None) -> None:
        """Let the next step go by these plans: all parameters with a gradient are in them."""
        plans = self._of.get(subset)
        if plans is None:
            return
        planned = {parameter for plan in plans.plans for parameter in plan.parameters}
        # Frozen ones too: they may be unfrozen.
        everything = subset.parameters if subset is not None else [p for p, _, _, _ in self._optimizer._named()]
        plans.idle = [parameter for parameter in everything if parameter not in planned]
        plans.state, plans.changes = self._optimizer.state, self._optimizer.state.changes
        plans.keep_members(self._optimizer.param_groups)
        plans.kept = bool(plans.plans) and not plans.partial

    def _run(self, plan: Plan, hyperparameters: Sequence[Any], inputs: GradientInputs) -> None:
        inputs = inputs.to(plan.device)
        if plan.device.type == "cuda" and plan.device.index != torch.cuda.current_device():
            # Triton launches on the current device, wherever the tensors are.
            with torch.cuda.device(plan.device):
                plan.run(hyperparameters, inputs)
        else:
            plan.run(hyperparameters, inputs)
        plan.note_weights()
