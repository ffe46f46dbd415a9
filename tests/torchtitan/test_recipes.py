"""The recipes as torchtitan's command line sees them; no training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from tests.torchtitan import device
from tests.torchtitan.models import make_model

pytestmark = pytest.mark.full

RECIPES = "flashoptim_dist.torchtitan.recipes"
SIZES = {
    "llama3_debug_flash": ("debugmodel", 8e-4),
    "llama3_1b_flash": ("1B", 3e-4),
    "llama3_8b_flash": ("8B", 3e-4),
    "llama3_70b_flash": ("70B", 1.5e-4),
    "moe_debug_flash": ("debugmodel", 8e-4),
}


def _parse(*arguments: str) -> Any:
    with device.as_device():
        from torchtitan.config import ConfigManager
    return ConfigManager().parse_args(["--module", *arguments])


@pytest.mark.parametrize("name", SIZES)
def test_recipe(name: str) -> None:
    from flashoptim_dist.torchtitan import FlashTrainer

    config = _parse(RECIPES, "--config", name)
    flavor, lr = SIZES[name]
    assert isinstance(config, FlashTrainer.Config)
    assert config.model_spec.flavor == flavor
    assert config.training.dtype == "bfloat16"
    assert isinstance(config.optimizer, device.FlashOptimizersContainer.Config)
    assert isinstance(config.checkpoint, device.FlashCheckpointManager.Config)
    assert (config.optimizer.optimizer_name, config.optimizer.lr, config.optimizer.param_groups) == (
        "FlashAdamW",
        lr,
        [],
    )


@pytest.mark.parametrize(
    "given, expected",
    [
        ([], {"lr": 8e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}),
        (
            ["--optimizer.lr", "1e-5", "--optimizer.betas", "0.5", "0.6", "--optimizer.weight_decay", "0.01"],
            {"lr": 1e-5, "betas": (0.5, 0.6), "weight_decay": 0.01, "eps": 1e-8},
        ),
        (["--optimizer.optimizer_name", "FlashLion", "--optimizer.lr", "1e-5"], {"lr": 1e-5, "betas": (0.9, 0.99)}),
    ],
    ids=["none", "adamw", "lion"],
)
def test_what_is_set_on_the_command_line_holds(given: list[str], expected: dict[str, Any]) -> None:
    config = _parse(RECIPES, "--config", "llama3_debug_flash", *given)
    [optimizer] = config.optimizer.build(model_parts=[make_model()])
    [group] = optimizer.param_groups
    assert {key: group[key] for key in expected} == expected


def test_options_are_typed_and_can_be_set() -> None:
    config = _parse(
        RECIPES, "--config", "llama3_debug_flash",
        "--optimizer.master_weight_bits", "32", "--optimizer.rounding", "nearest", "--optimizer.no-quantize",
        "--optimizer.no_decay", "norm,bias", "--gradient_release.enable", "--training.disable_cuda_graphs",
        "--checkpoint.no-export_master_weights",
    )  # fmt: skip
    assert (config.optimizer.master_weight_bits, config.optimizer.rounding) == (32, "nearest")
    assert (config.optimizer.quantize, config.optimizer.no_decay) == (False, ["norm", "bias"])
    assert config.gradient_release.enable
    assert not config.checkpoint.export_master_weights


def test_the_override_on_the_command_line_of_torchtitans_own_config() -> None:
    override = 'flashoptim_dist.torchtitan.flash_adamw={"lr": 3e-4}'
    config = _parse("llama3", "--config", "llama3_8b", "--training.dtype", "bfloat16", "--override.imports", override)
    device.apply_overrides(config.override, config)
    assert isinstance(config.optimizer, device.FlashOptimizersContainer.Config)
    [group] = config.optimizer.param_groups
    assert group.optimizer_kwargs == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(RECIPES, "--config", "llama3_debug_flash", "--help")
    text = capsys.readouterr().out.replace("-", "_")
    for option in (
        "optimizer_name", "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize",
        "decouple_lr", "decay_norms_and_embeddings", "no_decay", "master_weight_bits", "quantize", "rounding", "seed",
        "check_numerics", "offload_states",
    ):  # fmt: skip
        assert f"optimizer.{option}" in text, option
    assert "gradient_release.clipping" in text
    assert "export_master_weights" in text


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what is printed as the command line is refused, without frame and line breaks."""
    with pytest.raises(SystemExit) as refused:
        _parse(RECIPES, "--config", "moe_debug_flash", "--gradient_release.enable", *arguments)
    assert refused.value.code == 2
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())


def test_gradient_release_needs_cuda_graphs_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --training.disable_cuda_graphs" in _refusal(capsys)


@pytest.mark.parametrize("degree", ["pipeline_parallel_degree", "expert_parallel_degree"])
def test_gradient_release_refuses_what_it_was_not_made_for(capsys: pytest.CaptureFixture[str], degree: str) -> None:
    text = _refusal(capsys, "--training.disable_cuda_graphs", f"--parallelism.{degree}", "2")
    assert f"gradient_release.enable is not supported with parallelism.{degree} > 1" in text


def test_gradient_release_refuses_tied_weights_under_a_loss_in_chunks() -> None:
    with device.as_device():
        from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

        from flashoptim_dist.torchtitan import recipes, trainer
    config = recipes.with_flash_adamw(qwen3_debugmodel())
    config.training.disable_cuda_graphs = config.gradient_release.enable = True
    assert config.model_spec.model.enable_weight_tying
    with pytest.raises(ValueError, match=r"tied embedding .*ChunkedLossWrapper.* set config\.loss to its loss_fn"):
        trainer._check(config)
    chunked, config.loss = config.loss, config.loss.loss_fn
    trainer._check(config)
    config.loss, config.model_spec.model.enable_weight_tying = chunked, False
    trainer._check(config)


@pytest.mark.parametrize("name, value", [("clipping", "Global"), ("enable", "false")])
def test_wrong_options_of_gradient_release_are_refused(name: str, value: str) -> None:
    """Neither of the two may be taken for another: a norm that nobody clips, release that nobody asked for."""
    with device.as_device():
        from flashoptim_dist.torchtitan import recipes, trainer
    config = recipes.llama3_debug_flash()
    setattr(config.gradient_release, name, value)
    with pytest.raises(ValueError, match=rf"gradient_release\.{name} .*'{value}'"):
        trainer._check(config)


def test_a_config_for_another_trainer_is_refused() -> None:
    with device.as_device():
        from torchtitan.trainer import Trainer

        from flashoptim_dist.torchtitan import recipes

    class OtherTrainer(Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

    with pytest.raises(TypeError, match=r"OtherTrainer\.Config, whose own doings .*torchtitan\.flash_adamw"):
        recipes.with_flash_adamw(OtherTrainer.Config())
