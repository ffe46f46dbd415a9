"""Noticing that state was replaced between two steps, at a cost the host can afford in every step.

A plan holds addresses of state tensors. Whoever moves the state to the CPU between steps and back, or puts new tensors
into it, leaves them dangling. References would notice, but keep the memory that such callers want to free; looking at
every tensor takes longer than all else that a step does. So the dicts count their changes.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashoptim_dist.optim.state import STEP
from flashoptim_dist.sharding import local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.backends import StepTask


class _Changes:
    """A count that the dicts of one optimizer share."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _CountedDict(dict[Any, Any]):
    """What is taken out of a dict is counted in its ``_changes``."""

    __slots__ = ()
    _changes: _Changes

    def __delitem__(self, key: Any) -> None:
        self._changes.count += 1
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        """See dict."""
        self._changes.count += 1
        return super().pop(*args)

    def popitem(self) -> tuple[Any, Any]:
        """See dict."""
        self._changes.count += 1
        return super().popitem()

    def clear(self) -> None:
        """See dict."""
        self._changes.count += 1
        super().clear()


class ParameterState(_CountedDict):
    """The state of one parameter: a dict whose changes are counted. Copies are plain dicts, pickles are
    OrderedDicts."""

    __slots__ = ("_changes",)

    def __init__(self, entries: Mapping[str, Any], changes: _Changes) -> None:
        super().__init__(entries)
        self._changes = changes

    def __setitem__(self, name: str, value: Any) -> None:
        self._changes.count += 1
        super().__setitem__(name, value)

    def __ior__(self, other: Any) -> ParameterState:  # type: ignore[misc]
        self._changes.count += 1
        super().update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """See dict."""
        self._changes.count += 1
        super().update(*args, **kwargs)

    def setdefault(self, *args: Any) -> Any:
        """See dict."""
        self._changes.count += 1
        return super().setdefault(*args)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.load(weights_only=True) takes an OrderedDict, but no call of dict.
        return OrderedDict, (), None, None, iter(self.items())


class StateTable(_CountedDict, defaultdict[Any, Any]):
    """``optimizer.state``: the states of all parameters, whose changes are counted, in it and in its dicts.

    Dicts put into it are copied to :class:`ParameterState`. Copies and pickles are plain ones.
    """

    def __init__(self, states: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        self._changes = _Changes()
        self.update(states)

    @property
    def changes(self) -> int:
        """How often something was put in or taken out so far."""
        return self._changes.count

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._changes.count += 1
        # A torch optimizer may keep other things beside parameters' states; those are left as they are.
        counted = isinstance(value, ParameterState) and value._changes is self._changes
        is_state = isinstance(value, dict) and isinstance(key, Tensor)
        super().__setitem__(key, ParameterState(value, self._changes) if is_state and not counted else value)

    def __ior__(self, other: Any) -> StateTable:  # type: ignore[misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """See dict."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """See dict."""
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        """Return a plain defaultdict of the same states."""
        return defaultdict(dict, self)

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))


class MemoryWatch:
    """Memory replaced under state tensors that stay (``tensor.data = ...``), noticed by the address of each parameter's
    last plain entry. DTensors are replaced as objects.
    """

    def __init__(self, tasks: Sequence[StepTask]) -> None:
        lasts = [[value for value in task.state.values() if isinstance(value, Tensor)][-1] for task in tasks]
        plain = [value for value in lasts if not isinstance(value, DTensor)]
        self._tensors = [weakref.ref(value) for value in plain]  # which the caller may want to free
        self._addresses = [value.data_ptr() for value in plain]

    def holds(self) -> bool:
        """Return whether the memory is where it was."""
        if not self._tensors:
            return True
        tensors: list[Any] = [tensor() for tensor in self._tensors]
        try:
            return list(map(Tensor.data_ptr, tensors)) == self._addresses
        except TypeError:  # a tensor is gone
            return False


def check_state(task: StepTask, contiguous: bool = True) -> None:
    """Refuse state that a step would misread: after a parameter was resized, or the user put other tensors there.

    Args:
        task: whose entries are looked at; other things in its state are the user's own.
        contiguous: whether entries must be, as kernels want them.

    Raises:
        RuntimeError: an entry that is missing or no tensor, has another shape or dtype than the parameter needs, lies
            on another device than the weight, or is not contiguous, named.
    """
    record = task.record
    where = f"of parameter {record.name!r} of local shape {record.layout.local_shape}"
    start_anew = "del optimizer.state[parameter] starts it anew"
    expected = {STEP: ((), torch.float32), **{n: (e.local_shape, e.dtype) for n, e in record.entries.items()}}
    for name, (shape, dtype) in expected.items():
        value = task.state.get(name)
        if not isinstance(value, Tensor):
            found = "missing" if value is None else f"a {type(value).__name__}"
            raise RuntimeError(f"state {name!r} {where} is {found}, no tensor: {start_anew}")
        local = local_tensor(value)
        if local.device != task.weight.device:
            raise RuntimeError(
                f"state {name!r} {where} is on {local.device}, its weight on {task.weight.device}: move it back before "
                "step()"
            )
        if local.shape != shape or local.dtype != dtype:
            raise RuntimeError(
                f"state {name!r} {where} is {local.dtype} {tuple(local.shape)} and must be {dtype} {shape}: "
                f"{start_anew}, needed where a parameter was resized"
            )
        if contiguous and not local.is_contiguous():
            raise RuntimeError(f"state {name!r} {where} has strides {local.stride()}: make it contiguous before step()")
