"""Optimizer states from one optimizer to another: plain AdamW, Lion and SGD, the official flashoptim's, and ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist._version import __version__
from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.checkpoint.layout import MODEL, Path_
from flashoptim_dist.checkpoint.snapshot import LAYOUT_VERSION
from flashoptim_dist.convert.casting_rule import CastingRule
from flashoptim_dist.convert.fused_weights import FusedWeight, fused_weight
from flashoptim_dist.convert.lazy import LazyTensor, MemoryTensor, same_contents
from flashoptim_dist.convert.parameters import WEIGHT, ParameterConversion, Saved
from flashoptim_dist.convert.result import OutputTensor, Result, Unit, state_path, unit_of
from flashoptim_dist.convert.targets import Target
from flashoptim_dist.convert.training_state import Group, TrainingState
from flashoptim_dist.convert.unused_options import check_head_dim
from flashoptim_dist.optim.state import ERROR_BITS, STEP
from flashoptim_dist.optim.versions import check_format

ORIGIN = "converted_from"
"""In the format record of a plain checkpoint: what it was, so that the way back leads there."""

HEAD_DIM = "head_dim"
"""In the format record: the size of an attention head, where it was needed to convert."""

_OPTIONS = ("master_weight_bits", "quantize", "rounding", "seed")


@dataclass(frozen=True)
class Choices:
    """What a user may choose; None leaves it to what the checkpoint was, else to the defaults.

    Attributes:
        dtype: of the weights.
        keep_fp32: patterns on names of modules whose weights stay (or become) fp32.
        options: of the number format: master_weight_bits, quantize, rounding, seed.
        fresh: whether parameters without states get new ones.
        head_dim: rows of an attention head, for torchtitan's fused projections.
    """

    dtype: torch.dtype | None = None
    keep_fp32: tuple[str, ...] = ()
    options: dict[str, Any] | None = None
    fresh: bool = False
    head_dim: int | None = None


def convert_state(state: TrainingState, target: Target, choices: Choices) -> Result:
    """Return what ``state`` becomes for another optimizer. Nothing is read but what decides that.

    Raises:
        CheckpointFormatError: the states are of another family of optimizers, or don't fit the weights; named.
    """
    return _Conversion(state, target, choices).result()


class _Conversion:
    def __init__(self, state: TrainingState, target: Target, choices: Choices) -> None:
        self.state = state
        self.format = state.state_format()
        self.spec = _spec_of(state) if self.format == "flash" else None
        self.origin: dict[str, Any] = state.record.get(ORIGIN) or {}
        self.target = target.with_options(**self._options(choices))
        self.choices = choices
        self.rule = CastingRule([*state.weights, *state.aliases], choices.keep_fp32)
        self.family = state.family() if state.has_states else target.family
        self.changed: dict[str, str] = {}
        self.fused: dict[str, FusedWeight] = {}

    def result(self) -> Result:
        """Return what is to be written."""
        state, target = self.state, self.target
        if self.family != target.family:
            raise CheckpointFormatError(
                f"{state.path} holds the states of {state.optimizer_name()}, and {target.name} keeps other ones: there "
                "is no conversion between them"
            )
        self._use_optimizer_names()
        parts = {part for fused in self.fused.values() for part in fused.parts}
        self._find_ties(parts)
        result = Result(aliases=dict(state.aliases), unnamed=state.unnamed)
        groups = state.group_of()
        for name in dict.fromkeys([*state.weights, *self.fused, *state.states]):
            if name in parts:
                continue
            if name in state.states or name in groups:
                result.units += self._parameter(name, groups.get(name))
            else:
                result.units.append(self._copied(name))
        result.groups = [Group(target.group(group.options), list(group.names)) for group in state.groups]
        result.objects = [((MODEL, name), value) for name, value in state.model_objects.items()]
        for path, value in (leaf for other in state.others for leaf in _leaves(*other)):
            if isinstance(value, LazyTensor):
                result.units.append(unit_of(path, value))
            else:
                result.objects.append((path, value))
        result.record = self._record()
        result.notes = self._notes()
        return result

    def _options(self, choices: Choices) -> dict[str, Any]:
        """Return the options of the number format: chosen, else as they were saved."""
        before = self.spec or next(iter(self.origin.get("optimizers", [])), {})
        options = {name: before[name] for name in _OPTIONS if name in before}
        return options | (choices.options or {})

    # ------------------------------------------------------------------ names

    def _use_optimizer_names(self) -> None:
        """Call a tied weight as the optimizer calls it, and find the parts of a fused one.

        Raises:
            CheckpointFormatError: there are states of which the model has no weight, or no use for ``head_dim``.
        """
        state = self.state
        for name in [*state.states, *state.group_of()]:
            first = state.aliases.get(name)
            if first is not None:
                state.weights[name] = state.weights.pop(first)
                state.aliases = {
                    alias: name if of == first else of for alias, of in state.aliases.items() if alias != name
                }
                state.aliases[first] = name
        head_dim = self.choices.head_dim or state.record.get(HEAD_DIM)
        for name in dict.fromkeys([*state.states, *state.group_of()]):
            if name not in state.weights and (fused := fused_weight(name, state.weights, head_dim)) is not None:
                self.fused[name] = fused
        check_head_dim(self.choices.head_dim, self.fused, state)
        unknown = [name for name in state.states if name not in state.weights and name not in self.fused]
        if state.weights and unknown:
            raise CheckpointFormatError(
                f"{state.path}: the optimizer has states of {unknown[0]!r} ({len(unknown)} such), and the model has no "
                "weight of that name"
            )

    def _find_ties(self, parts: set[str]) -> None:
        """Let a weight that the optimizer does not know, and that is equal to one it knows, be a second name of it.

        Plain DCP writes a tied weight once for each of its names, and the optimizer's state once. ``parts`` of fused
        weights are known by other names.
        """
        state = self.state
        known = {*state.states, *state.group_of()}
        shapes: dict[tuple[int, ...], list[str]] = {}
        for name in known & state.weights.keys():
            shapes.setdefault(state.weights[name].shape, []).append(name)
        for name in [name for name in state.weights if name not in known and name not in parts]:
            weight = state.weights[name]
            if len(weight.shape) < 2:
                continue
            for candidate in sorted(shapes.get(weight.shape, [])):
                if same_contents(weight, state.weights[candidate]):
                    del state.weights[name]
                    state.aliases = {alias: candidate if of == name else of for alias, of in state.aliases.items()} | {
                        name: candidate
                    }
                    break

    # ------------------------------------------------------------------ tensors

    def _dtype(self, name: str, present: torch.dtype) -> torch.dtype:
        """Return the dtype that a weight gets."""
        chosen, rule = self.choices.dtype, self.rule
        if not self.target.is_flash:
            wanted = rule.dtype(name, present, chosen or torch.float32)
        elif chosen is not None:
            wanted = rule.dtype(name, present, chosen)
        elif name in self.origin.get("weight_dtypes", {}) and not self.choices.keep_fp32:
            wanted = getattr(torch, self.origin["weight_dtypes"][name])
        elif present in (torch.bfloat16, torch.float16) or self.format in ("flash", "flashoptim"):
            # Patterns hold here too; otherwise every weight stays what it is.
            wanted = rule.dtype(name, present, present)
        else:
            wanted = rule.dtype(name, present, torch.bfloat16)
        if wanted != present:
            self.changed[name] = str(present).removeprefix("torch.")
        return wanted

    def _common_dtype(self, names: Sequence[str], present: torch.dtype) -> torch.dtype:
        """Return the dtype that the weights of one parameter get."""
        wanted = {self._dtype(name, present) for name in names}
        if len(wanted) != 1:
            raise CheckpointFormatError(
                f"{', '.join(names)} are one parameter, which has one dtype: let keep_fp32 match all of them or none"
            )
        return wanted.pop()

    def _copied(self, name: str) -> Unit:
        """Return the unit of a weight that no optimizer updates."""
        weight = self.state.weights[name]
        return unit_of((MODEL, name), weight, self._dtype(name, weight.dtype))

    def _parameter(self, name: str, group: int | None) -> list[Unit]:
        state, target = self.state, self.target
        fused = self.fused.get(name)
        weight = state.weights.get(name) if fused is None else fused.weight(state.weights)
        dtype = None if weight is None else self._common_dtype(fused.parts if fused else (name,), weight.dtype)
        saved_state = state.states.get(name, {})
        keeps_low_bits = target.is_flash and weight is not None and weight.dtype.itemsize > 2 and dtype != weight.dtype
        fresh = target.is_flash and self.choices.fresh
        if not saved_state and not keeps_low_bits and not fresh:
            return [self._copied(part) for part in (fused.parts if fused else (name,)) if part in state.weights]
        options = state.groups[group].options if group is not None else {}
        saved = Saved(
            name,
            weight,
            {key: value for key, value in saved_state.items() if value is not None},
            self.format or "torch",
            self.family,
            self.spec,
            int(options.get("master_bytewidth") or 0),
        )
        conversion = ParameterConversion(saved, target, dtype)
        units = _units(name, conversion, fused) if conversion.outputs else []
        if target.is_flash or target.family == "adam":
            step = MemoryTensor(torch.tensor(conversion.step, dtype=torch.float32), f"step of {name!r}")
            units.append(unit_of(state_path(name, STEP), step))
        return units

    # ------------------------------------------------------------------ record

    def _record(self) -> dict[str, Any]:
        before = self.state.record
        record: dict[str, Any] = {
            "library": "flashoptim_dist",
            "library_version": __version__,
            "torch_version": str(torch.__version__),
            "layout_version": LAYOUT_VERSION,
            "world_size": before.get("world_size", 1),
            "optimizers": [self.target.record()],
            "same_on_all_ranks": dict(before.get("same_on_all_ranks", {})),
        }
        if head_dim := self.choices.head_dim or before.get(HEAD_DIM):
            record[HEAD_DIM] = head_dim
        if not self.target.is_flash and self.format == "flash":
            record[ORIGIN] = {
                "optimizers": [dict(spec) for spec in self.state.specs if spec.get("name")] or [dict(self.spec or {})],
                "weight_dtypes": dict(self.changed),
            }
        return record

    def _notes(self) -> list[str]:
        notes = []
        if self.changed:
            notes.append(f"{len(self.changed)} weights changed their dtype")
        if self.state.has_states and not self.state.weights:
            notes.append("the checkpoint holds no weights: only optimizer states were converted")
        if self.target.is_flash and self.state.has_states and not self.state.weights and self.format == "torch":
            notes.append("corrections begin at zero, since the weights that they correct are not there (--weights)")
        return notes


def _spec_of(state: TrainingState) -> dict[str, Any] | None:
    """Return the format record of this library's states, checked; None where the checkpoint has none."""
    for spec in state.specs:
        if spec.get("name"):
            try:
                check_format(spec)
            except ValueError as error:
                raise CheckpointFormatError(f"{state.path}: {error}") from error
            return dict(spec)
    return None


def _leaves(path: Path_, value: Any) -> Iterator[tuple[Path_, Any]]:
    """Yield a value by its path; containers that hold tensors are taken apart."""
    if isinstance(value, Mapping) and _holds_tensors(value):
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, list | tuple) and _holds_tensors(value):
        for index, inner in enumerate(value):
            yield from _leaves((*path, index), inner)
    else:
        yield path, value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(inner) for inner in value)
    return isinstance(value, LazyTensor)


def _units(name: str, conversion: ParameterConversion, fused: FusedWeight | None) -> list[Unit]:
    """Return the units of one parameter: one, and where its weight is saved in parts, one for each of these."""
    outputs = {
        key: OutputTensor((MODEL, name) if key == WEIGHT else state_path(name, key), spec.global_shape, spec.dtype)
        for key, spec in conversion.outputs.items()
    }
    units = []
    if fused is not None and WEIGHT in outputs:
        dtype = outputs.pop(WEIGHT).dtype
        saved = conversion.saved
        correction = {key: value for key, value in saved.state.items() if key == ERROR_BITS}
        # Moments say nothing about the weight: as before the first step, they are left out.
        alone = ParameterConversion(replace(saved, state={STEP: 0.0, **correction}), conversion.target, dtype)
        units = [_part(fused, index, alone, dtype) for index in range(len(fused.parts))]
    if not outputs:
        return units

    def compute(start: int, stop: int) -> list[Tensor]:
        made = conversion.compute(start, stop)
        return [made[key] for key in outputs]

    return [*units, Unit(tuple(outputs.values()), compute)]


def _part(fused: FusedWeight, index: int, conversion: ParameterConversion, dtype: torch.dtype) -> Unit:
    def weight(start: int, stop: int) -> Tensor:
        return conversion.compute(start, stop)[WEIGHT]

    output = OutputTensor((MODEL, fused.parts[index]), fused.part_shape(index, conversion.shape), dtype)
    return Unit((output,), lambda start, stop: (fused.part(index, weight, start, stop),))
