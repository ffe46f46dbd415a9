"""The pool of ranks that all multi-process tests stand on."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests import pool
from tests.pool import RankError, mesh, run_ranks


@dataclass
class Pair:
    """A class of the test module: pickles of it must resolve on the ranks."""

    left: torch.Tensor
    right: float


class AwkwardError(Exception):
    """Can be pickled, and not unpickled: its constructor wants two arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"awkward {a} {b}")


def _sum_of_ranks(offset: float) -> float:
    total = torch.tensor(offset + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def _swap(pair: Pair, *, scale: float) -> Pair:
    assert isinstance(pair, Pair)
    return Pair(pair.left * scale + dist.get_rank(), -pair.right)


def _settings() -> tuple[int, int, float, int, str]:
    return (os.getpid(), torch.get_num_threads(), torch.rand(()).item(), dist.get_world_size(), dist.get_backend())


def _spoil_settings() -> None:
    torch.manual_seed(99)
    torch.set_default_dtype(torch.float64)


def _default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


def _fail_on(rank: int, kind: str) -> None:
    print(f"a last word of rank {dist.get_rank()}", flush=True)
    if dist.get_rank() == rank:
        if kind == "value":
            raise ValueError(f"bad value on rank {rank}")
        if kind == "awkward":
            raise AwkwardError(1, 2)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            os._exit(7)
        if kind == "hang":
            time.sleep(3600)
    dist.barrier()


def _lambda() -> object:
    return lambda: None


def _mesh_facts() -> tuple[bool, tuple[int, ...], tuple[str, ...] | None, bool]:
    one = mesh(2, 2)
    group_works = torch.ones(())
    dist.all_reduce(group_works, group=one.get_group("dp_shard"))
    return one is mesh(2, 2), tuple(one.mesh.shape), one.mesh_dim_names, group_works.item() == 2.0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    expected = sum(10.0 + rank for rank in range(world_size))
    assert run_ranks(world_size, _sum_of_ranks, 10.0) == [expected] * world_size


def test_arguments_and_results_may_be_tensors_and_classes_of_the_test_module() -> None:
    results = run_ranks(2, _swap, Pair(torch.arange(3.0), 4.0), scale=2.0)
    for rank, result in enumerate(results):
        assert torch.equal(result.left, torch.arange(3.0) * 2 + rank)
        assert result.right == -4.0


def test_the_ranks_stay_and_start_each_call_alike() -> None:
    first = run_ranks(2, _settings)
    run_ranks(2, _spoil_settings)
    second = run_ranks(2, _settings)
    assert first == second
    assert first[0][0] != first[1][0]
    assert [settings[1:] for settings in first] == [(1, first[0][2], 2, "gloo")] * 2
    assert run_ranks(2, _default_dtype) == [torch.float32] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_comes_back_with_its_traceback(failing: int) -> None:
    with pytest.raises(ValueError, match=f"bad value on rank {failing}") as caught:
        run_ranks(2, _fail_on, failing, "value")
    cause = caught.value.__cause__
    assert isinstance(cause, RankError)
    assert f"rank {failing} of 2 failed in _fail_on" in str(cause)
    assert "test_pool.py" in str(cause)
    assert f"a last word of rank {failing}" in str(cause)
    assert f"ended: rank {1 - failing}" in str(cause)
    assert run_ranks(2, _sum_of_ranks, 0.0) == [1.0, 1.0]


def test_an_exception_that_does_not_unpickle_comes_back_as_text() -> None:
    with pytest.raises(RankError, match="awkward 1 2"):
        run_ranks(2, _fail_on, 1, "awkward")
    assert run_ranks(2, _sum_of_ranks, 0.0) == [1.0, 1.0]


@pytest.mark.parametrize(("kind", "text"), [("kill", "signal SIGKILL"), ("exit", "exit code 7")])
def test_a_dead_rank_is_named(kind: str, text: str) -> None:
    with pytest.raises(RankError, match=f"(?s)rank 1 of 3 failed in _fail_on.*{text}"):
        run_ranks(3, _fail_on, 1, kind)
    assert run_ranks(3, _sum_of_ranks, 0.0) == [3.0] * 3


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0, 1 of 2 did not return from _fail_on within 1 s.*_fail_on"):
        run_ranks(2, _fail_on, 1, "hang", timeout_s=1.0)
    assert run_ranks(2, _sum_of_ranks, 0.0) == [1.0, 1.0]


def test_a_result_that_does_not_pickle_is_an_error() -> None:
    with pytest.raises(Exception, match=r"(?i)pickle|local object"):  # what Python 3.13 says of it
        run_ranks(1, _lambda)


def test_functions_that_ranks_cannot_find_are_refused() -> None:
    with pytest.raises(ValueError, match="module-level function"):
        run_ranks(1, lambda: None)
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(0, _settings)


def test_the_longest_unused_pool_goes_when_there_are_too_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool.close_pools()
    monkeypatch.setattr(pool, "MAX_RANKS", 3)
    run_ranks(1, _settings)
    before = run_ranks(2, _settings)
    run_ranks(1, _settings)
    assert list(pool._pools) == [2, 1]
    run_ranks(3, _settings)
    assert list(pool._pools) == [3]
    after = run_ranks(2, _settings)
    assert list(pool._pools) == [2]
    assert {settings[0] for settings in before}.isdisjoint(settings[0] for settings in after)


def test_closing_ends_every_process() -> None:
    pids = [settings[0] for settings in run_ranks(2, _settings)]
    pool.close_pools()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_meshes_are_cached() -> None:
    assert run_ranks(4, _mesh_facts) == [(True, (2, 2), ("dp_replicate", "dp_shard"), True)] * 4
