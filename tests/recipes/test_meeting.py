"""The store of a start of the ranks, where torchrun's own still holds what an earlier start left."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch.distributed as dist
from llama_support import meeting


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """torchrun's store, in the place where the ranks look for it."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(meeting, "_TRY_SECONDS", 1.0)
    return store


@pytest.mark.parametrize("left", ["nobody listens", "another store", "nothing"])
def test_an_address_that_an_earlier_start_left_is_not_taken(agents: dist.TCPStore, left: str) -> None:
    other = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    other.set(meeting._KEY, "another name")
    if left == "another store":
        agents.set(meeting._KEY, f"{other.port} the-name-of-a-rank-that-is-gone")
    elif left == "nobody listens":
        agents.set(meeting._KEY, "1 the-name-of-a-rank-that-is-gone")
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(meeting.fresh_store, rank, 20) for rank in (1, 2)]
        own = meeting.fresh_store(0, 20)
        stores = [future.result() for future in waiting]
    own.set("said", "by rank 0")
    assert [store.get("said") for store in stores] == [b"by rank 0"] * 2


def test_a_rank_0_that_does_not_come_is_told(agents: dist.TCPStore) -> None:
    agents.set(meeting._KEY, "1 the-name-of-a-rank-that-is-gone")
    with pytest.raises(TimeoutError, match="rank 1 found no rank 0 at localhost within 2 seconds"):
        meeting.fresh_store(1, 2)
