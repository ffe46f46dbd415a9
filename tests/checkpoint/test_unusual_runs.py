"""Unusual models, optimizers and extras: odd names, empty and 0-dim parameters, rare dtypes, hundreds of groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointError, snapshot
from tests.checkpoint.models import build, differences, flash, gathered, steps, trainable
from tests.pool import mesh, run_ranks


class Odd(nn.Module):
    """Names that look like parts of a key, shapes without elements, buffers of all kinds."""

    def __init__(self, fill: float = 1.0) -> None:
        super().__init__()
        for name in ("a/b c", "émile", "exp_avg", "step", "%s{}"):
            self.register_parameter(name, nn.Parameter(torch.randn(4, 64)))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.randn(0))
        self.no_rows = nn.Parameter(torch.randn(0, 64))
        self.no_columns = nn.Parameter(torch.randn(5, 0))
        self.state = nn.ModuleDict({"param_groups": nn.Linear(3, 3), "0": nn.Linear(64, 2)})
        self.register_buffer("passing", torch.full((3,), fill), persistent=False)
        self.register_buffer("empty", torch.ones(0))
        self.register_buffer("transposed", torch.randn(6, 4).t())
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(fill > 0))
        self.register_buffer("float8", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("unsigned", torch.arange(5).to(torch.uint32))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "flash": lambda net: fod.FlashAdamW(net.named_parameters(), lr=1e-2),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_odd_names_shapes_and_dtypes_come_back(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    net = Odd()
    net.float8 = net.float8.clone()
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer = OPTIMIZERS[kind](net)
    steps(net, optimizer, range(2))
    saved = gathered(net, optimizer)
    one = checkpoint.save(tmp_path / "one", net, optimizer)
    two = checkpoint.async_save(tmp_path / "two", net, optimizer).result()
    for path in (one, two):
        net = Odd(fill=-1.0)
        for parameter in net.parameters():
            parameter.data = parameter.data.to(dtype)
        optimizer = OPTIMIZERS[kind](net)
        checkpoint.load(path, net, optimizer, verify="full")
        assert differences(saved, gathered(net, optimizer)) == []
        assert net.passing.tolist() == [-1.0] * 3  # not persistent: neither saved nor touched


def _sharded_oddities(path: str, load: bool) -> dict[str, Tensor]:
    torch.manual_seed(5 if load else 0)
    net = nn.Module()
    net.no_rows = nn.Parameter(torch.randn(0, 64))
    net.one_row = nn.Parameter(torch.randn(1, 64))
    net.no_columns = nn.Parameter(torch.randn(5, 0))
    net.register_parameter("a/b", nn.Parameter(torch.randn(7, 64)))
    fully_shard(net.to(torch.bfloat16), mesh=mesh(dist.get_world_size()))
    optimizer = fod.FlashAdamW(net.named_parameters(), lr=1e-2)
    if load:
        checkpoint.load(path, net, optimizer)
    else:
        steps(net, optimizer, range(2))
        checkpoint.save(path, net, optimizer)
    return gathered(net, optimizer)


def test_parameters_without_elements_are_sharded_too(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _sharded_oddities, path, False)[0]
    assert saved["model.no_rows"].shape == (0, 64)
    assert differences(saved, run_ranks(3, _sharded_oddities, path, True)[0]) == []


def _many_groups(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.ParameterList([nn.Parameter(torch.randn(2, 64)) for _ in range(count)])
    groups = [
        {"params": [(name, parameter)], "lr": 1e-3 * (index % 5)}
        for index, (name, parameter) in enumerate(net.named_parameters())
    ]
    return net, fod.FlashAdamW(groups)


def test_hundreds_of_groups_are_saved_with_few_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 300
    net, optimizer = _many_groups(count)
    steps(net, optimizer, [0])
    pickles = 0
    save_object = snapshot.save_object

    def counted(*arguments: Any) -> None:
        nonlocal pickles
        pickles += 1
        save_object(*arguments)

    monkeypatch.setattr(snapshot, "save_object", counted)
    path = checkpoint.save(tmp_path / "x", net, optimizer)
    options = len(optimizer.param_groups[0])
    assert pickles < 2 * count + 4 * options  # two lists of names for each group, each value of an option once
    rates = [group["lr"] for group in optimizer.param_groups]
    other, later = _many_groups(count)
    for group in later.param_groups:
        group["lr"] = 7.0
    checkpoint.load(path, other, later)
    assert [group["lr"] for group in later.param_groups] == rates
    assert differences(gathered(net, optimizer), gathered(other, later)) == []


def test_equal_values_of_different_types_stay_apart(tmp_path: Path) -> None:
    net = build("single")
    optimizer = flash(net)
    values = {
        "a": 1,
        "b": True,
        "c": 1.0,
        "d": "1",
        "e": 0.0,
        "f": -0.0,
        "g": (1, True),
        "h": (1.0, 1),
        "i": [1],
        "j": None,
    }
    path = checkpoint.save(tmp_path / "x", net, optimizer, extras=values)
    found: dict[str, Any] = {}
    checkpoint.load(path, net, optimizer, extras=found)
    assert repr(found) == repr(values)


ONES = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        {1: ONES, "b": {}},
        {"b": {}, "c": ONES},
        {(1, 2): ONES},
        [ONES, {}],
        [[ONES], [ONES, ONES]],
        (ONES, ONES),
        {"": ONES},
        {"float8": torch.ones(3).to(torch.float8_e5m2), 2: ONES},
        {1, 2},
        1 + 2j,
        10**30,
        b"\x00",
        torch.float32,
    ],
    ids=repr,
)
def test_extras_keep_their_form(tmp_path: Path, value: Any) -> None:
    net = build("single")
    optimizer = flash(net)
    path = checkpoint.save(tmp_path / "x", net, optimizer, extras={"value": value})
    found: dict[str, Any] = {}
    checkpoint.load(path, net, optimizer, extras=found)
    assert repr(found["value"]) == repr(value)


def _average_with_optimizer(path: str) -> str:
    net = build()
    optimizer = flash(net)
    steps(net, optimizer, [0])
    try:
        checkpoint.save(path, net, flash(net), extras={"other": optimizer})
    except CheckpointError as error:
        return str(error)
    return ""


def test_dtensors_under_numbers_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """An optimizer's state is keyed by numbers: as an extra its shards could not be found again by name."""
    messages = run_ranks(2, _average_with_optimizer, str(tmp_path / "x"))
    assert messages[0] == messages[1]
    assert "extras 'other' can't be saved: it holds DTensors" in messages[0]
    assert "pass an optimizer as one of the optimizers" in messages[0]


def test_extras_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    net = build("single")
    with pytest.raises(CheckpointError, match=r"two things would be saved as 'extras.a.b'"):
        checkpoint.save(tmp_path / "x", net, flash(net), extras={"a.b": 1, "a": {"b": ONES}})


def test_a_model_in_training_is_not_changed_by_a_save(tmp_path: Path) -> None:
    net, same = build("single"), build("single")
    optimizer, other = flash(net), flash(same)
    for step in range(3):
        steps(net, optimizer, [step])
        steps(same, other, [step])
        checkpoint.save(tmp_path / "x", net, optimizer, overwrite=True)
        checkpoint.async_save(tmp_path / "y", net, optimizer, overwrite=True).result()
    assert differences(gathered(net, optimizer), gathered(same, other)) == []
    assert all(parameter.grad is None for _, parameter in trainable(net))
