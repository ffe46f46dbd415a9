"""Gradient release: step parameters while the backward pass runs, and free their gradients.

A gradient then lives only from its layer's backward to that of the next. Parameters are collected by unit (an FSDP2
unit, or a layer) and stepped together, in one launch, when the next unit's first gradient arrives; the last unit at
the end of the backward. On GPUs that happens on a stream of its own, beside the backward's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.release_clipping import UnitClipping
from flashoptim_dist.release_units import ReleaseStream, Unit, drop_unsharded_gradients, find_units

_DDP = (
    "gradient release cannot be used with DistributedDataParallel, which reduces gradients after they are complete and "
    "keeps its own copies of them; shard the model with flashoptim_dist.shard_model (a mesh of one dimension, or "
    "(replicas, 1) for replicas alone)"
)
_IN_STEP = (
    "call step() of every optimizer once for every update, after its last backward(), as without gradient release (the "
    "first step() of several ends the update of all)"
)
_WAY_BACK = "To give up an update, as after an exception that was caught, call handle.abandon_update()"


def enable_gradient_release(
    model: nn.Module | Sequence[nn.Module],
    optimizer: FlashOptimizer | Sequence[FlashOptimizer],
    *,
    accumulation_steps: int = 1,
    clip_value: float | None = None,
    clip_parameter_norm: float | None = None,
    clip_global_norm: float | None = None,
    skip_nonfinite: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> GradientRelease:
    """Step parameters during the backward pass; the training loop stays as it is, ``optimizer.step()`` included.

    ``optimizer.step()`` waits for the stream of the steps, steps what is left (parameters that the last backward did
    not reach) and begins the next update; schedulers, state dicts and checkpoints are used as without. Without
    clipping the results are those without release, bit for bit. Parameters that no optimizer given here owns, or that
    were frozen when this was called, are left to ``optimizer.step()``.

    Works with FSDP2 (HSDP and tensor parallelism included) and without any sharding. All ranks must call.

    Args:
        model: the model, or the model parts of a pipeline; after ``shard_model``.
        optimizer: what steps it, or several, in any order; parameters find their own. The parameters of all make one
            update: it ends with the first ``step()``, which steps what is left of all of them.
        accumulation_steps: backward passes per update, each reduced into the sharded gradient (no
            ``set_requires_gradient_sync``): parameters are stepped in the last. For updates of varying numbers of
            backward passes leave it at 1 and put all but the last into ``with handle.accumulate():``.
        clip_value: clamp the elements of gradients to [-clip_value, clip_value], as ``clip_grad_value_`` does. Applied
            before norms are taken.
        clip_parameter_norm: clip the norm of each parameter's gradient, over all its shards.
        clip_global_norm: clip by an estimate of the global norm; the rule is that of
            :class:`flashoptim_dist.release_clipping.UnitClipping`. Not together with clip_parameter_norm.
        skip_nonfinite: skip a unit whose gradient is not finite, and all that follow it in the same update, on all
            ranks; counted in ``optimizer.skipped_steps``. Clipping by a norm and grad_scaler include it.
        grad_scaler: the GradScaler that scales the loss; ``scaler.step(optimizer)`` and ``scaler.update()`` stay.

    Raises:
        TypeError: an optimizer that is not ours; a model under DistributedDataParallel or FSDP1.
        ValueError: an option out of range, or optimizers that own none of the model's parameters.
        RuntimeError: gradient release is on already for one of the parameters.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for one in optimizers:
        if not isinstance(one, FlashOptimizer):
            raise TypeError(
                f"gradient release steps layer by layer, which {type(one).__name__} cannot; use one of this package's "
                "optimizers"
            )
    for part in parts:
        _check_wrappers(part)
    if accumulation_steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, got {accumulation_steps}")
    units = find_units(parts, optimizers)
    clipping = UnitClipping(
        units,
        value=clip_value,
        parameter_norm=clip_parameter_norm,
        global_norm=clip_global_norm,
        skip_nonfinite=skip_nonfinite,
        grad_scaler=grad_scaler,
    )
    return GradientRelease(parts, optimizers, units, clipping, accumulation_steps)


class GradientRelease:
    """Gradient release that is switched on; made by :func:`enable_gradient_release`, ended by :meth:`remove`."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: Sequence[FlashOptimizer],
        units: Sequence[Unit],
        clipping: UnitClipping,
        accumulation_steps: int,
    ) -> None:
        self._parts, self._optimizers, self._units = list(parts), list(optimizers), list(units)
        self._clipping, self._accumulation_steps = clipping, accumulation_steps
        self._stream = ReleaseStream(parts)
        self._parameters = sum(len(unit.parameters) for unit in units)
        self._pending: Unit | None = None
        self._collected: list[Tensor] = []
        self._seen: dict[Tensor, int] = {}
        self._stepped: set[Tensor] = set()
        self._accumulating = False
        self._graph_task = -1
        self._handles: list[Any] = []
        for unit in self._units:
            for parameter in unit.parameters:
                if parameter.requires_grad:
                    hook = _Hook(self, unit)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            self._handles.append(optimizer.register_zero_grad_hook(self._on_zero_grad))
        for part in self._parts:
            self._handles.append(part.register_forward_pre_hook(_ForwardHook(self), prepend=True))

    # ------------------------------------------------------------------ what users call

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of backward passes inside: nothing is stepped, and the next pass adds to them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @property
    def gradient_norm(self) -> Tensor | None:
        """Global norm of the last update's gradients, after clip_value and before any other clipping.

        Of all optimizers together, from the first of their ``step()`` calls on.

        fp32, 0-dim, on the device; None before the first update, and where no norm is taken (without clipping by a
        norm, skip_nonfinite and grad_scaler).
        """
        return self._clipping.last_norm

    def state_dict(self) -> dict[str, Any]:
        """Return the running norms of clip_global_norm, by unit; empty where no norm is taken.

        Those of FSDP2's units mean the same on any number of ranks. Synchronizes with the device. Call it between
        updates.
        """
        return self._clipping.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over running norms; those of unknown units are passed over, units without any begin anew.

        Raises:
            ValueError: a running norm that cannot be one.
        """
        self._clipping.load_state_dict(state_dict)

    def abandon_update(self) -> None:
        """Give up the update that was begun, of all optimizers: after an exception in a backward pass, for instance.

        Drops the gradients that are left of all parameters that are released, and their norms; nothing is counted as a
        skipped step. Parameters that were stepped already stay stepped: there is no way back. ``zero_grad()`` calls
        this where the last backward pass raised after it had stepped or collected parameters. No collective; all ranks
        must call, or their parameters drift apart. Under FSDP2 call ``model.reset_iter_state()`` too.
        """
        self._pending, self._collected = None, []
        self._seen.clear()
        self._stepped.clear()
        self._graph_task = -1
        self._stream.join()
        self._clipping.abandon()
        for unit in self._units:
            for parameter in unit.parameters:
                parameter.grad = None
        drop_unsharded_gradients(self._parts)

    def remove(self) -> None:
        """Switch gradient release off: gradients stay until ``zero_grad()`` again."""
        self._flush()
        self._stream.join()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------ hooks

    def _gradient_arrived(self, unit: Unit, parameter: Tensor) -> None:
        """Collect a parameter whose gradient of this backward pass is complete."""
        if self._accumulating:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradient release frees gradients, so backward(create_graph=True) cannot be used; call "
                "handle.remove() first"
            )
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if parameter in self._stepped:
            raise self._got_another_gradient(unit, parameter)
        if self._seen[parameter] < self._accumulation_steps:
            return
        if self._pending is not unit:
            self._flush()
            self._pending = unit
        self._collected.append(parameter)
        self._stepped.add(parameter)
        self._stream.gradient_is_ready(parameter)
        task = torch._C._current_graph_task_id()
        # Outside of a backward (a pipeline schedule that reduces gradients by itself) step() does the last flush.
        if task not in (-1, self._graph_task):
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _got_another_gradient(self, unit: Unit, parameter: Tensor) -> RuntimeError:
        return RuntimeError(
            f"parameter {unit.names[parameter]!r} got another gradient after it was stepped in this update, with "
            f"accumulation_steps={self._accumulation_steps}. Where several backward passes make one update "
            "(retain_graph included), set accumulation_steps, or put all but the last into `with "
            "handle.accumulate():`; checkpointed layers that share weights need use_reentrant=False; and "
            f"{_IN_STEP}. {_WAY_BACK}"
        )

    def _end_of_backward(self) -> None:
        self._flush()
        self._stream.join()
        self._graph_task = -1  # last: until here, an exception is one of the backward pass

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert isinstance(optimizer, FlashOptimizer)
        if self._clipping.is_scaled_by_another(optimizer) and (self._stepped or self._has_leftovers()):
            raise RuntimeError(
                "the loss is scaled by a GradScaler, of which gradient release does not know, so that it steps with "
                "scaled gradients. Call enable_gradient_release(..., grad_scaler=scaler)"
            )
        self._flush()
        if not self._makes_template(optimizer):
            self._flush_leftovers(optimizer)
            self._clipping.finish(self._optimizers)
        self._stream.join()
        self._forget(optimizer)
        self._graph_task = -1

    def _makes_template(self, optimizer: FlashOptimizer) -> bool:
        """Whether step() may only be asked for a template of the state, of gradients that torch made, and sees to it.

        Of one optimizer whose first step has a learning rate of 0 this is no different: step() takes what is left.
        """
        if optimizer.state or any(float(group["lr"]) != 0.0 for group in optimizer.param_groups):
            return False
        # With several, what is left belongs to the others' update; torch makes no template where there are gradients.
        return len(self._optimizers) == 1 or not any(
            owner is optimizer and parameter in self._seen
            for unit in self._units
            for parameter, owner in unit.optimizers.items()
        )

    def _has_leftovers(self) -> bool:
        return any(parameter.grad is not None for unit in self._units for parameter in unit.parameters)

    def _flush_leftovers(self, optimizer: torch.optim.Optimizer) -> None:
        """Step what the last backward did not reach, of all optimizers: it belongs to the update that ends here.

        On all ranks the same units in the same order, whichever optimizer is stepped first.
        """
        if len(self._stepped) >= self._parameters:
            return  # mostly nothing is left
        left = {unit: [p for p in unit.parameters if p.grad is not None] for unit in self._units}
        several = len(self._optimizers) > 1
        for unit, parameters in left.items():
            for parameter in parameters:
                if several and parameter in self._stepped:
                    raise self._got_another_gradient(unit, parameter)
        for unit, parameters in left.items():
            if parameters:
                self._pending, self._collected = unit, parameters
                for parameter in parameters:
                    self._stream.gradient_is_ready(parameter)
                self._flush()
                if several:
                    self._stepped.update(parameters)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._flush()  # of a closure's backward
        self._stream.join()

    def _on_zero_grad(self, optimizer: FlashOptimizer) -> None:
        if self._graph_task != -1 and torch._C._current_graph_task_id() == -1:
            # The end of the last backward pass never came, so it raised.
            self.abandon_update()
            return
        of_optimizer = (
            unit.optimizers[p] is optimizer for unit in self._units for p in unit.parameters if p in self._stepped
        )
        if self._stepped and any(of_optimizer):
            raise RuntimeError(
                "zero_grad() came between a backward pass, in which gradient release stepped parameters, and "
                f"step(): {_IN_STEP}. {_WAY_BACK}"
            )
        self._forget(optimizer)

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the next update of an optimizer's parameters."""
        if len(self._optimizers) == 1:
            self._seen.clear()
            self._stepped.clear()
            return
        for unit in self._units:
            for parameter, owner in unit.optimizers.items():
                if owner is optimizer:
                    self._seen.pop(parameter, None)
                    self._stepped.discard(parameter)

    def _before_forward(self) -> None:
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise TypeError(_DDP)
        self._stream.before_forward()

    # ------------------------------------------------------------------ the steps

    def _flush(self) -> None:
        """Step what was collected of one unit, in one launch per optimizer and device, and free the gradients."""
        if self._pending is None:
            return
        unit, collected = self._pending, self._collected
        self._pending, self._collected = None, []
        with torch.no_grad(), self._stream.stepping():
            subsets = unit.subsets(collected)
            for (optimizer, subset), inputs in zip(subsets, self._clipping.inputs(unit, subsets), strict=True):
                optimizer._step(inputs, subset)
        for parameter in collected:
            parameter.grad = None


def _check_wrappers(part: nn.Module) -> None:
    for module in part.modules():
        if isinstance(module, DistributedDataParallel):
            raise TypeError(_DDP)
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(
                "gradient release cannot be used with FullyShardedDataParallel (FSDP1), whose parameters are views of "
                "flat ones; shard the model with FSDP2: flashoptim_dist.shard_model"
            )


class _Hook:
    """Of one parameter, bound to its own unit. Parameters do not keep the handle, which keeps them: torch cannot free
    such a circle.
    """

    releases_gradient = True

    def __init__(self, release: GradientRelease, unit: Unit) -> None:
        self._release, self._unit = weakref.ref(release), unit

    def __call__(self, parameter: Tensor) -> None:
        release = self._release()
        if release is not None:
            release._gradient_arrived(self._unit, parameter)

    def has_stepped(self, parameter: Tensor) -> bool:
        """Whether the parameter was stepped in this update already, and its gradient freed."""
        release = self._release()
        return release is not None and parameter in release._stepped


class _ForwardHook:
    """Before the forward pass of a model part. A copy of the module, or a file, gets a hook that does nothing: gradient
    release stays with the model it was switched on for.
    """

    def __init__(self, release: GradientRelease | None = None) -> None:
        self._release = None if release is None else weakref.ref(release)

    def __call__(self, module: nn.Module, args: Any) -> None:
        release = None if self._release is None else self._release()
        if release is not None:
            release._before_forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardHook, ()
