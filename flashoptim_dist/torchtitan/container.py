"""torchtitan 0.3's optimizer container with the optimizers of this library in it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.tools.logging import logger

from flashoptim_dist.formats import canonical_name
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.checks import check_switch
from flashoptim_dist.torchtitan import groups
from flashoptim_dist.torchtitan.flat_state import flat_state, load_flat_state
from flashoptim_dist.torchtitan.precision import describe_fp32_weights

FlashName = Literal["FlashAdamW", "FlashAdam", "FlashLion", "FlashSGDW", "FlashSGD"]


def _check_release(base: type) -> None:
    """Refuse a torchtitan that makes its optimizers in another way, in which our names would not be asked for."""
    missing = [name for name in ("_resolve_optimizer_factory", "_build_param_groups") if not hasattr(base, name)]
    if missing:
        raise ImportError(
            f"torchtitan's OptimizersContainer has no {missing[0]}; this adapter is made for torchtitan 0.3: "
            "pip install 'torchtitan>=0.3,<0.4'"
        )


_check_release(OptimizersContainer)


class _ByCanonicalName:
    """A model's parameters by the names that checkpoints have, without those of activation checkpointing's wrappers.

    torchtitan matches patterns with the wrappers' names in between, where ``layers.0.attention`` matches nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._model.named_parameters():
            yield canonical_name(name), parameter


class FlashOptimizersContainer(OptimizersContainer):
    """``OptimizersContainer`` whose groups may name this library's optimizers beside torchtitan's own.

    Its state dictionary is torchtitan's flat one, in compressed form and with the format record; see ``flat_state``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """All options of the optimizers.

        ``param_groups`` may stay empty. Parameters that none of its patterns claims go to ``optimizer_name`` with the
        options below. A group of that optimizer takes what it leaves out from them, too; a group of another one takes
        only the options of the number format from here and has to give its own lr.
        """

        optimizer_name: FlashName = "FlashAdamW"
        """Optimizer of all parameters that no entry of param_groups claims."""

        lr: float = 3e-4
        """Learning rate."""

        betas: tuple[float, float] | None = None
        """Decay rates of the moments. None: (0.9, 0.95) for FlashAdamW, as in torchtitan's configs, (0.9, 0.999) for
        FlashAdam, (0.9, 0.99) for FlashLion."""

        eps: float | None = None
        """Added to Adam's denominator. None: 1e-8."""

        weight_decay: float | None = None
        """Weight decay: decoupled, but for FlashAdam and FlashSGD (L2). None: 0.1 for FlashAdamW, as in torchtitan's
        configs, 0 for the others."""

        momentum: float | None = None
        """Momentum of FlashSGD and FlashSGDW. None: 0, which keeps no moments."""

        dampening: float | None = None
        """Dampening of SGD's momentum. None: 0."""

        nesterov: bool | None = None
        """Nesterov momentum for SGD. None: no."""

        maximize: bool = False
        """Ascend instead of descend."""

        decouple_lr: bool = False
        """Decay by 1 - weight_decay * lr / initial lr instead of 1 - weight_decay * lr (FlashAdamW, FlashLion,
        FlashSGDW)."""

        decay_norms_and_embeddings: bool = True
        """False: weight_decay 0 for norms, biases and embeddings, by their names, in the groups of this library's
        optimizers and of Adam and AdamW."""

        no_decay: list[str] = field(default_factory=list)
        """Regular expressions; parameters whose names they match have weight_decay 0, in any group of this library's
        optimizers and of Adam and AdamW."""

        master_weight_bits: Literal[24, 32] | None = 24
        """Bits of the master weight of a 16-bit parameter: 24 (1 byte of correction), 32 (2 bytes), None (none). fp32
        parameters need no correction: see --training.dtype."""

        quantize: bool = True
        """False keeps the moments in fp32."""

        rounding: Literal["stochastic", "nearest"] = "stochastic"
        """How moments and master weights are rounded."""

        seed: int = 0
        """Seed of the stochastic rounding; results depend on it, never on the number of ranks."""

        check_numerics: bool = False
        """Count the updates that are too small to change a weight: container.optimizers[i].numerics_report()."""

        offload_states: bool = False
        """Keep the states in pinned host memory and stream them through the step."""

        def __post_init__(self) -> None:
            if self.implementation == "fused_opt_states_bf16":
                raise ValueError(
                    "optimizer.implementation='fused_opt_states_bf16' makes torchtitan's own bf16 states, which are "
                    "not those of this library; use 'fused'"
                )
            _check_types(self)
            groups.hyperparameters(self.optimizer_name, _hyperparameters(self))
            groups.instance_options(self.optimizer_name, _all_options(self))
            groups.check_patterns("no_decay", self.no_decay)
            _check_param_groups(self.param_groups)
            groups.check_patterns("param_groups", [group.pattern for group in self.param_groups])

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Build the optimizers of all model parts, as torchtitan does.

        Raises:
            ValueError: an option or a group that an optimizer does not take, by name.
        """
        config.__post_init__()  # options may have been set after the config was made
        self._config = config
        super().__init__(config, model_parts=model_parts)
        names = [name for one in self.optimizers for group in one.param_groups for name in group["param_names"]]
        for pattern in config.no_decay:
            if not any(re.search(pattern, name) for name in names):
                logger.warning(f"optimizer.no_decay: {pattern!r} matches no parameter of this rank's model parts")
        ours = [optimizer for optimizer in self.optimizers if isinstance(optimizer, FlashOptimizer)]
        text = describe_fp32_weights(ours)
        if text:
            logger.info(text)

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., torch.optim.Optimizer]:
        optimizer = groups.FLASH_OPTIMIZERS.get(name)
        if optimizer is None:
            factory: Callable[..., torch.optim.Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
            return factory
        options = _all_options(self._config)
        if name not in groups.DECOUPLED:
            options["decouple_lr"] = False  # it is meant for the config's own optimizer, which knows it
        return functools.partial(optimizer, **groups.instance_options(name, options))

    def _build_param_groups(
        self, model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        configs = [_completed(group, self._config) for group in param_group_configs]
        rest = ParamGroupConfig(
            pattern=".*",
            optimizer_name=self._config.optimizer_name,
            optimizer_kwargs=groups.hyperparameters(self._config.optimizer_name, _hyperparameters(self._config)),
        )
        named: Any = _ByCanonicalName(model)
        names = [name for name, parameter in named.named_parameters() if parameter.requires_grad]
        if len(configs) in groups.matched_first(names, [group.pattern for group in [*configs, rest]]):
            configs.append(rest)
        built, patterns = OptimizersContainer._build_param_groups(named, configs, impl_kwargs)
        undecayed = [*self._config.no_decay]
        if not self._config.decay_norms_and_embeddings:
            undecayed += groups.NO_DECAY_PATTERNS
        result: dict[str, list[dict[str, Any]]] = {}
        result_patterns: dict[str, list[str]] = {}
        for name, of_optimizer in built.items():
            takes_decay = name in groups.FLASH_OPTIMIZERS or name in ("Adam", "AdamW")
            for group, pattern in zip(of_optimizer, patterns[name], strict=True):
                parts = groups.without_decay(group, undecayed if takes_decay else ())
                result.setdefault(name, []).extend(parts)
                result_patterns.setdefault(name, []).extend([pattern] * len(parts))
        return result, result_patterns

    def state_dict(self) -> dict[str, Any]:
        """Return the flat state of all optimizers: ours by ``flat_state``, others as torchtitan has it."""
        result: dict[str, Any] = {}
        for optimizer in self.optimizers:
            if isinstance(optimizer, FlashOptimizer):
                result.update(flat_state(optimizer))
            else:
                init_optim_state(optimizer)
                result.update(get_flat_optim_state_dict(optimizer))
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a flat state into all optimizers. What other optimizers' entries it holds is passed over.

        Raises:
            ValueError: it was saved in another form than this run's, or by another kind of optimizer.
        """
        for optimizer in self.optimizers:
            if isinstance(optimizer, FlashOptimizer):
                optimizer.init_state()  # what is live tells which entries to look for
                initial = [group.get("initial_lr") for group in optimizer.param_groups]
                load_flat_state(optimizer, state_dict)
                for group, own in zip(optimizer.param_groups, initial, strict=True):
                    _follow_own_schedule(group, own)
            else:
                init_optim_state(optimizer)
                load_flat_optim_state_dict(optimizer, state_dict)


def _follow_own_schedule(group: dict[str, Any], initial_lr: float | None) -> None:
    """Scale a loaded group's lr to the run's initial one, which torchtitan's schedulers go by, whatever was saved.

    ``decouple_lr`` divides by the initial lr, which therefore has to be that of the schedule.
    """
    saved = group.get("initial_lr")
    if initial_lr is None or saved is None or float(saved) == float(initial_lr):
        return
    if saved:
        group["lr"] = group["lr"] * (initial_lr / saved)
    group["initial_lr"] = initial_lr


def _check_types(config: FlashOptimizersContainer.Config) -> None:
    """Refuse what the optimizers themselves never see, or would take for their own default."""
    if config.optimizer_name not in groups.FLASH_OPTIMIZERS:
        raise ValueError(
            f"optimizer.optimizer_name is {config.optimizer_name!r}, and must be one of "
            f"{', '.join(groups.FLASH_OPTIMIZERS)}; torch's own are for param_groups"
        )
    if config.lr is None:
        raise ValueError("optimizer.lr is None, and must be a number")
    switch = "decay_norms_and_embeddings"
    check_switch({switch: config.decay_norms_and_embeddings}, switch, "optimizer.")
    ours = [name for name in config.optimizer_factory_kwargs_by_name if name in groups.FLASH_OPTIMIZERS]
    if ours:
        raise ValueError(
            f"optimizer.optimizer_factory_kwargs_by_name has arguments of {ours[0]}, which come from the config: give "
            "the options of the config itself, or the optimizer_kwargs of a group in param_groups"
        )


def _check_param_groups(param_groups: Any) -> None:
    if not isinstance(param_groups, list | tuple) or not all(isinstance(one, ParamGroupConfig) for one in param_groups):
        raise ValueError(f"optimizer.param_groups must be a list of ParamGroupConfig, got {param_groups!r}")
    for group in param_groups:
        if not isinstance(group.optimizer_kwargs, dict):
            raise ValueError(
                f"optimizer.param_groups: the optimizer_kwargs of the group {group.pattern!r} must be a dictionary, "
                f"got {group.optimizer_kwargs!r}"
            )


def _hyperparameters(config: FlashOptimizersContainer.Config) -> dict[str, Any]:
    names = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")
    return {**{name: getattr(config, name) for name in names}, "maximize": config.maximize or None}


def _all_options(config: FlashOptimizersContainer.Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in (*groups.INSTANCE_OPTIONS, "decouple_lr")}


def _completed(group: ParamGroupConfig, config: FlashOptimizersContainer.Config) -> ParamGroupConfig:
    """Return a group with what it takes from the config's own options."""
    if group.optimizer_name not in groups.FLASH_OPTIMIZERS:
        return group
    given = dict(group.optimizer_kwargs)
    known = (*groups.HYPERPARAMETERS[group.optimizer_name], *FlashOptimizer.group_options, *groups.TORCH_SWITCHES)
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(
            f"optimizer.param_groups: the group {group.pattern!r} has {unknown[0]!r} in its optimizer_kwargs, which "
            f"{group.optimizer_name} does not know; it knows {', '.join(known)}"
        )
    if group.optimizer_name == config.optimizer_name:
        given = {**groups.hyperparameters(group.optimizer_name, _hyperparameters(config)), **given}
    elif "lr" not in given:
        raise ValueError(
            f"optimizer.param_groups: the group {group.pattern!r} of {group.optimizer_name} needs an lr in its "
            f"optimizer_kwargs; those of the config are {config.optimizer_name}'s"
        )
    return ParamGroupConfig(pattern=group.pattern, optimizer_name=group.optimizer_name, optimizer_kwargs=given)
