"""Optimizer states and parameter groups out of a checkpoint, matched by parameter name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.checkpoint.layout import OPTIMIZER, PARAM_GROUPS, STATE, Path_
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.sharding import like_parameter, local_tensor

_STATE_PREFIX = f"{OPTIMIZER}.{STATE}."
_GROUPS_PREFIX = f"{OPTIMIZER}.{PARAM_GROUPS}."


class OptimizerLoad:
    """One load: where the tensors are to be read to, and what is handed to ``load_state_dict`` afterwards.

    No state is made by stepping: a parameter without saved state stays without, and the live state of a parameter is
    where its saved state is read to, if it fits.
    """

    def __init__(
        self,
        reader: SafeReader,
        names: Mapping[torch.Tensor, list[str]],
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        """Match the checkpoint's states with the optimizers' parameters; nothing is read or changed yet."""
        self._reader = reader
        self._names = names
        self._optimizers = optimizers
        self._saved = _states_by_parameter(reader, {name for all_names in names.values() for name in all_names})
        self._groups = _groups_by_parameter(reader)
        self._loaded: dict[torch.Tensor, dict[str, Any]] = {}
        self._keys: dict[str, tuple[torch.Tensor, str]] = {}

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return a tensor to read into for every saved state tensor that a live parameter has use for."""
        result: dict[str, torch.Tensor] = {}
        entries = self._reader.metadata.state_dict_metadata
        for optimizer in self._optimizers:
            for parameter in _parameters(optimizer):
                name = self._saved_name(parameter)
                for path, key in self._saved.get(name, {}).items() if name else ():
                    saved = entries[key]
                    if isinstance(saved, TensorStorageMetadata):
                        live = _at(optimizer.state.get(parameter, {}), path)
                        value = result[key] = _destination(parameter, saved, live, key)
                    else:
                        value = self._reader.object(key)
                    _put(self._loaded.setdefault(parameter, {}), path, value)
        return result

    def finish(self) -> None:
        """Hand states and group options to the optimizers."""
        for optimizer in self._optimizers:
            numbers = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}
            state: dict[int, Any] = {}
            for parameter, number in numbers.items():
                if parameter in self._loaded:
                    state[number] = self._loaded[parameter]
                elif self._saved_name(parameter) is None and optimizer.state.get(parameter):
                    state[number] = optimizer.state[parameter]  # the checkpoint does not know this parameter
            groups = [
                {**self._options(group, index), "params": [numbers[parameter] for parameter in group["params"]]}
                for index, group in enumerate(optimizer.param_groups)
            ]
            tensors = [group.get("lr") for group in optimizer.param_groups]
            optimizer.load_state_dict({STATE: state, PARAM_GROUPS: groups})
            for group, live in zip(optimizer.param_groups, tensors, strict=True):
                _keep_kind_of_lr(group, live)

    def _saved_name(self, parameter: torch.Tensor) -> str | None:
        """Return which of a parameter's names the checkpoint's optimizer used, None if it had no such one."""
        names = self._names.get(parameter, [])
        return next((name for name in names if name in self._groups or name in self._saved), None)

    def _options(self, group: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a live group's options, replaced by the saved ones that all of its parameters agree on."""
        options = {key: value for key, value in group.items() if key != "params"}
        saved = [self._groups[name] for name in map(self._saved_name, group["params"]) if name in self._groups]
        for key in dict.fromkeys(key for one in saved for key in one):
            values = [one[key] for one in saved if key in one]
            if all(_equal(value, values[0]) for value in values[1:]):
                options[key] = values[0]
            elif key in options:
                warnings.warn(
                    f"parameters of group {index} had different {key!r} when they were saved; the group keeps its own, "
                    f"{options[key]!r}",
                    stacklevel=2,
                )
        return options


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states_by_parameter(reader: SafeReader, live: set[str]) -> dict[str, dict[Path_, str]]:
    """Return for every parameter name the paths and keys of its states, in torch's nested or flattened spelling."""
    paths = reader.metadata.planner_data or {}
    result: dict[str, dict[Path_, str]] = {}
    for key in reader.names():
        if not key.startswith(_STATE_PREFIX):
            continue
        path = paths.get(key, ())
        if len(path) >= 4:  # nested: optimizer, state, parameter, state name
            name, inner = str(path[2]), tuple(path[3:])
        else:  # flattened: one string, in which only the live names tell where the parameter's name ends
            pieces = key[len(_STATE_PREFIX) :].split(".")
            cuts = [cut for cut in range(len(pieces) - 1, 0, -1) if ".".join(pieces[:cut]) in live]
            cut = cuts[0] if cuts else len(pieces) - 1
            name, inner = ".".join(pieces[:cut]), tuple(pieces[cut:])
        result.setdefault(name, {})[inner] = key
    return result


def _groups_by_parameter(reader: SafeReader) -> dict[str, dict[str, Any]]:
    """Return for every parameter name the options of its saved group."""
    paths = reader.metadata.planner_data or {}
    nested: dict[int, dict[str, Any]] = {}
    flattened: dict[str, dict[str, Any]] = {}
    for key in reader.names():
        if not key.startswith(_GROUPS_PREFIX):
            continue
        path = paths.get(key, ())
        if len(path) >= 4:
            _put(nested.setdefault(int(path[2]), {}), tuple(path[3:]), _value(reader, key))
        else:
            name, option = key[len(_GROUPS_PREFIX) :].rsplit(".", 1)
            flattened.setdefault(name, {})[option] = _value(reader, key)
    for group in nested.values():
        names = group.pop("params", [])
        group.pop("param_names", None)
        flattened.update(dict.fromkeys(names, group))
    return flattened


def _value(reader: SafeReader, key: str) -> Any:
    if reader.is_object(key):
        return reader.object(key)
    return reader.small_tensor(key)


def _destination(parameter: torch.Tensor, saved: TensorStorageMetadata, live: Any, key: str) -> torch.Tensor:
    """Return the live state tensor where it fits, else a new one placed like its parameter."""
    shape, dtype = torch.Size(saved.size), saved.properties.dtype
    if isinstance(live, torch.Tensor) and live.shape == shape and live.dtype == dtype:
        return live
    if not shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    device = local_tensor(parameter).device
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=device)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    sharded = [placement for placement in parameter.placements if not placement.is_replicate()]
    if any(getattr(placement, "dim", 0) >= len(shape) for placement in sharded):
        raise CheckpointFormatError(
            f"{key!r} has shape {tuple(shape)}, which can't be placed like its parameter {tuple(parameter.shape)} with "
            f"{parameter.placements}"
        )
    local_shape, _ = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return like_parameter(torch.empty(local_shape, dtype=dtype, device=device), parameter, shape)


def _keep_kind_of_lr(group: dict[str, Any], live: Any) -> None:
    """Keep a learning rate the tensor that it was (captured graphs hold on to it), and a number else."""
    loaded = group.get("lr")
    if isinstance(live, torch.Tensor) and loaded is not live:
        group["lr"] = live.fill_(float(loaded)) if loaded is not None else live
    elif isinstance(loaded, torch.Tensor) and isinstance(live, float | int):
        group["lr"] = loaded.item()


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(left).cpu(), torch.as_tensor(right).cpu()))
    return bool(left == right)


def _at(value: Any, path: Path_) -> Any:
    for piece in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(piece, value.get(str(piece)))
    return value


def _put(target: dict[Any, Any], path: Path_, value: Any) -> None:
    for piece in path[:-1]:
        target = target.setdefault(piece, {})
    target[path[-1]] = value
