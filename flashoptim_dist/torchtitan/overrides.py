"""Overrides that put this library's optimizers into an existing torchtitan config.

--override.imports 'flashoptim_dist.torchtitan.flash_adamw={"lr": 3e-4}'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config.override import derive, override

from flashoptim_dist.torchtitan import groups
from flashoptim_dist.torchtitan.checkpointer import FlashCheckpointManager
from flashoptim_dist.torchtitan.container import FlashOptimizersContainer

_PACKAGE = __name__.rpartition(".")[0]

_REPLACED = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
"""The optimizers of torchtitan whose groups become ours."""

_KEPT_BY_ALL = ("lr", "weight_decay", "maximize")
"""What a group of Adam or AdamW hands on to another kind of optimizer."""


def check_plain(config: Any, ours: type, subject: str, end: str) -> None:
    """Check that a config is torchtitan's plain one, the base of ``ours``, or ours: of others ``derive`` loses fields.

    Raises:
        TypeError: it is of another kind; ``end`` says what would put an end to that, and the way out.
    """
    if type(config) not in (ours.__base__, ours):
        raise TypeError(f"{subject} is a {type(config).__qualname__}, whose own doings {end}")


def _register(target: type, description: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an override under the package's name, which is shorter to type than this module's."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__module__ = _PACKAGE
        decorated: Callable[..., Any] = override(target=target, description=description)(function)
        return decorated

    return decorate


@_register(OptimizersContainer.Config, "AdamW in 5.1 bytes per parameter")
def flash_adamw(config: Any, **options: Any) -> FlashOptimizersContainer.Config:
    """Give the groups of Adam and AdamW to FlashAdamW; other groups stay.

    Args:
        config: the optimizer config that is replaced.
        options: fields of ``FlashOptimizersContainer.Config``. lr, betas, eps, weight_decay and so on hold for all
            these groups; what is not given stays as each group has it.
    """
    return _replaced(config, "FlashAdamW", options)


@_register(OptimizersContainer.Config, "Adam with L2 decay in 5.1 bytes per parameter")
def flash_adam(config: Any, **options: Any) -> FlashOptimizersContainer.Config:
    """Give the groups of Adam and AdamW to FlashAdam; see :func:`flash_adamw`. weight_decay becomes L2."""
    return _replaced(config, "FlashAdam", options)


@_register(OptimizersContainer.Config, "Lion in 4.1 bytes per parameter")
def flash_lion(config: Any, **options: Any) -> FlashOptimizersContainer.Config:
    """Give the groups of Adam and AdamW to FlashLion; see :func:`flash_adamw`.

    Lion's learning rate is 3 to 10 times smaller than AdamW's: give ``lr``. betas are Lion's own.
    """
    return _replaced(config, "FlashLion", options)


@_register(OptimizersContainer.Config, "SGD with decoupled decay in 4.1 bytes per parameter")
def flash_sgdw(config: Any, **options: Any) -> FlashOptimizersContainer.Config:
    """Give the groups of Adam and AdamW to FlashSGDW; see :func:`flash_adamw`. Give ``lr`` and ``momentum``."""
    return _replaced(config, "FlashSGDW", options)


@_register(CheckpointManager.Config, "final model-only checkpoint with the corrections applied")
def export_master_weights(config: Any) -> FlashCheckpointManager.Config:
    """Let the last, model-only checkpoint hold the master weights instead of the 16-bit ones."""
    check_plain(
        config,
        FlashCheckpointManager.Config,
        "the config's checkpoint",
        "the export of master weights would end: leave it out, or choose a config with torchtitan's plain "
        "CheckpointManager",
    )
    result: FlashCheckpointManager.Config = derive(config, FlashCheckpointManager.Config)
    return result


def _replaced(config: Any, name: str, options: dict[str, Any]) -> FlashOptimizersContainer.Config:
    check_plain(
        config,
        FlashOptimizersContainer.Config,
        "the config's optimizer",
        f"{name} would end; choose a config with torchtitan's plain OptimizersContainer",
    )
    if isinstance(config, FlashOptimizersContainer.Config) and config.optimizer_name != name:
        raise ValueError(
            f"the config is for {config.optimizer_name} already, whose options would become {name}'s: give "
            f"--optimizer.optimizer_name {name} and its options, --optimizer.lr and --optimizer.weight_decay among them"
        )
    known = {field.name for field in fields(FlashOptimizersContainer.Config)}
    own = known - {"param_groups", "optimizer_name", "implementation", "optimizer_factory_kwargs_by_name"}
    unknown = sorted(set(options) - own)
    if unknown:
        raise TypeError(f"{name} has no option {', '.join(map(repr, unknown))}; it has {', '.join(sorted(own))}")
    if isinstance(options.get("betas"), list):  # from JSON
        options = {**options, "betas": tuple(options["betas"])}
    given = {key: options[key] for key in groups.HYPERPARAMETERS[name] if options.get(key) is not None}
    param_groups = [_group(group, name, given) for group in config.param_groups]
    changed = [group for group, old in zip(param_groups, config.param_groups, strict=True) if group is not old]
    if config.param_groups and not changed:
        names = sorted({group.optimizer_name for group in config.param_groups})
        raise ValueError(
            f"no parameter group to give to {name}: the config has {names}, and Adam and AdamW are replaced"
        )
    from_adam = any(group.optimizer_name in _REPLACED for group in config.param_groups)
    if from_adam and "lr" not in given and not name.startswith("FlashAdam"):
        raise ValueError(
            f"{name} needs an lr of its own, and the config's are for Adam and AdamW: add one to the override in "
            '--override.imports, as in ={"lr": 1e-4}'
        )
    hidden = sorted({group.optimizer_name for group in config.param_groups if group.optimizer_name in _REPLACED})
    for other in hidden:
        if config.optimizer_factory_kwargs_by_name.get(other):
            raise ValueError(
                f"the config has options of {other} in optimizer_factory_kwargs_by_name, which {name} would lose; put "
                "them into the optimizer_kwargs of its param_groups"
            )
    theirs = config.implementation
    result: FlashOptimizersContainer.Config = derive(
        config,
        FlashOptimizersContainer.Config,
        **{
            **options,
            "optimizer_name": name,
            "param_groups": param_groups,
            "implementation": "fused" if theirs == "fused_opt_states_bf16" else theirs,
        },
    )
    return result


def _group(group: ParamGroupConfig, name: str, given: dict[str, Any]) -> ParamGroupConfig:
    """Return a group of Adam or AdamW as one of ours, with all its hyperparameters; others' groups as they are."""
    if group.optimizer_name == name:
        kwargs = {**group.optimizer_kwargs, **given}
        return ParamGroupConfig(pattern=group.pattern, optimizer_name=name, optimizer_kwargs=kwargs)
    replaced = _REPLACED.get(group.optimizer_name)
    if replaced is None:
        return group
    defaults = groups.constructor_defaults(replaced)
    kept = {**{key: defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}, **group.optimizer_kwargs}
    for switch in ("fused", "foreach", "capturable"):
        kept.pop(switch, None)
    if not name.startswith("FlashAdam"):
        kept = {key: kept[key] for key in _KEPT_BY_ALL if key in kept}
    return ParamGroupConfig(pattern=group.pattern, optimizer_name=name, optimizer_kwargs={**kept, **given})
