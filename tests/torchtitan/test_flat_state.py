"""The flat state: what it holds, round trips through DCP in one process, and what it refuses."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from flashoptim_dist.formats import FORMAT_VERSION
from tests.torchtitan.device import ParamGroupConfig, flat_state, load_flat_state
from tests.torchtitan.models import (
    assert_equal,
    container,
    make_model,
    schedulers,
    set_gradients,
    snapshot,
    train,
)


def _save(path: Path, model: Any, optimizers: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP: no process group
        dcp.save({**model.state_dict(), "optimizer": optimizers}, checkpoint_id=path, no_dist=True)


def _load(path: Path, model: Any, optimizers: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no process group|.*single process")
        state = {**model.state_dict(), "optimizer": optimizers}
        dcp.load(state, checkpoint_id=path, no_dist=True)


def _trained(steps: int = 3, seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    model = make_model(seed=seed)
    optimizers = container(model, **options)
    scheduler = schedulers(optimizers)
    train(model, optimizers, scheduler, 0, steps)
    return model, optimizers, scheduler


MIXED: dict[str, Any] = {
    "decay_norms_and_embeddings": False,
    "param_groups": [
        ParamGroupConfig(pattern=r"\.w1\.", optimizer_name="FlashLion", optimizer_kwargs={"lr": 1e-4}),
        ParamGroupConfig(pattern="lm_head", optimizer_name="AdamW", optimizer_kwargs={"lr": 2e-4}),
        ParamGroupConfig(
            pattern=r"\.w2\.", optimizer_name="FlashAdamW", optimizer_kwargs={"lr": 1e-3, "master_weight_bits": 32}
        ),
    ],
}


def test_it_is_compressed_and_spelled_as_torchtitans() -> None:
    _, optimizers, _ = _trained()
    flat = optimizers.state_dict()
    name = "layers.0.w1.weight"
    dtypes = {key.rpartition(".")[2]: flat[key].dtype for key in flat if key.startswith(f"state.{name}.")}
    assert dtypes == {
        "step": torch.float32,
        "exp_avg": torch.int8,
        "exp_avg_scale": torch.bfloat16,
        "exp_avg_sq": torch.uint8,
        "exp_avg_sq_scale": torch.bfloat16,
        "error_bits": torch.int8,
    }
    assert flat[f"param_groups.{name}.betas"] == (0.9, 0.95)
    record = json.loads(flat[f"format.{name}"])
    assert (record["name"], record["version"], record["optimizer"]) == ("fd1", FORMAT_VERSION, "FlashAdamW")
    assert record["entries"]["exp_avg"] == "int8"


def test_our_options_stay_out_of_the_saved_groups() -> None:
    _, plain, _ = _trained()
    _, optimizers, _ = _trained(**MIXED)
    keys = {key.rpartition(".")[2] for key in optimizers.state_dict() if key.startswith("param_groups.layers.0.w2.")}
    assert keys == {key.rpartition(".")[2] for key in plain.state_dict() if key.startswith("param_groups.layers.0.w2.")}
    assert keys >= {"lr", "betas", "eps", "weight_decay", "initial_lr"}
    assert not keys & {"master_weight_bits", "quantize", "rounding", "seed", "decouple_lr", "param_names"}
    record = json.loads(optimizers.state_dict()["format.layers.0.w2.weight"])
    assert (record["master_weight_bits"], record["entries"]["error_bits"]) == (32, "int16")


@pytest.mark.parametrize(
    "options", [{}, {"master_weight_bits": 32, "quantize": False}, MIXED], ids=["24", "32", "mixed"]
)
def test_resume_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizers, scheduler = _trained(3, **options)
    _save(tmp_path, model, optimizers)
    schedule = scheduler.state_dict()
    train(model, optimizers, scheduler, 3, 6)
    model2 = make_model(seed=5)
    optimizers2 = container(model2, **options)
    scheduler2 = schedulers(optimizers2)
    _load(tmp_path, model2, optimizers2)
    scheduler2.load_state_dict(schedule)
    train(model2, optimizers2, scheduler2, 3, 6)
    assert_equal(snapshot(model, optimizers), snapshot(model2, optimizers2))


def test_states_are_read_into_the_live_tensors_and_keep_their_dtypes(tmp_path: Path) -> None:
    model, optimizers, _ = _trained()
    _save(tmp_path, model, optimizers)
    model2 = make_model(seed=5)
    optimizers2 = container(model2)
    schedulers(optimizers2)
    optimizers2.state_dict()
    [optimizer] = optimizers2.optimizers
    before = {key: value for key, value in optimizers2.state_dict().items() if isinstance(value, Tensor)}
    _load(tmp_path, model2, optimizers2)
    after = {key: value for key, value in optimizers2.state_dict().items() if isinstance(value, Tensor)}
    assert {key: value.data_ptr() for key, value in before.items()} == {k: v.data_ptr() for k, v in after.items()}
    assert {key: value.dtype for key, value in after.items() if "exp_avg_sq" in key} == {
        key: torch.bfloat16 if "scale" in key else torch.uint8 if optimizer.state[p]["exp_avg"].dtype == torch.int8
        else torch.float32
        for name, p in model2.named_parameters()
        for key in after if key.startswith(f"state.{name}.exp_avg_sq")
    }  # fmt: skip
    assert_equal(snapshot(model, optimizers), snapshot(model2, optimizers2))


def test_loading_into_a_run_that_has_trained_takes_the_saved_state(tmp_path: Path) -> None:
    model, optimizers, _ = _trained(3)
    _save(tmp_path, model, optimizers)
    saved = snapshot(model, optimizers)
    model2, optimizers2, _ = _trained(5, seed=9)
    with torch.no_grad():
        model2.lm_head.weight.add_(1.0)  # its correction is stale now
    _load(tmp_path, model2, optimizers2)
    assert_equal(saved, snapshot(model2, optimizers2))


def test_a_container_that_was_never_asked_for_its_state_loads_one() -> None:
    model, optimizers, _ = _trained()
    state = {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizers.state_dict().items()
    }
    fresh = make_model(seed=0)
    fresh.load_state_dict(model.state_dict())
    loaded = container(fresh)
    schedulers(loaded)  # which adds to the groups, as it did to the other
    loaded.load_state_dict(state)
    assert_equal(snapshot(model, optimizers), snapshot(fresh, loaded))


def test_asking_for_the_state_is_no_step() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = container(model)
    flat = optimizers.state_dict()
    assert {float(value) for key, value in flat.items() if key.endswith(".step")} == {0.0}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_parameters_that_come_into_use_late_begin_at_step_0(tmp_path: Path) -> None:
    """Saved before they had a gradient, loaded, then used: their first step is the first."""
    model = make_model()
    optimizers = container(model)
    late = model.layers["1"].w2.weight
    for step in range(2):
        set_gradients(model, step)
        late.grad = None
        optimizers.step()
    _save(tmp_path, model, optimizers)
    model2 = make_model(seed=3)
    optimizers2 = container(model2)
    _load(tmp_path, model2, optimizers2)
    set_gradients(model2, 2)
    optimizers2.step()
    flat = optimizers2.state_dict()
    assert float(flat["state.layers.1.w2.weight.step"]) == 1.0
    assert float(flat["state.layers.1.w1.weight.step"]) == 3.0
    # The same without a checkpoint in between.
    set_gradients(model, 2)
    optimizers.step()
    assert_equal(snapshot(model, optimizers), snapshot(model2, optimizers2))


def test_state_is_complete_even_while_gradients_are_there() -> None:
    """torchtitan makes no state then; with CUDA graphs gradients are never freed."""
    model = make_model()
    optimizers = container(model)
    set_gradients(model, 0)
    flat = optimizers.state_dict()
    assert "state.lm_head.weight.exp_avg" in flat
    assert model.lm_head.weight.grad is not None


def test_options_a_state_lacks_stay_as_they_are() -> None:
    _, optimizers, _ = _trained()
    [optimizer] = optimizers.optimizers
    flat = {key: value for key, value in optimizers.state_dict().items() if not key.endswith(".maximize")}
    model = make_model()
    [fresh] = container(model, maximize=True).optimizers
    fresh.init_state()
    load_flat_state(fresh, flat)
    assert fresh.param_groups[0]["maximize"] is True
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_checkpoints_load_over_another_grouping(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizers, _ = _trained()
    _save(tmp_path, model, optimizers)
    model2 = make_model(seed=3)
    optimizers2 = container(model2, decay_norms_and_embeddings=False, no_decay=["w2"])
    schedulers(optimizers2)
    _load(tmp_path, model2, optimizers2)
    assert_equal(snapshot(model, optimizers), snapshot(model2, optimizers2))
    warned = [record.getMessage() for record in caplog.records if "checkpoint's holds" in record.getMessage()]
    assert [text.partition(" parameters")[0] for text in warned] == ["weight_decay of 8"]
    assert "is 0.1 in the checkpoint and 0.0 in this run" in warned[0]


def test_another_learning_rate_on_resume_is_the_initial_one_of_decouple_lr(tmp_path: Path) -> None:
    """torchtitan's schedulers go by the run's; the checkpoint's initial one would make the decay ten times as much."""
    model, optimizers, scheduler = _trained(3, lr=1e-3, decouple_lr=True, weight_decay=1e-2)
    _save(tmp_path, model, optimizers)
    model2 = make_model(seed=3)
    optimizers2 = container(model2, lr=1e-2, decouple_lr=True, weight_decay=1e-2)
    scheduler2 = schedulers(optimizers2)
    _load(tmp_path, model2, optimizers2)
    scheduler2.load_state_dict(scheduler.state_dict())
    [before], [after] = optimizers.optimizers, optimizers2.optimizers
    for step in (3, 4):
        assert after.param_groups[0]["lr"] == pytest.approx(10.0 * before.param_groups[0]["lr"])
        assert after.param_groups[0]["lr"] * after._decay_rate(0) == pytest.approx(
            before.param_groups[0]["lr"] * before._decay_rate(0)
        )
        train(model, optimizers, scheduler, step, step + 1)
        train(model2, optimizers2, scheduler2, step, step + 1)


def test_a_group_that_was_several_keeps_its_own_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first of its parameters had no decay, which must not become that of all."""
    model, optimizers, _ = _trained(decay_norms_and_embeddings=False)
    _save(tmp_path, model, optimizers)
    model2 = make_model(seed=3)
    optimizers2 = container(model2)
    schedulers(optimizers2)
    _load(tmp_path, model2, optimizers2)
    [group] = optimizers2.optimizers[0].param_groups
    assert group["weight_decay"] == 0.1
    assert group["lr"] == optimizers.optimizers[0].param_groups[0]["lr"]  # what all were saved with
    warned = [record.getMessage() for record in caplog.records if "saved in several" in record.getMessage()]
    assert len(warned) == 1
    assert "with weight_decay 0.0 and 0.1: this run's weight_decay 0.1 holds" in warned[0]


@pytest.mark.parametrize("given", [[0.9, 0.95], (0.9, 0.95)])
def test_options_that_are_the_same_bring_no_warning(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, optimizers, _ = _trained(lr=1e-3)
    flat = {**optimizers.state_dict()}
    flat |= {key: given for key in flat if key.endswith(".betas")}
    [fresh] = container(make_model(), implementation="foreach").optimizers
    fresh.init_state()
    load_flat_state(fresh, flat)
    assert not caplog.records


@pytest.mark.parametrize(
    "dtype, options, message",
    [
        (torch.bfloat16, {"master_weight_bits": 32}, "'error_bits' .* is int8 in the checkpoint and int16 in this run"),
        (torch.float32, {}, "'error_bits' .* is int8 in the checkpoint and not kept in this run"),
        (torch.bfloat16, {"quantize": False}, "'exp_avg' .* is int8 in the checkpoint and float32 in this run"),
    ],
)
def test_state_of_another_form_is_refused_instead_of_cast(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any], message: str
) -> None:
    model, optimizers, _ = _trained()
    _save(tmp_path, model, optimizers)
    other = make_model(dtype)
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, other, container(other, **options))


def test_plain_adamw_and_ours_do_not_read_each_others_state(tmp_path: Path) -> None:
    """DCP misses keys, so that codes are never taken for fp32 moments."""
    plain: dict[str, Any] = {
        "param_groups": [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
    }
    model, optimizers, _ = _trained()
    _save(tmp_path / "ours", model, optimizers)
    model2, optimizers2, _ = _trained(**plain)
    _save(tmp_path / "theirs", model2, optimizers2)
    for name, options in (("ours", plain), ("theirs", {})):
        fresh = make_model()
        with pytest.raises(CheckpointException, match="Missing key in checkpoint"):
            _load(tmp_path / name, fresh, container(fresh, **options))


def test_another_kind_of_optimizer_is_named() -> None:
    _, optimizers, _ = _trained(optimizer_name="FlashSGDW", momentum=0.9)
    flat = optimizers.state_dict()
    [fresh] = container(make_model()).optimizers
    fresh.init_state()
    with pytest.raises(ValueError, match="saved by FlashSGDW, and FlashAdamW keeps another one"):
        load_flat_state(fresh, flat)


def test_adam_and_adamw_share_their_state() -> None:
    _, optimizers, _ = _trained(optimizer_name="FlashAdam")
    [fresh] = container(make_model()).optimizers
    load_flat_state(fresh, {**flat_state(fresh), **optimizers.state_dict()})
    assert float(fresh.state_dict()["state"][0]["step"]) == 3.0


def test_a_newer_format_is_refused() -> None:
    _, optimizers, _ = _trained()
    flat = optimizers.state_dict()
    for key in [key for key in flat if key.startswith("format.")]:
        flat[key] = json.dumps({**json.loads(flat[key]), "version": FORMAT_VERSION + 1})
    [fresh] = container(make_model()).optimizers
    fresh.init_state()
    with pytest.raises(ValueError, match="install a newer flashoptim_dist"):
        load_flat_state(fresh, flat)


def test_an_earlier_version_is_decoded_and_encoded_anew() -> None:
    """Version 1's codes mean other moments; without the record they would be taken for today's."""
    _, optimizers, _ = _trained()
    flat = dict(optimizers.state_dict())
    for key in [key for key in flat if key.startswith("format.")]:
        flat[key] = json.dumps({**json.loads(flat[key]), "version": 1})
    [fresh] = container(make_model()).optimizers
    fresh.init_state()
    with pytest.warns(UserWarning, match=f"version 1 to version {FORMAT_VERSION}"):
        load_flat_state(fresh, flat)
    name = "layers.0.w1.weight"
    codes = fresh.state_dict()["state"][fresh.param_groups[0]["param_names"].index(name)]["exp_avg_sq"]
    assert not torch.equal(codes, flat[f"state.{name}.exp_avg_sq"])
