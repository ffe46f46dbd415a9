"""The processes that save or load together: agreement on success, so that a failure on one rank ends all of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashoptim_dist.checkpoint import errors
from flashoptim_dist.checkpoint.errors import CheckpointError
from flashoptim_dist.sharding.process_groups import can_make_a_group

Result = TypeVar("Result")

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the slowest one to write. A rank that died is noticed at once: its connection closes."""

_LOST = "lost contact with another rank, which may have been killed; start all ranks anew"


class _Connection:
    """The one reference to a process group, so that the group can be closed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group

    def close(self) -> None:
        """Close this rank's sockets: a rank that waits for this one gets an error and waits no longer."""
        group, self.group = self.group, None
        if group is not None:
            with suppress(Exception):  # it is broken already
                dist.destroy_process_group(group)


_own_groups: dict[int, tuple[dist.ProcessGroup, _Connection]] = {}


@dataclass(frozen=True)
class Ranks:
    """A CPU process group that nothing else uses, or a single process (``connection`` is None).

    Every method is a collective: all ranks must call it. What is raised has the same type and message on all of them,
    unless a rank is gone altogether; then the others lose contact with each other too, and none waits.
    """

    connection: _Connection | None
    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this rank does what one rank does for all."""
        return self.rank == 0

    def run(self, doing: str, function: Callable[[], Result]) -> Result:
        """Run ``function`` on every rank and return its result, once it is known that none failed.

        Args:
            doing: what is going on, for the error message ("saving /data/run/step-00000010").
            function: may raise anything, and communicates with nobody.

        Raises:
            CheckpointError: the function failed on some rank.
        """
        result: Any = None
        failure: tuple[str, str] | None = None
        stop: BaseException | None = None
        cause: Exception | None = None
        try:
            result = function()
        except CheckpointError as error:
            cause, failure = error, (type(error).__name__, str(error))
        except Exception as error:
            cause, failure = error, ("CheckpointError", f"{type(error).__name__}: {error}")
        except BaseException as error:  # KeyboardInterrupt, SystemExit: the other ranks must not wait for this one
            stop, failure = error, ("CheckpointError", f"stopped by {type(error).__name__}")
        outcomes = self._all_gather(doing, failure)
        if stop is not None:
            raise stop
        failures = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
        if failures:
            rank, (kind, text) = next(iter(failures.items()))
            everywhere = len(failures) == self.world_size and len(set(failures.values())) == 1
            where = "" if everywhere else f"rank {rank}: "
            raise getattr(errors, kind)(f"{doing} failed: {where}{text}") from cause
        return result

    def gather(self, doing: str, function: Callable[[], Result]) -> list[Result]:
        """Run ``function`` on every rank; return all results by rank on the first rank, an empty list elsewhere."""
        result = self.run(doing, function)
        if self.connection is None:
            return [result]
        gathered: list[Any] | None = [None] * self.world_size if self.is_first else None
        self._communicate(doing, lambda group: dist.gather_object(result, gathered, group_dst=0, group=group))
        return gathered or []

    def all_gather(self, doing: str, function: Callable[[], Result]) -> list[Result]:
        """Run ``function`` on every rank and return all results, by rank, everywhere; for small results."""
        return self._all_gather(doing, self.run(doing, function))

    def on_first(self, doing: str, function: Callable[[], Result]) -> Result:
        """Run ``function`` on the first rank and return its result everywhere; for small results."""
        return self.all_gather(doing, lambda: function() if self.is_first else None)[0]  # type: ignore[return-value]

    def scatter(self, doing: str, function: Callable[[], Sequence[Result]]) -> Result:
        """Run ``function`` on the first rank and return to each rank its item of the result."""
        items = self.run(doing, lambda: list(function()) if self.is_first else None)
        if self.connection is None:
            assert items is not None
            return items[0]
        received: list[Any] = [None]
        self._communicate(doing, lambda group: dist.scatter_object_list(received, items, group_src=0, group=group))
        return received[0]

    def _all_gather(self, doing: str, value: Any) -> list[Any]:
        if self.connection is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        self._communicate(doing, lambda group: dist.all_gather_object(gathered, value, group=group))
        return gathered

    def _communicate(self, doing: str, function: Callable[[dist.ProcessGroup], None]) -> None:
        assert self.connection is not None
        if self.connection.group is None:
            raise CheckpointError(f"{doing} failed: {_LOST}")
        try:
            function(self.connection.group)
        except Exception as error:
            text = str(error).splitlines()[0]
            traceback.clear_frames(error.__traceback__)  # they hold on to the group, whose sockets are to be closed
        else:
            return
        self.connection.close()
        raise CheckpointError(f"{doing} failed: {_LOST} ({text})")


def own_ranks(process_group: dist.ProcessGroup | None = None) -> Ranks:
    """Return the ranks of a process group (default: all), with a gloo group of their own that is made once.

    A group of its own, because a background save communicates while the training loop does. All ranks of
    ``process_group`` must call at the first use.

    Raises:
        CheckpointError: on all ranks of ``process_group``, which have made different numbers of groups before.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 0, 1)
    parent = dist.group.WORLD if process_group is None else process_group
    if parent is None or dist.get_world_size(parent) == 1:
        return Ranks(None, 0, 1)
    made = _own_groups.get(id(parent))
    if made is None or made[0] is not parent:
        if process_group is not None and not can_make_a_group([process_group]):
            raise CheckpointError(
                "the ranks of process_group can't make a group of their own: they have made different numbers of "
                "groups before. Let all ranks call every dist.new_group and init_device_mesh alike, or all take part"
            )
        group = dist.new_group(
            dist.get_process_group_ranks(parent),
            backend="gloo",
            timeout=TIMEOUT,
            use_local_synchronization=process_group is not None,
        )
        _own_groups[id(parent)] = made = (parent, _Connection(group))
    return Ranks(made[1], dist.get_rank(parent), dist.get_world_size(parent))


def current_cuda_device() -> torch.device | None:
    """Return the current CUDA device where CUDA is in use, else None; asking does not initialize CUDA."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return None
