"""What a conversion writes: tensors that are computed block by block, and everything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.checkpoint.layout import FORMAT, MODEL, OPTIMIZER, PARAM_GROUPS, STATE, Path_
from flashoptim_dist.convert.lazy import ComputedTensor, LazyTensor, blocks, cast
from flashoptim_dist.convert.training_state import Group, Layout


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: where in the nested state, its shape and its dtype."""

    path: Path_
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Unit:
    """Tensors that are computed together, in blocks of rows: all of one parameter.

    ``compute(start, stop)`` returns rows of each, in the order of ``outputs``, whose first dimensions agree.
    """

    outputs: tuple[OutputTensor, ...]
    compute: Callable[[int, int], Sequence[Tensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that decides the blocks: that of the largest output."""
        return max((output.shape for output in self.outputs), key=lambda shape: (len(shape), torch.Size(shape).numel()))

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(torch.Size(output.shape).numel() * output.dtype.itemsize for output in self.outputs)

    def rows(self, start: int, stop: int) -> list[Tensor]:
        """Return rows of every output, computed in blocks."""
        parts = blocks(self.shape, start, stop)
        if len(parts) == 1:
            return list(self.compute(start, stop))
        whole = [torch.empty((stop - start, *output.shape[1:]), dtype=output.dtype) for output in self.outputs]
        for first, last in parts:
            for target, value in zip(whole, self.compute(first, last), strict=True):
                target[first - start : last - start] = value
        return whole

    def tensors(self) -> list[tuple[Path_, LazyTensor]]:
        """Return each output by itself; reading it computes its whole unit, block by block."""
        return [(output.path, self._tensor(index, output)) for index, output in enumerate(self.outputs)]

    def _tensor(self, index: int, output: OutputTensor) -> LazyTensor:
        where = ".".join(map(str, output.path))
        return ComputedTensor(output.shape, output.dtype, where, lambda a, b: self.compute(a, b)[index])


@dataclass
class Result:
    """The whole of what is written."""

    units: list[Unit] = field(default_factory=list)
    objects: list[tuple[Path_, Any]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied weights, and the names that hold them."""
    record: dict[str, Any] = field(default_factory=dict)
    unnamed: bool = False
    """Whether the optimizer's parameters are known by number alone."""
    notes: list[str] = field(default_factory=list)
    """What a user should know of how it was converted."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(unit.nbytes for unit in self.units)


def unit_of(path: Path_, tensor: LazyTensor, dtype: torch.dtype | None = None) -> Unit:
    """Return a unit that copies a tensor, cast to another dtype if one is given."""
    dtype = tensor.dtype if dtype is None else dtype
    output = OutputTensor(path, tensor.shape, dtype)
    return Unit((output,), lambda start, stop: (cast(tensor.rows(start, stop), dtype, tensor.where),))


def path_in(layout: Layout, path: Path_) -> Path_:
    """Return where an entry of the nested state sits in a layout."""
    if layout == "nested":
        return path
    if path[0] == OPTIMIZER:
        return (OPTIMIZER, ".".join(map(str, path[1:])))
    return path[1:] if layout == "torchtitan" and path[0] == MODEL else path


def group_entries(layout: Layout, groups: Iterable[Group], unnamed: bool = False) -> list[tuple[Path_, Any]]:
    """Return the entries of parameter groups: by number with their parameters' names, or flattened by parameter.

    ``param_names`` is among them where names are known: an optimizer made from names asks for it when it loads. So do
    torchtitan's optimizers for ``fused``, ``foreach`` and ``initial_lr``, which others may go without.
    """
    entries: list[tuple[Path_, Any]] = []
    for index, group in enumerate(groups):
        options = group.options if unnamed else {**group.options, "param_names": list(group.names)}
        if layout == "torchtitan":
            options = {"fused": False, "foreach": False, "initial_lr": options.get("lr"), **options}
        if layout == "nested":
            numbered: Mapping[str, Any] = {**options, "params": list(group.names)}
            entries += [((OPTIMIZER, PARAM_GROUPS, index, key), value) for key, value in numbered.items()]
        else:
            entries += [
                ((OPTIMIZER, f"{PARAM_GROUPS}.{name}.{key}"), value)
                for name in group.names
                for key, value in options.items()
            ]
    return entries


def format_entries(layout: Layout, result: Result) -> list[tuple[Path_, Any]]:
    """Return the format record of each parameter's state that the torchtitan adapters keep beside it, and ask for.

    JSON: the optimizer's record and, under ``entries``, the dtypes of the states.
    """
    specs = [spec for spec in result.record.get("optimizers", []) if spec.get("name")]
    if layout != "torchtitan" or not specs:
        return []
    dtypes: dict[str, dict[str, str]] = {name: {} for group in result.groups for name in group.names}
    for output in (output for unit in result.units for output in unit.outputs):
        if output.path[:2] == (OPTIMIZER, STATE):
            name, entry = map(str, output.path[2:])
            dtypes.setdefault(name, {})[entry] = str(output.dtype).removeprefix("torch.")
    return [
        ((OPTIMIZER, f"{FORMAT}.{name}"), json.dumps({**specs[0], "entries": entries}, sort_keys=True))
        for name, entries in dtypes.items()
    ]


def state_path(name: str, state: str) -> Path_:
    """Return where a state of a parameter sits."""
    return (OPTIMIZER, STATE, name, state)
