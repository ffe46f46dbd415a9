"""Any number of ranks to any number of ranks: states bit-equal, and training goes on as if uninterrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from flashoptim_dist import checkpoint
from tests.checkpoint.models import adamw, build, differences, flash, gathered, train
from tests.pool import run_ranks

OPTIMIZERS = {"adamw": adamw, "flash": flash}


def _save(path: str, kind: str, placement: str) -> dict[str, Tensor]:
    net = build(placement)
    optimizer = OPTIMIZERS[kind](net)
    train(net, optimizer, range(3))
    checkpoint.save(path, net, optimizer)
    return gathered(net, optimizer)


def _load(path: str, kind: str, placement: str) -> dict[str, Tensor]:
    net = build(placement, seed=5)
    optimizer = OPTIMIZERS[kind](net)
    loaded = checkpoint.load(path, net, optimizer)
    assert loaded.world_size is not None
    return gathered(net, optimizer)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 4), (4, 3), (3, 3)])
def test_states_are_bit_equal_on_another_number_of_ranks(tmp_path: Path, kind: str, before: int, after: int) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(before, _save, path, kind, "fsdp")[0]
    for loaded in run_ranks(after, _load, path, kind, "fsdp"):
        assert differences(saved, loaded) == []
    assert any("exp_avg" in name for name in saved)
