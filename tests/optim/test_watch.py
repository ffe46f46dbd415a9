"""The state is a dict of dicts like any optimizer's; that it counts its changes shows nowhere."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flashoptim_dist as fod
from flashoptim_dist.optim.watch import ParameterState, StateTable


def _trained() -> tuple[nn.Parameter, fod.FlashAdamW]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, 64).bfloat16())
    optimizer = fod.FlashAdamW([("weight", parameter)], lr=1e-2)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return parameter, optimizer


CHANGES: list[Callable[[StateTable, Any], object]] = [
    lambda table, key: table[key].__setitem__("step", 0),
    lambda table, key: table[key].update(step=0),
    lambda table, key: table[key].__ior__({"step": 0}),
    lambda table, key: table[key].setdefault("new", 0),
    lambda table, key: table[key].pop("step"),
    lambda table, key: table[key].popitem(),
    lambda table, key: table[key].clear(),
    lambda table, key: table[key].__delitem__("step"),
    lambda table, key: table.__setitem__(key, {}),
    lambda table, key: table.update({key: {}}),
    lambda table, key: table.__ior__({key: {}}),
    lambda table, key: table[nn.Parameter(torch.zeros(1))],
    lambda table, key: table.setdefault(nn.Parameter(torch.zeros(1)), {}),
    lambda table, key: table.pop(key),
    lambda table, key: table.popitem(),
    lambda table, key: table.clear(),
    lambda table, key: table.__delitem__(key),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_counts(change: Callable[[StateTable, Any], object]) -> None:
    key = nn.Parameter(torch.zeros(2))
    table = StateTable({key: {"step": 1}})
    before = table.changes
    assert table[key]["step"] == 1
    assert table.get(key) == {"step": 1}
    assert list(table.items()) == [(key, {"step": 1})]
    assert table.changes == before, "reading is no change"
    change(table, key)
    assert table.changes > before


def test_what_is_put_in_counts_its_changes_too() -> None:
    key = nn.Parameter(torch.zeros(2))
    table = StateTable({})
    for put in (
        lambda: table.__setitem__(key, {"step": 1}),
        lambda: table.update({key: {"step": 1}}),
        lambda: table.setdefault(key, {"step": 1}),
        lambda: table[key],
        lambda: table.__setitem__(key, StateTable({key: {"step": 1}})[key]),  # another table's
    ):
        table.clear()
        put()
        before = table.changes
        table[key]["step"] = 2
        assert table.changes > before
    table["shared"] = {"scheduler": 1}
    assert type(table["shared"]) is dict, "not a parameter's"


def test_copies_and_pickles_are_ordinary_dicts() -> None:
    parameter, optimizer = _trained()
    assert isinstance(optimizer.state, defaultdict)
    assert isinstance(optimizer.state[parameter], ParameterState)
    for copied in (copy.copy(optimizer.state), copy.deepcopy(optimizer.state), optimizer.state.copy()):
        assert type(copied) is defaultdict
    assert type(copy.deepcopy(optimizer.state[parameter])) is dict
    assert type(copy.copy(optimizer.state[parameter])) is dict
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded["state"][0]) is dict
    buffer = io.BytesIO()
    torch.save({**optimizer.state[parameter], "all": optimizer.state[parameter]}, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)["all"]) is OrderedDict


def test_a_copied_optimizer_counts_its_own_changes() -> None:
    parameter, optimizer = _trained()
    other = copy.deepcopy(optimizer)
    assert isinstance(other.state, StateTable)
    before = optimizer.state.changes, other.state.changes
    next(iter(other.state.values()))["step"] = torch.zeros(())
    assert (optimizer.state.changes, other.state.changes) == (before[0], before[1] + 1)
    assert float(optimizer.state[parameter]["step"]) == 1.0
