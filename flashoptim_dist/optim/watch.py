"""Noticing that state tensors were replaced between two steps, at a cost the host can afford in every step.

A plan holds addresses of state tensors. Whoever moves the state to the CPU between steps and back, or puts new tensors
into it, leaves them dangling. References would notice, but keep the memory that such callers want to free.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from flashoptim_dist.sharding import local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.backends import StepTask


class StateWatch:
    """The state tensors of some parameters, as objects: none may be gone, and those in the dicts must be the same.

    An object that lives has its id for itself, so equal ids and no death mean the same objects. Memory that is replaced
    under a plain tensor (``tensor.data = ...``) is noticed by the address of each parameter's last entry.
    """

    def __init__(self, tasks: Sequence[StepTask]) -> None:
        self._states: list[dict[str, Any]] = [task.state for task in tasks]
        gone: list[bool] = []
        self._gone = gone
        tensors = [value for state in self._states for value in state.values() if isinstance(value, Tensor)]
        self._guards = [weakref.ref(tensor, lambda _: gone.append(True)) for tensor in tensors]
        self._ids = self._current_ids()
        lasts = [[value for value in state.values() if isinstance(value, Tensor)][-1] for state in self._states]
        self._plain = [number for number, value in enumerate(lasts) if not isinstance(value, DTensor)]
        self._names = [list(state)[-1] for state in self._states]
        self._addresses = self._current_addresses()

    def _current_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._states))))

    def _current_addresses(self) -> list[int]:
        states, names = self._states, self._names
        return [states[number][names[number]].data_ptr() for number in self._plain]

    def holds(self) -> bool:
        """Return whether all state tensors are where they were."""
        return not self._gone and self._current_ids() == self._ids and self._current_addresses() == self._addresses


def check_state(task: StepTask) -> None:
    """Refuse state that a kernel would misread.

    Raises:
        RuntimeError: a state tensor on another device than the weight, or not contiguous, named.
    """
    for name, value in task.state.items():
        local = local_tensor(value)
        if local.device != task.weight.device:
            raise RuntimeError(
                f"state {name!r} of parameter {task.record.name!r} is on {local.device}, its weight on "
                f"{task.weight.device}: move it back before step()"
            )
        if not local.is_contiguous():
            raise RuntimeError(
                f"state {name!r} of parameter {task.record.name!r} of local shape {tuple(local.shape)} has strides "
                f"{local.stride()}: make it contiguous before step()"
            )
