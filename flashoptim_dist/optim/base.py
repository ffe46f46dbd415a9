"""The optimizer base: options, state, detection of changed weights, and the step's bookkeeping; the arithmetic is
elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashoptim_dist.formats import FormatSpec, Rounding
from flashoptim_dist.optim.backends import StepTask, step_with_torch
from flashoptim_dist.optim.checks import (
    check_common,
    check_decoupling,
    check_gradient,
    check_group_alone,
    check_options,
    check_parameter,
    check_torch_options,
)
from flashoptim_dist.optim.conversion import dequantize
from flashoptim_dist.optim.live_options import convert_states, follow_options, options_of_groups
from flashoptim_dist.optim.loading import load_state
from flashoptim_dist.optim.masters import MasterWeights
from flashoptim_dist.optim.records import ParameterRecord, fingerprint, new_record
from flashoptim_dist.optim.rules import Hyperparameters
from flashoptim_dist.optim.scaling import GradientInputs, GradientScaling
from flashoptim_dist.optim.state import ERROR_BITS, MomentSpec, new_entry, new_state
from flashoptim_dist.optim.stepper import FusedStepper, Subset, takes_kernels
from flashoptim_dist.optim.update_check import NumericsReport, UpdateCheck
from flashoptim_dist.optim.watch import StateTable
from flashoptim_dist.sharding import like_parameter, local_tensor

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_logger = logging.getLogger(__name__)


class FlashOptimizer(MasterWeights, GradientScaling):
    """Base of the optimizers whose state is compressed; use a subclass.

    State per parameter, under the names it has on disk, DTensors whenever the parameter is one: ``step`` (0-dim
    fp32), each moment (int8 or uint8 codes, with bf16 ``<moment>_scale`` per group of 32; fp32 without scales for
    parameters of fewer than 2 dimensions or rows under 32), and ``error_bits`` (int8 or int16 correction of a 16-bit
    weight).
    """

    moment_specs: ClassVar[tuple[MomentSpec, ...]] = ()
    moments_are_optional: ClassVar[bool] = False
    group_options: ClassVar[tuple[str, ...]] = ("master_weight_bits", "quantize", "rounding", "seed", "decouple_lr")
    """Options that live on the optimizer; a group dict holds one only where the user put it there."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        decouple_lr: bool = False,
        compress_state_dict: bool = True,
        check_numerics: bool = False,
        offload_states: bool = False,
        torch_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "master_weight_bits": master_weight_bits,
            "quantize": quantize,
            "rounding": rounding,
            "seed": seed,
            "decouple_lr": decouple_lr,
            "offload_states": offload_states,
        }
        self.compress_state_dict = compress_state_dict
        self._fused: bool | None = (torch_options or {}).get("fused")
        self._update_check = UpdateCheck() if check_numerics else None
        self._first_lr: list[float] = []
        extra = {"compress_state_dict": compress_state_dict, "check_numerics": check_numerics}
        check_options({**self._options, **extra}, "")
        check_torch_options(torch_options or {}, "")
        if self._fused and check_numerics:
            raise ValueError(
                "check_numerics=True counts in the pure-torch step, fused=True asks for kernels: leave one out"
            )
        self._init_runtime()
        super().__init__(params, defaults)
        self._count_changes()

    def _count_changes(self) -> None:
        """Make the state one that counts its changes, whoever put another one there."""
        if not isinstance(self.state, StateTable):
            self.state = StateTable(self.state)

    def _init_runtime(self) -> None:
        self._records: dict[Tensor, ParameterRecord] = {}
        self._followed: list[tuple[Any, ...]] = []  # options of the groups that records and states go by
        self._init_scaling()
        self._stepper = FusedStepper(self)

    # ------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; options of the format may stand in it and then hold for this group alone.

        Raises:
            ValueError: an option out of range, or a parameter that cannot be optimized, named.
        """
        super().add_param_group(param_group)
        group, where = self.param_groups[-1], f"parameter group {len(self.param_groups) - 1}: "
        try:
            check_group_alone(group, where)
            check_options(group, where)
            check_torch_options(group, where)
            check_common(group, where)
            self._check_group(group, where)
            lr = float(group.get("initial_lr", group["lr"]))
            check_decoupling(self._option(group, "decouple_lr"), self._decay_is_decoupled(group), lr, where)
            if self._option(group, "decouple_lr"):
                group.setdefault("initial_lr", lr)  # where schedulers keep it; saved with the group
            names = group.get("param_names", [None] * len(group["params"]))
            for parameter, name in zip(group["params"], names, strict=True):
                check_parameter(parameter, name)
        except (TypeError, ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        self._first_lr.append(lr)
        self._stepper.forget()

    def _check_group(self, group: dict[str, Any], where: str) -> None:
        """Check the hyperparameters of a group beside lr and weight_decay."""

    def _decay_is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """Return whether the decay multiplies the weight, rather than being added to the gradient (L2)."""
        return True

    def _option(self, group: Mapping[str, Any], name: str) -> Any:
        return group.get(name, self._options[name])

    def _decay_rate(self, index: int) -> float:
        """Return the decoupled decay of a group per unit of learning rate: the factor is 1 - lr * decay_rate.

        With ``decouple_lr`` the factor is 1 - weight_decay * lr / initial lr; the initial one is the group's own
        ``initial_lr``, which schedulers set, else the one that the group was made with.
        """
        group = self.param_groups[index]
        rate = float(group["weight_decay"])
        if rate and self._option(group, "decouple_lr"):
            rate /= float(group.get("initial_lr", self._first_lr[index]))
        return rate

    def _hyperparameters(self, index: int) -> Hyperparameters:
        """Return the hyperparameters of a group as they are now, and with them its rule."""
        raise TypeError(f"{type(self).__name__} is the base of the optimizers; use a subclass")

    def format_spec(self) -> dict[str, Any]:
        """Return the record of the number format that a checkpoint carries (JSON-serializable)."""
        options = {name: self._options[name] for name in ("master_weight_bits", "quantize", "rounding", "seed")}
        return FormatSpec(optimizer=type(self).__name__, **options).to_dict()

    def numerics_report(self) -> NumericsReport:
        """Return, by parameter, how many updates were too small to change a weight; ``str()`` of it is a table.

        Of this rank's shard; no communication. Reading it synchronizes with the device, once. What counts as too small
        is defined in ``optim.update_check``.

        Raises:
            RuntimeError: the optimizer was not made with check_numerics=True.
        """
        if self._update_check is None:
            raise RuntimeError("updates are not counted: make the optimizer with check_numerics=True")
        return self._update_check.report()

    # ------------------------------------------------------------------ records and state

    def _named(self) -> Iterable[tuple[Tensor, str | None, int, dict[str, Any]]]:
        """Yield (parameter, name or None, ordinal, group) in order."""
        ordinal = 0
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [None] * len(group["params"])
            if len(names) != len(group["params"]):
                raise RuntimeError(
                    f"parameter group {index} holds {len(group['params'])} parameters and {len(names)} names: change "
                    "its lists 'params' and 'param_names' together"
                )
            for parameter, name in zip(group["params"], names, strict=True):
                yield parameter, name, ordinal, group
                ordinal += 1

    def _new_records(self, groups: list[dict[str, Any]]) -> dict[Tensor, ParameterRecord]:
        """Return records for parameters in these groups (the optimizer's own, or ones about to be loaded)."""
        records = {}
        group_of = [group for group in groups for _ in group["params"]]
        for parameter, name, ordinal, _ in self._named():
            group = group_of[ordinal]
            options = {option: self._option(group, option) for option in self.group_options}
            options["offload_states"] = self._options["offload_states"]
            records[parameter] = new_record(parameter, name, ordinal, self._moments_of(group), options)
        return records

    def _record(self, parameter: Tensor) -> ParameterRecord:
        record = self._records.get(parameter)
        if record is None or not record.fits(parameter):
            self._renew_records()
            if parameter not in self._records:
                raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not one of this optimizer's")
            record = self._records[parameter]
        return record

    def _set_records(self, records: dict[Tensor, ParameterRecord]) -> None:
        """Go by these records, to which all states fit."""
        self._records, self._followed = records, options_of_groups(self)

    def _follow_options(self) -> None:
        follow_options(self)

    def _renew_records(self) -> None:
        self._stepper.forget()
        old, self._records = self._records, self._new_records(self.param_groups)
        for parameter, record in self._records.items():
            record.seen = old[parameter].seen if parameter in old else None

    def _moments_of(self, group: Mapping[str, Any]) -> tuple[MomentSpec, ...]:
        """Return the moments that parameters of this group keep; SGD without momentum keeps none."""
        return self.moment_specs

    def init_state(self) -> None:
        """Create the state of every parameter that requires a gradient and has none, without a step. No communication.

        State is zero: it decodes to zero moments and to the 16-bit weights as they are, whenever those are set.
        """
        self._stepper.settle()
        self._follow_options()
        made = []
        for parameter, _, _, _ in self._named():
            if parameter.requires_grad and not self.state.get(parameter):
                made.append(self._make_state(parameter))
        _log_precisions(made)

    def _make_state(self, parameter: Tensor) -> ParameterRecord:
        record = self._record(parameter)
        self.state[parameter] = new_state(record.entries, parameter)
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do; once any parameter has state, all trainable ones are included.

        A parameter that never had a gradient is saved with zero state and step 0, so that a checkpoint always matches
        the template a fresh optimizer gives. A never-stepped optimizer has an empty state. Tensors are the live ones;
        with ``compress_state_dict=False`` the moments are decoded to new fp32 tensors without scales, which torch's
        optimizers load. ``error_bits`` stays in any case, as in flashoptim, or masters would lose their low bits;
        torch's optimizers carry it along unread, cast to the parameter's dtype. ``"format"`` beside ``"state"`` and
        ``"param_groups"`` is :meth:`format_spec`.
        """
        if self.state:
            self.init_state()
        result = super().state_dict()
        for parameter, _, ordinal, _ in self._named():
            if ordinal in result["state"]:
                result["state"][ordinal] = self._saved_entries(parameter, result["state"][ordinal])
        return {**result, "format": self.format_spec()}

    @torch.no_grad()
    def _saved_entries(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's state as it is saved: without a stale correction, decoded if that is asked for."""
        entries, record = dict(state), self._record(parameter)
        if ERROR_BITS in entries and self._is_stale(parameter, record):
            entries[ERROR_BITS] = torch.zeros_like(entries[ERROR_BITS])
        compressed = [moment for moment in self.moment_specs if moment.scale_name in entries]
        if compressed and not self.compress_state_dict:
            stored = [(local_tensor(entries[m.name]), local_tensor(entries.pop(m.scale_name))) for m in compressed]
            decoded = dequantize(stored, [moment.signed for moment in compressed], record.layout)
            for moment, values in zip(compressed, decoded, strict=True):
                entries[moment.name] = like_parameter(values, parameter, record.layout.global_shape)
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer, bit for bit, or one of torch's, quantized on the way in.

        Parameters are matched by name where both sides have names, else by order. Hyperparameters are the saved ones,
        as in torch; the options of the format (master_weight_bits, quantize, rounding, seed, decouple_lr) stay this
        optimizer's, and state in another form is converted, parameter by parameter, with one warning that says so.
        (Another rounding leaves no trace in the state and is said by its record, which torch's
        ``get_optimizer_state_dict`` leaves out.)
        Correction bits that come with the state are kept until the first step, whatever is loaded into the weights in
        between.

        All ranks must call where DTensors of other placements are loaded, which are redistributed. Scales that the
        number format never writes (negative, not finite, no lattice of a variance) are refused after that, and by each
        rank for its own shards, without communication: an error of these, as any other, may be raised on one rank
        alone, and what all ranks do together afterwards has to wait until all are known to have loaded.
        ``flashoptim_dist.checkpoint.load`` sees to that.

        Raises:
            ValueError: other groups or parameters, shapes, formats or scales, with the parameter named. Nothing is
                changed.
        """
        load_state(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_records"):  # unpickled or deep-copied
            self._init_runtime()
        self._count_changes()
        self._stepper.forget()  # the state is another one

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_options", "_fused", "_first_lr", "compress_state_dict")
        state = {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}
        return {**state, "_update_check": None if self._update_check is None else UpdateCheck()}

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step. No collective; every rank steps its own shards.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a sparse gradient, or one whose placements differ from its parameter's, named. Other
                parameters may have been stepped by then, as with torch's optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(self._gradient_inputs())
        self.clip_coefficient = None
        return loss

    def _step(self, inputs: GradientInputs, subset: Subset | None = None) -> None:
        """Step all parameters that have a gradient, or those of a subset, each of which has one. Within no_grad.

        A subset's skipped steps are not counted; the caller counts the step that they are part of.
        """
        self._count_changes()
        self._follow_options()
        stepped = self._stepper.step_as_before(inputs, subset)
        if stepped is None:
            return
        if subset is None and self._has_no_gradient():  # gradient release has stepped all there was
            if self._update_check is not None:
                self._update_check.poll()
            return
        if self._make_missing_states(subset):
            return
        tasks = self._tasks(stepped, subset)
        on_device = [device for device in tasks if self._update_check is None and takes_kernels(device, self._fused)]
        self._stepper.forget_plans_of(subset)
        skipped = False
        for device, of_device in tasks.items():
            if device in on_device:
                self._stepper.step(device, of_device, inputs, subset)
            elif self._options["offload_states"] and device.type == "cuda":
                raise RuntimeError(
                    "offload_states=True streams states through the Triton kernels, which fused=False and "
                    "check_numerics=True go without, on a machine without Triton too: leave one of the two out"
                )
            else:
                skipped |= step_with_torch(of_device, inputs)
            for task in of_device:
                task.record.seen = fingerprint(task.parameter)
        if len(on_device) == len(tasks):
            self._stepper.keep(subset)
        elif skipped and subset is None and not on_device:
            self._skipped_steps += 1
        if self._update_check is not None:
            self._update_check.poll()

    def _has_no_gradient(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return all(parameter.grad is None for group in self.param_groups for parameter in group["params"])

    def _make_missing_states(self, subset: Subset | None) -> bool:
        """Create the state that parameters with a gradient lack; say whether this step only asks for that.

        torch's ``get_optimizer_state_dict`` and torchtitan make a template of a fresh optimizer by a step with zero
        gradients and lr = 0. Such a step creates the state and is not counted, so that asking changes nothing. Looked
        at only when no state exists yet; a first step with lr = 0 and live gradients is a real one.
        """
        fresh = not self.state
        made = []
        chosen = subset.parameters if subset is not None else [p for p, _, _, _ in self._named()]
        for parameter in chosen:
            if parameter.grad is not None and not self.state.get(parameter):
                check_gradient(parameter, parameter.grad, self._record(parameter).name)
                made.append(self._make_state(parameter))
        _log_precisions(made)
        if not fresh or subset is not None or any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        gradients = [local_tensor(p.grad) for p, _, _, _ in self._named() if p.grad is not None]
        return not any(bool(gradient.count_nonzero()) for gradient in gradients if gradient.numel())

    def _tasks(
        self, stepped: Container[Tensor] = (), subset: Subset | None = None
    ) -> dict[torch.device, list[StepTask]]:
        """Return the tasks of this step by device: one per parameter with a gradient that is not ``stepped`` yet."""
        tasks: dict[torch.device, list[StepTask]] = {}
        for index, group in enumerate(self.param_groups):
            hyperparameters, moments = self._hyperparameters(index), self._moments_of(group)
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or parameter in stepped or (subset is not None and parameter not in subset):
                    continue
                record = self._record(parameter)
                if record.moments != moments:
                    self._renew_records()
                    convert_states(self)
                    record = self._record(parameter)
                check_gradient(parameter, gradient, record.name)
                state = self.state[parameter]
                self._drop_stale_correction(parameter, record, state)
                weight = local_tensor(parameter)
                check = self._update_check
                task = StepTask(
                    parameter=parameter,
                    record=record,
                    weight=weight,
                    gradient=local_tensor(gradient),
                    state=state,
                    group=index,
                    hyperparameters=hyperparameters,
                    fresh_moments=self._complete(parameter, record, state),
                    counter=None if check is None else check.counter(record.name, weight.device),
                )
                tasks.setdefault(weight.device, []).append(task)
        return tasks

    def _complete(self, parameter: Tensor, record: ParameterRecord, state: dict[str, Any]) -> bool:
        """Create entries that a state lacks (momentum switched on in mid-run); return whether there were any."""
        if record.checked_state is state:
            return False
        missing = [name for name in record.entries if name not in state]
        for name in missing:
            state[name] = new_entry(record.entries[name], parameter)
        if ERROR_BITS in state and ERROR_BITS not in record.entries:
            del state[ERROR_BITS]  # the weight was cast to fp32 since, and has all its bits itself
        record.checked_state = state
        return any(name != ERROR_BITS for name in missing)


def _log_precisions(records: list[ParameterRecord]) -> None:
    """Log which precision how many parameters got."""
    if records:
        kinds = Counter(record.describe() for record in records)
        _logger.info("optimizer state made: %s", "; ".join(f"{count} x {kind}" for kind, count in kinds.items()))
