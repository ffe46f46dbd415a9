"""Reading a directory of torch.distributed.checkpoint: ours, plain torch's nested and flattened, torchtitan's."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from flashoptim_dist.checkpoint.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.layout import FORMAT, LATEST, METADATA, MODEL, OPTIMIZER, Path_, step_name, steps_in
from flashoptim_dist.checkpoint.optimizer_state import SavedOptimizer
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.checkpoint.verify import check_files
from flashoptim_dist.convert.archive import open_archive
from flashoptim_dist.convert.lazy import Box, ChunkedTensor, LazyTensor
from flashoptim_dist.convert.training_state import Group, TrainingState


def is_dcp(path: Path) -> bool:
    """Return whether a folder is a DCP directory, whole or not."""
    return (path / METADATA).exists() or any(path.glob("*.distcp"))


def newest_in(path: Path) -> Path:
    """Return the newest checkpoint where ``path`` is a folder of them (``latest``, ``step-...``), else ``path``.

    Raises:
        DamagedCheckpointError: ``latest`` names one that is not there.
    """
    if is_dcp(path) or not path.is_dir():
        return path
    latest = path / LATEST
    if latest.is_file():
        name = latest.read_text(encoding="utf-8", errors="replace").strip()
        if Path(name).name != name or not (path / name).is_dir():
            raise DamagedCheckpointError(f"{latest} names {name!r}, which is not there")
        return path / name
    steps = steps_in(path)
    return path / step_name(steps[-1]) if steps else path


def read_dcp(path: Path) -> TrainingState:
    """Return the contents of a DCP directory, after comparing its files' sizes with the manifest, if it has one.

    Raises:
        CheckpointError: it is none, damaged, or unsafe; the file is named.
    """
    path = newest_in(local_path(path))
    check_files(path, "size")
    reader = SafeReader(path)
    return _Contents(reader).training_state()


def _tensor(reader: SafeReader, key: str, saved: TensorStorageMetadata) -> ChunkedTensor:
    """Return an entry; what its chunks hold is compared with what ``.metadata`` says when they are read."""

    def place(offsets: tuple[int, ...]) -> Any:
        return reader.place(MetadataIndex(key, torch.Size(offsets)), MetadataIndex(key))

    def open_chunk(box: Box) -> LazyTensor:
        offsets, sizes = box
        info = place(offsets)
        file = reader.directory / info.relative_path
        if info.transform_descriptors:
            raise CheckpointError(f"{file} was written through {info.transform_descriptors}, which can't be undone")
        chunk = open_archive(file, info.offset, info.length, key)
        if not isinstance(chunk, LazyTensor) or chunk.shape != sizes or chunk.dtype != saved.properties.dtype:
            raise DamagedCheckpointError(f"{file} (entry {key!r}) is not the tensor that {METADATA} announces")
        return chunk

    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks]
    identity = tuple((info.relative_path, info.offset) for info in (place(offsets) for offsets, _ in boxes))
    where = f"{reader.directory} (entry {key!r})"
    return ChunkedTensor(saved.size, saved.properties.dtype, where, boxes, open_chunk, identity)


class _Contents:
    """Sorts the entries of a DCP directory."""

    def __init__(self, reader: SafeReader) -> None:
        self._reader = reader
        self._paths: dict[str, Path_] = {
            key: tuple(path) for key, path in (reader.metadata.planner_data or {}).items() if isinstance(path, tuple)
        }

    def training_state(self) -> TrainingState:
        model, others = self._sort()
        state = TrainingState(self._reader.directory, "dcp")
        if FORMAT in self._reader.metadata.state_dict_metadata and self._reader.is_object(FORMAT):
            state.record = self._reader.object(FORMAT)
        self._add_model(state, model)
        self._add_optimizer(state)
        if any(len(self._paths.get(key, (1, 2))) == 1 for key in model.values()):
            state.layout = "torchtitan"
        state.others = [(self._paths.get(key, (key,)), self._value(key)) for key in others]
        return state

    def _sort(self) -> tuple[dict[str, str], list[str]]:
        """Return the model's entries by name, and the entries that are neither the model's nor the optimizer's."""
        model: dict[str, str] = {}
        top: dict[str, str] = {}
        others: list[str] = []
        for key in self._reader.names():
            path = self._paths.get(key, ())
            if key == FORMAT or key.startswith(f"{OPTIMIZER}."):
                continue
            if len(path) >= 2 and path[0] == MODEL:
                model[".".join(map(str, path[1:]))] = key
            elif not path and key.startswith(f"{MODEL}."):
                model[key.removeprefix(f"{MODEL}.")] = key
            elif len(path) <= 1 and not self._reader.is_object(key):
                top[key] = key
            else:
                others.append(key)
        if model:
            return model, others + list(top)
        return top, others

    def _add_model(self, state: TrainingState, model: dict[str, str]) -> None:
        first: dict[Hashable, str] = {}
        for name, key in model.items():
            value = self._value(key)
            if not isinstance(value, LazyTensor):
                state.model_objects[name] = value
            elif value.numel and value.identity in first:
                state.aliases[name] = first[value.identity]
            else:
                first[value.identity] = name
                state.weights[name] = value

    def _add_optimizer(self, state: TrainingState) -> None:
        saved = SavedOptimizer(self._reader, {*state.weights, *state.aliases})
        for name, entries in saved.states.items():
            for path, key in entries.items():
                if len(path) != 1:
                    raise CheckpointFormatError(
                        f"{state.path}: the optimizer state {key!r} is nested; only those of Adam, AdamW, Lion and SGD "
                        "convert"
                    )
                state.states.setdefault(name, {})[str(path[0])] = self._value(key)
        nested = any(len(self._paths.get(key, ())) >= 4 for key in self._reader.names() if key.startswith(OPTIMIZER))
        if saved.states and not nested:
            state.layout = "flattened"
        state.groups = _regroup(saved.groups, nested)
        if not state.record and (specs := self._format_of_parameters()):
            state.record = {"optimizers": specs}

    def _format_of_parameters(self) -> list[dict[str, Any]]:
        """Return the different format records that the torchtitan adapters keep beside the states, one by parameter.

        Raises:
            CheckpointFormatError: they are of several versions of the number format.
        """
        specs: list[dict[str, Any]] = []
        for key in self._reader.names():
            if key.startswith(f"{OPTIMIZER}.{FORMAT}.") and self._reader.is_object(key):
                spec = {name: value for name, value in _json(self._reader.object(key)).items() if name != "entries"}
                if spec and spec not in specs:
                    specs.append(spec)
        versions = {(spec.get("name"), spec.get("version")) for spec in specs}
        if len(versions) > 1:
            raise CheckpointFormatError(
                f"{self._reader.directory} holds states of {len(versions)} number formats, {sorted(map(str, versions))}"
            )
        return specs

    def _value(self, key: str) -> Any:
        saved = self._reader.metadata.state_dict_metadata[key]
        if isinstance(saved, TensorStorageMetadata):
            return _tensor(self._reader, key, saved)
        return self._reader.object(key)


def _json(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _regroup(by_name: dict[str, dict[str, Any]], nested: bool) -> list[Group]:
    """Return the groups: of the nested form as they were, of the flattened one parameters with the same options."""
    groups: list[Group] = []
    found: dict[Any, Group] = {}
    for name, options in by_name.items():
        key = id(options) if nested else repr(sorted(options.items(), key=lambda item: str(item[0])))
        if key not in found:
            found[key] = Group(dict(options), [])
            groups.append(found[key])
        found[key].names.append(name)
    return groups
