"""The container: typed options, groups, mixed optimizers, the schedule, overrides, the line on fp32 weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flashoptim_dist import FlashAdamW, FlashLion, FlashSGDW
from tests.torchtitan.device import (
    CheckpointManager,
    Configurable,
    FlashCheckpointManager,
    FlashOptimizersContainer,
    OptimizersContainer,
    OverrideConfig,
    ParamGroupConfig,
    apply_overrides,
    default_adamw,
)
from tests.torchtitan.models import Model, container, make_model, schedulers, set_gradients, train


class Root(Configurable):
    """Stands for the trainer: overrides are applied to a tree of configs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: OptimizersContainer.Config = field(default_factory=lambda: default_adamw(lr=8e-4, eps=1e-7))
        checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)


def overridden(*imports: Any, optimizer: Any = None) -> Root.Config:
    root = Root.Config() if optimizer is None else Root.Config(optimizer=optimizer)
    apply_overrides(OverrideConfig(imports=list(imports)), root)
    return root


def groups_of(optimizers: Any) -> list[tuple[str, list[str], dict[str, Any]]]:
    return [(type(one).__name__, group["param_names"], group) for one in optimizers for group in one.param_groups]


def test_all_parameters_go_to_flash_adamw_with_torchtitans_hyperparameters() -> None:
    model = make_model()
    optimizers = container(model, lr=1e-3)
    [optimizer] = optimizers.optimizers
    assert isinstance(optimizer, FlashAdamW)
    [group] = optimizer.param_groups
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.95), 1e-8, 0.1)


def test_every_option_arrives() -> None:
    optimizers = container(
        make_model(), lr=2e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3, maximize=True, decouple_lr=True,
        master_weight_bits=32, quantize=False, rounding="nearest", seed=7, check_numerics=True, offload_states=True,
    )  # fmt: skip
    [optimizer] = optimizers.optimizers
    [group] = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-3, (0.8, 0.99), 1e-6, 0.3)
    assert group["maximize"] is True
    spec = optimizer.format_spec()
    assert (spec["master_weight_bits"], spec["quantize"], spec["rounding"], spec["seed"]) == (32, False, "nearest", 7)
    assert optimizer._options["decouple_lr"] is True
    assert optimizer._options["offload_states"] is True
    optimizer.numerics_report()  # raises without check_numerics


def test_norms_and_embeddings_without_decay_by_one_option() -> None:
    optimizers = container(make_model(), decay_norms_and_embeddings=False, no_decay=[r"layers\.1\.w2"])
    undecayed = {name for _, names, group in groups_of(optimizers) for name in names if group["weight_decay"] == 0.0}
    assert undecayed == {
        "tok_embeddings.weight", "norm.weight",
        "layers.0.attention_norm.weight", "layers.1.attention_norm.weight",
        "layers.0.w1.bias", "layers.1.w1.bias", "layers.1.w2.weight",
    }  # fmt: skip
    decays = {name: group["weight_decay"] for _, names, group in groups_of(optimizers) for name in names}
    assert decays["lm_head.weight"] == decays["layers.0.w1.weight"] == 0.1


def test_one_pattern_on_lion_one_on_plain_adamw_the_rest_on_flash_adamw() -> None:
    model = make_model()
    optimizers = container(
        model,
        master_weight_bits=32,
        param_groups=[
            ParamGroupConfig(pattern=r"\.w1\.", optimizer_name="FlashLion", optimizer_kwargs={"lr": 1e-4}),
            ParamGroupConfig(pattern="embeddings", optimizer_name="AdamW", optimizer_kwargs={"lr": 2e-4}),
            ParamGroupConfig(pattern=r"\.w2\.", optimizer_name="FlashAdamW", optimizer_kwargs={"lr": 5e-4}),
        ],
    )
    kinds = {type(one): one for one in optimizers}
    assert set(kinds) == {FlashLion, torch.optim.AdamW, FlashAdamW}
    assert kinds[FlashLion].param_groups[0]["betas"] == (0.9, 0.99)
    assert kinds[FlashLion].format_spec()["master_weight_bits"] == 32
    by_lr = {group["lr"]: group for group in kinds[FlashAdamW].param_groups}
    assert set(by_lr) == {5e-4, 3e-4}
    assert by_lr[5e-4]["weight_decay"] == 0.1  # what the group leaves out it takes from the config
    before = {name: value.clone() for name, value in model.state_dict().items()}
    set_gradients(model, 0)
    optimizers.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert moved >= {name for name in before if "norm" not in name}  # a bf16 1 does not move by 3e-4


def test_patterns_see_names_without_the_wrappers_of_activation_checkpointing() -> None:
    model = make_model()
    model.layers["0"] = checkpoint_wrapper(model.layers["0"])
    group = ParamGroupConfig(pattern=r"^layers\.0\.w2", optimizer_name="FlashLion", optimizer_kwargs={"lr": 1e-4})
    optimizers = container(model, param_groups=[group])
    assert [names for kind, names, _ in groups_of(optimizers) if kind == "FlashLion"] == [["layers.0.w2.weight"]]
    [parameter] = optimizers.optimizers[0].param_groups[0]["params"]
    assert parameter is model.layers["0"].w2.weight


def test_groups_that_take_everything_leave_no_rest() -> None:
    optimizers = container(
        make_model(),
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="FlashSGDW", optimizer_kwargs={"lr": 0.1})],
    )
    assert [type(one) for one in optimizers] == [FlashSGDW]


def test_decouple_lr_stays_with_those_that_know_it() -> None:
    group = ParamGroupConfig(pattern="norm", optimizer_name="FlashAdam", optimizer_kwargs={"lr": 0.1})
    optimizers = container(make_model(), decouple_lr=True, param_groups=[group])
    assert {type(one).__name__: one._options["decouple_lr"] for one in optimizers} == {
        "FlashAdam": False, "FlashAdamW": True
    }  # fmt: skip


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optimizer_name": "FlashLion", "eps": 1e-6}, "FlashLion has no eps"),
        ({"optimizer_name": "FlashSGD", "decouple_lr": True}, "FlashSGD has no decoupled weight decay"),
        ({"momentum": 0.9}, "FlashAdamW has no momentum"),
        ({"implementation": "fused_opt_states_bf16"}, "fused_opt_states_bf16"),
        ({"no_decay": ["norm", "("]}, r"no_decay: '\(' is no regular expression"),
        ({"no_decay": "norm"}, "no_decay must be a list of regular expressions, got 'norm'"),
        ({"no_decay": ["norm", 3]}, "no_decay must be a list"),
        ({"no_decay": ["norm", ""]}, "no_decay: an empty pattern matches every parameter"),
        (
            {"param_groups": [ParamGroupConfig(pattern="(", optimizer_name="AdamW")]},
            r"param_groups: '\(' is no regular",
        ),
        ({"decay_norms_and_embeddings": "false"}, "decay_norms_and_embeddings must be True or False, got 'false'"),
        ({"optimizer_name": "AdamW"}, "'AdamW', and must be one of FlashAdamW"),
        ({"lr": None}, "lr is None, and must be a number"),
        ({"param_groups": None}, "param_groups must be a list of ParamGroupConfig, got None"),
        ({"param_groups": [{"pattern": "norm"}]}, "param_groups must be a list of ParamGroupConfig"),
        (
            {"param_groups": [ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs=None)]},
            "optimizer_kwargs of the group 'norm' must be a dictionary, got None",
        ),
        (
            {"optimizer_factory_kwargs_by_name": {"FlashAdamW": {"compress_state_dict": False}}},
            "optimizer_factory_kwargs_by_name has arguments of FlashAdamW, which come from the config",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlashOptimizersContainer.Config(**options)


def test_options_set_after_the_config_was_made_are_checked_too() -> None:
    config = FlashOptimizersContainer.Config()
    config.no_decay = "norm"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no_decay must be a list"):
        config.build(model_parts=[make_model()])


def test_a_group_of_another_optimizer_needs_its_own_lr() -> None:
    group = ParamGroupConfig(pattern="norm", optimizer_name="FlashLion")
    with pytest.raises(ValueError, match="'norm' of FlashLion needs an lr"):
        container(make_model(), param_groups=[group])


def test_unknown_options_of_a_group_are_refused_by_name() -> None:
    group = ParamGroupConfig(pattern="norm", optimizer_name="FlashAdamW", optimizer_kwargs={"weight_deacy": 0.0})
    with pytest.raises(ValueError, match=r"'norm' has 'weight_deacy' .* it knows lr, betas"):
        container(make_model(), param_groups=[group])


def test_a_pattern_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        container(make_model(), no_decay=["nrom", "norm"])
    warned = [record.getMessage() for record in caplog.records if "no_decay" in record.getMessage()]
    assert warned == ["optimizer.no_decay: 'nrom' matches no parameter of this rank's model parts"]


def test_an_unknown_optimizer_is_torchtitans_error() -> None:
    group = ParamGroupConfig(pattern="norm", optimizer_name="Sophia", optimizer_kwargs={"lr": 1.0})
    with pytest.raises(NotImplementedError, match="Sophia"):
        container(make_model(), param_groups=[group])


def test_pipeline_parts_need_not_hold_every_group() -> None:
    parts = [make_model(), make_model(seed=1)]
    del parts[1].tok_embeddings, parts[0].lm_head
    config = FlashOptimizersContainer.Config(decay_norms_and_embeddings=False)
    optimizers = config.build(model_parts=parts)
    assert len(optimizers) == 2


def test_schedule_moves_all_optimizers() -> None:
    model = make_model()
    group = ParamGroupConfig(pattern="norm", optimizer_name="FlashLion", optimizer_kwargs={"lr": 1e-4})
    optimizers = container(model, lr=1e-3, param_groups=[group])
    scheduler = schedulers(optimizers)
    seen = []
    for step in range(4):
        seen.append([one.param_groups[0]["lr"] for one in optimizers])
        train(model, optimizers, scheduler, step, step + 1)
    assert seen[0] == pytest.approx([5e-5, 5e-4])  # the first of two steps of warmup
    assert seen[1] == pytest.approx([1e-4, 1e-3])
    assert seen[3][1] < seen[2][1]
    assert set(scheduler.get_metrics()) == {"lr/FlashLion", "lr/FlashAdamW"}


def test_step_pre_hooks_of_the_container_run() -> None:
    """torchtitan balances its experts in one."""
    model = make_model()
    optimizers = container(model)
    calls: list[int] = []
    optimizers.register_step_pre_hook(lambda *args: calls.append(1))
    set_gradients(model, 0)
    optimizers.step()
    assert calls == [1]


def test_gradients_that_are_kept_for_cuda_graphs_are_zeroed_in_place() -> None:
    model = make_model()
    optimizers = container(model)
    set_gradients(model, 0)
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    optimizers.step()
    optimizers.zero_grad(set_to_none=False)
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name]
        assert not parameter.grad.any()


def test_a_torchtitan_that_makes_its_optimizers_otherwise_is_refused() -> None:
    from flashoptim_dist.torchtitan import container as module

    with pytest.raises(ImportError, match=r"has no _resolve_optimizer_factory; .*torchtitan>=0\.3,<0\.4"):
        module._check_release(torch.optim.Optimizer)
    module._check_release(OptimizersContainer)


# ---------------------------------------------------------------------- overrides


def test_one_override_and_nothing_else() -> None:
    root = overridden(("flashoptim_dist.torchtitan.flash_adamw", {"lr": 3e-4, "master_weight_bits": 32}))
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    assert isinstance(optimizer, FlashAdamW)
    [group] = optimizer.param_groups
    # lr is the one given; the rest is the config's.
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.9, 0.95), 1e-7, 0.1)
    assert optimizer.format_spec()["master_weight_bits"] == 32


def test_override_without_arguments_keeps_the_learning_rate() -> None:
    root = overridden("flashoptim_dist.torchtitan.flash_adamw")
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    assert optimizer.param_groups[0]["lr"] == 8e-4


def test_override_keeps_groups_and_what_torch_sets_in_them() -> None:
    config = OptimizersContainer.Config(
        implementation="fused_opt_states_bf16",
        param_groups=[
            ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "fused": False}),
            ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3}),
        ],
    )
    root = overridden(
        ("flashoptim_dist.torchtitan.flash_adamw", {"betas": [0.8, 0.9], "decay_norms_and_embeddings": False}),
        optimizer=config,
    )
    assert root.optimizer.implementation == "fused"
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    rows = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rows == [
        (1e-2, (0.8, 0.9), 0.0),  # of the norms' group nothing decays; its decay was torch's AdamW's, 0.01
        (1e-3, (0.8, 0.9), 0.0),  # Adam's, 0
    ]


def test_lion_and_sgd_overrides_take_decay_but_not_betas() -> None:
    root = overridden(("flashoptim_dist.torchtitan.flash_lion", {"lr": 1e-4}))
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.99), 0.1)
    root = overridden(("flashoptim_dist.torchtitan.flash_sgdw", {"lr": 0.1, "momentum": 0.9}))
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    group = optimizer.param_groups[0]
    assert (type(optimizer), group["momentum"], group["weight_decay"]) == (FlashSGDW, 0.9, 0.1)
    root = overridden("flashoptim_dist.torchtitan.flash_adam")
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    assert type(optimizer).__name__ == "FlashAdam"


@pytest.mark.parametrize("name, kind", [("flash_lion", "FlashLion"), ("flash_sgdw", "FlashSGDW")])
def test_lion_and_sgd_overrides_do_not_go_on_with_adamws_learning_rate(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} needs an lr of its own, .*override.imports"):
        overridden(f"flashoptim_dist.torchtitan.{name}")
    ours = FlashOptimizersContainer.Config(optimizer_name=kind, lr=1e-4)  # type: ignore[arg-type]
    assert overridden(f"flashoptim_dist.torchtitan.{name}", optimizer=ours).optimizer.lr == 1e-4


def test_override_leaves_other_optimizers_groups_alone() -> None:
    config = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern="w1", optimizer_name="DistMuon", optimizer_kwargs={"lr": 1e-2}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}),
        ],
    )
    root = overridden("flashoptim_dist.torchtitan.flash_adamw", optimizer=config)
    assert [group.optimizer_name for group in root.optimizer.param_groups] == ["DistMuon", "FlashAdamW"]
    only_muon = OptimizersContainer.Config(param_groups=config.param_groups[:1])
    with pytest.raises(ValueError, match="DistMuon"):
        overridden("flashoptim_dist.torchtitan.flash_adamw", optimizer=only_muon)


def test_override_on_one_of_our_configs_sets_what_is_given() -> None:
    group = ParamGroupConfig(pattern="norm", optimizer_name="FlashAdamW", optimizer_kwargs={"weight_decay": 0.0})
    config = FlashOptimizersContainer.Config(lr=1e-2, seed=3, param_groups=[group])
    root = overridden(("flashoptim_dist.torchtitan.flash_adamw", {"lr": 1e-3}), optimizer=config)
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-3, 0.0), (1e-3, 0.1)]
    assert optimizer.format_spec()["seed"] == 3


def test_override_refuses_to_make_another_optimizer_of_one_of_ours() -> None:
    with pytest.raises(ValueError, match=r"for FlashAdamW already, .* --optimizer\.optimizer_name FlashLion"):
        overridden(
            ("flashoptim_dist.torchtitan.flash_lion", {"lr": 1e-4}), optimizer=FlashOptimizersContainer.Config(lr=1e-3)
        )


def test_override_refuses_unknown_options_by_name() -> None:
    with pytest.raises(TypeError, match=r"'learning_rate'.*lr"):
        overridden(("flashoptim_dist.torchtitan.flash_adamw", {"learning_rate": 1.0}))


def test_export_override_keeps_the_options() -> None:
    config = Root.Config(checkpoint=CheckpointManager.Config(interval=123, keep_latest_k=3))
    apply_overrides(OverrideConfig(imports=["flashoptim_dist.torchtitan.export_master_weights"]), config)
    assert isinstance(config.checkpoint, FlashCheckpointManager.Config)
    assert (config.checkpoint.interval, config.checkpoint.keep_latest_k) == (123, 3)
    assert config.checkpoint.export_master_weights


def test_export_override_refuses_a_manager_with_doings_of_its_own() -> None:
    class OtherManager(CheckpointManager):
        @dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):
            pass

    config = Root.Config(checkpoint=OtherManager.Config())
    with pytest.raises(TypeError, match=r"OtherManager\.Config, whose own doings the export"):
        apply_overrides(OverrideConfig(imports=["flashoptim_dist.torchtitan.export_master_weights"]), config)


# ---------------------------------------------------------------------- fp32 weights


def _built_with(dtype: torch.dtype, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    with caplog.at_level(logging.INFO):
        container(make_model(dtype), **options)
    return "\n".join(record.getMessage() for record in caplog.records if "fp32" in record.getMessage())


def test_fp32_weights_train_and_one_line_says_what_they_cost(caplog: pytest.LogCaptureFixture) -> None:
    text = _built_with(torch.float32, caplog)
    assert text.count("\n") == 0
    assert "all weights are fp32" in text
    assert "--training.dtype bfloat16" in text
    model: Model = make_model(torch.float32)
    optimizers = container(model)
    set_gradients(model, 0)
    optimizers.step()
    [optimizer] = optimizers.optimizers
    state = optimizer.state
    held = sum(4 * p.numel() + sum(v.nbytes for k, v in state[p].items() if k != "step") for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert f"{held / count:.2f} bytes per parameter" in text


def test_fp32_line_predicts_what_bf16_weights_cost(caplog: pytest.LogCaptureFixture) -> None:
    text = _built_with(torch.float32, caplog, master_weight_bits=32)
    model = make_model()
    optimizers = container(model, master_weight_bits=32)
    set_gradients(model, 0)
    optimizers.step()
    [optimizer] = optimizers.optimizers
    state = optimizer.state
    held = sum(p.nbytes + sum(v.nbytes for k, v in state[p].items() if k != "step") for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert f"these are {held / count:.2f} and 2, at 32-bit master weights" in text


def test_bf16_weights_bring_no_such_line(caplog: pytest.LogCaptureFixture) -> None:
    assert _built_with(torch.bfloat16, caplog) == ""


# ---------------------------------------------------------------------- what an override would lose


def test_an_override_refuses_a_container_with_doings_of_its_own() -> None:
    class OtherContainer(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            pass

    with pytest.raises(TypeError, match=r"OtherContainer\.Config, whose own doings FlashAdamW would end"):
        overridden("flashoptim_dist.torchtitan.flash_adamw", optimizer=OtherContainer.Config())


def test_an_override_refuses_options_that_stand_outside_of_groups() -> None:
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
    config = OptimizersContainer.Config(
        param_groups=[group], optimizer_factory_kwargs_by_name={"AdamW": {"weight_decay": 0.7}}
    )
    with pytest.raises(ValueError, match="options of AdamW in optimizer_factory_kwargs_by_name"):
        overridden("flashoptim_dist.torchtitan.flash_adamw", optimizer=config)


def test_lion_in_place_of_adamw_still_ascends() -> None:
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "maximize": True})
    config = OptimizersContainer.Config(param_groups=[group])
    root = overridden(("flashoptim_dist.torchtitan.flash_lion", {"lr": 1e-4}), optimizer=config)
    [optimizer] = root.optimizer.build(model_parts=[make_model()])
    assert optimizer.param_groups[0]["maximize"] is True
