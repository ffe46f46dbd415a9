"""``load_state_dict``: matching, placing, converting, and refusing without a change."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flashoptim_dist import FlashAdamW
from flashoptim_dist.formats import encode_moments, from_groups, merge, to_groups
from tests import pool
from tests.numbers import assert_same_bits
from tests.optim.cases import KINDS_OF_PARAMETERS, Case, whole, whole_state
from tests.pool import run_ranks


class Model(nn.Module):
    """One parameter per case, by the case's name."""

    def __init__(self, cases: tuple[Case, ...] = KINDS_OF_PARAMETERS) -> None:
        super().__init__()
        for case in cases:
            self.register_parameter(case.name, nn.Parameter(case.weight()))


def set_gradients(model: nn.Module, step: int) -> None:
    for case in KINDS_OF_PARAMETERS:
        model.get_parameter(case.name).grad = case.gradient(step)


def trained(optimizer_type: Any = FlashAdamW, steps: int = 3, **options: Any) -> tuple[Model, Any]:
    model = Model()
    optimizer = optimizer_type(model.named_parameters(), lr=1e-2, **options)
    continue_training(model, optimizer, range(1, steps + 1))
    return model, optimizer


def continue_training(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def assert_same_training(model: nn.Module, optimizer: Any, other_model: nn.Module, other: Any) -> None:
    for name, parameter in model.named_parameters():
        states = whole_state(optimizer, parameter), whole_state(other, other_model.get_parameter(name))
        assert states[0].keys() == states[1].keys()
        for entry in states[0]:
            assert_same_bits(states[1][entry], states[0][entry], f"{entry} of {name}")


def fresh_copy(model: nn.Module, **options: Any) -> tuple[Model, FlashAdamW]:
    other = Model()
    other.load_state_dict(model.state_dict())
    return other, FlashAdamW(other.named_parameters(), lr=0.5, **options)


# ---------------------------------------------------------------------------------------------- matching


def test_loading_goes_on_as_if_uninterrupted() -> None:
    model, optimizer = trained()
    other_model, other = fresh_copy(model)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 1e-2
    assert_same_training(model, optimizer, other_model, other)
    for each in ((model, optimizer), (other_model, other)):
        continue_training(*each, range(4, 7))
    assert_same_training(model, optimizer, other_model, other)


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_parameters_are_matched_by_name(wrapper: str) -> None:
    model, optimizer = trained()
    other_model, _ = fresh_copy(model)
    other = FlashAdamW([(wrapper + n, p) for n, p in reversed(list(other_model.named_parameters()))], lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == [wrapper + case.name for case in reversed(KINDS_OF_PARAMETERS)]
    assert_same_training(model, optimizer, other_model, other)
    for each in ((model, optimizer), (other_model, other)):
        continue_training(*each, range(4, 6))
    assert_same_training(model, optimizer, other_model, other)


def test_parameters_without_names_are_matched_by_order() -> None:
    model = Model()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2)
    continue_training(model, optimizer, range(1, 3))
    other_model, _ = fresh_copy(model)
    other = FlashAdamW(other_model.parameters(), lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert_same_training(model, optimizer, other_model, other)
    # A saved state with names, loaded where there are none, and the other way round.
    for source, target in ((trained()[1], other), (other, trained()[1])):
        target.load_state_dict(source.state_dict())
        assert ("param_names" in target.param_groups[0]) == (target is not other)


def test_names_that_stand_as_ids_are_matched_by_name() -> None:
    """What ``get_optimizer_state_dict`` returns, given to ``load_state_dict`` directly, in another order."""
    model, optimizer = trained()
    other_model, _ = fresh_copy(model)
    other = FlashAdamW(list(other_model.named_parameters())[::-1], lr=1e-2)
    other.load_state_dict(get_optimizer_state_dict(model, optimizer))
    assert_same_training(model, optimizer, other_model, other)


def test_groups_keep_their_own_hyperparameters() -> None:
    def build() -> tuple[Model, FlashAdamW]:
        model = Model()
        named = list(model.named_parameters())
        groups = [
            {"params": named[:2], "lr": 1e-2, "weight_decay": 0.0},
            {"params": named[2:], "rounding": "nearest", "master_weight_bits": 32, "seed": 3},
        ]
        return model, FlashAdamW(groups, lr=1e-3)

    model, optimizer = build()
    continue_training(model, optimizer, range(1, 3))
    other_model, other = build()
    other.param_groups[0]["lr"] = 7.0
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [1e-2, 1e-3]
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 1e-2]
    assert other.state[other_model.fp16]["error_bits"].dtype == torch.int16
    assert other.state[other_model.matrix]["error_bits"].dtype == torch.int8
    for each in ((model, optimizer), (other_model, other)):
        continue_training(*each, range(3, 5))
    assert_same_training(model, optimizer, other_model, other)


# ---------------------------------------------------------------------------------------------- torch's own states


@pytest.mark.parametrize("way", ["load_state_dict", "nested", "flattened"])
def test_a_state_of_torchs_adamw_is_quantized_on_the_way_in(way: str) -> None:
    """With all its group keys, fused and foreach among them; flashoptim's mixed dtypes (A5) are no trap here."""
    model, optimizer = trained(torch.optim.AdamW, foreach=True)
    other_model, other = fresh_copy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "load_state_dict":
            other.load_state_dict(optimizer.state_dict())
        else:
            options = StateDictOptions(flatten_optimizer_state_dict=way == "flattened")
            state = get_optimizer_state_dict(model, optimizer, options=options)
            set_optimizer_state_dict(other_model, other, state, options=options)
    assert other.param_groups[0]["lr"] == 1e-2
    for case in KINDS_OF_PARAMETERS:
        saved = optimizer.state[model.get_parameter(case.name)]
        loaded = other.state[other_model.get_parameter(case.name)]
        assert loaded["step"].item() == 3.0
        names = ("exp_avg", "exp_avg_sq")
        values = [saved[name].to(torch.float32) for name in names]
        if case.name == "vector":
            for name, value in zip(names, values, strict=True):
                assert_same_bits(loaded[name], value, name)
            continue
        rows = values[0].reshape(case.shape[0], -1)
        encoded = encode_moments([to_groups(value.reshape(rows.shape)) for value in values], [True, False])
        for name, (codes, scales) in zip(names, encoded, strict=True):
            assert_same_bits(loaded[name], from_groups(codes, *rows.shape).reshape(case.shape).contiguous(), name)
            assert_same_bits(loaded[name + "_scale"].flatten(), scales, name)
        if case.name != "fp32":
            assert not loaded["error_bits"].any()
    continue_training(other_model, other, range(4, 5))
    assert all(other.state[parameter]["step"].item() == 4.0 for parameter in other_model.parameters())


@pytest.mark.parametrize("key", ["foreach", "fused", "capturable", "decoupled_weight_decay", "anything"])
def test_foreign_group_keys_are_kept_and_ignored(key: str) -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    state["param_groups"][0][key] = False
    other_model, other = fresh_copy(model)
    other.load_state_dict(state)
    for each in ((model, optimizer), (other_model, other)):
        continue_training(*each, range(4, 5))
    assert_same_training(model, optimizer, other_model, other)


def test_our_group_keys_are_those_of_torch() -> None:
    """So that a plain AdamW's saved groups have all that a flattened load asks for; options of ours stay outside."""
    model, optimizer = trained()
    theirs = torch.optim.AdamW(model.named_parameters())
    assert optimizer.param_groups[0].keys() <= theirs.param_groups[0].keys()


# ---------------------------------------------------------------------------------------------- other options


def converted(source: dict[str, Any], target: dict[str, Any]) -> tuple[Model, Any, Model, Any, list[str]]:
    model, optimizer = trained(**source)
    other_model, other = fresh_copy(model, **target)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(optimizer.state_dict())
    return model, optimizer, other_model, other, [str(w.message) for w in caught]


def master(optimizer: Any, parameter: Tensor) -> Tensor:
    return merge(parameter.detach(), optimizer.state[parameter].get("error_bits"))


def test_wider_corrections_keep_every_master() -> None:
    model, optimizer, other_model, other, said = converted({}, {"master_weight_bits": 32})
    assert len(said) == 1
    assert "corrections of 8 bits to 16 (3x)" in said[0] or "corrections of 8 bits to 16 (4x)" in said[0]
    for name, parameter in model.named_parameters():
        assert_same_bits(master(other, other_model.get_parameter(name)), master(optimizer, parameter), name)


def test_narrower_corrections_round_every_master_to_nearest() -> None:
    model, optimizer, other_model, other, said = converted({"master_weight_bits": 32}, {})
    assert len(said) == 1
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32:
            continue
        wide = optimizer.state[parameter]["error_bits"].to(torch.int32)
        narrow = other.state[other_model.get_parameter(name)]["error_bits"].to(torch.int32)
        error = (narrow * 256 - wide).abs()
        assert bool(((error <= 128) | (narrow == 127)).all())
        assert int(error.max()) < 256


def test_moments_go_to_fp32_and_back_unchanged() -> None:
    """8-bit to fp32 decodes exactly; back, every code but those of a group whose top code is below 127 is kept."""
    model, optimizer, other_model, other, said = converted({}, {"quantize": False})
    assert any("8-bit moments to fp32" in text for text in said)
    state = other.state[other_model.matrix]
    assert "exp_avg_scale" not in state
    assert state["exp_avg"].dtype == torch.float32
    back_model, back = fresh_copy(other_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back.load_state_dict(other.state_dict())
    codes, again = optimizer.state[model.matrix]["exp_avg"], back.state[back_model.matrix]["exp_avg"]
    assert int((codes.to(torch.int32) - again.to(torch.int32)).abs().max()) <= 1
    assert_same_bits(back.state[back_model.matrix]["error_bits"], optimizer.state[model.matrix]["error_bits"])


def test_without_masters_corrections_are_left_out() -> None:
    _, _, other_model, other, said = converted({}, {"master_weight_bits": None})
    assert any("weights with a correction to weights without" in text for text in said)
    assert all("error_bits" not in other.state[parameter] for parameter in other_model.parameters())
    continue_training(other_model, other, range(4, 5))


def test_the_same_options_convert_nothing() -> None:
    assert converted({}, {})[4] == []


# ---------------------------------------------------------------------------------------------- refusals


def state_of_matrix(state: dict[str, Any]) -> dict[str, Any]:
    entries: dict[str, Any] = state["state"][0]
    return entries


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "codes without scales": (
        lambda s: state_of_matrix(s).pop("exp_avg_scale"),
        r"'exp_avg' of parameter 'matrix' was saved as torch.int8 and 'exp_avg_scale' is missing",
    ),
    "codes of another dtype": (
        lambda s: state_of_matrix(s).update(exp_avg=state_of_matrix(s)["exp_avg"].view(torch.uint8)),
        r"'exp_avg' of parameter 'matrix' was saved as torch.uint8, and this number format has torch.int8",
    ),
    "codes cast to floats": (
        lambda s: state_of_matrix(s).update(exp_avg=state_of_matrix(s)["exp_avg"].to(torch.bfloat16)),
        r"'exp_avg' of parameter 'matrix' was saved as torch.bfloat16",
    ),
    "scales of another dtype": (
        lambda s: state_of_matrix(s).update(exp_avg_sq_scale=state_of_matrix(s)["exp_avg_sq_scale"].half()),
        r"'exp_avg_sq_scale' of parameter 'matrix' was saved as torch.float16",
    ),
    "corrections of another dtype": (
        lambda s: state_of_matrix(s).update(error_bits=state_of_matrix(s)["error_bits"].float()),
        r"'error_bits' of parameter 'matrix' was saved as torch.float32",
    ),
    "a moment of another shape": (
        lambda s: state_of_matrix(s).update(exp_avg=state_of_matrix(s)["exp_avg"].t()),
        r"'exp_avg' of parameter 'matrix' has shape \(40, 6\) and needs \(6, 40\)",
    ),
    "scales of another shape": (
        lambda s: state_of_matrix(s).update(exp_avg_scale=torch.ones(6, 1, dtype=torch.bfloat16)),
        r"'exp_avg_scale' of parameter 'matrix' has shape \(6, 1\) and needs \(6, 2\)",
    ),
    "no tensor": (
        lambda s: state_of_matrix(s).update(exp_avg="lost"),
        r"'exp_avg' of parameter 'matrix' is no tensor but str",
    ),
    "a moment missing": (
        lambda s: [state_of_matrix(s).pop(name) for name in ("exp_avg_sq", "exp_avg_sq_scale")],
        r"parameter 'matrix' holds .* saved by another kind of optimizer",
    ),
    "entries of another optimizer": (
        lambda s: state_of_matrix(s).update(max_exp_avg_sq=torch.ones(6, 40)),
        r"parameter 'matrix' holds .*'max_exp_avg_sq'.* FlashAdamW keeps",
    ),
    "another name": (
        lambda s: s["param_groups"][0].update(param_names=["other", *s["param_groups"][0]["param_names"][1:]]),
        r"no parameter named 'matrix'",
    ),
    "more parameters": (
        lambda s: s["param_groups"][0]["params"].append(5),
        r"parameter group 0 of the state has 6 parameters and this optimizer's has 5",
    ),
    "more groups": (
        lambda s: s["param_groups"].append({"params": []}),
        r"the state has 2 parameter groups and this optimizer 1",
    ),
    "amsgrad": (lambda s: s["param_groups"][0].update(amsgrad=True), r"parameter group 0 of the state: amsgrad"),
    "another format": (lambda s: s["format"].update(name="fd9"), r"number format 'fd9'"),
    "a later format": (lambda s: s["format"].update(version=99), r"version 99.*newer flashoptim_dist"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_by_name_and_nothing_changed(what: str) -> None:
    spoil, message = REFUSALS[what]
    _, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    spoil(state)
    other_model, other = trained(steps=2)
    before = {name: whole_state(other, parameter) for name, parameter in other_model.named_parameters()}
    groups = copy.deepcopy(other.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    for name, parameter in other_model.named_parameters():
        for entry, value in whole_state(other, parameter).items():
            assert_same_bits(value, before[name][entry], f"{entry} of {name}")
    assert other.state_dict()["param_groups"] == groups


# ---------------------------------------------------------------------------------------------- hooks, copies


def test_torchs_load_hooks_run() -> None:
    model, optimizer = trained()
    other_model, other = fresh_copy(model)
    seen: list[str] = []

    def pre(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("pre")
        state["param_groups"][0] = {**state["param_groups"][0], "lr": 0.25}
        return state

    other.register_load_state_dict_pre_hook(pre)
    other.register_load_state_dict_post_hook(lambda _: seen.append("post"))
    saved = optimizer.state_dict()
    other.load_state_dict(state_dict=saved)  # torch's checkpoint helpers pass it by keyword
    assert seen == ["pre", "post"]
    assert other.param_groups[0]["lr"] == 0.25
    assert_same_training(model, optimizer, other_model, other)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_train_on_alike(way: str) -> None:
    """Model and optimizer copied together, so that the copy's optimizer steps the copy's parameters."""
    pair = trained(seed=5, rounding="stochastic")
    clone = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert clone[1].state.keys() == set(clone[0].parameters())
    for each in (pair, clone):
        for parameter in each[0].parameters():
            parameter.grad_dtype = None
        continue_training(*each, range(4, 6))
    assert_same_training(*pair, *clone)
    assert clone[1].format_spec() == pair[1].format_spec()
    untouched = copy.deepcopy(FlashAdamW(Model().named_parameters()))
    assert not untouched.state


# ---------------------------------------------------------------------------------------------- onto shards


SHARDED = Case("matrix", (7, 128))


def load_onto(form: str) -> list[dict[str, Tensor]]:
    """A state in some form, into a parameter cut by columns; gathered, with the state that it came from."""
    plain = SHARDED.parameter()
    source = FlashAdamW([("matrix", plain)], lr=1e-2)
    for step in (1, 2):
        SHARDED.step(source, plain, step)
    expected = whole_state(source, plain)
    mesh = pool.mesh(2)
    state = source.state_dict()
    if form != "whole tensors":
        placements = [Shard(0) if form == "cut by rows" else Shard(1)]
        entries = state["state"][0]
        for name in entries:
            if name != "step":
                entries[name] = distribute_tensor(entries[name], mesh, placements, src_data_rank=None)
    parameter = nn.Parameter(distribute_tensor(plain.detach(), mesh, [Shard(1)], src_data_rank=None))
    optimizer = FlashAdamW([("matrix", parameter)], lr=1e-2)
    optimizer.load_state_dict(state)
    for name, entry in optimizer.state[parameter].items():
        assert name == "step" or (isinstance(entry, DTensor) and entry.placements == parameter.placements)
    loaded = whole_state(optimizer, parameter)
    # Back onto one plain tensor.
    alone = SHARDED.parameter()
    with torch.no_grad():
        alone.copy_(whole(parameter))
    gathered = FlashAdamW([("matrix", alone)], lr=1e-2)
    gathered.load_state_dict(optimizer.state_dict())
    return [expected, loaded, whole_state(gathered, alone)]


@pytest.mark.parametrize("form", ["whole tensors", "cut by rows", "cut by columns"])
def test_states_are_placed_like_the_parameter(form: str) -> None:
    """Whole tensors are sliced, DTensors of other placements redistributed, and a plain parameter gets all of it."""
    for expected, *results in run_ranks(2, load_onto, form):
        for result in results:
            for name, value in expected.items():
                assert_same_bits(result[name], value, name)
