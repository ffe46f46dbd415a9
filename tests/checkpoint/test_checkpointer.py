"""A folder of checkpoints: latest, retention, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashoptim_dist.checkpoint import Checkpointer, CheckpointError
from tests.checkpoint.models import OPTIMIZERS, adamw, build, differences, gathered, steps
from tests.pool import run_ranks


class Loader:
    """A data loader with a position."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def _run(directory: str, kind: str, until: int) -> tuple[Any, ...]:
    """Resume if there is something to resume from, train until step `until`, save at each."""
    import torch.distributed as dist

    net = build()
    optimizer = OPTIMIZERS[kind](net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = Loader()
    extras: dict[str, Any] = {}
    checkpointer = Checkpointer(directory, net, optimizer, scheduler=scheduler, dataloader=loader, keep_last=2)
    found = checkpointer.load(extras=extras)
    assert extras == ({} if found is None else {"note": f"step {found}"})
    noise = torch.zeros(())
    for step in range(found or 0, until):
        steps(net, optimizer, [step])
        scheduler.step()
        loader.position += 10 + dist.get_rank()
        noise = torch.rand(())
        checkpointer.save(step + 1, extras={"note": f"step {step + 1}"})
    return found, gathered(net, optimizer), optimizer.param_groups[0]["lr"], loader.position, noise.item()


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "flash" else pytest.mark.full) for k in OPTIMIZERS])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """C39 of the collected bug reports: resuming is bit-exact."""
    straight = run_ranks(2, _run, str(tmp_path / "a"), kind, 6)
    first = run_ranks(2, _run, str(tmp_path / "b"), kind, 3)
    resumed = run_ranks(2, _run, str(tmp_path / "b"), kind, 6)
    assert [result[0] for result in (straight[0], first[0], resumed[0])] == [None, None, 3]
    for rank in range(2):
        assert differences(straight[rank][1], resumed[rank][1]) == []
        assert straight[rank][2:] == resumed[rank][2:]
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["latest", "step-00000005", "step-00000006"]


def test_nothing_to_load_is_none(tmp_path: Path) -> None:
    net = build("single")
    assert Checkpointer(tmp_path / "none", net, adamw(net)).load() is None


def test_a_step_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    net = build("single")
    with pytest.raises(CheckpointError, match="step-00000007 does not exist"):
        Checkpointer(tmp_path, net, adamw(net)).load(7)
