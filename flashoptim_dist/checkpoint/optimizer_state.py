"""Optimizer states and parameter groups out of a checkpoint, matched by parameter name."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flashoptim_dist.checkpoint.errors import CheckpointFormatError, DamagedCheckpointError
from flashoptim_dist.checkpoint.layout import OPTIMIZER, PARAM_GROUPS, STATE, Path_
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.formats import FORMAT_VERSION, find_fault, read_faults
from flashoptim_dist.sharding import like_parameter, local_tensor

_STATE_PREFIX = f"{OPTIMIZER}.{STATE}."
_GROUPS_PREFIX = f"{OPTIMIZER}.{PARAM_GROUPS}."


class SavedOptimizer:
    """The checkpoint's optimizer entries by parameter name, in torch's nested or flattened spelling."""

    def __init__(self, reader: SafeReader, live_names: set[str]) -> None:
        """Sort the entries; only group options are read."""
        self.states = _states_by_parameter(reader, live_names)
        self.groups = _groups_by_parameter(reader)

    def name_of(self, names: Iterable[str]) -> str | None:
        """Return which of a parameter's names the checkpoint's optimizer used, None if it had no such one."""
        return next((name for name in names if name in self.groups or name in self.states), None)


class OptimizerLoad:
    """The load of one optimizer: where its tensors are read to, and what is handed to it before or afterwards.

    No state is made by stepping, and a parameter without saved state is left without. Nothing is held twice: an
    optimizer of this library whose states have the saved form gets them read into place; otherwise they are read into
    the live state's tensors where these fit, else into new ones, which ``load_state_dict`` takes over.
    """

    def __init__(
        self,
        reader: SafeReader,
        saved: SavedOptimizer,
        names: Mapping[torch.Tensor, list[str]],
        optimizer: torch.optim.Optimizer,
        spec: Mapping[str, Any] | None,
    ) -> None:
        """Match the checkpoint's states with the optimizer's parameters; nothing is read or changed yet.

        Args:
            reader: the checkpoint.
            saved: its optimizer entries.
            names: the names of every parameter of the model.
            optimizer: the optimizer to load.
            spec: the format record of the optimizer that was saved, None for one of torch's.
        """
        self._reader = reader
        self._saved = saved
        self._optimizer = optimizer
        self._spec = spec
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._number = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._name = {parameter: saved.name_of(names.get(parameter, [])) for parameter in self._parameters}
        self._groups = [self._group(group, index) for index, group in enumerate(optimizer.param_groups)]
        self._lrs = [group.get("lr") for group in optimizer.param_groups]
        self._entries: dict[torch.Tensor, dict[Any, Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def destinations(self) -> dict[str, torch.Tensor]:
        """Prepare the optimizer and return, by key, the tensors to read into."""
        self._tensors = self._destinations()
        return self._tensors

    def _destinations(self) -> dict[str, torch.Tensor]:
        in_place = self._prepare_in_place()
        if in_place is not None:
            return in_place
        result: dict[str, torch.Tensor] = {}
        for parameter, path, key in self._wanted():
            saved = self._reader.metadata.state_dict_metadata[key]
            if isinstance(saved, TensorStorageMetadata):
                live = _at(self._optimizer.state.get(parameter, {}), path)
                value = result[key] = _destination(parameter, saved, live, key)
            else:
                value = self._reader.object(key)
            _put(self._entries.setdefault(parameter, {}), path, value)
        return result

    def finish(self) -> None:
        """Hand what was read to the optimizer, unless it was read into place.

        Raises:
            DamagedCheckpointError: scales are none; a size does not tell, and a step would fail, or not even that.
        """
        self._check_scales()
        if self._entries:
            self._load_state_dict(self._entries)

    def _check_scales(self) -> None:
        signed = {moment.scale_name: moment.signed for moment in getattr(self._optimizer, "moment_specs", ())}
        version = FORMAT_VERSION if self._spec is None else self._spec["version"]
        found: dict[str, torch.Tensor] = {}
        for _, path, key in self._wanted():
            if len(path) != 1 or path[0] not in signed or key not in self._tensors:
                continue
            scales = local_tensor(self._tensors[key])
            if scales.dtype == torch.bfloat16:
                found[key] = find_fault(scales, signed[path[0]], version)
        for key, fault in zip(found, read_faults(list(found.values())), strict=True):
            if fault:
                raise DamagedCheckpointError(f"{self._reader.directory} is damaged: {key!r} {fault}")

    def _wanted(self) -> list[tuple[torch.Tensor, Path_, str]]:
        """Return parameter, path and key of every saved state that a live parameter has use for."""
        return [
            (parameter, path, key)
            for parameter, name in self._name.items()
            if name is not None
            for path, key in self._saved.states.get(name, {}).items()
        ]

    def _prepare_in_place(self) -> dict[str, torch.Tensor] | None:
        """Give an optimizer of this library empty states and return them by key, if they have the saved form.

        None, with the optimizer as it was but for its state and group options, if they don't.
        """
        optimizer: Any = self._optimizer
        wanted = self._wanted()
        if not wanted:
            return self._load_state_dict({})
        if self._spec is None or self._spec["version"] != optimizer.format_spec()["version"]:
            return None
        self._load_state_dict({})
        optimizer.init_state()
        result: dict[str, torch.Tensor] = {}
        for parameter, path, key in wanted:
            saved = self._reader.metadata.state_dict_metadata[key]
            live = _at(optimizer.state.get(parameter, {}), path)
            if not isinstance(saved, TensorStorageMetadata) or not _fits(live, saved):
                return None
            result[key] = live
        counts = Counter(parameter for parameter, _, _ in wanted)
        for parameter, name in self._name.items():
            if counts[parameter] and counts[parameter] != len(optimizer.state[parameter]):
                return None  # the saved form has fewer entries than the live one
            if not counts[parameter] and name is not None:
                optimizer.state.pop(parameter, None)
        return result

    def _load_state_dict(self, entries: Mapping[torch.Tensor, Any]) -> dict[str, torch.Tensor]:
        """Call ``load_state_dict`` with these states; what the checkpoint does not know of keeps its own.

        That is put back afterwards: beside the saved states it would be read in their version of the number format.
        """
        live = self._optimizer.state
        kept = {
            parameter: live[parameter] for parameter, name in self._name.items() if name is None and parameter in live
        }
        state = {self._number[parameter]: values for parameter, values in entries.items()}
        whole: dict[str, Any] = {STATE: state, PARAM_GROUPS: self._groups}
        if self._spec is not None:
            whole["format"] = dict(self._spec)
        self._optimizer.load_state_dict(whole)
        self._optimizer.state.update(kept)
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            _keep_kind_of_lr(group, lr)
        return {}

    def _group(self, group: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a live group, numbered, its options replaced by the saved ones that its parameters agree on."""
        options = {key: value for key, value in group.items() if key != "params"}
        names = [self._name[parameter] for parameter in group["params"]]
        saved = [self._saved.groups[name] for name in names if name in self._saved.groups]
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
        return {**options, "params": [self._number[parameter] for parameter in group["params"]]}


def _states_by_parameter(reader: SafeReader, live: set[str]) -> dict[str, dict[Path_, str]]:
    """Return for every parameter name the paths and keys of its states."""
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
    nested: dict[str | int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for key in reader.names():
        if not key.startswith(_GROUPS_PREFIX):
            continue
        path = paths.get(key, ())
        if len(path) >= 4:
            _put(nested.setdefault(path[2], {}), tuple(path[3:]), _value(reader, key))
        else:
            name, option = key[len(_GROUPS_PREFIX) :].rsplit(".", 1)
            by_name.setdefault(name, {})[option] = _value(reader, key)
    for group in nested.values():
        names = group.pop("params", [])
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise DamagedCheckpointError(f"{reader.directory} is damaged: parameter groups in it name no parameters")
        by_name.update(dict.fromkeys(names, group))
    for group in by_name.values():
        group.pop("param_names", None)
    return by_name


def _value(reader: SafeReader, key: str) -> Any:
    return reader.object(key) if reader.is_object(key) else reader.small_tensor(key)


def _fits(live: Any, saved: TensorStorageMetadata) -> bool:
    return (
        isinstance(live, torch.Tensor) and live.shape == torch.Size(saved.size) and live.dtype == saved.properties.dtype
    )


def _destination(parameter: torch.Tensor, saved: TensorStorageMetadata, live: Any, key: str) -> torch.Tensor:
    """Return the live state tensor where it fits, else a new one placed like its parameter."""
    if _fits(live, saved):
        return live
    shape, dtype = torch.Size(saved.size), saved.properties.dtype
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
