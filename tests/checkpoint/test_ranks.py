"""Agreement between ranks: a failure on one is the same error on all, and a rank that gives up keeps nobody waiting."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from flashoptim_dist.checkpoint import CheckpointError, DamagedCheckpointError
from flashoptim_dist.checkpoint.ranks import own_ranks
from tests.pool import run_ranks


def _collectives() -> tuple[Any, ...]:
    ranks = own_ranks()
    everywhere = ranks.all_gather("testing", lambda: ranks.rank * 10)
    first = ranks.gather("testing", lambda: ranks.rank * 10)
    mine = ranks.scatter("testing", lambda: [f"for {rank}" for rank in range(ranks.world_size)])
    told = ranks.on_first("testing", lambda: f"from {ranks.rank}")
    return everywhere, first, mine, told


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_go_where_they_should(world_size: int) -> None:
    tens = [rank * 10 for rank in range(world_size)]
    for rank, result in enumerate(run_ranks(world_size, _collectives)):
        assert result == (tens, tens if rank == 0 else [], f"for {rank}", "from 0")


def test_without_a_process_group_there_is_one_rank() -> None:
    assert _collectives() == ([0], [0], "for 0", "from 0")


def _fail(which: list[int], kind: str) -> str:
    ranks = own_ranks()

    def work() -> None:
        if ranks.rank in which:
            if kind == "damaged":
                raise DamagedCheckpointError("file x is damaged")
            if kind == "stop":
                raise KeyboardInterrupt
            raise OSError(28, "No space left on device")

    try:
        ranks.run("saving x", work)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        return "interrupted"
    return ""


def test_a_failure_is_the_same_error_on_all_ranks() -> None:
    assert (
        run_ranks(3, _fail, [1], "damaged")
        == ["DamagedCheckpointError: saving x failed: rank 1: file x is damaged"] * 3
    )
    assert (
        run_ranks(3, _fail, [2, 1], "os")
        == ["CheckpointError: saving x failed: rank 1: OSError: [Errno 28] No space left on device"] * 3
    )
    # What all of them say alike is nobody's in particular.
    assert (
        run_ranks(3, _fail, [0, 1, 2], "damaged") == ["DamagedCheckpointError: saving x failed: file x is damaged"] * 3
    )
    interrupted = "CheckpointError: saving x failed: rank 1: stopped by KeyboardInterrupt"
    assert run_ranks(3, _fail, [1], "stop") == [interrupted, "interrupted", interrupted]


def _give_up() -> str:
    ranks = own_ranks()
    ranks.run("saving x", lambda: None)
    if ranks.is_first:
        assert ranks.connection is not None
        time.sleep(0.2)  # let the others wait
        ranks.connection.close()
    messages = []
    for _ in range(2):
        try:
            ranks.scatter("saving x", lambda: [1, 2, 3])
        except CheckpointError as error:
            messages.append(str(error).split(" (")[0])
    dist.barrier()  # the training's own group is as it was
    return "; ".join(messages)


def test_a_rank_that_gave_up_keeps_nobody_waiting() -> None:
    lost = "saving x failed: lost contact with another rank, which may have been killed; start all ranks anew"
    assert run_ranks(3, _give_up, timeout_s=60.0) == [f"{lost}; {lost}"] * 3
    with pytest.raises(Exception, match="lost contact"):  # stays so: the ranks are to be started anew
        run_ranks(3, _fail_loudly)


def _fail_loudly() -> None:
    own_ranks().run("saving x", lambda: None)


def _a_part(alike: bool) -> str:
    pair = dist.new_group([0, 1])
    # Its number is in the name of the next group, under which its ranks look for each other.
    extra = None if alike or dist.get_rank() else dist.new_group([0], use_local_synchronization=True)
    try:
        if dist.get_rank() > 1:
            return ""
        ranks = own_ranks(pair)
        return str(ranks.all_gather("testing", lambda: ranks.rank))
    except CheckpointError as error:
        return str(error)
    finally:
        if extra is not None:
            dist.destroy_process_group(extra)


def test_ranks_that_have_made_other_groups_are_told_so_instead_of_waiting() -> None:
    assert run_ranks(3, _a_part, True, timeout_s=60.0) == ["[0, 1]", "[0, 1]", ""]
    refused = run_ranks(3, _a_part, False, timeout_s=60.0)
    assert refused[0] == refused[1]
    assert "different numbers of groups" in refused[0]
