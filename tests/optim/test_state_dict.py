"""Invariant 2 through torch's own functions: saved on some ranks, loaded on others, training goes on bit for bit.

``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` with ``dcp.save`` and ``dcp.load``, nested and flattened,
over every kind of parameter at once. The reference is an uninterrupted run on plain tensors in this process.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from flashoptim_dist import FlashAdamW
from tests.numbers import assert_same_bits
from tests.optim.cases import LINE, OPTIONS, SHARDED, Case, expected_entries, whole_state
from tests.pool import run_ranks

CASES = tuple(case for case in SHARDED if case.meshes == LINE)
"""Those that can be cut over 1, 2, 3 and 4 ranks."""
NEVER = Case("never stepped", (6, 64))

SAVED_AT, END = 3, 5
FORMS = {"nested": False, "flattened": True}
States = dict[str, dict[str, Tensor]]


class Model(nn.Module):
    """One parameter for each case, by the case's name."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        for case in (*CASES, NEVER):
            mesh = case.mesh(dist.get_world_size()) if sharded else None
            self.register_parameter(case.name, case.parameter(mesh))

    def blank(self) -> None:
        """Lose all weights, as a fresh process has."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()


def build(sharded: bool, **options: Any) -> tuple[Model, FlashAdamW]:
    model = Model(sharded)
    return model, FlashAdamW(model.named_parameters(), lr=1e-2, **{"weight_decay": 0.1, **options})


def train(model: Model, optimizer: FlashAdamW, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for case in CASES:
            parameter = model.get_parameter(case.name)
            parameter.grad = case.place(
                case.gradient(step), parameter.device_mesh if isinstance(parameter, DTensor) else None
            )
        optimizer.step()


def gathered(model: Model, optimizer: FlashAdamW) -> States:
    optimizer.state_dict()  # gives what was never stepped its zero state
    return {name: whole_state(optimizer, parameter) for name, parameter in model.named_parameters()}


@cache
def straight(last: int, kind: str) -> States:
    model, optimizer = build(False, **OPTIONS[kind])
    train(model, optimizer, 1, last)
    return gathered(model, optimizer)


def entries_of(model: Model, optimizer: FlashAdamW, form: str) -> tuple[dict[str, Any], StateDictOptions]:
    options = StateDictOptions(flatten_optimizer_state_dict=FORMS[form])
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model, options=options), "optimizer": optimizer_state}, options


def save(path: str, kind: str, form: str) -> None:
    model, optimizer = build(True, **OPTIONS[kind])
    train(model, optimizer, 1, SAVED_AT)
    state, _ = entries_of(model, optimizer, form)
    dcp.save(state, checkpoint_id=path)


def load(path: str, kind: str, form: str) -> tuple[States, States] | None:
    model, optimizer = build(True, **OPTIONS[kind])
    model.blank()
    state, options = entries_of(model, optimizer, form)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    loaded = gathered(model, optimizer)
    train(model, optimizer, SAVED_AT + 1, END)
    later = gathered(model, optimizer)
    return (loaded, later) if dist.get_rank() == 0 else None


def assert_same_states(actual: States, expected: States, when: str) -> None:
    assert actual.keys() == expected.keys()
    for name, entries in expected.items():
        assert actual[name].keys() == entries.keys()
        for entry, value in entries.items():
            assert_same_bits(actual[name][entry], value, f"{entry} of {name}, {when}")


FAST = {(1, 2, "nested"), (2, 1, "flattened"), (4, 2, "nested")}


def _marks(before: int, after: int, form: str) -> list[pytest.MarkDecorator]:
    """CI has each pair of two world sizes in one form, by turns."""
    if (before, after, form) in FAST:
        return []
    in_turn = before != after and list(FORMS)[(before + after) % len(FORMS)] == form
    return [pytest.mark.full] if in_turn else [pytest.mark.full, pytest.mark.long]


PAIRS = [
    pytest.param(before, after, form, id=f"{before} to {after}, {form}", marks=_marks(before, after, form))
    for before in (1, 2, 3, 4)
    for after in (1, 2, 3, 4)
    for form in FORMS
]


@pytest.mark.parametrize("before, after, form", PAIRS)
def test_training_goes_on_on_other_ranks(tmp_path: Path, before: int, after: int, form: str) -> None:
    run_ranks(before, save, str(tmp_path), "stochastic", form)
    result = run_ranks(after, load, str(tmp_path), "stochastic", form)[0]
    assert result is not None
    assert_same_states(result[0], straight(SAVED_AT, "stochastic"), "loaded")
    assert_same_states(result[1], straight(END, "stochastic"), "two steps later")


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, form",
    [
        pytest.param(kind, form, marks=[] if (number + turn) % len(FORMS) == 0 else pytest.mark.long)
        for number, kind in enumerate(OPTIONS)
        for turn, form in enumerate(FORMS)
    ],
)
def test_every_kind_of_state_goes_from_three_ranks_to_two(tmp_path: Path, kind: str, form: str) -> None:
    run_ranks(3, save, str(tmp_path), kind, form)
    result = run_ranks(2, load, str(tmp_path), kind, form)[0]
    assert result is not None
    assert_same_states(result[0], straight(SAVED_AT, kind), "loaded")
    assert_same_states(result[1], straight(END, kind), "two steps later")


def template(form: str) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], bool]:
    """dtypes and global shapes of a fresh optimizer's entries, and whether lr and gradients stayed as they were."""
    model, optimizer = build(True)
    state, _ = entries_of(model, optimizer, form)
    entries: dict[str, Tensor] = {}
    if form == "flattened":
        prefix = "state."
        entries = {key[len(prefix) :]: value for key, value in state["optimizer"].items() if key.startswith(prefix)}
    else:
        for name, of_parameter in state["optimizer"]["state"].items():
            entries |= {f"{name}.{entry}": value for entry, value in of_parameter.items()}
    for key, value in entries.items():
        assert isinstance(value, DTensor) or key.endswith(".step"), f"{key} is no DTensor"
        local = value.to_local() if isinstance(value, DTensor) else value
        assert not local.any(), f"{key} is not zero"
    untouched = optimizer.param_groups[0]["lr"] == 1e-2 and all(p.grad is None for p in model.parameters())
    return {key: (value.dtype, tuple(value.shape)) for key, value in entries.items()}, untouched


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_fresh_optimizer_gives_the_whole_template(world_size: int, form: str) -> None:
    expected = {
        f"{case.name}.{entry}": spec
        for case in (*CASES, NEVER)
        for entry, spec in expected_entries(case, OPTIONS["stochastic"]).items()
    }
    for entries, untouched in run_ranks(world_size, template, form):
        assert entries == expected
        assert untouched


def test_an_optimizer_that_never_stepped_has_an_empty_state() -> None:
    """Also of flashoptim PR #5: before the first step, and without asking for a template."""
    _, optimizer = build(False)
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    assert saved["param_groups"][0]["lr"] == 1e-2
    _, other = build(False)
    other.load_state_dict(saved)
    assert not other.state
