"""Master weights, in and out: the fp32 value of a weight and its correction, by name; which corrections are stale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flashoptim_dist.formats import canonical_name, merge, split
from flashoptim_dist.optim.conversion import local_part
from flashoptim_dist.optim.records import ParameterRecord, fingerprint
from flashoptim_dist.optim.state import ERROR_BITS, new_entry, new_state
from flashoptim_dist.sharding import like_parameter, local_tensor


class MasterWeights:
    """The part of ``FlashOptimizer`` that reads and writes master weights; the class beside it keeps the records."""

    state: Any
    _stepper: Any

    def _named(self) -> Iterable[tuple[Tensor, str | None, int, dict[str, Any]]]:
        raise NotImplementedError

    def _record(self, parameter: Tensor) -> ParameterRecord:
        raise NotImplementedError

    def _follow_options(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def master_weight(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master weight: a new fp32 tensor, a DTensor placed like it where it is one.

        No communication. Exact: weight and correction decoded, or the weight itself where it has none.
        """
        record, state = self._record(parameter), self.state.get(parameter, {})
        error_bits = None if self._is_stale(parameter, record) else state.get(ERROR_BITS)
        weight = local_tensor(parameter).detach()
        value = merge(weight, None if error_bits is None else local_tensor(error_bits))
        if value.dtype == weight.dtype:
            value = value.clone()  # fp32 parameters: a copy, like all others
        return like_parameter(value, parameter, record.layout.global_shape)

    def get_master_weights(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return all master weights by parameter name: new fp32 tensors, DTensors where the parameters are.

        Names are the model's if one is given, else those that the optimizer was built with, without wrapper prefixes,
        else "#0", "#1", ... in order. No communication. It holds 4 bytes per local element; take
        :meth:`master_weight` one by one where that is too much.

        Raises:
            ValueError: a parameter of the optimizer that the model does not have.
        """
        return {name: self.master_weight(parameter) for name, parameter in self._by_name(model).items()}

    @torch.no_grad()
    def set_master_weights(self, mapping: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
        """Set weights and corrections from fp32 values by parameter name, also before the first step.

        Values are whole tensors, the same on every rank, or DTensors; bits that the master weight does not hold are
        rounded to nearest. Parameters that are not named keep theirs; moments are left alone. All ranks must call:
        a DTensor of other placements than the parameter's is redistributed.

        Raises:
            ValueError: an unknown name or another shape, named. Nothing is changed.
        """
        self._stepper.forget()
        self._follow_options()
        by_name = self._by_name(model)
        if model is not None:  # tied weights go by any of their names
            owned = set(by_name.values())
            tied = model.named_parameters(remove_duplicate=False)
            by_name |= {canonical_name(name): parameter for name, parameter in tied if parameter in owned}
        chosen = {name: _chosen(by_name, name, value) for name, value in mapping.items()}
        for name, parameter in chosen.items():
            record, weight = self._record(parameter), local_tensor(parameter)
            layout = record.layout
            local = local_part(mapping[name].detach(), parameter, layout.global_shape, layout.local_shape, repr(name))
            master = local.to(device=weight.device, dtype=torch.float32)
            if record.correction_bits:
                if not self.state.get(parameter):
                    self.state[parameter] = new_state(record.entries, parameter)
                state = self.state[parameter]
                if ERROR_BITS not in state:  # the weight was fp32 in the last step
                    state[ERROR_BITS] = new_entry(record.entries[ERROR_BITS], parameter)
                new_weight, correction = split(master, weight.dtype, record.correction_bits)
                weight.copy_(new_weight)
                local_tensor(state[ERROR_BITS]).copy_(correction)
            else:
                weight.copy_(master)
            record.seen = fingerprint(parameter)

    def reset_corrections(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Zero the correction bits of some parameters (default: all), after weights changed behind the optimizer's
        back.

        ``step`` does so by itself where torch leaves a trace of the change (``load_state_dict``, ``copy_``); writes
        through ``.data``, foreach operations and collectives leave none.
        """
        self._stepper.settle()
        chosen = None if parameters is None else set(parameters)
        for parameter, state in self.state.items():
            if ERROR_BITS in state and (chosen is None or parameter in chosen):
                local_tensor(state[ERROR_BITS]).zero_()

    def _is_stale(self, parameter: Tensor, record: ParameterRecord) -> bool:
        """Return whether a weight changed since its correction was made; the correction belongs to the old weight."""
        self._stepper.settle()
        return record.seen is not None and record.seen != fingerprint(parameter)

    def _drop_stale_correction(self, parameter: Tensor, record: ParameterRecord, state: Mapping[str, Any]) -> None:
        """Zero a stale correction, for the step that follows.

        Reading (state dicts, master weights) passes over a stale correction and leaves it: in the middle of a load the
        correction may be the newer one of the two.
        """
        if ERROR_BITS in state and self._is_stale(parameter, record):
            local_tensor(state[ERROR_BITS]).zero_()

    def _by_name(self, model: nn.Module | None) -> dict[str, Tensor]:
        """Return the optimizer's parameters by canonical name: the model's, else their own, else "#ordinal"."""
        own = {self._record(parameter).name: parameter for parameter, _, _, _ in self._named()}
        if model is None:
            return own
        names: dict[Tensor, str] = {parameter: canonical_name(name) for name, parameter in model.named_parameters()}
        missing = [name for name, parameter in own.items() if parameter not in names]
        if missing:
            raise ValueError(f"the model does not have {len(missing)} of the optimizer's parameters: {_some(missing)}")
        return {names[parameter]: parameter for parameter in own.values()}


def _chosen(by_name: Mapping[str, Tensor], name: str, value: Any) -> Tensor:
    """Return the parameter that a value is for, checked against it."""
    parameter = by_name.get(canonical_name(name))
    if parameter is None:
        raise ValueError(
            f"this optimizer has no parameter named {name!r}; it has {_some(list(by_name))}. Build it from "
            "model.named_parameters(), or pass model="
        )
    label = f"the master weight of parameter {name!r}"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        found = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"{label} must be a floating-point tensor, got {found}")
    if tuple(value.shape) != tuple(parameter.shape):
        raise ValueError(
            f"{label} has shape {tuple(value.shape)} and needs {tuple(parameter.shape)}: give the whole tensor or "
            "a DTensor"
        )
    return parameter


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
