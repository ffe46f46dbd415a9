"""Scheduler, data position, random states and extras come back; what another number of ranks means for them."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointError
from tests.checkpoint.models import adamw, build, flash, steps
from tests.pool import mesh, run_ranks


class Loader:
    """A data loader with a position."""

    def __init__(self, position: Any) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: NPY002 the global one is meant


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    _draw()


def _save(path: str, same: bool) -> tuple[Any, list[float]]:
    net = build()
    rank = 0 if same else dist.get_rank()
    _seed(rank)
    loader = Loader({"epoch": 1, "rows": torch.tensor([5, rank]), "order": np.arange(3) + rank, "raw": b"ab"})
    checkpoint.save(path, net, flash(net), dataloader=loader)
    return repr(loader.position), _draw()


def _load(path: str, with_loader: bool) -> tuple[Any, list[float], list[str]]:
    net = build()
    _seed(100 + dist.get_rank())
    loader = Loader(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoint.load(path, net, flash(net), dataloader=loader if with_loader else None)
        except CheckpointError as error:
            return str(error), [], []
    texts = [str(warning.message) for warning in caught]
    return repr(loader.position), _draw(), texts


def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _save, path, False)
    loaded = run_ranks(2, _load, path, True)
    assert [result[:2] for result in loaded] == saved
    assert saved[0] != saved[1]


def test_on_another_number_of_ranks_positions_are_refused_and_streams_are_new(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _save, path, False)
    expected = (
        f"loading {path} failed: it holds the data positions of 2 ranks, and 3 are loading: what each rank would read "
        "next is not defined. Load on 2 ranks, or pass dataloader=None and start the data anew"
    )
    assert [result[0] for result in run_ranks(3, _load, path, True)] == [expected] * 3
    first = run_ranks(3, _load, path, False)
    assert all("random states of 2 ranks, and 3 are loading" in result[2][0] for result in first)
    draws = [result[1] for result in first]
    assert draws == [result[1] for result in run_ranks(3, _load, path, False)]  # the same each time
    for column in zip(*draws, *(draw for _, draw in saved), strict=True):
        assert len(set(column)) == 5  # on every rank others, and not those of the saved ranks


def test_what_all_ranks_shared_loads_on_any_number(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _save, path, True)
    for result in run_ranks(3, _load, path, True):
        assert result == (*saved[0], [])
    for result in run_ranks(1, _load, path, True):
        assert result == (*saved[0], [])


def test_what_was_not_saved_is_named(tmp_path: Path) -> None:
    net = build("single")
    optimizer = adamw(net)
    path = checkpoint.save(tmp_path / "checkpoint", net, optimizer)
    with pytest.raises(CheckpointError, match="no data position: it was saved without a data loader"):
        checkpoint.load(path, net, optimizer, dataloader=Loader(0))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(CheckpointError, match="no scheduler: it was saved without one"):
        checkpoint.load(path, net, optimizer, scheduler=scheduler)
    with pytest.raises(CheckpointError, match=r"object has no state_dict\(\), so its state can't be saved"):
        checkpoint.save(tmp_path / "other", net, optimizer, dataloader=object())


def test_random_states_can_be_left_alone(tmp_path: Path) -> None:
    net = build("single")
    path = checkpoint.save(tmp_path / "with", net, flash(net))
    without = checkpoint.save(tmp_path / "without", net, flash(net), rng=False)
    _seed(1)
    expected = _draw()
    for folder, rng in ((path, False), (without, True), (without, False)):
        _seed(1)
        checkpoint.load(folder, net, flash(net), rng=rng)
        assert _draw() == expected
    _seed(1)
    checkpoint.load(path, net, flash(net))
    assert _draw() != expected


def test_saving_and_loading_draw_no_random_numbers(tmp_path: Path) -> None:
    net = build("single")
    optimizer = flash(net)
    _seed(5)
    expected = [_draw(), _draw()]
    _seed(5)
    drawn = [_draw()]
    checkpoint.save(tmp_path / "x", net, optimizer)
    drawn.append(_draw())
    assert drawn == expected


def test_a_scheduler_made_after_the_load_goes_on(tmp_path: Path) -> None:
    """C33 of the collected bug reports: `initial_lr` was missing."""
    net = build("single")
    optimizer = flash(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        steps(net, optimizer, [step])
        scheduler.step()
    path = checkpoint.save(tmp_path / "x", net, optimizer, scheduler=scheduler)
    optimizer = flash(net)
    checkpoint.load(path, net, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**3)
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step, last_epoch=3)
    assert later.get_last_lr() == [pytest.approx(1e-2 * 0.5**4)]


def test_several_schedulers_go_in_order(tmp_path: Path) -> None:
    net = build("single")
    optimizer = flash(net)
    make = torch.optim.lr_scheduler.ConstantLR
    first, second = make(optimizer), make(optimizer, total_iters=9)
    second.last_epoch = 7
    path = checkpoint.save(tmp_path / "x", net, optimizer, scheduler=[first, second])
    first, second = make(optimizer), make(optimizer)
    checkpoint.load(path, net, optimizer, scheduler=[first, second])
    assert (first.last_epoch, second.last_epoch, second.total_iters) == (0, 7, 9)
    with pytest.raises(CheckpointError, match="holds 2 scheduler states, and 1 are to be loaded"):
        checkpoint.load(path, net, optimizer, scheduler=[first])


def test_a_learning_rate_tensor_stays_that_tensor(tmp_path: Path) -> None:
    net = build("single")
    rate = torch.tensor(0.5)
    optimizer = flash(net)
    optimizer.param_groups[0]["lr"] = rate
    path = checkpoint.save(tmp_path / "x", net, optimizer)
    rate.fill_(0.1)
    checkpoint.load(path, net, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.5
    number = flash(net)
    checkpoint.load(path, net, number)
    assert number.param_groups[0]["lr"] == 0.5
    assert isinstance(number.param_groups[0]["lr"], float)


class Average:
    """Keeps tensors of its own, like an average of the weights."""

    def __init__(self, value: float) -> None:
        placed = mesh(dist.get_world_size())
        whole = torch.full((5, 4), value) + torch.arange(5.0)[:, None]
        self.weights = distribute_tensor(whole, placed, [Shard(0)])
        self.count = int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.count = state["weights"], state["count"]


def _extras(path: str, load: bool) -> Any:
    net = build()
    average = Average(0.0 if load else 3.0)
    extras = {
        "average": average,
        "step": 0 if load else 7,
        "plain": torch.zeros(3) if load else torch.arange(3.0),
        "nested": {} if load else {"list": [torch.ones(2), torch.zeros(1)], "text": "x", "none": None},
        "empty": {},
    }
    if not load:
        checkpoint.save(path, net, flash(net), extras=extras)
    else:
        plain = extras["plain"]
        loaded = checkpoint.load(path, net, flash(net), extras=extras)
        assert extras["plain"] is plain  # read in place
        assert loaded.extras["step"] == 7
        assert loaded.world_size == 2
    return {**extras, "average": (average.weights.full_tensor(), average.count)}


def test_extras_come_back(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _extras, path, False)
    loaded = run_ranks(3, _extras, path, True)
    assert repr(loaded) == repr([saved[0]] * 3)


def test_extras_that_could_not_be_read_safely_are_refused_at_once(tmp_path: Path) -> None:
    net = build("single")
    with pytest.raises(CheckpointError, match=r"'extras.thing' can't be saved: it holds something else than numbers"):
        checkpoint.save(tmp_path / "x", net, flash(net), extras={"thing": Loader(1).load_state_dict})
    assert list(tmp_path.iterdir()) == []
