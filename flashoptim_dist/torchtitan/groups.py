"""Which options an optimizer of ours takes from a torchtitan config, and parameter groups cut by parameter name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import flashoptim_dist as fod
from flashoptim_dist.optim.base import FlashOptimizer

FLASH_OPTIMIZERS: dict[str, type[FlashOptimizer]] = {
    optimizer.__name__: optimizer
    for optimizer in (fod.FlashAdamW, fod.FlashAdam, fod.FlashLion, fod.FlashSGDW, fod.FlashSGD)
}

_ADAM = ("lr", "betas", "eps", "weight_decay", "maximize")
_LION = ("lr", "betas", "weight_decay", "maximize")
_SGD = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
HYPERPARAMETERS: dict[str, tuple[str, ...]] = {
    "FlashAdamW": _ADAM,
    "FlashAdam": _ADAM,
    "FlashLion": _LION,
    "FlashSGDW": _SGD,
    "FlashSGD": _SGD,
}
"""What stands in each parameter group, by optimizer."""

TORCHTITAN_DEFAULTS: dict[str, dict[str, Any]] = {"FlashAdamW": {"betas": (0.9, 0.95), "weight_decay": 0.1}}
"""Where torchtitan's own configs differ from the optimizer's defaults."""

TORCH_SWITCHES = ("fused", "foreach", "capturable", "amsgrad", "differentiable")
"""torch's own keys, which a group may hold; the optimizer ignores or refuses them."""

INSTANCE_OPTIONS = ("master_weight_bits", "quantize", "rounding", "seed", "check_numerics", "offload_states")
"""What is set once per optimizer, by all of them."""

DECOUPLED = ("FlashAdamW", "FlashLion", "FlashSGDW")
"""The optimizers that know ``decouple_lr``."""

NO_DECAY_PATTERNS = (r"norm\w*\.(weight|bias)$", r"\.bias$", r"embed\w*\.weight$")
"""Norms, biases and embeddings by torchtitan's names (``attention_norm.weight``, ``tok_embeddings.weight``)."""


def constructor_defaults(optimizer: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what an optimizer's constructor takes where a group gives nothing, by name."""
    parameters = inspect.signature(optimizer).parameters
    return {name: value.default for name, value in parameters.items() if value.default is not inspect.Parameter.empty}


def hyperparameters(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's hyperparameters for a parameter group: those given, which are not None.

    Raises:
        ValueError: one that this optimizer does not take.
    """
    chosen = {key: value for key, value in given.items() if value is not None}
    foreign = [key for key in chosen if key not in HYPERPARAMETERS[name]]
    if foreign:
        raise ValueError(
            f"optimizer.{foreign[0]}={chosen[foreign[0]]!r}: {name} has no {foreign[0]}, it takes "
            f"{', '.join(HYPERPARAMETERS[name])}; leave it at None"
        )
    return {**TORCHTITAN_DEFAULTS.get(name, {}), **chosen}


def instance_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer's constructor beside the groups.

    Raises:
        ValueError: decouple_lr for an optimizer whose decay is not decoupled.
    """
    options = {key: given[key] for key in INSTANCE_OPTIONS}
    if name in DECOUPLED:
        options["decouple_lr"] = given["decouple_lr"]
    elif given["decouple_lr"]:
        raise ValueError(f"optimizer.decouple_lr=True: {name} has no decoupled weight decay, {DECOUPLED} have")
    return options


def check_patterns(option: str, patterns: Any) -> None:
    """Check the regular expressions of an option.

    Raises:
        ValueError: they are no list of strings, or one is no regular expression, or an empty one.
    """
    # A string would be taken for its letters, each of them a pattern that matches nearly all names.
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"optimizer.{option} must be a list of regular expressions, got {patterns!r}")
    for pattern in patterns:
        if not pattern:  # as a comma too many leaves one on the command line
            raise ValueError(f"optimizer.{option}: an empty pattern matches every parameter: leave it out, or give .*")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"optimizer.{option}: {pattern!r} is no regular expression: {error}") from error


def matched_first(names: Iterable[str], patterns: Sequence[str]) -> set[int]:
    """Return which patterns are the first to match one of the names, by index."""
    compiled = [re.compile(pattern) for pattern in patterns]
    found: set[int] = set()
    for name in names:
        index = next((index for index, pattern in enumerate(compiled) if pattern.search(name)), None)
        if index is not None:
            found.add(index)
    return found


def without_decay(group: Mapping[str, Any], patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Cut a group in two: parameters as they were, and those whose names match, with weight_decay 0.

    Returns:
        One group where only one of the two has parameters, or where the group has no decay.
    """
    if not patterns or group.get("weight_decay") == 0.0:
        return [dict(group)]
    compiled = [re.compile(pattern) for pattern in patterns]
    parts: tuple[list[int], list[int]] = ([], [])
    for index, name in enumerate(group["param_names"]):
        parts[any(pattern.search(name) for pattern in compiled)].append(index)
    result = []
    for chosen, change in zip(parts, ({}, {"weight_decay": 0.0}), strict=True):
        if chosen:
            own = {key: [group[key][index] for index in chosen] for key in ("params", "param_names")}
            result.append({**group, **own, **change})
    return result
