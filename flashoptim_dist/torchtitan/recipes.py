"""Ready configs for torchtitan 0.3 with this library's optimizers; names that move between its releases stay in here.

torchrun ... -m torchtitan.train --module flashoptim_dist.torchtitan.recipes --config llama3_8b_flash
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import derive
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3 import model_registry as llama3_models
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_70b, llama3_debugmodel

from flashoptim_dist.torchtitan import groups
from flashoptim_dist.torchtitan.container import FlashOptimizersContainer
from flashoptim_dist.torchtitan.overrides import check_plain, export_master_weights, flash_adamw
from flashoptim_dist.torchtitan.trainer import FlashTrainer


def with_flash_adamw(config: Any, **options: Any) -> FlashTrainer.Config:
    """Return a torchtitan config with FlashAdamW, bf16 weights, export of master weights, and gradient release at hand.

    Args:
        config: of any model; its learning rate, betas, decay, parallelism and data stay.
        options: fields of ``FlashOptimizersContainer.Config`` to set.

    Raises:
        TypeError: the config is for a trainer of its own, whose doings would be lost.
    """
    check_plain(
        config,
        FlashTrainer.Config,
        "the config",
        "FlashTrainer would end: keep it, and add --training.dtype bfloat16 and --override.imports "
        "flashoptim_dist.torchtitan.flash_adamw flashoptim_dist.torchtitan.export_master_weights",
    )
    checkpoint = config.checkpoint
    if isinstance(checkpoint, CheckpointManager.Config):
        checkpoint = export_master_weights(checkpoint)
    result: FlashTrainer.Config = derive(
        config,
        FlashTrainer.Config,
        optimizer=_with_options_of_its_own(flash_adamw(config.optimizer, **options)),
        checkpoint=checkpoint,
        training=dataclasses.replace(config.training, dtype="bfloat16"),
    )
    return result


def _with_options_of_its_own(config: FlashOptimizersContainer.Config) -> FlashOptimizersContainer.Config:
    """Make the options of a last group, which takes all the rest, the config's own, which the command line sets."""
    last = config.param_groups[-1] if config.param_groups else None
    name = config.optimizer_name
    if last is None or (last.pattern, last.optimizer_name) != (".*", name):
        return config
    if not set(last.optimizer_kwargs) <= set(groups.HYPERPARAMETERS[name]):
        return config
    # What is the default anyway stays None, so that another optimizer_name finds nothing that it does not know.
    defaults = groups.constructor_defaults(groups.FLASH_OPTIMIZERS[name]) | groups.TORCHTITAN_DEFAULTS.get(name, {})
    chosen = {key: value for key, value in last.optimizer_kwargs.items() if key == "lr" or defaults[key] != value}
    result: FlashOptimizersContainer.Config = derive(
        config, FlashOptimizersContainer.Config, param_groups=config.param_groups[:-1], **chosen
    )
    return result


def llama3_debug_flash() -> FlashTrainer.Config:
    """The Llama 3 debug model of 6 million parameters."""
    return with_flash_adamw(llama3_debugmodel())


def llama3_1b_flash() -> FlashTrainer.Config:
    """Llama 3.2 1B: torchtitan's options for 8B, with the smaller model."""
    config = llama3_8b()
    spec = llama3_models("1B")
    config.model_spec = spec
    config.hf_assets_path = "./assets/hf/Llama-3.2-1B"
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)))
    return with_flash_adamw(config)


def llama3_8b_flash() -> FlashTrainer.Config:
    """Llama 3.1 8B."""
    return with_flash_adamw(llama3_8b())


def llama3_70b_flash() -> FlashTrainer.Config:
    """Llama 3.1 70B, tensor parallel over 8."""
    return with_flash_adamw(llama3_70b())


def moe_debug_flash() -> FlashTrainer.Config:
    """The DeepSeek V3 debug model: mixture of experts, latent attention."""
    return with_flash_adamw(deepseek_v3_debugmodel())
