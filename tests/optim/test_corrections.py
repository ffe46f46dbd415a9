"""Corrections belong to their weights: what keeps both, and what drops a correction whose weight was changed.

Invariant 3: a step with zero gradient and lr = 0 changes no weight and no correction; zero gradients from the start
never move a weight beyond its decay.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from flashoptim_dist import FlashAdamW
from flashoptim_dist.formats import merge, split
from flashoptim_dist.sharding import local_tensor
from tests.numbers import assert_same_bits, every_16_bit
from tests.optim.cases import PLAIN, SHARDED, Case, whole, whole_state
from tests.pool import mesh, run_ranks

ROUNDINGS = ("nearest", "stochastic")
KEPT = ("weight", "error_bits")


def idle_step(optimizer: torch.optim.Optimizer) -> None:
    """A step with zero gradients and lr = 0."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


# ---------------------------------------------------------------------------------------------- invariant 3


@pytest.mark.parametrize("bits", [24, 32, None])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("case", [*SHARDED, *PLAIN], ids=str)
def test_an_idle_step_changes_no_weight_and_no_correction(case: Case, rounding: Any, bits: int | None) -> None:
    parameter = case.parameter()
    optimizer = FlashAdamW([(case.name, parameter)], lr=1e-2, rounding=rounding, master_weight_bits=bits)
    case.step(optimizer, parameter, 1)
    before = whole_state(optimizer, parameter)
    # The momentum is alive: lr = 0 alone must hold the weight.
    for _ in range(3):
        idle_step(optimizer)
    after = whole_state(optimizer, parameter)
    assert after["step"].item() == 4.0
    for name in KEPT:
        if name in before:
            assert_same_bits(after[name], before[name], name)


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_idle_step_keeps_every_weight(dtype: torch.dtype, bits: int) -> None:
    """All 65536 patterns, NaN and Inf among them, over random corrections that a split could have made."""
    weight = every_16_bit(dtype).reshape(256, 256)
    parameter = nn.Parameter(weight.clone())
    optimizer = FlashAdamW([("w", parameter)], lr=0.0, weight_decay=0.1, master_weight_bits=bits)
    optimizer.init_state()
    noise = torch.randint(
        -(1 << (bits - 17)), 1 << (bits - 17), weight.shape, generator=torch.Generator().manual_seed(0)
    )
    state = optimizer.state[parameter]
    state["error_bits"].copy_(noise)
    kept_weight, kept = split(merge(weight, state["error_bits"]), dtype, bits - 16)
    state["error_bits"].copy_(kept)
    idle_step(optimizer)
    finite = torch.isfinite(weight)
    assert_same_bits(parameter.detach()[finite], kept_weight[finite], "weight")
    assert_same_bits(state["error_bits"], kept, "error_bits")
    assert torch.equal(torch.isnan(parameter), torch.isnan(weight))
    assert torch.equal(torch.isinf(parameter), torch.isinf(weight))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("case", SHARDED[:1] + SHARDED[11:13] + SHARDED[-6:], ids=str)
def test_zero_gradients_never_move_a_weight_beyond_its_decay(case: Case, rounding: Any, decay: float) -> None:
    """50 steps at lr 0.01: the master is off the exact decay by each step's rounding, one unit of 24 bits at most."""
    parameter = case.parameter()
    start = parameter.detach().to(torch.float64)
    optimizer = FlashAdamW([(case.name, parameter)], lr=1e-2, weight_decay=decay, rounding=rounding)
    for _ in range(50):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert not optimizer.state[parameter]["exp_avg"].any()
    assert not optimizer.state[parameter]["exp_avg_sq"].any()
    master = optimizer.master_weight(parameter).to(torch.float64)
    if decay == 0.0:
        assert_same_bits(parameter.detach(), case.weight(), "weight")
        assert torch.equal(master, start)
        return
    exact = start * (1 - 1e-2 * decay) ** 50
    # A unit of a 24-bit master of bf16 is 2^-15 of the weight, of fp16 2^-18 and at least 2^-32, of fp32 2^-23.
    unit = {torch.bfloat16: 2.0**-15, torch.float16: 2.0**-18, torch.float32: 2.0**-23}[case.dtype]
    floor = 2.0**-32 if case.dtype == torch.float16 else 0.0
    assert bool(((master - exact).abs() <= 50 * torch.maximum(start.abs() * unit, torch.tensor(floor))).all())
    assert bool((master.abs() <= start.abs()).all())


# ---------------------------------------------------------------------------------------------- changed weights


def new_weight(parameter: Tensor) -> Tensor:
    """Another weight for every element; a DTensor like the parameter."""
    return torch.full_like(parameter.detach(), 0.8125) - parameter.detach() * 0.5


def by_load_state_dict(model: nn.Module, weights: dict[str, Tensor]) -> None:
    model.load_state_dict(weights)


def by_set_model_state_dict(model: nn.Module, weights: dict[str, Tensor]) -> None:
    set_model_state_dict(model, weights)


def by_copy(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def by_arithmetic(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.0).add_(weights[name])


def by_local_copy(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local_tensor(parameter).copy_(local_tensor(weights[name]))


def by_new_data(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].clone()


SEEN: dict[str, Callable[[nn.Module, dict[str, Tensor]], None]] = {
    "load_state_dict": by_load_state_dict,
    "set_model_state_dict": by_set_model_state_dict,
    "copy_": by_copy,
    "mul_ and add_": by_arithmetic,
    "copy_ of the local tensor": by_local_copy,
    "new data": by_new_data,
}
"""Changes of weights that leave a trace. (FSDP2 keeps its own hold on the data: ``new data`` is for plain modules.)"""


def by_data_copy(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        local_tensor(parameter.data).copy_(local_tensor(weights[name]))


def by_foreach(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        locals_of = [local_tensor(parameter.detach()) for parameter in model.parameters()]
        torch._foreach_copy_(locals_of, [local_tensor(weights[name]) for name, _ in model.named_parameters()])


UNSEEN = {"data.copy_": by_data_copy, "foreach on detached data": by_foreach}
"""Changes that may leave none: ``reset_corrections`` is for them."""


def build(sharded: bool) -> tuple[nn.Module, FlashAdamW]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 5)).to(torch.bfloat16)
    if sharded:
        model = fully_shard(model, mesh=mesh(2))
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2)
    return model, optimizer


def train(model: nn.Module, optimizer: FlashAdamW, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def change(way: str, sharded: bool, *, reset: bool = False) -> None:
    """Train, change every weight in some way, and take an idle step: the weights are the new ones, to the bit."""
    model, optimizer = build(sharded)
    train(model, optimizer, range(2))
    assert any(bool(local_tensor(state["error_bits"]).any()) for state in optimizer.state.values())
    weights = {name: new_weight(parameter) for name, parameter in model.named_parameters()}
    {**SEEN, **UNSEEN}[way](model, weights)
    if reset:
        optimizer.reset_corrections()
    saved = optimizer.state_dict()["state"]
    idle_step(optimizer)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        # A state dict that is taken before the step has no stale correction either.
        assert not local_tensor(saved[number]["error_bits"]).any()
        assert not local_tensor(optimizer.state[parameter]["error_bits"]).any()
        assert_same_bits(local_tensor(parameter.detach()), local_tensor(weights[name]), name)


@pytest.mark.parametrize("way", SEEN)
def test_changed_weights_lose_their_corrections(way: str) -> None:
    change(way, sharded=False)


@pytest.mark.parametrize("way", [way for way in SEEN if way != "new data"])
def test_changed_shards_lose_their_corrections(way: str) -> None:
    run_ranks(2, change, way, True)


@pytest.mark.parametrize("way", UNSEEN)
def test_reset_corrections_is_for_what_leaves_no_trace(way: str) -> None:
    change(way, sharded=False, reset=True)
    run_ranks(2, change, way, True, reset=True)


def test_reset_corrections_of_some_parameters() -> None:
    model, optimizer = build(False)
    train(model, optimizer, range(2))
    first, second = model[0].weight, model[2].weight
    kept = whole(optimizer.state[second]["error_bits"])
    optimizer.reset_corrections([first])
    assert not optimizer.state[first]["error_bits"].any()
    assert_same_bits(optimizer.state[second]["error_bits"], kept)


def look_without_touching(sharded: bool) -> None:
    """What reads weights, or moves them about and back, keeps every correction."""
    model, optimizer = build(sharded)
    train(model, optimizer, range(2))
    before = [whole_state(optimizer, parameter) for parameter in model.parameters()]
    x = torch.randn(4, 64).to(torch.bfloat16)
    with torch.no_grad():
        model(x)
    model(x).sum().backward()
    optimizer.zero_grad()
    model.state_dict()
    optimizer.state_dict()
    get_model_state_dict(model)
    get_optimizer_state_dict(model, optimizer)
    optimizer.get_master_weights()
    torch.save(model.state_dict(), io.BytesIO())
    for parameter in model.parameters():
        whole(parameter)
        parameter.requires_grad_(False).requires_grad_(True)
    if sharded:
        model.unshard()
        model.reshard()
    model.eval()
    model.train()
    idle_step(optimizer)
    for parameter, old in zip(model.parameters(), before):
        new = whole_state(optimizer, parameter)
        for name in KEPT:
            assert_same_bits(new[name], old[name], name)


def test_reading_weights_keeps_corrections() -> None:
    look_without_touching(sharded=False)
    run_ranks(2, look_without_touching, True)


# ---------------------------------------------------------------------------------------------- loading, in any order


ORDERS = ("weights first", "optimizer first", "optimizer, weights, optimizer", "weights after a forward pass")


def load_in_order(path: str, order: str, used: bool, sharded: bool) -> None:
    """Load weights and optimizer in some order, into fresh or used ones; go on as the run that was saved."""
    model, optimizer = build(sharded)
    train(model, optimizer, range(3))
    expected = {name: whole_state(optimizer, parameter) for name, parameter in model.named_parameters()}
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=path)
    other_model, other = build(sharded)
    if used:
        train(other_model, other, range(7, 9))
    state = {"model": get_model_state_dict(other_model), "optimizer": get_optimizer_state_dict(other_model, other)}
    dcp.load(state, checkpoint_id=path)

    def load_weights() -> None:
        set_model_state_dict(other_model, state["model"])

    def load_optimizer() -> None:
        set_optimizer_state_dict(other_model, other, state["optimizer"])

    if order == "weights first":
        load_weights()
        load_optimizer()
    else:
        load_optimizer()
        if order == "weights after a forward pass":
            other_model(torch.randn(4, 64).to(torch.bfloat16)).sum().backward()
            other.zero_grad()
        load_weights()
        if order == "optimizer, weights, optimizer":
            load_optimizer()
    for name, parameter in other_model.named_parameters():
        for entry, value in whole_state(other, parameter).items():
            assert_same_bits(value, expected[name][entry], f"{entry} of {name}")
    train(model, optimizer, range(3, 5))
    train(other_model, other, range(3, 5))
    for name, parameter in other_model.named_parameters():
        straight = whole_state(optimizer, model.get_parameter(name))
        for entry, value in whole_state(other, parameter).items():
            assert_same_bits(value, straight[entry], f"{entry} of {name}, two steps later")


@pytest.mark.parametrize(
    "order, used",
    [
        pytest.param(
            order,
            used,
            id=f"{order}-{'used' if used else 'fresh'}",
            marks=[] if number % 2 == used else pytest.mark.full,
        )
        for number, order in enumerate(ORDERS)
        for used in (False, True)
    ],
)
def test_corrections_survive_loading_in_any_order(tmp_path: Any, order: str, used: bool) -> None:
    run_ranks(1, load_in_order, str(tmp_path / "alone"), order, used, False)
    run_ranks(2, load_in_order, str(tmp_path / "sharded"), order, used, True)
