"""One parameter from its saved form into another: weight, correction and moments, a block of rows at a time.

The number format is never spelled out here: a block is loaded into an optimizer of one parameter of that shape, which
reads older versions of the format and foreign states as it does in training, and what it then holds is the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.convert import official
from flashoptim_dist.convert.lazy import ComputedTensor, LazyTensor, cast
from flashoptim_dist.convert.targets import TARGETS, Target, flash_class, moments_of
from flashoptim_dist.convert.training_state import StateFormat, TrainingState
from flashoptim_dist.formats import FORMAT_VERSION, correction_bits
from flashoptim_dist.optim import FlashOptimizer
from flashoptim_dist.optim.state import ERROR_BITS, SCALE_SUFFIX, STEP, EntrySpec, entry_specs
from flashoptim_dist.sharding import shard_layout

WEIGHT = "weight"
"""Under this name the outputs of a conversion hold the weight itself."""


@dataclass(frozen=True)
class Saved:
    """A parameter as it was saved.

    ``weight`` is None where the checkpoint holds no weights. ``master_bytewidth`` is that of its group in a state of
    the official package, ``record`` the format record of one of this library's.
    """

    name: str
    weight: LazyTensor | None
    state: Mapping[str, Any]
    state_format: StateFormat
    family: str
    record: Mapping[str, Any] | None = None
    master_bytewidth: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape, of the weight or else of a moment."""
        if self.weight is not None:
            return self.weight.shape
        for name, value in self.state.items():
            if isinstance(value, LazyTensor) and name != STEP and not name.endswith((SCALE_SUFFIX, official.SCALES)):
                return value.shape
        raise CheckpointFormatError(f"parameter {self.name!r} has neither a weight nor a moment")

    def step(self) -> float:
        """Return the step count; torch's SGD saves none."""
        step = self.state.get(STEP)
        if isinstance(step, LazyTensor):
            if step.numel != 1:
                raise CheckpointFormatError(f"{step.where} has shape {step.shape}, and must be one number")
            return float(step.whole().item())
        if step is not None:
            return float(step)
        return 1.0 if any(isinstance(value, LazyTensor) for value in self.state.values()) else 0.0


class ParameterConversion:
    """The conversion of one parameter; ``outputs`` says what there will be, ``compute`` makes a block of it.

    All outputs have the parameter's rows as their first dimension, except that scalars are their only row.
    """

    def __init__(self, saved: Saved, target: Target, weight_dtype: torch.dtype | None) -> None:
        """Plan the conversion; only the step counter is read.

        Args:
            saved: the parameter as it was saved.
            target: what it is converted to.
            weight_dtype: of the weight in the result; None where there is no weight.

        Raises:
            CheckpointFormatError: entries are missing, or of another shape.
        """
        self.saved = saved
        self.target = target
        self.weight_dtype = weight_dtype
        self.shape = saved.shape
        self.step = saved.step()
        self._moments = self._present_moments()
        self._check()
        self.outputs = self._outputs()

    def compute(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return rows ``start`` to ``stop`` of all outputs."""
        saved, target = self.saved, self.target
        weight = None if saved.weight is None else saved.weight.rows(start, stop)
        if self._keeps_its_form():
            placeholder = torch.zeros(self._block(start, stop), dtype=self._placeholder_dtype())
            parameter = nn.Parameter(placeholder if weight is None else weight, requires_grad=True)
            entries = self._saved_entries(start, stop)
            optimizer = self._loaded(target.optimizer, parameter, entries, saved.record, target.options)
            result = self._entries_of(optimizer, parameter)
            return result if weight is None else {WEIGHT: weight, **result}
        master, moments = self._decoded(weight, start, stop)
        in_dtype = None  # before the format, which saturates, could hide that a weight does not fit
        if master is not None and self.weight_dtype is not None:
            in_dtype = cast(master, self.weight_dtype, f"parameter {saved.name!r}")
        if not target.is_flash:
            return dict(moments) if in_dtype is None else {**moments, WEIGHT: in_dtype}
        # A weight that goes without a correction is zero here: only the moments are wanted.
        dtype = self.weight_dtype or torch.float32
        parameter = nn.Parameter(torch.zeros(self._block(start, stop), dtype=dtype), requires_grad=True)
        entries = {STEP: torch.tensor(self.step), **moments} if moments else {}
        optimizer = self._loaded(target.optimizer, parameter, entries, None, target.options)
        if not optimizer.state.get(parameter):
            optimizer.init_state()
        if master is not None:
            optimizer.set_master_weights({saved.name: master})
        result = self._entries_of(optimizer, parameter)
        return result if self.weight_dtype is None else {WEIGHT: parameter.detach(), **result}

    # ------------------------------------------------------------------ what there is

    def _present_moments(self) -> dict[str, LazyTensor]:
        """Return the saved moments that are floating or codes, by name; official ones decoded."""
        result: dict[str, LazyTensor] = {}
        for moment in moments_of(self.saved.family):
            if self.saved.state_format == "flashoptim":
                value = official.decoded_moment(self.saved.name, moment.name, self.saved.state)
            else:
                value = self.saved.state.get(moment.name)
            if isinstance(value, LazyTensor):
                result[moment.name] = value
        return result

    def _check(self) -> None:
        saved = self.saved
        wanted = {moment.name for moment in moments_of(saved.family)}
        if self._moments and self._moments.keys() != wanted:
            missing = ", ".join(sorted(wanted - self._moments.keys()))
            raise CheckpointFormatError(f"parameter {saved.name!r} has no {missing} in its optimizer state")
        for name, value in self._moments.items():
            if value.shape != self.shape:
                raise CheckpointFormatError(
                    f"{name} of parameter {saved.name!r} has shape {value.shape}, and the parameter {self.shape}: they "
                    "are of different models"
                )
        correction = saved.state.get(ERROR_BITS)
        if correction is None:
            return
        if not isinstance(correction, LazyTensor) or correction.shape != self.shape:
            raise CheckpointFormatError(f"{ERROR_BITS} of parameter {saved.name!r} is not of its shape {self.shape}")
        if saved.weight is None and not self._keeps_its_form():
            raise CheckpointFormatError(
                f"parameter {saved.name!r} has corrections to a weight that is not there, and without it they would be "
                "lost: give the weights too (--weights)"
            )
        if saved.weight is not None and saved.weight.dtype not in (torch.bfloat16, torch.float16):
            raise CheckpointFormatError(
                f"parameter {saved.name!r} has corrections, and its weight is {saved.weight.dtype}: the weights are "
                "not those that the optimizer updated"
            )

    def _keeps_its_form(self) -> bool:
        """Whether the saved state can be loaded as it is, so that codes stay the codes they are."""
        if self.saved.state_format != "flash" or not self.target.is_flash or not self.saved.state:
            return False
        return self.saved.weight is None or self.saved.weight.dtype == self.weight_dtype

    def _placeholder_dtype(self) -> torch.dtype:
        return torch.bfloat16 if ERROR_BITS in self.saved.state else torch.float32

    def _block(self, start: int, stop: int) -> tuple[int, ...]:
        return (stop - start, *self.shape[1:]) if self.shape else ()

    def _outputs(self) -> dict[str, EntrySpec]:
        def entry(dtype: torch.dtype) -> EntrySpec:
            return EntrySpec(dtype, self.shape, self.shape)

        outputs: dict[str, EntrySpec] = {}
        if self.weight_dtype is not None:
            outputs[WEIGHT] = entry(self.weight_dtype)
        if not self.target.is_flash:
            return outputs | {name: entry(torch.float32) for name in self._moments}
        target = self.target
        moments = moments_of(target.family)
        if target.family == "sgd" and not self._moments:
            moments = ()
        dtype = self.weight_dtype
        if dtype is None and self._keeps_its_form():
            dtype = self._placeholder_dtype()
        bits = correction_bits(dtype, target.master_weight_bits) if dtype is not None else 0
        layout = shard_layout(torch.empty(self.shape, device="meta"), self.saved.name, quantize=target.quantize)
        return outputs | entry_specs(layout, moments, quantize=target.quantize, correction_bits=bits)

    # ------------------------------------------------------------------ blocks

    def _saved_entries(self, start: int, stop: int) -> dict[str, Any]:
        """Return the saved state of a block, as it is."""
        entries: dict[str, Any] = {STEP: torch.tensor(self.step)}
        for name, value in self.saved.state.items():
            if isinstance(value, LazyTensor) and name != STEP:
                entries[name] = value.rows(start, stop)
        return entries

    def _decoded(self, weight: Tensor | None, start: int, stop: int) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return a block's fp32 master weight and fp32 moments."""
        saved = self.saved
        if saved.state_format == "flash" and saved.state:
            placeholder = torch.zeros(self._block(start, stop), dtype=torch.float32)
            parameter = nn.Parameter(placeholder if weight is None else weight, requires_grad=True)
            bits = self._saved_bits()
            # What an older version wrote is decoded once, not coded anew before.
            quantize = (saved.record or {}).get("version", FORMAT_VERSION) == FORMAT_VERSION
            options = {"master_weight_bits": bits, "compress_state_dict": False, "quantize": quantize}
            entries = self._saved_entries(start, stop)
            optimizer = self._loaded(flash_class(saved.family), parameter, entries, saved.record, options)
            state = optimizer.state_dict()["state"][0]
            master = None if weight is None else optimizer.master_weight(parameter)
            return master, {name: state[name] for name in self._moments}
        moments = {name: value.rows(start, stop).to(torch.float32) for name, value in self._moments.items()}
        if weight is None:
            return None, moments
        correction = saved.state.get(ERROR_BITS)
        if correction is None or saved.state_format != "flashoptim":
            return weight.to(torch.float32), moments
        errors = official.error_bits(correction.rows(start, stop), weight, saved.master_bytewidth, correction.where)
        return official.master_weight(weight, errors), moments

    def _saved_bits(self) -> int | None:
        correction = self.saved.state.get(ERROR_BITS)
        if not isinstance(correction, LazyTensor):
            return None
        return 16 + 8 * correction.dtype.itemsize

    def _loaded(
        self,
        kind: Any,
        parameter: nn.Parameter,
        entries: Mapping[str, Any],
        record: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> FlashOptimizer:
        """Return an optimizer of one parameter with these entries loaded."""
        momentum = {"momentum": 0.9} if self.saved.family == "sgd" and self._moments else {}
        optimizer: FlashOptimizer = kind([(self.saved.name, parameter)], **momentum, **options)
        whole: dict[str, Any] = {
            "state": {0: dict(entries)} if entries else {},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
        if record is not None:
            whole["format"] = dict(record)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it was converted is what was asked for
                optimizer.load_state_dict(whole)
        except (ValueError, TypeError) as error:
            raise CheckpointFormatError(str(error)) from error
        return optimizer

    def _entries_of(self, optimizer: FlashOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = optimizer.state[parameter]
        return {name: state[name] for name in self.outputs if name != WEIGHT}


def master_weight(state: TrainingState, name: str) -> LazyTensor:
    """Return a weight with its correction, in fp32; a weight that has none as it is.

    Raises:
        CheckpointFormatError: the correction does not fit the weight.
    """
    weight = state.weights[name]
    names = [name, *(alias for alias, of in state.aliases.items() if of == name)]
    owner = next((one for one in names if ERROR_BITS in state.states.get(one, {})), None)
    if owner is None:
        return weight
    record = next((spec for spec in state.specs if spec.get("name")), None)
    group = state.group_of().get(owner)
    options = state.groups[group].options if group is not None else {}
    # Whatever the optimizer, the correction is the same: an Adam before its first step goes without moments.
    saved = Saved(
        owner,
        weight,
        {STEP: 0.0, ERROR_BITS: state.states[owner][ERROR_BITS]},
        state.state_format() or "flash",
        "adam",
        record,
        int(options.get("master_bytewidth") or 0),
    )
    conversion = ParameterConversion(saved, TARGETS["adamw"], torch.float32)
    return ComputedTensor(
        weight.shape, torch.float32, weight.where, lambda start, stop: conversion.compute(start, stop)[WEIGHT]
    )
