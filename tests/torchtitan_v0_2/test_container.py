"""The adapter of torchtitan 0.2.2: typed options, groups, the schedule, the line on fp32 weights, what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import flashoptim_dist as fod
from tests.torchtitan_v0_2.device import (
    ConfigManager,
    OptimizersContainer,
    TheirOptimizer,
    build_lr_schedulers,
    build_optimizers_with_moe_load_balancing,
    train_spec,
    v0_2,
)

JOB = ("--model.name", "llama3_flash", "--experimental.custom_import", "flashoptim_dist.torchtitan.v0_2")
TYPED = (*JOB, "--job.custom_config_module", "flashoptim_dist.torchtitan.v0_2")


def _model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    layers = {"tok_embeddings": nn.Embedding(10, 64), "w1": nn.Linear(64, 32), "ffn_norm": nn.LayerNorm(32)}
    return nn.ModuleDict(layers).to(dtype)


def _config(*arguments: str) -> Any:
    return ConfigManager().parse_args([*TYPED, *arguments])


def _build(*arguments: str, model: nn.Module | None = None) -> Any:
    return v0_2.build_flash_optimizers([model or _model()], _config(*arguments).optimizer, None)


def test_importing_the_module_adds_the_model() -> None:
    spec = train_spec.get_train_spec(ConfigManager().parse_args(list(JOB)).model.name)
    plain = train_spec.get_train_spec("llama3")
    assert spec.build_optimizers_fn is v0_2.build_flash_optimizers
    assert spec.model_cls is plain.model_cls
    assert spec.state_dict_adapter is plain.state_dict_adapter


def test_without_the_typed_options_these_have_their_defaults() -> None:
    container = v0_2.build_flash_optimizers([_model()], TheirOptimizer(lr=1e-4), None)
    [optimizer] = container.optimizers
    assert isinstance(container, OptimizersContainer)
    assert isinstance(optimizer, fod.FlashAdamW)
    [group] = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-4, (0.9, 0.95), 1e-8, 0.1)
    assert group["param_names"] == [name for name, _ in _model().named_parameters()]
    spec = optimizer.format_spec()
    assert (spec["master_weight_bits"], spec["quantize"], spec["rounding"], spec["seed"]) == (24, True, "stochastic", 0)


def test_every_option_arrives() -> None:
    given = (
        "--optimizer.lr 1e-3 --optimizer.beta1 0.8 --optimizer.beta2 0.99 --optimizer.eps 1e-6 "
        "--optimizer.weight_decay 0.2 --optimizer.master_weight_bits 32 --optimizer.no-quantize "
        "--optimizer.rounding nearest --optimizer.seed 7 --optimizer.maximize --optimizer.decouple_lr "
        "--optimizer.check_numerics --optimizer.offload_states"
    )
    [optimizer] = _build(*given.split()).optimizers
    [group] = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.8, 0.99), 1e-6, 0.2)
    assert group["maximize"] is True
    spec = optimizer.format_spec()
    assert (spec["master_weight_bits"], spec["quantize"], spec["rounding"], spec["seed"]) == (32, False, "nearest", 7)
    assert optimizer._options["decouple_lr"] is True
    assert optimizer._options["offload_states"] is True
    assert str(optimizer.numerics_report())
    assert _build("--optimizer.master_weight_bits", "None").optimizers[0].format_spec()["master_weight_bits"] is None


def test_help_shows_every_option_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _config("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--optimizer.master-weight-bits {None,24,32} Bits of the master weight of a 16-bit parameter" in shown
    assert "--optimizer.rounding {stochastic,nearest} How moments and master weights are rounded" in shown
    with pytest.raises(SystemExit):
        _config("--optimizer.rounding", "up")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("AdamW", fod.FlashAdamW), ("Adam", fod.FlashAdam), ("FlashLion", fod.FlashLion), ("FlashSGDW", fod.FlashSGDW)],
)
def test_all_optimizers_are_there(name: str, kind: type) -> None:
    [optimizer] = _build("--optimizer.name", name).optimizers
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == 8e-4


def test_norms_and_embeddings_go_without_decay_where_asked() -> None:
    def decays(*arguments: str) -> dict[str, float]:
        [optimizer] = _build(*arguments).optimizers
        return {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}

    assert set(decays().values()) == {0.1}
    found = decays("--optimizer.no-decay-norms-and-embeddings")
    assert [name for name, decay in found.items() if decay] == ["w1.weight"]
    assert [name for name, decay in decays("--optimizer.no_decay", "w1,bias").items() if decay] == [
        "tok_embeddings.weight",
        "ffn_norm.weight",
    ]


def test_the_schedule_sets_the_learning_rate_of_every_group() -> None:
    config = _config("--optimizer.no-decay-norms-and-embeddings", "--lr_scheduler.warmup_steps", "4")
    model = _model()
    container = v0_2.build_flash_optimizers([model], config.optimizer, None)
    schedulers = build_lr_schedulers(container, config.lr_scheduler, 10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    container.step()
    schedulers.step()
    assert [group["lr"] for group in container.optimizers[0].param_groups] == [pytest.approx(8e-4 * 2 / 4)] * 2
    container.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_names_are_those_of_the_model_without_wrappers() -> None:
    model = _model()
    model["w1"] = nn.ModuleDict({"_checkpoint_wrapped_module": model["w1"]})
    container = _build(model=model)
    assert "w1.weight" in container.optimizers[0].param_groups[0]["param_names"]
    assert "state.w1.weight.exp_avg_scale" in container.state_dict()


def test_a_state_loads_bit_for_bit_and_what_was_saved_otherwise_is_refused() -> None:
    model = _model()
    container = _build(model=model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    container.step()
    saved = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in container.state_dict().items()
    }
    other = _build(model=_model())
    other.load_state_dict(saved)
    for key, value in other.state_dict().items():
        assert torch.equal(value, saved[key]) if isinstance(value, torch.Tensor) else value == saved[key]
    with pytest.raises(ValueError, match=r"'error_bits' of parameter 'tok_embeddings\.weight' is int8"):
        _build("--optimizer.master_weight_bits", "32").load_state_dict(saved)
    with pytest.raises(ValueError, match="was saved by FlashAdamW, and FlashLion keeps another one"):
        _build("--optimizer.name", "FlashLion").load_state_dict(saved)


def test_one_line_says_what_fp32_weights_cost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _build(model=_model(torch.float32))
        _build(model=_model())
    [line] = [record.getMessage() for record in caplog.records if "fp32" in record.getMessage()]
    assert "--training.dtype bfloat16" in line
    assert "bytes per parameter" in line


def test_what_it_can_not_do_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"optimizer\.early_step_in_backward"):
        _build("--optimizer.early_step_in_backward")
    with pytest.raises(NotImplementedError, match=r"fault_tolerance\.enable"):
        v0_2.build_flash_optimizers([_model()], _config().optimizer, None, SimpleNamespace(enabled=True))
    with pytest.raises(ValueError, match=r"optimizer\.name is 'Muon'.*FlashLion"):
        _build("--optimizer.name", "Muon")
    with pytest.raises(ValueError, match="FlashAdamW has no momentum"):
        _build("--optimizer.momentum", "0.9")
    with pytest.raises(ValueError, match=r"optimizer\.no_decay: '\(' is no regular expression"):
        _build("--optimizer.no_decay", "(")
    config = _config()
    config.optimizer.no_decay = "norm"  # as TOML may have it
    with pytest.raises(ValueError, match="no_decay must be a list of regular expressions, got 'norm'"):
        v0_2.build_flash_optimizers([_model()], config.optimizer, None)
    spec = SimpleNamespace(build_optimizers_fn=build_optimizers_with_moe_load_balancing)
    with pytest.raises(ValueError, match="build_optimizers_with_moe_load_balancing"):
        v0_2.with_flash(spec)
