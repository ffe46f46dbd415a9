"""The adapter of torchtitan 0.2.2: importing this module adds the model ``llama3_flash``, which is ``llama3`` with this
library's optimizers.

    torchrun ... -m torchtitan.train --model.name llama3_flash --training.dtype bfloat16 \\
        --experimental.custom_import flashoptim_dist.torchtitan.v0_2

``--optimizer.name`` keeps torchtitan's names, AdamW and Adam, and knows FlashLion, FlashSGDW and FlashSGD too. With
``--job.custom_config_module flashoptim_dist.torchtitan.v0_2`` the options of :class:`Optimizer` are options of the job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.protocols.train_spec import TrainSpec, _extra_train_specs, get_train_spec, register_train_spec
from torchtitan.tools.logging import logger

from flashoptim_dist.formats import canonical_name
from flashoptim_dist.optim import FlashOptimizer
from flashoptim_dist.torchtitan import groups
from flashoptim_dist.torchtitan.flat_state import flat_state, load_flat_state
from flashoptim_dist.torchtitan.precision import describe_fp32_weights
from flashoptim_dist.torchtitan.v0_2_config import JobConfig, Optimizer

__all__ = [
    "MODEL_NAME",
    "FlashOptimizersContainer",
    "JobConfig",
    "Optimizer",
    "build_flash_optimizers",
    "with_flash",
]

MODEL_NAME = "llama3_flash"

_FLASH_NAMES = {"AdamW": "FlashAdamW", "Adam": "FlashAdam"}


class FlashOptimizersContainer(OptimizersContainer):
    """``OptimizersContainer`` of this library's optimizers, one for each model part.

    Its state dictionary is torchtitan's flat one, in compressed form and with the format record; see ``flat_state``.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[FlashOptimizer],
        optimizer_kwargs: dict[str, Any],
        no_decay: Iterable[str] = (),
    ) -> None:
        """Make the optimizers.

        Args:
            model_parts: the model, or this rank's parts of it.
            optimizer_cls: one of this library's classes.
            optimizer_kwargs: its arguments beside the parameters.
            no_decay: regular expressions on parameter names: these have weight_decay 0.
        """
        patterns = list(no_decay)
        self.model_parts = model_parts
        self.optimizers = []
        everything: list[nn.Parameter] = []
        for model in model_parts:
            named = [(canonical_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
            whole = {
                "params": [parameter for _, parameter in named],
                "param_names": [name for name, _ in named],
                "weight_decay": optimizer_kwargs.get("weight_decay", 0.0),
            }
            made: Any = optimizer_cls
            self.optimizers.append(made(groups.without_decay(whole, patterns), **optimizer_kwargs))
            everything.extend(whole["params"])
        self._validate_length(len(model_parts))
        self._post_init(everything, optimizer_kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step all optimizers.

        Tensor parallelism without FSDP leaves gradients that are placed otherwise than their parameters (replicated,
        where the embedding is sharded). torch's optimizers redistribute them in passing; so does this, for which all
        ranks must call.
        """
        # Not by the parent's step(): its wrapper would run the hooks of this container a second time.
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
            optimizer.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the flat state of all optimizers; every trainable parameter has state then. No communication."""
        return {key: value for optimizer in self.optimizers for key, value in flat_state(optimizer).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a flat state. No communication.

        Raises:
            ValueError: it was saved in another form than this run's, or by another kind of optimizer.
        """
        for optimizer in self.optimizers:
            optimizer.init_state()  # what is live tells which entries to look for
            load_flat_state(optimizer, state_dict)


def build_flash_optimizers(
    model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: Any, ft_manager: Any = None
) -> FlashOptimizersContainer:
    """Build the optimizers of all model parts from torchtitan's ``[optimizer]`` section; a ``build_optimizers_fn``.

    Args:
        model_parts: the model, or this rank's parts of it, after parallelization.
        optimizer_config: torchtitan's; the options of :class:`Optimizer` have their defaults where it lacks them.
        parallel_dims: unused: parameters say how they are placed.
        ft_manager: torchft's, which must be off.

    Raises:
        ValueError: an option that the optimizer does not have.
        NotImplementedError: early_step_in_backward, or torchft.
    """
    if optimizer_config.early_step_in_backward:
        raise NotImplementedError(
            "optimizer.early_step_in_backward is there for torchtitan's own optimizers alone: leave it out. This "
            "library's gradient release (docs/training-loop.md) needs a training loop of its own"
        )
    if ft_manager is not None and ft_manager.enabled:
        raise NotImplementedError(
            "torchft keeps copies of torch's own optimizers' states: leave fault_tolerance.enable out"
        )
    name = _FLASH_NAMES.get(optimizer_config.name, optimizer_config.name)
    if name not in groups.FLASH_OPTIMIZERS:
        known = ", ".join([*_FLASH_NAMES, *groups.FLASH_OPTIMIZERS])
        raise ValueError(f"optimizer.name is {name!r}, and must be one of {known}")
    options = Optimizer(
        **{
            option.name: getattr(optimizer_config, option.name)
            for option in dataclasses.fields(Optimizer)
            if hasattr(optimizer_config, option.name)
        }
    )
    groups.check_patterns("no_decay", options.no_decay)
    patterns = list(options.no_decay)
    if not options.decay_norms_and_embeddings:
        patterns += groups.NO_DECAY_PATTERNS
    container = FlashOptimizersContainer(
        model_parts,
        groups.FLASH_OPTIMIZERS[name],
        {
            **groups.hyperparameters(name, _hyperparameters(name, optimizer_config, options)),
            **groups.instance_options(name, dataclasses.asdict(options)),
        },
        patterns,
    )
    text = describe_fp32_weights(container.optimizers)
    if text:
        logger.info(text)
    return container


def with_flash(spec: TrainSpec) -> TrainSpec:
    """Return a train spec with this library's optimizers in it, to register under another name.

    Raises:
        ValueError: the spec builds its optimizers in a way of its own (mixture-of-experts models balance their experts
            in there), which would be lost.
    """
    if spec.build_optimizers_fn is not build_optimizers:
        raise ValueError(
            f"this model's train spec builds its optimizers by {spec.build_optimizers_fn.__name__}, whose other work "
            "would be lost; torchtitan 0.3 has an adapter without that limit"
        )
    return dataclasses.replace(spec, build_optimizers_fn=build_flash_optimizers)


def _hyperparameters(name: str, config: Any, options: Optimizer) -> dict[str, Any]:
    """Return torchtitan's and our hyperparameters as far as this optimizer has them.

    torchtitan's config has values of Adam's for all; ours that are not the defaults must be ones that it knows.
    """
    theirs = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    ours = {key: getattr(options, key) or None for key in ("momentum", "dampening", "nesterov", "maximize")}
    known = groups.HYPERPARAMETERS[name]
    return {**{key: value for key, value in theirs.items() if key in known}, **ours}


if MODEL_NAME not in _extra_train_specs:
    register_train_spec(MODEL_NAME, with_flash(get_train_spec("llama3")))
