"""Reading a DCP directory that may come from anybody: pickles go through an allow-list, errors name the file."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from flashoptim_dist.checkpoint.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from flashoptim_dist.checkpoint.files import read_small, size_of, unreadable
from flashoptim_dist.checkpoint.layout import METADATA
from flashoptim_dist.checkpoint.nesting import is_plain
from flashoptim_dist.checkpoint.planners import InPlacePlanner
from flashoptim_dist.checkpoint.safe_unpickle import load_metadata, load_object, reading_error


class SafeReader(FileSystemReader):
    """DCP's reader of local files, for a directory that may come from anybody."""

    def __init__(self, directory: Path) -> None:
        """Read ``.metadata``.

        Raises:
            CheckpointError: there is no checkpoint.
            DamagedCheckpointError, UnsafeCheckpointError: see ``safe_unpickle.load_metadata``.
        """
        super().__init__(directory)
        self.directory = directory
        file = directory / METADATA
        if not (directory.is_dir() and any(directory.iterdir())):
            raise CheckpointError(f"there is no checkpoint in {directory}")
        self.metadata = load_metadata(read_small(file), str(file))
        self._plain: dict[bytes, Any] = {}
        self.files = sorted({_file_of(info, file) for info in (self.metadata.storage_data or {}).values()})
        self._check_lengths()
        if self.metadata.storage_meta is None:
            self.metadata.storage_meta = StorageMeta()
        self.set_up_storage_reader(self.metadata, True)

    def _check_lengths(self) -> None:
        ends: dict[str, int] = {}
        for info in (self.metadata.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.directory / name
            size = size_of(file)
            if size < end:
                raise DamagedCheckpointError(f"{file} has {size} bytes, and entries up to byte {end}")

    def read_metadata(self) -> Metadata:
        """Return the metadata. No keyword arguments: DCP would otherwise look for metadata of single ranks."""
        return self.metadata

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return list(self.metadata.state_dict_metadata)

    def is_object(self, key: str) -> bool:
        """Return whether an entry is an object and no tensor."""
        return isinstance(self.metadata.state_dict_metadata.get(key), BytesStorageMetadata)

    def object(self, key: str) -> Any:
        """Return an object."""
        info = self.place(MetadataIndex(key))
        file = self.directory / info.relative_path
        if info.transform_descriptors:
            raise CheckpointError(
                f"{file} was written through {info.transform_descriptors}, which this library can't undo"
            )
        try:
            with open(file, "rb") as stream:
                stream.seek(info.offset)
                data = stream.read(info.length)
        except OSError as error:
            raise unreadable(file, error) from error
        if len(data) != info.length:
            raise DamagedCheckpointError(f"{file} ends at byte {info.offset + len(data)}, inside entry {key!r}")
        if data in self._plain:  # the same learning rate in hundreds of groups
            return self._plain[data]
        value = load_object(data, str(file), key)
        if is_plain(value):
            self._plain[data] = value
        return value

    def small_tensor(self, key: str) -> torch.Tensor:
        """Return a tensor that every rank needs whole, on the CPU."""
        saved = self.metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        value = torch.empty(saved.size, dtype=saved.properties.dtype)
        self.read_tensors({key: value})
        return value

    def read_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read entries into tensors and DTensors, this rank's part of each. No communication."""
        planner = InPlacePlanner()
        planner.set_up_planner(tensors, self.metadata, True)
        self.read_data(planner.create_local_plan(), planner).wait()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read tensors; an error names the file.

        One by one: torch's loop keeps each tensor until it has read the next.
        """
        done: Any = super().read_data(LoadPlan([]), planner)
        for item in sorted(plan.items, key=self._position):
            file = self.directory / self.storage_data[item.storage_index].relative_path
            try:
                done = super().read_data(LoadPlan([item]), planner)
            except OSError as error:
                raise unreadable(file, error) from error
            except Exception as error:
                raise reading_error(f"{file} (entry {item.storage_index.fqn!r})", error) from error
        return done

    def place(self, *indices: MetadataIndex) -> Any:
        """Return where the first of these that is known lies: ``relative_path``, ``offset`` and ``length``.

        Raises:
            DamagedCheckpointError: none is known.
        """
        for index in indices:
            if index in self.storage_data:
                return self.storage_data[index]
        raise DamagedCheckpointError(f"{self.directory / METADATA} does not say where {indices[0].fqn!r} is")

    def _position(self, item: ReadItem) -> tuple[str, int]:
        info = self.place(item.storage_index)
        return info.relative_path, info.offset


def _file_of(info: Any, metadata_file: Path) -> str:
    name = getattr(info, "relative_path", None)
    if not isinstance(name, str) or PurePosixPath(name).name != name or name in ("", ".", ".."):
        raise UnsafeCheckpointError(f"{metadata_file} refers to {name!r}, which is no file of this checkpoint")
    return name
