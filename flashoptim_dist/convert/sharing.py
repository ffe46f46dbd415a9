"""Sharing work out over ranks, evenly by bytes and the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Work = TypeVar("Work", bound=_Sized)


def shares(work: Sequence[Work], count: int) -> list[list[Work]]:
    """Return each rank's share: the largest piece goes to whom has least; pieces keep their order."""
    owner: dict[int, int] = {}
    loads = [0] * count
    for index in sorted(range(len(work)), key=lambda index: -work[index].nbytes):
        rank = loads.index(min(loads))
        owner[index] = rank
        loads[rank] += work[index].nbytes
    return [[piece for index, piece in enumerate(work) if owner[index] == rank] for rank in range(count)]
