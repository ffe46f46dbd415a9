"""Clipping and finite checks of gradient release: unit by unit, without a pass over all gradients.

When a unit is stepped, the gradients of units that come later in the backward pass do not exist yet, and those of
earlier ones are gone. So the global norm is estimated; all else is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flashoptim_dist.clipping_reductions import own_groups_over, ranks_of, replicas_of
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.checks import check_gradient
from flashoptim_dist.optim.norms import NormPlan
from flashoptim_dist.optim.scaling import GradientInputs
from flashoptim_dist.optim.stepper import Subset
from flashoptim_dist.release_units import Unit
from flashoptim_dist.sharding import local_tensor

MEMORY = 0.9
"""Decay of the running mean squares of norms: they remember about ten updates."""

_EPSILON = 1e-6


class UnitClipping:
    """Coefficients for the gradients of one unit after the other, on the device; made alike on all ranks.

    A unit's squares are added up by one launch and one all-reduce of a few numbers, over all ranks of its mesh and on a
    process group of their own, in the stream of the steps. A sum that is not finite is the flag: the unit is skipped,
    and so is all that follows in the same update; the update counts as one skipped step.

    The rule of ``global_norm``: with n the norm of this unit's gradient, r the root of its running mean square over
    earlier updates (decay 0.9, bias-corrected), and R that of all units together (the root of the sum of the units'
    mean squares), the estimate of the global norm is

        N = max(R n / r, norm of the units so far in this update)

    and the coefficient min(1, max_norm / (N + 1e-6)). Where all units' norms grow or shrink together this is the global
    norm itself. For a unit that has no history (all of them, in the first update) N = n sqrt(number of units), so that
    the first update as a whole is clipped to max_norm at most. Updates that are skipped leave no trace in the means.

    Args:
        units: of all model parts.
        value: largest magnitude of an element.
        parameter_norm: largest norm of a parameter's gradient.
        global_norm: largest global norm.
        skip_nonfinite: check for NaN and Inf also where nothing is clipped.
        grad_scaler: gradients are divided by its scale, and it is told of what is not finite.

    All ranks must call: the process groups are made here.

    Raises:
        ValueError: a bound that is negative or NaN; two norms to clip by.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        value: float | None,
        parameter_norm: float | None,
        global_norm: float | None,
        skip_nonfinite: bool,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        bounds = {"clip_value": value, "clip_parameter_norm": parameter_norm, "clip_global_norm": global_norm}
        for name, bound in bounds.items():
            if bound is not None and not float(bound) >= 0.0:
                raise ValueError(f"{name} must be a number >= 0, got {bound}")
        if parameter_norm is not None and global_norm is not None:
            raise ValueError("clip_parameter_norm and clip_global_norm exclude each other: give one of them")
        self._units, self._value = list(units), value
        self._parameter_norm, self._global_norm = parameter_norm, global_norm
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._takes_norms = (
            skip_nonfinite or parameter_norm is not None or global_norm is not None or self._scaler is not None
        )
        self._number = {unit.name: number for number, unit in enumerate(self._units)}
        self._sums: dict[Subset, _Sums] = {}
        self._groups: dict[DeviceMesh, tuple[dist.ProcessGroup, ...]] = {}
        self._running: _RunningNorms | None = None
        self._loaded: dict[str, Any] = {}
        self._given: dict[FlashOptimizer, Tensor] = {}
        self.last_norm: Tensor | None = None
        if self._takes_norms:
            for unit in self._units:
                for parameter in unit.parameters:
                    if isinstance(parameter, DTensor):
                        self._groups_of(parameter.device_mesh)

    def is_scaled_by_another(self, optimizer: FlashOptimizer) -> bool:
        """Whether the ``step()`` that was called comes from a GradScaler, and not from the one that was given."""
        names = ("found_inf", "grad_scale")  # which GradScaler.step() sets for the time of the call
        if all(getattr(optimizer, name, None) is None for name in names):
            return False
        return self._scaler is None or id(optimizer) not in self._scaler._per_optimizer_states

    def inputs(self, unit: Unit, subsets: Sequence[tuple[FlashOptimizer, Subset]]) -> list[GradientInputs]:
        """Return what the step of each subset of a unit needs; clamp their gradients. All ranks must call.

        A coefficient that ``clip_grad_norm_`` gave an optimizer (of gradients that were accumulated) counts as well.

        Raises:
            RuntimeError: a sparse gradient, named.
        """
        scales = [self._scale_of(optimizer) for optimizer, _ in subsets]
        squares: list[Tensor] = []
        for (optimizer, subset), scale in zip(subsets, scales, strict=True):
            gradients = [local_tensor(parameter.grad) for parameter in subset.parameters if parameter.grad is not None]
            if any(gradient.layout != torch.strided for gradient in gradients):
                for parameter in subset.parameters:
                    assert parameter.grad is not None
                    check_gradient(parameter, parameter.grad, unit.names[parameter])
            if self._value is not None:
                _clamp(gradients, self._value, scale)
            if self._takes_norms:
                square = self._squares(subset, gradients, optimizer._fused)
                if scale is not None:
                    square = square / scale.to(square.device, non_blocking=True).double().square()
                squares.append(square)
        given = [optimizer.clip_coefficient for optimizer, _ in subsets]
        for (optimizer, _), coefficient in zip(subsets, given, strict=True):
            if coefficient is not None:
                self._given[optimizer] = coefficient
        if not self._takes_norms:
            return [GradientInputs(coefficient=coefficient) for coefficient in given]
        if self._running is None:
            self._running = _RunningNorms(len(self._units), squares[0].device)
            self._running.load(self._loaded, self._number)
        running = self._running
        estimate = running.arrived(self._number[unit.name], [square.sum() for square in squares])
        found = []
        for square, scale, earlier in zip(squares, scales, given, strict=True):
            if self._parameter_norm is not None:
                coefficient = _coefficient(self._parameter_norm, square.sqrt())
            elif self._global_norm is not None:
                coefficient = _coefficient(self._global_norm, estimate)
            else:
                coefficient = torch.ones_like(estimate)
            coefficient = torch.where(running.is_bad, math.nan, coefficient.to(estimate.device)).float()
            if earlier is not None:
                coefficient = coefficient * earlier.to(coefficient.device)
            found.append(GradientInputs(grad_scale=scale, coefficient=coefficient))
        return found

    def finish(self, optimizers: Sequence[FlashOptimizer]) -> None:
        """End an update, if one was begun: count it if it was skipped, and take its norms into the means."""
        given, self._given = self._given, {}
        running = self._running if self._running is not None and self._running.began else None
        for optimizer in optimizers:
            flags = [] if running is None else [running.is_bad]
            # What is left for step() itself takes the coefficient too, and is counted there.
            if optimizer in given and optimizer._has_no_gradient():
                flags.append(~(given[optimizer] >= 0.0))
            if flags:
                device = flags[0].device
                counter = optimizer._stepper.skip_counter(device)
                counter += torch.stack([flag.to(device) for flag in flags]).any().to(counter.dtype)
            if running is not None and self._scaler is not None:
                # What GradScaler.update() reads; its own check found no gradient to look at.
                state = self._scaler._per_optimizer_states[id(optimizer)]
                state["found_inf_per_device"] = {running.is_bad.device: running.is_bad.float()}
        if running is not None:
            self.last_norm = running.finish()

    def abandon(self) -> None:
        """Forget an update that was begun, as if it had not been; ``last_norm`` stays."""
        self._given = {}
        if self._running is not None:
            self._running.begin()

    def state_dict(self) -> dict[str, Any]:
        """Return mean squares and weights by unit, as numbers."""
        if self._running is None:
            return dict(self._loaded)
        return self._running.save(self._number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._loaded = dict(state_dict)
        if self._running is not None:
            self._running.load(self._loaded, self._number)

    def _scale_of(self, optimizer: FlashOptimizer) -> Tensor | None:
        """Return what an optimizer's gradients are multiplied by; None after ``scaler.unscale_`` of those left."""
        if self._scaler is None:
            return None
        state = self._scaler._per_optimizer_states.get(id(optimizer), {})
        return None if state.get("stage") is OptState.UNSCALED else self._scaler._get_scale_async()

    # ------------------------------------------------------------------ sums over a unit

    def _squares(self, subset: Subset, gradients: Sequence[Tensor], fused: bool | None) -> Tensor:
        """Return the sum of squares of each parameter's whole gradient: fp64 [parameters]."""
        count, device = len(gradients), gradients[0].device
        sums = self._sums.get(subset)
        if sums is None or not sums.plan.fits(gradients, range(count), count):
            if len(self._sums) > 8 * len(self._units):
                self._sums.clear()  # of sets of parameters that do not come any more, most likely
            plan = NormPlan(gradients, range(count), count, device, infinity=False, fused=fused)
            sums = self._sums[subset] = _Sums(plan, self._reductions(subset, device))
        squares = sums.plan.sums(gradients)
        for reduction in sums.reductions:
            part = squares if reduction.rows is None else squares[reduction.rows]
            if reduction.replicas is not None:
                part = part / reduction.replicas
            moved = part.to(reduction.device)
            for group in reduction.groups:
                dist.all_reduce(moved, group=group)
            if reduction.rows is None:
                squares = moved.to(device)
            else:
                squares[reduction.rows] = moved.to(device)
        return squares

    def _reductions(self, subset: Subset, device: torch.device) -> list[_Reduction]:
        """Return one reduction for each set of ranks that meshes of more than one rank have."""
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[tuple[int, DTensor]]] = {}
        for row, parameter in enumerate(subset.parameters):
            if isinstance(parameter, DTensor):
                by_groups.setdefault(self._groups_of(parameter.device_mesh), []).append((row, parameter))
        found = []
        for groups, members in by_groups.items():
            if groups:
                rows = [row for row, _ in members]
                replicas = torch.tensor([replicas_of(parameter) for _, parameter in members], dtype=torch.float64)
                some = torch.tensor(rows, device=device) if len(rows) < len(subset.parameters) else None
                weights = replicas.to(device) if bool((replicas > 1.0).any()) else None
                kind = members[0][1].device_mesh.device_type
                found.append(_Reduction(groups, some, weights, device if device.type == kind else torch.device(kind)))
        return found

    def _groups_of(self, mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups that reduce over all ranks of a mesh, one after the other; the same for meshes of the same
        ranks. Where they are made, all must call.
        """
        found = self._groups.get(mesh)
        if found is None:
            ranks = ranks_of(mesh)
            alike = [m for m in self._groups if m.device_type == mesh.device_type and ranks_of(m) == ranks]
            found = self._groups[alike[0]] if alike else tuple(own_groups_over(mesh, ranks))
            self._groups[mesh] = found
        return found


@dataclass(frozen=True)
class _Reduction:
    """A sum over the ranks of a mesh: over one group (or several, one after the other), of which rows (None: all),
    divided by how many replicas, on which device.
    """

    groups: tuple[dist.ProcessGroup, ...]
    rows: Tensor | None
    replicas: Tensor | None
    device: torch.device


@dataclass(frozen=True)
class _Sums:
    """How the squares of a subset are added up, on this rank and over ranks."""

    plan: NormPlan
    reductions: list[_Reduction]


def _clamp(gradients: list[Tensor], bound: float, scale: Tensor | None) -> None:
    """Clamp in place, to a bound that is meant for gradients divided by the scale."""
    if scale is None:
        torch._foreach_clamp_min_(gradients, -bound)
        torch._foreach_clamp_max_(gradients, bound)
        return
    for gradient in gradients:
        largest = bound * scale.to(gradient.device, non_blocking=True)
        gradient.clamp_(min=-largest, max=largest)


def _coefficient(max_norm: float, norm: Tensor) -> Tensor:
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


class _RunningNorms:
    """Mean squares of the units' norms over earlier updates, and the squares of the present one; all on the device.

    ``_means`` is fp64 [units, 2]: sum of squares with weights that decay by ``MEMORY`` an update, and the sum of the
    weights.
    """

    def __init__(self, units: int, device: torch.device) -> None:
        self._units = units
        self._means = torch.zeros(units, 2, dtype=torch.float64, device=device)
        self.begin()

    def begin(self) -> None:
        """Begin an update, whatever there is of the present one."""
        self._present = torch.full((self._units,), -1.0, dtype=torch.float64, device=self._means.device)
        self.is_bad = torch.zeros((), dtype=torch.bool, device=self._means.device)
        self.began = False

    def arrived(self, unit: int, squares: Sequence[Tensor]) -> Tensor:
        """Take the square of a unit's norm, in parts; return the estimate of the global norm."""
        self.began = True
        square = torch.stack([part.to(self._means.device) for part in squares]).sum()
        self.is_bad |= ~torch.isfinite(square)
        self._present[unit] = self._present[unit].clamp(min=0.0) + square
        mine = self._present[unit]
        so_far = self._present.clamp(min=0.0).sum()
        means = self._means[:, 0] / self._means[:, 1].clamp(min=1e-300)
        own = means[unit]
        by_share = means.sum() * mine / own
        known = torch.where(own > 0.0, torch.maximum(by_share, so_far), mine * self._units)
        return known.sqrt()

    def finish(self) -> Tensor:
        """Take this update's squares into the means, unless it was skipped; return its global norm, fp32."""
        norm = self._present.clamp(min=0.0).sum().sqrt().float()
        present = (self._present >= 0.0) & ~self.is_bad
        decayed = self._means * MEMORY
        fresh = torch.stack([self._present, torch.ones_like(self._present)], dim=1) * (1.0 - MEMORY)
        self._means = torch.where(present.unsqueeze(1), decayed + fresh, self._means)
        self.begin()
        return norm

    def save(self, numbers: dict[str, int]) -> dict[str, Any]:
        values = self._means.tolist()
        return {name: values[number] for name, number in numbers.items() if values[number][1] > 0.0}

    def load(self, saved: dict[str, Any], numbers: dict[str, int]) -> None:
        means = torch.zeros(self._means.shape, dtype=torch.float64)
        for name, value in saved.items():
            if name in numbers:
                if len(value) != 2 or not all(math.isfinite(number) and number >= 0.0 for number in value):
                    raise ValueError(
                        f"the running norm of unit {name!r} is {value}, and must be a mean square and its weight, "
                        "finite and not negative; leave it out of the state to begin anew"
                    )
                means[numbers[name]] = torch.tensor(value, dtype=torch.float64)
        self._means = means.to(self._means.device)
