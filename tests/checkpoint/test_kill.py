"""Ranks killed with SIGKILL at random moments of saving: what was acknowledged is never lost, what loads is right."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from flashoptim_dist.checkpoint import Checkpointer
from tests import pool
from tests.checkpoint.models import build, differences, flash, gathered, steps
from tests.pool import RankError, run_ranks

MOST_STEPS = 400


def _train_until_killed(directory: str, victim: int, delay_s: float, background: bool) -> None:
    """Go on from the last checkpoint, save after every step, and be killed."""
    net = build(seed=9)
    optimizer = flash(net)
    checkpointer = Checkpointer(directory, net, optimizer, keep_last=2, background=background)
    faulthandler.dump_traceback_later(20.0)  # a rank that hangs shows where
    done = checkpointer.load() or 0
    if done == 0:
        net = build()
        optimizer = flash(net)
        checkpointer = Checkpointer(directory, net, optimizer, keep_last=2, background=background)
    # The first life ends only after two saves, however slow the machine, so that there is something to lose.
    doomed_from = done if done else 2
    for step in range(done, MOST_STEPS):
        if step == doomed_from and dist.get_rank() == victim:
            threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        steps(net, optimizer, [step])
        checkpointer.save(step + 1)
        if dist.get_rank() == 0:
            # In the background, a save that has returned tells that the one before it is on disk.
            Path(directory, "acknowledged").write_text(str(step if background else step + 1))


def _load(directory: str) -> tuple[int | None, dict[str, Tensor]]:
    net = build(seed=9)
    optimizer = flash(net)
    step = Checkpointer(directory, net, optimizer).load(verify="full")
    return step, gathered(net, optimizer)


def _states(until: int) -> dict[int, dict[str, Tensor]]:
    net = build("single")
    optimizer = flash(net)
    states = {0: gathered(net, optimizer)}
    for step in range(until):
        steps(net, optimizer, [step])
        states[step + 1] = gathered(net, optimizer)
    return states


@pytest.fixture(autouse=True)
def _time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell a rank that is slow, on a loaded machine, from one that hangs."""
    monkeypatch.setattr(pool, "GRACE_S", 30.0)


def _kill_often(directory: Path, times: int, world_size: int, seed: int) -> None:
    chance = random.Random(seed)
    states: dict[int, dict[str, Tensor]] = {}
    directory.mkdir()
    previous = 0
    for _ in range(times):
        victim, delay_s = chance.randrange(world_size), chance.uniform(0.0, 0.4)
        background = chance.random() < 0.5
        with pytest.raises(RankError, match="SIGKILL") as caught:
            run_ranks(world_size, _train_until_killed, str(directory), victim, delay_s, background)
        assert "still running" not in str(caught.value), str(caught.value)  # the others ended by themselves
        acknowledged = directory / "acknowledged"
        told = int(acknowledged.read_text() or 0) if acknowledged.exists() else 0
        step, state = run_ranks(1, _load, str(directory))[0]
        step = step or 0
        assert step >= max(told, previous)
        if step not in states:
            states = _states(step + 20)
        if step:
            assert differences(states[step], state) == []
        previous = step
    assert previous > 0
    left = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
    assert len(left - {"latest", "acknowledged"}) <= 3


def test_a_killed_rank_loses_nothing(tmp_path: Path) -> None:
    _kill_often(tmp_path / "run", times=4, world_size=2, seed=0)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world_size", "seed"),
    [pytest.param(1, 1, marks=pytest.mark.long), (2, 2), pytest.param(3, 3, marks=pytest.mark.long)],
)
def test_fifty_killed_saves_lose_nothing(tmp_path: Path, world_size: int, seed: int) -> None:
    _kill_often(tmp_path / "run", times=50, world_size=world_size, seed=seed)
