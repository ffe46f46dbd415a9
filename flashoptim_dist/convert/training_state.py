"""What a checkpoint holds, whoever wrote it: weights, optimizer states by parameter name, groups, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.checkpoint.layout import Path_
from flashoptim_dist.convert.lazy import LazyTensor

Container = Literal["dcp", "torch", "safetensors"]
"""A DCP directory, a file of torch.save, a folder (or file) of safetensors."""

Layout = Literal["nested", "flattened", "torchtitan"]
"""How a DCP directory spells its keys: torch's two forms of an optimizer's state beside ``model.``, or torchtitan's,
whose model stands at the top."""

StateFormat = Literal["flash", "torch", "flashoptim"]
"""Whose states: this library's, plain floating ones as torch's optimizers keep them, the official flashoptim's."""

FAMILIES = {"adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}
"""The moments of each family of optimizers, by name on disk."""

_OFFICIAL_QUANTIZED = "::quantized"


@dataclass
class Group:
    """Options of a parameter group, and the names of its parameters."""

    options: dict[str, Any]
    names: list[str]


@dataclass
class TrainingState:
    """The contents of a checkpoint; tensors stay on disk until they are read."""

    path: Path
    container: Container
    layout: Layout = "nested"
    weights: dict[str, LazyTensor] = field(default_factory=dict)
    """The model's tensors by name; a tied weight under its first name only."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied weights, and the names that hold them."""
    model_objects: dict[str, Any] = field(default_factory=dict)
    """The model's entries that are no tensors."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizer states: tensors (:class:`LazyTensor`) and numbers by parameter and state name."""
    groups: list[Group] = field(default_factory=list)
    others: list[tuple[Path_, Any]] = field(default_factory=list)
    """Everything else: scheduler, data loader, random states, extras."""
    record: dict[str, Any] = field(default_factory=dict)
    """The ``format`` entry, empty where there is none."""
    unnamed: bool = False
    """Whether the optimizer's parameters are known by number alone."""

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The format records of the optimizers."""
        return [dict(spec) for spec in self.record.get("optimizers", []) if isinstance(spec, Mapping)]

    @property
    def has_states(self) -> bool:
        """Whether any parameter has optimizer state."""
        return any(self.states.values())

    def state_format(self) -> StateFormat | None:
        """Return whose states these are; None where there are none."""
        if not self.has_states:
            return None
        names = {name for state in self.states.values() for name in state}
        if any(name.endswith(_OFFICIAL_QUANTIZED) for name in names):
            return "flashoptim"
        if any("master_bytewidth" in group.options for group in self.groups):
            return "flashoptim"
        if "error_bits" in names or any(name.endswith("_scale") for name in names):
            return "flash"
        return "flash" if any(spec.get("name") for spec in self.specs) else "torch"

    def family(self) -> str:
        """Return which family of optimizers the states are of.

        Raises:
            CheckpointFormatError: of one that this library has no counterpart of.
        """
        names = {name.split("::")[0] for state in self.states.values() for name in state}
        names = {name.removesuffix("_scale") for name in names} - {"step", "error_bits"}
        if "max_exp_avg_sq" in names:
            raise CheckpointFormatError(f"{self.path}: states of AMSGrad can't be converted: nothing here keeps them")
        for spec in self.specs:
            for family in FAMILIES:
                if family in str(spec.get("optimizer", "")).lower():
                    return family
        for family, moments in FAMILIES.items():
            if names == set(moments):
                return family
        if not names:
            return self._family_of_groups()
        raise CheckpointFormatError(
            f"{self.path}: its optimizer keeps {sorted(names)}; only the states of Adam, AdamW, Lion and SGD convert"
        )

    def _family_of_groups(self) -> str:
        options = {name for group in self.groups for name in group.options}
        if "momentum" in options:
            return "sgd"
        return "lion" if "betas" in options and "eps" not in options else "adam"

    def group_of(self) -> dict[str, int]:
        """Return the index of each parameter's group."""
        return {name: index for index, group in enumerate(self.groups) for name in group.names}

    def optimizer_name(self) -> str:
        """Return the class of the (first) optimizer as far as it is known."""
        for spec in self.specs:
            return str(spec.get("optimizer"))
        if not self.has_states:
            return "none"
        names = {"adam": "Adam or AdamW", "lion": "Lion", "sgd": "SGD"}
        family = names.get(self.family(), "")
        return f"flashoptim's {family}" if self.state_format() == "flashoptim" else family
