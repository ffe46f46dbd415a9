"""The optimizer base: options, state, detection of changed weights, and the step's bookkeeping; the arithmetic is
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashoptim_dist.formats import (
    MASTER_WEIGHT_BITS,
    ROUNDINGS,
    FormatSpec,
    Rounding,
    canonical_name,
    correction_bits,
    noise_key,
    parameter_id,
)
from flashoptim_dist.optim import reference
from flashoptim_dist.optim.loading import load_state
from flashoptim_dist.optim.state import ERROR_BITS, STEP, EntrySpec, MomentSpec, entry_specs, new_state
from flashoptim_dist.sharding import ShardLayout, local_tensor, shard_layout

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

FORMAT_OPTIONS = ("master_weight_bits", "quantize", "rounding", "seed")
"""Options that live on the optimizer; a group dict holds one only where the user put it there."""


@dataclass
class ParameterRecord:
    """What the optimizer knows of one parameter beside its state; derived, never saved."""

    name: str
    layout: ShardLayout
    entries: dict[str, EntrySpec]
    noise_key: int | None
    seen: tuple[Any, ...] | None = field(default=None)


class FlashOptimizer(torch.optim.Optimizer):
    """Base of the optimizers whose state is compressed; use a subclass.

    State per parameter, under the names it has on disk, DTensors whenever the parameter is one: ``step`` (0-dim
    fp32), each moment (int8 or uint8 codes, with bf16 ``<moment>_scale`` per group of 32; fp32 without scales for
    parameters of fewer than 2 dimensions or rows under 32), and ``error_bits`` (int8 or int16 correction of a 16-bit
    weight).
    """

    moment_specs: ClassVar[tuple[MomentSpec, ...]] = ()

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        master_weight_bits: int | None,
        quantize: bool,
        rounding: Rounding,
        seed: int,
    ) -> None:
        self._options: dict[str, Any] = {
            "master_weight_bits": master_weight_bits,
            "quantize": quantize,
            "rounding": rounding,
            "seed": seed,
        }
        _check_options(self._options, "")
        self._records: dict[Tensor, ParameterRecord] = {}
        self._init_runtime()
        super().__init__(params, defaults)

    def _init_runtime(self) -> None:
        # GradScaler's protocol: it leaves unscaling and the skip to step(), through these attributes.
        self._step_supports_amp_scaling = True
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._skipped_steps: Tensor | int = 0

    # ------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; options of the format may stand in it and then hold for this group alone.

        Raises:
            ValueError: an option out of range, or a parameter that cannot be optimized, named.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group, f"parameter group {len(self.param_groups) - 1}: ")
            self._check_group(group)
            names = group.get("param_names", [None] * len(group["params"]))
            for parameter, name in zip(group["params"], names, strict=True):
                _check_parameter(parameter, name)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._records.clear()

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check the hyperparameters of a group; subclasses extend it."""
        lr = float(group["lr"])
        if not lr >= 0.0 or math.isinf(lr):
            raise ValueError(f"lr must be a finite number >= 0, got {lr}")
        if not float(group["weight_decay"]) >= 0.0:
            raise ValueError(f"weight_decay must be >= 0, got {group['weight_decay']}")

    def _option(self, group: Mapping[str, Any], name: str) -> Any:
        return group.get(name, self._options[name])

    def format_spec(self) -> dict[str, Any]:
        """Return the record of the number format that a checkpoint carries (JSON-serializable)."""
        return FormatSpec(optimizer=type(self).__name__, **self._options).to_dict()

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was not finite. Reading it synchronizes with the device."""
        return int(self._skipped_steps)

    # ------------------------------------------------------------------ records and state

    def _named(self) -> Iterable[tuple[Tensor, str | None, int, dict[str, Any]]]:
        """Yield (parameter, name or None, ordinal, group) in order."""
        ordinal = 0
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            for parameter, name in zip(group["params"], names, strict=True):
                yield parameter, name, ordinal, group
                ordinal += 1

    def _build_records(self) -> None:
        old = self._records
        self._records = {}
        for parameter, name, ordinal, group in self._named():
            label = canonical_name(name) if name is not None else f"#{ordinal}"
            layout = shard_layout(parameter, label)
            key = None
            if self._option(group, "rounding") == "stochastic":
                key = noise_key(self._option(group, "seed"), parameter_id(name, ordinal))
            entries = entry_specs(
                layout,
                self._moments_of(group),
                quantize=self._option(group, "quantize"),
                correction_bits=correction_bits(parameter.dtype, self._option(group, "master_weight_bits")),
            )
            record = ParameterRecord(label, layout, entries, key)
            if parameter in old:
                record.seen = old[parameter].seen
            self._records[parameter] = record

    def _record(self, parameter: Tensor) -> ParameterRecord:
        record = self._records.get(parameter)
        if record is None or record.layout.local_shape != tuple(local_tensor(parameter).shape):
            self._build_records()
            record = self._records[parameter]
        return record

    def _moments_of(self, group: Mapping[str, Any]) -> tuple[MomentSpec, ...]:
        """Return the moments that parameters of this group keep; SGD without momentum keeps none."""
        return self.moment_specs

    def init_state(self) -> None:
        """Create the state of every parameter that requires a gradient and has none, without a step. No communication.

        State is zero: it decodes to zero moments and to the 16-bit weights as they are, whenever those are set.
        """
        for parameter, _, _, _ in self._named():
            if parameter.requires_grad and not self.state.get(parameter):
                self.state[parameter] = new_state(self._record(parameter).entries, parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do; once any parameter has state, all trainable ones are included.

        A parameter that never had a gradient is saved with zero state and step 0, so that a checkpoint always matches
        the template a fresh optimizer gives. A never-stepped optimizer has an empty state. All tensors are the live
        ones.
        """
        if self.state:
            self.init_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer, bit for bit, or one of torch's, quantized on the way in.

        Parameters are matched by name where both sides have names, else by order. Correction bits that come with the
        state are kept until the first step, whatever is loaded into the weights in between.

        Raises:
            ValueError: other groups or parameters, shapes or formats, with the parameter named.
        """
        load_state(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_records"):  # unpickled or deep-copied
            self._records = {}
            self._init_runtime()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def reset_corrections(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Zero the correction bits of some parameters (default: all), after weights changed behind the optimizer's
        back.

        ``step`` does so by itself where torch leaves a trace of the change (``load_state_dict``, ``copy_``); writes
        through ``.data``, foreach operations and collectives leave none.
        """
        chosen = None if parameters is None else set(parameters)
        for parameter, state in self.state.items():
            if ERROR_BITS in state and (chosen is None or parameter in chosen):
                local_tensor(state[ERROR_BITS]).zero_()

    def _drop_stale_correction(self, parameter: Tensor, record: ParameterRecord, state: dict[str, Any]) -> None:
        """Zero the correction of a weight that changed since the last step; it belongs to the old weight."""
        if record.seen is not None and ERROR_BITS in state and _fingerprint(parameter) != record.seen:
            local_tensor(state[ERROR_BITS]).zero_()

    def _forget_weights(self) -> None:
        """Take the weights as they are at the next step for those that the corrections belong to."""
        for record in self._records.values():
            record.seen = None

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. No collective; every rank steps its own shards.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a sparse gradient, or one whose placements differ from its parameter's, named.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_template_step():
            return loss
        factor, skip = self._amp_factor()
        if skip:
            self._skipped_steps += 1
            return loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group, factor)
        return loss

    def _is_template_step(self) -> bool:
        """Create missing state; say whether this step only asks for that.

        torch's ``get_optimizer_state_dict`` and torchtitan make a template of a fresh optimizer by a step with zero
        gradients and lr = 0. Such a step creates the state and is not counted, so that asking changes nothing. Looked
        at only when no state exists yet; a first step with lr = 0 and live gradients is a real one.
        """
        fresh = not self.state
        for parameter, _, _, _ in self._named():
            if parameter.grad is not None and not self.state.get(parameter):
                _check_gradient(parameter, self._record(parameter).name)
                self.state[parameter] = new_state(self._record(parameter).entries, parameter)
        if not fresh or any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        gradients = [local_tensor(p.grad) for p, _, _, _ in self._named() if p.grad is not None]
        return not any(bool(gradient.count_nonzero()) for gradient in gradients if gradient.numel())

    def _amp_factor(self) -> tuple[float, bool]:
        """Return (factor on the gradients, whether to skip) from GradScaler's attributes."""
        if self.found_inf is not None and float(self.found_inf) != 0.0:
            return 1.0, True
        return (1.0 if self.grad_scale is None else 1.0 / float(self.grad_scale)), False

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any], factor: float) -> None:
        record = self._record(parameter)
        state = self.state[parameter]
        gradient = parameter.grad
        assert gradient is not None
        _check_gradient(parameter, record.name)
        self._drop_stale_correction(parameter, record, state)
        state[STEP] += 1
        step = int(state[STEP])
        weight = local_tensor(parameter)
        scalars, rule = self._rule(group, step)
        moments = tuple(
            reference.MomentTensors(
                signed=moment.signed,
                values=local_tensor(state[moment.name]),
                scale=local_tensor(state[moment.scale_name]) if moment.scale_name in state else None,
            )
            for moment in self._moments_of(group)
        )
        task = reference.ParameterStep(
            layout=record.layout,
            weight=weight,
            gradient=local_tensor(gradient),
            correction=local_tensor(state[ERROR_BITS]) if ERROR_BITS in state else None,
            moments=moments,
            scalars=scalars,
            gradient_factor=-factor if group.get("maximize", False) else factor,
            noise_key=record.noise_key,
            step=step,
        )
        reference.step_parameter(task, rule)
        record.seen = _fingerprint(parameter)

    def _rule(self, group: dict[str, Any], step: int) -> tuple[Any, reference.Rule]:
        """Return the scalars and the update rule of a group at a step."""
        raise TypeError(f"{type(self).__name__} is the base of the optimizers; use a subclass")


def _fingerprint(parameter: Tensor) -> tuple[Any, ...]:
    """Return what tells, for free and at best effort, that a weight's memory was written or replaced."""
    local = local_tensor(parameter)
    return (local.data_ptr(), parameter._version, local._version)


def _check_options(options: Mapping[str, Any], where: str) -> None:
    bits = options.get("master_weight_bits", 24)
    if bits not in MASTER_WEIGHT_BITS:
        raise ValueError(f"{where}master_weight_bits must be 24, 32 or None, got {bits!r}")
    rounding = options.get("rounding", "nearest")
    if rounding not in ROUNDINGS:
        raise ValueError(f"{where}rounding must be one of {ROUNDINGS}, got {rounding!r}")
    if not isinstance(options.get("quantize", True), bool):
        raise ValueError(f"{where}quantize must be True or False, got {options['quantize']!r}")
    seed = options.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"{where}seed must be an integer >= 0, got {seed!r}")


def _check_parameter(parameter: Tensor, name: str | None) -> None:
    label = f"parameter {name!r}" if name is not None else f"a parameter of shape {tuple(parameter.shape)}"
    if parameter.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"{label} has dtype {parameter.dtype}; this optimizer steps bfloat16, float16 and float32 parameters"
        )
    if parameter.layout != torch.strided:
        raise TypeError(f"{label} has layout {parameter.layout}; only strided parameters can be stepped")


def _check_gradient(parameter: Tensor, name: str) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise RuntimeError(f"parameter {name!r} has a sparse gradient; build its embedding with sparse=False")
    if isinstance(parameter, DTensor):
        if not isinstance(gradient, DTensor):
            raise RuntimeError(
                f"parameter {name!r} is a DTensor and its gradient is not; set .grad to a DTensor of its placements"
            )
        if gradient.placements != parameter.placements:
            raise RuntimeError(
                f"parameter {name!r} {tuple(parameter.shape)} has placements {parameter.placements} and its gradient "
                f"{gradient.placements}; call grad.redistribute(placements=parameter.placements) before step()"
            )
