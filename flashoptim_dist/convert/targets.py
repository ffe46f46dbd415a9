"""What a checkpoint is converted to: the optimizers by their names on the command line, and options of groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.convert import official
from flashoptim_dist.formats import MASTER_WEIGHT_BITS, ROUNDINGS, FormatSpec
from flashoptim_dist.optim import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW
from flashoptim_dist.optim.state import MomentSpec

_LION_DEFAULTS = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class Target:
    """An optimizer to convert to.

    Attributes:
        name: on the command line.
        family: which states it keeps: adam, lion or sgd.
        optimizer: its class; None for a plain Lion, of which torch has none.
        master_weight_bits, quantize, rounding, seed: of this library's optimizers, as their arguments.
    """

    name: str
    family: str
    optimizer: type[torch.optim.Optimizer] | None
    master_weight_bits: int | None = 24
    quantize: bool = True
    rounding: str = "stochastic"
    seed: int = 0

    @property
    def is_flash(self) -> bool:
        """Whether it is one of this library's optimizers."""
        return self.optimizer is not None and issubclass(self.optimizer, FlashOptimizer)

    @property
    def class_name(self) -> str:
        """Name of its class."""
        return self.optimizer.__name__ if self.optimizer is not None else "Lion"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of this library's optimizers."""
        names = ("master_weight_bits", "quantize", "rounding", "seed")
        return {name: getattr(self, name) for name in names}

    def with_options(self, **options: Any) -> Target:
        """Return it with other options of the number format.

        Raises:
            CheckpointFormatError: one is out of range.
        """
        changed = replace(self, **options)
        if changed.master_weight_bits not in MASTER_WEIGHT_BITS:
            raise CheckpointFormatError(
                f"master_weight_bits is {changed.master_weight_bits}, and must be 24, 32 or None"
            )
        if changed.rounding not in ROUNDINGS:
            raise CheckpointFormatError(f"rounding is {changed.rounding!r}, and must be one of {', '.join(ROUNDINGS)}")
        return changed

    def record(self) -> dict[str, Any]:
        """Return the format record that a checkpoint carries of it."""
        if not self.is_flash:
            return {"name": None, "optimizer": self.class_name}
        return FormatSpec(optimizer=self.class_name, **self.options).to_dict()

    def group_defaults(self) -> dict[str, Any]:
        """Return the options that a group of it has at least."""
        if self.optimizer is None:
            return dict(_LION_DEFAULTS)
        kind: Any = self.optimizer
        made = kind([nn.Parameter(torch.zeros(1))])
        return {name: value for name, value in made.param_groups[0].items() if name not in _NOT_OPTIONS}

    def group(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a saved group for this optimizer: its own where saved, its defaults, and what
        training loops keep there (``initial_lr``); not what other optimizers alone understand.
        """
        defaults = self.group_defaults()
        foreign = {*FlashOptimizer.group_options, *official.GROUP_OPTIONS, *_NOT_OPTIONS}
        result = {**defaults, **{name: value for name, value in options.items() if name not in foreign}}
        # AdamW and Adam differ in this one alone; the target's name decides.
        if "decoupled_weight_decay" in result:
            result["decoupled_weight_decay"] = self.name.removeprefix("flash_") == "adamw"
        return result


TARGETS = {
    target.name: target
    for target in (
        Target("adamw", "adam", torch.optim.AdamW),
        Target("adam", "adam", torch.optim.Adam),
        Target("lion", "lion", None),
        Target("sgd", "sgd", torch.optim.SGD),
        Target("flash_adamw", "adam", FlashAdamW),
        Target("flash_adam", "adam", FlashAdam),
        Target("flash_lion", "lion", FlashLion),
        Target("flash_sgd", "sgd", FlashSGD),
        Target("flash_sgdw", "sgd", FlashSGDW),
    )
}


def target_named(name: str) -> Target:
    """Return a target by its name.

    Raises:
        CheckpointFormatError: there is none of that name.
    """
    if name not in TARGETS:
        raise CheckpointFormatError(f"there is no optimizer {name!r} to convert to; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def flash_class(family: str) -> type[FlashOptimizer]:
    """Return one of this library's optimizers that keeps the states of a family."""
    return {"adam": FlashAdamW, "lion": FlashLion, "sgd": FlashSGD}[family]


def moments_of(family: str) -> tuple[MomentSpec, ...]:
    """Return the moments of a family."""
    return flash_class(family).moment_specs
