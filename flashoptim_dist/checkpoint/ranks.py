"""The processes that save or load together: agreement on success, so that a failure on one rank ends all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashoptim_dist.checkpoint import errors
from flashoptim_dist.checkpoint.errors import CheckpointError

Result = TypeVar("Result")

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the slowest one to write. A rank that died is noticed at once: its connection closes."""

_own_groups: dict[Any, tuple[Any, dist.ProcessGroup]] = {}


@dataclass(frozen=True)
class Ranks:
    """A CPU process group that nothing else uses, or a single process (``group`` is None)."""

    group: dist.ProcessGroup | None
    rank: int
    world_size: int

    def together(self, doing: str, function: Callable[[], Result]) -> list[Result]:
        """Run ``function`` on every rank and return all results by rank (all ranks must call).

        Args:
            doing: what is going on, for the error message ("saving /data/run/step-00000010").
            function: may raise anything; must communicate with nobody, or raise the same on all ranks.

        Raises:
            CheckpointError: the function failed on some rank. Type and message are the same on every rank.
        """
        result: Any = None
        failure: tuple[str, str] | None = None
        stop: BaseException | None = None
        cause: BaseException | None = None
        try:
            result = function()
        except CheckpointError as error:
            cause, failure = error, (type(error).__name__, str(error))
        except Exception as error:
            cause, failure = error, ("CheckpointError", f"{type(error).__name__}: {error}")
        except BaseException as error:  # KeyboardInterrupt, SystemExit: the other ranks must not wait for this one
            stop, failure = error, ("CheckpointError", f"stopped by {type(error).__name__}")
        outcomes = self._gather(doing, (result, failure))
        if stop is not None:
            raise stop
        failures = {rank: outcome[1] for rank, outcome in enumerate(outcomes) if outcome[1] is not None}
        if failures:
            rank, (kind, text) = next(iter(failures.items()))
            everywhere = len(failures) == self.world_size and len(set(failures.values())) == 1
            where = "" if everywhere else f"rank {rank}: "
            raise getattr(errors, kind)(f"{doing} failed. {where}{text}") from cause
        return [outcome[0] for outcome in outcomes]

    def _gather(self, doing: str, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(gathered, value, group=self.group)
        except Exception as error:
            raise CheckpointError(f"{doing} failed: lost contact with another rank ({error})") from error
        return gathered


def own_ranks(process_group: dist.ProcessGroup | None = None) -> Ranks:
    """Return the ranks of a process group (default: all), with a gloo group of their own that is made once.

    A group of its own, because a background save communicates while the training loop does. All ranks of
    ``process_group`` must call at the first use.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 0, 1)
    parent = dist.group.WORLD if process_group is None else process_group
    if dist.get_world_size(parent) == 1:
        return Ranks(None, 0, 1)
    made = _own_groups.get(id(parent))
    if made is None or made[0] is not parent:
        group = dist.new_group(
            dist.get_process_group_ranks(parent),
            backend="gloo",
            timeout=TIMEOUT,
            use_local_synchronization=process_group is not None,
        )
        _own_groups[id(parent)] = made = (parent, group)
    return Ranks(made[1], dist.get_rank(made[1]), dist.get_world_size(made[1]))


def current_cuda_device() -> torch.device | None:
    """Return the current CUDA device where CUDA is in use, else None; asking does not initialize CUDA."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return None
