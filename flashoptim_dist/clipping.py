"""Clip gradients by their global norm without passing over them a second time.

One launch adds up the squares of all local gradients; one reduction per device mesh makes the norm; the coefficient
stays on the device, and the next ``step()`` multiplies by it as it reads the gradients.
"""

from __future__ import annotations

import math
import operator
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from flashoptim_dist.clipping_reductions import MeshSums, reduce_over
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.norms import NormPlan
from flashoptim_dist.sharding import local_tensor

ParametersOrOptimizer = Tensor | Iterable[Tensor] | torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

_EPSILON = 1e-6
"""Added to the norm in the coefficient, as in torch."""


@torch.no_grad()
def clip_grad_norm_(
    parameters_or_optimizer: ParametersOrOptimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Clip the gradients so that their global norm is at most ``max_norm``; return the norm before.

    With an optimizer of ours the gradients are only read: its next ``step()`` multiplies them by the coefficient, or
    is skipped on all ranks if the norm is not finite, and ``optimizer.skipped_steps`` counts it. ``.grad`` keeps what
    it holds. Without (parameters, or another optimizer) the gradients are multiplied in place, as torch does.

    All ranks must call, in the same order. Parameters may be plain tensors and DTensors of any meshes and placements
    (FSDP, HSDP, tensor and expert parallel): one all-reduce over the ranks of each mesh, whatever its dimensions, of
    meshes of the same ranks together; replicas count once. A plain tensor counts as it is on this rank, without
    communication; it must be the same on all of them. Nothing waits for the device, except with
    ``error_if_nonfinite``, and in the first call for a mesh of several dimensions over a part of all ranks: its ranks
    make a group then. Where torch lets no part of the ranks do that by themselves (``init_process_group(device_id=)``,
    or ranks that have made different numbers of groups) there is an all-reduce per dimension instead; flatten such a
    mesh beforehand, as all ranks can, to have one.

    Args:
        parameters_or_optimizer: one or more parameters, or one or more optimizers, whose parameters share the norm.
        max_norm: largest norm; inf clips nothing, and still skips a step that is not finite.
        norm_type: 2 or inf (or "inf").
        error_if_nonfinite: raise if the norm is NaN or Inf; all ranks do. An optimizer of ours that takes a step all
            the same then skips it. Synchronizes with the device.
        foreach: accepted, without effect; it stands here for torch's order of arguments.
        pp_group: ranks that hold the other stages of a pipeline, as a group or a mesh of one dimension.

    Returns:
        The norm, fp32, 0-dim, a plain tensor on the gradients' device; the same on all ranks. The coefficient is
        min(1, max_norm / (norm + 1e-6)), as in ``torch.nn.utils.clip_grad_norm_``. A second call before the step sees
        gradients that the first has clipped.

    Raises:
        TypeError: something else than parameters or optimizers.
        ValueError: another norm_type, or a negative or NaN max_norm.
        RuntimeError: a sparse or complex gradient, or gradients that gradient release has applied already; optimizers
            that were clipped apart from each other in the same step; with ``error_if_nonfinite`` a norm that is not
            finite.
    """
    if float(norm_type) not in (2.0, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, got {norm_type}; other norms: torch.nn.utils.clip_grad_norm_")
    if not float(max_norm) >= 0.0:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm}")
    optimizers, parameters = _resolve(parameters_or_optimizer)
    ours = [optimizer for optimizer in optimizers if isinstance(optimizer, FlashOptimizer)]
    lazy = bool(optimizers) and len(ours) == len(optimizers)
    norm = _global_norm(parameters, ours, math.isinf(float(norm_type)), pp_group)
    earlier = ours[0].clip_coefficient if lazy else None
    if any(optimizer.clip_coefficient is not earlier for optimizer in ours if lazy):
        raise RuntimeError(
            "these optimizers were clipped apart from each other before, in this step: clip them together, in one call,"
            " or drop what was clipped with zero_grad()"
        )
    if earlier is not None:
        norm = norm * earlier.to(norm.device)
    coefficient = (norm + _EPSILON).reciprocal_().mul_(float(max_norm)).clamp_(max=1.0)
    if lazy:
        if earlier is not None:
            coefficient = coefficient * earlier.to(norm.device)
        # A norm is not negative, and NaN is not less than anything: isfinite in one operation instead of four.
        coefficient = torch.where(norm < math.inf, coefficient, math.nan).float()
        for optimizer in ours:
            optimizer.clip_coefficient = coefficient
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        instead = "the step is skipped and counted in optimizer.skipped_steps" if lazy else "it makes the gradients NaN"
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {float(norm)}; with error_if_nonfinite=False {instead}"
        )
    if not lazy:
        _multiply(parameters, coefficient.float())
    return norm.float()


def _resolve(given: ParametersOrOptimizer) -> tuple[list[torch.optim.Optimizer], list[Tensor]]:
    """Return the optimizers given, if any, and all parameters."""
    if isinstance(given, Tensor | torch.optim.Optimizer):
        items: list[Tensor | torch.optim.Optimizer] = [given]
    elif isinstance(given, Iterable):
        items = list(given)
    else:  # a module, most likely
        raise TypeError(f"give parameters, or optimizers, not {type(given).__name__}")
    if not items and isinstance(given, Iterator):
        warnings.warn(
            "clip_grad_norm_ got an iterator that gives no parameters, and clips nothing; one that was used before is "
            "empty: call model.parameters() each time, or give the optimizer",
            stacklevel=3,
        )
    optimizers = [item for item in items if isinstance(item, torch.optim.Optimizer)]
    parameters = [item for item in items if isinstance(item, Tensor)]
    if len(optimizers) + len(parameters) < len(items) or (optimizers and parameters):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise TypeError(f"give parameters, or optimizers, not {kinds}")
    for optimizer in optimizers:
        parameters += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A tensor's own hash goes through Python, and costs the host ten times as much.
    return optimizers, list({id(parameter): parameter for parameter in parameters}.values())


# ---------------------------------------------------------------------- the norm


class _Known:
    """What the last norm of some parameters was taken from, so that the next one need not look at each again.

    It keeps types, specs and norm plans, as one list per attribute, and no tensors: neither gradients nor parameters
    live longer for it.

    Args:
        parameters: as :func:`_resolve` gives them.
        locals_: this rank's part of each gradient there is, in order.
        meshes: of all of them.
        plans: by device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        locals_: Sequence[Tensor],
        meshes: MeshSums,
        plans: dict[torch.device, NormPlan],
    ) -> None:
        self.meshes, self.plans = meshes, plans
        all_gradients = [parameter.grad for parameter in parameters]
        gradients = [gradient for gradient in all_gradients if gradient is not None]
        self._types = [*map(type, parameters), *map(type, all_gradients)]
        self._parameter_is_sharded = [isinstance(parameter, DTensor) for parameter in parameters]
        self._is_sharded = [isinstance(gradient, DTensor) for gradient in gradients]
        self._specs = self._specs_of(parameters, gradients)
        self._missing = [row for row, gradient in enumerate(all_gradients) if gradient is None]
        self._of_missing = [_form_without_gradient(parameters[row]) for row in self._missing]
        self._devices = [local.device for local in locals_]
        self._rows = {d: [row for row, other in enumerate(self._devices) if other == d] for d in plans}
        # Partial gradients are reduced in each call; what other tensors than plain ones hold is looked at every time.
        self._is_usual = all(type(local) is Tensor for local in locals_) and not any(map(_is_partial, gradients))

    def _specs_of(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        if all(self._parameter_is_sharded) and all(self._is_sharded):
            return [p._spec for p in parameters] + [g._spec for g in gradients]
        chosen = [*compress(parameters, self._parameter_is_sharded), *compress(gradients, self._is_sharded)]
        return [tensor._spec for tensor in chosen]

    def sums(self, parameters: Sequence[Tensor], infinity: bool) -> Tensor | None:
        """Return the buckets' sums, fp64 [buckets], or None if anything but the gradients' addresses changed.

        What is compared decides alone over buckets and plans: that parameters are others does not matter.
        """
        if not self._is_usual:
            return None
        # Attributes of DTensors cost three times as much while torch looks for their __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            gradients: list[Any] = [parameter.grad for parameter in parameters]
            if [*map(type, parameters), *map(type, gradients)] != self._types:
                return None
            if self._missing:
                gradients = [gradient for gradient in gradients if gradient is not None]
                if [_form_without_gradient(parameters[row]) for row in self._missing] != self._of_missing:
                    return None
            specs = self._specs_of(parameters, gradients)
            if not all(map(operator.is_, specs, self._specs)):
                for spec, kept in zip(specs, self._specs, strict=True):
                    if spec.mesh is not kept.mesh or spec.placements != kept.placements:
                        return None
                self._specs = specs
            if all(self._is_sharded):
                locals_ = [gradient._local_tensor for gradient in gradients]
            else:
                pairs = zip(gradients, self._is_sharded, strict=True)
                locals_ = [gradient._local_tensor if sharded else gradient for gradient, sharded in pairs]
            if not {Tensor}.issuperset(map(type, locals_)) or [local.device for local in locals_] != self._devices:
                return None
            chosen: list[tuple[NormPlan, list[Tensor], list[int]]] = []
            for device, plan in self.plans.items():
                of_device = locals_ if len(self.plans) == 1 else [locals_[row] for row in self._rows[device]]
                addresses = plan.addresses_if_same(of_device)
                if addresses is None:
                    return None
                chosen.append((plan, of_device, addresses))
        for row in self._missing:
            if parameters[row].requires_grad:
                _check_not_released(parameters[row])
        return _add_up([plan.sums(tensors, addresses) for plan, tensors, addresses in chosen], infinity)


def _form_without_gradient(parameter: Tensor) -> tuple[bool, torch.device]:
    return parameter.requires_grad, local_tensor(parameter).device


def _is_partial(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(isinstance(placement, Partial) for placement in gradient.placements)


def _add_up(sums: Sequence[Tensor], infinity: bool) -> Tensor | None:
    """Return the sums of several devices together, on the first; None for no device."""
    total: Tensor | None = None
    for found in sums:
        if total is None:
            total = found
        else:
            found = found.to(total.device)
            total = torch.maximum(total, found) if infinity else total + found
    return total


_known: weakref.WeakKeyDictionary[FlashOptimizer, dict[tuple[bool, int], _Known]] = weakref.WeakKeyDictionary()
"""By the first of the optimizers given, the norm and how many there are; kept from step to step."""


def _global_norm(
    parameters: Sequence[Tensor],
    optimizers: Sequence[FlashOptimizer],
    infinity: bool,
    pp_group: dist.ProcessGroup | DeviceMesh | None,
) -> Tensor:
    """Return the norm of all gradients, fp64, 0-dim, on the first gradient's device."""
    kept = _known.setdefault(optimizers[0], {}) if optimizers else {}
    key = (infinity, len(optimizers))
    known = kept.get(key)
    sums = known.sums(parameters, infinity) if known is not None else None
    if sums is None or known is None:
        sums, known = _sums_and_plans(parameters, optimizers, infinity, known.plans if known is not None else {})
        kept[key] = known
    total = known.meshes.total(sums, infinity)
    if pp_group is not None:
        groups = [pp_group] if isinstance(pp_group, dist.ProcessGroup) else pp_group.get_all_groups()
        total = reduce_over(total, groups, infinity)
    return total if infinity else total.sqrt()


def _sums_and_plans(
    parameters: Sequence[Tensor],
    optimizers: Sequence[FlashOptimizer],
    infinity: bool,
    earlier: dict[torch.device, NormPlan],
) -> tuple[Tensor, _Known]:
    """Look at every parameter and gradient; return the buckets' sums, fp64 [buckets], and what they came from."""
    meshes = MeshSums()
    locals_: list[Tensor] = []
    by_device: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
    for parameter in parameters:
        if not parameter.requires_grad and parameter.grad is None:
            continue
        bucket = meshes.bucket(parameter)
        gradient = parameter.grad
        if gradient is None:
            _check_not_released(parameter)
            by_device.setdefault(local_tensor(parameter).device, ([], []))
            continue
        gradient = _summed_gradient(gradient, parameter)
        if isinstance(gradient, DTensor):
            # Its own placements: autograd leaves what a replicated parameter was multiplied by, shards for example.
            bucket = meshes.bucket(gradient)
        local = local_tensor(gradient)
        gradients, buckets = by_device.setdefault(local.device, ([], []))
        gradients.append(local)
        buckets.append(bucket)
        locals_.append(local)
    count = len(meshes.keys)
    plans: dict[torch.device, NormPlan] = {}
    for device, (gradients, buckets) in by_device.items():
        plan = earlier.get(device)
        if plan is None or not plan.fits(gradients, buckets, count):
            fused = optimizers[0]._fused if optimizers else None
            plan = NormPlan(gradients, buckets, count, device, infinity=infinity, fused=fused)
        plans[device] = plan
    sums = _add_up([plans[device].sums(gradients) for device, (gradients, _) in by_device.items()], infinity)
    if sums is None:
        sums = torch.zeros(count, dtype=torch.float64)
    return sums, _Known(parameters, locals_, meshes, plans)


def _summed_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient, a Partial one after its reduction (all ranks of its mesh take part)."""
    if gradient.is_complex():
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has a complex gradient ({gradient.dtype}), whose norm is "
            "not taken here; clip with torch.nn.utils.clip_grad_norm_"
        )
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient; build its embedding with "
            "sparse=False"
        )
    if isinstance(gradient, DTensor) and _is_partial(gradient):
        placements = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=placements)
    return gradient


def _check_not_released(parameter: Tensor) -> None:
    """Refuse to take the norm of a gradient that gradient release has applied and freed: it would be 0."""
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        if getattr(hook, "releases_gradient", False) and hook.has_stepped(parameter):
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was stepped during the backward pass already, so its "
                "gradient can't be clipped any more: call enable_gradient_release(..., clip_global_norm=max_norm), "
                "whose handle.gradient_norm is the norm"
            )


def _multiply(parameters: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply all gradients in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            by_device.setdefault(local.device, []).append(local)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, coefficient.to(device))
