"""``load_state_dict`` refuses scales that the number format never writes, after its collectives and by one transfer."""

from __future__ import annotations

import copy
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
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

from flashoptim_dist import FlashAdamW, FlashLion, FlashSGD
from tests import pool
from tests.numbers import assert_same_bits
from tests.optim.cases import Case, whole_state
from tests.optim.test_loading import assert_same_training, continue_training, fresh_copy, trained
from tests.optim.test_versions import entries as version1_entries
from tests.optim.test_versions import parameter_and_optimizer
from tests.pool import run_ranks

# Patterns of bf16 numbers. A variance's scale is T << 3 | k - 14, T to 0xFDE and k - 14 to 6, or 0.
NAN, INFINITE, NEGATIVE, MINUS_ZERO = 0x7FC0, 0x7F80, 0x3F80 - (1 << 15), -(1 << 15)
NO_SHIFT, NO_TOP, ABOVE_THE_LARGEST_TOP = 0x3F87, 0x0006, 0x7EF8

FAULTS = [
    *[("exp_avg_scale", word, "has scales that are negative or not finite") for word in (NAN, INFINITE, NEGATIVE)],
    *[("exp_avg_sq_scale", word, "has scales that are negative or not finite") for word in (NAN, INFINITE, NEGATIVE)],
    *[
        ("exp_avg_sq_scale", word, "has scales that number format version 2 never writes")
        for word in (MINUS_ZERO, NO_SHIFT, NO_TOP, ABOVE_THE_LARGEST_TOP)
    ],
]


def spoil(scales: Tensor, word: int) -> None:
    scales.view(torch.int16).view(-1)[-1] = word


@pytest.mark.parametrize("options", [{}, {"quantize": False}, {"master_weight_bits": None}], ids=str)
@pytest.mark.parametrize(("entry", "word", "fault"), FAULTS)
def test_refused_by_name_and_nothing_changed(entry: str, word: int, fault: str, options: dict[str, Any]) -> None:
    state = copy.deepcopy(trained()[1].state_dict())
    spoil(state["state"][0][entry], word)
    other_model, other = trained(steps=2, **options)
    before = {name: whole_state(other, parameter) for name, parameter in other_model.named_parameters()}
    groups = copy.deepcopy(other.state_dict()["param_groups"])
    with pytest.raises(ValueError) as caught:
        other.load_state_dict(state)
    said = str(caught.value)
    assert said.startswith(f"'{entry}' of parameter 'matrix' (shape (6, 40)) {fault}: the state is damaged")
    assert "oad an older state, or delete the parameter's entry" in said
    assert ('state_dict["format"] = {' in said) == ("never writes" in fault)
    for name, parameter in other_model.named_parameters():
        for key, value in whole_state(other, parameter).items():
            assert_same_bits(value, before[name][key], f"{key} of {name}")
    assert other.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(
    ("optimizer_type", "entry"),
    [(FlashLion, "exp_avg_scale"), (lambda named, lr: FlashSGD(named, lr, momentum=0.9), "momentum_buffer_scale")],
    ids=["lion", "sgd"],
)
def test_a_momentum_without_a_variance_is_looked_at_too(optimizer_type: Callable[..., Any], entry: str) -> None:
    _, optimizer = trained(optimizer_type)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    spoil(state["state"][0][entry], NAN)
    with pytest.raises(ValueError, match=rf"'{entry}' of parameter 'matrix' .* negative or not finite"):
        optimizer.load_state_dict(state)


def test_all_that_is_wrong_is_counted() -> None:
    _, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    for number in (0, 1):
        for entry in ("exp_avg_scale", "exp_avg_sq_scale"):
            if entry in state["state"][number]:
                spoil(state["state"][number][entry], NAN)
    count = sum(entry.endswith("_scale") for number in (0, 1) for entry in state["state"][number])
    assert count > 1
    with pytest.raises(ValueError, match=rf"not finite \({count} such entries\): the state is damaged"):
        optimizer.load_state_dict(state)


def test_the_way_out_that_the_error_names() -> None:
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    spoil(state["state"][0]["exp_avg_scale"], NAN)
    del state["state"][0]
    other_model, other = fresh_copy(model)
    other.load_state_dict(state)
    assert not other.state[other_model.matrix]
    for name, parameter in other_model.named_parameters():
        if name != "matrix":
            loaded, expected = whole_state(other, parameter), whole_state(optimizer, model.get_parameter(name))
            for key, value in expected.items():
                assert_same_bits(loaded[key], value, f"{key} of {name}")
    continue_training(other_model, other, range(4, 5))
    assert other.state[other_model.matrix]["step"].item() == 1.0


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
def test_torchs_helpers_load_what_is_sound_and_pass_the_refusal_on(flatten: bool) -> None:
    """They make states of their own first, in an optimizer that has none."""
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other_model, other = fresh_copy(model)
    set_optimizer_state_dict(other_model, other, copy.deepcopy(state), options=options)
    assert_same_training(model, optimizer, other_model, other)
    scales = state["state.matrix.exp_avg_sq_scale"] if flatten else state["state"]["matrix"]["exp_avg_sq_scale"]  # type: ignore[index,call-overload]
    spoil(scales, NEGATIVE)  # type: ignore[arg-type]
    other_model, other = fresh_copy(model)
    with pytest.raises(ValueError, match=r"'exp_avg_sq_scale' of parameter 'matrix' .* negative or not finite"):
        set_optimizer_state_dict(other_model, other, state, options=options)


@pytest.mark.parametrize("entry", ["exp_avg_scale", "exp_avg_sq_scale"])
@pytest.mark.parametrize("word", [NAN, INFINITE, NEGATIVE])
def test_scales_of_version_1_are_numbers_not_lattices(entry: str, word: int) -> None:
    _, optimizer = parameter_and_optimizer()
    state = optimizer.state_dict()
    state["format"] = {"name": "fd1", "version": 1}
    state["state"] = {0: version1_entries()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(state)
    spoil(state["state"][0][entry], word)
    with pytest.raises(ValueError, match=rf"'{entry}' of parameter .* negative or not finite: the state is damaged\."):
        optimizer.load_state_dict(state)


class _Reads(TorchFunctionMode):
    """Counts what makes the host wait for a tensor's values, steps excepted, which are fp32."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "equal")
        if getattr(func, "__name__", "") in waiting and args[0].dtype != torch.float32:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_all_scales_are_read_at_once() -> None:
    model, optimizer = trained()
    assert sum("exp_avg_scale" in state for state in optimizer.state.values()) > 1
    state = optimizer.state_dict()
    _, other = fresh_copy(model)
    with _Reads() as reads:
        other.load_state_dict(state)
    assert reads.count == 1


CASES = (Case("first", (7, 128)), Case("second", (7, 128)))


def load_redistributed() -> str:
    """Load shards by rows into parameters cut by columns, with one odd scale in the last column of the first."""
    mesh = pool.mesh(2)
    plain = {case.name: case.parameter() for case in CASES}
    source = FlashAdamW(list(plain.items()), lr=1e-2)
    for case in CASES:
        plain[case.name].grad = case.gradient(1)
    source.step()
    state = source.state_dict()
    spoil(state["state"][0]["exp_avg_scale"], NAN)
    for entries in state["state"].values():
        for name in entries:
            if name != "step":
                entries[name] = distribute_tensor(entries[name], mesh, [Shard(0)], src_data_rank=None)
    sharded = [
        (name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(1)], src_data_rank=None)))
        for name, parameter in plain.items()
    ]
    optimizer = FlashAdamW(sharded, lr=1e-2)
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return ""


def test_the_rank_that_holds_it_raises_and_no_other_waits_in_the_load() -> None:
    """The second parameter is redistributed by both ranks after the first one's scales were looked at."""
    first, second = run_ranks(2, load_redistributed)
    assert first == ""
    assert second.startswith("'exp_avg_scale' of parameter 'first' (shape (7, 128)) has scales that are negative")
