"""Reading pickles of an untrusted checkpoint: only what checkpoints are made of, everything else is refused by name.

Two kinds of pickle occur in a DCP directory: ``.metadata``, which torch reads with plain ``pickle.load``, and the byte
entries, which torch reads with ``torch.load(weights_only=False)``. Both could run any code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from flashoptim_dist.checkpoint.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
"""DCP's dataclasses, pickled as an empty object and its fields."""
_CALLED = {
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    # The folder's own name as torch records it; the class has another home in each Python version.
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
"""What is pickled as a call."""


class _MetadataUnpickler(pickle.Unpickler):
    """Gives a pickle stand-ins of its own for the classes and functions that it may name.

    A pickle can set attributes of whatever it gets hold of; of the real ones they would stay, for the whole process.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _stand_in(super().find_class(module, name))
        if name in _CALLED.get(module, ()):
            return partial(super().find_class(module, name))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnsafeCheckpointError(f"asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeCheckpointError("refers to objects outside the file")


def _stand_in(record: type) -> type:
    """Return a class that makes empty objects of another one."""
    return type(record.__name__, (), {"__new__": lambda _, *arguments: object.__new__(record)})


def load_metadata(data: bytes, file: str) -> Metadata:
    """Return the contents of a ``.metadata`` file.

    Raises:
        UnsafeCheckpointError: it names a class or function that is not on the list; nothing was run.
        DamagedCheckpointError: it is no pickle of DCP metadata.
    """
    metadata = _guarded(file, lambda: _MetadataUnpickler(io.BytesIO(data)).load())
    if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise DamagedCheckpointError(f"{file} holds no DCP metadata")
    try:
        whole = (
            all(isinstance(key, str) and _is_whole(entry) for key, entry in metadata.state_dict_metadata.items())
            and all(
                isinstance(place.offset, int) and isinstance(place.length, int) and min(place.offset, place.length) >= 0
                for place in (metadata.storage_data or {}).values()
            )
            and _are_paths(metadata.planner_data or {})
        )
    except (AttributeError, TypeError, ValueError):  # a pickle may leave out fields, or fill them with anything
        whole = False
    if not whole:
        raise DamagedCheckpointError(f"{file} is damaged: it holds incomplete DCP metadata")
    return metadata


def _is_whole(entry: Any) -> bool:
    """Return whether an entry's description has all its fields."""
    if not isinstance(entry, TensorStorageMetadata):
        return isinstance(entry, BytesStorageMetadata)
    lengths = {len(entry.size)} | {len(part) for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes)}
    numbers = [*entry.size, *(n for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes) for n in part)]
    return (
        isinstance(entry.properties.dtype, torch.dtype)
        and len(lengths) == 1
        and all(isinstance(number, int) and number >= 0 for number in numbers)
        and all(
            offset + length <= size
            for chunk in entry.chunks
            for offset, length, size in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        )
    )


def _are_paths(paths: dict[Any, Any]) -> bool:
    """Return whether these are places of entries in nested containers, none of them inside another."""
    inner = {path[:length] for path in paths.values() for length in range(len(path))}
    return all(
        isinstance(key, str)
        and isinstance(path, tuple)
        and all(isinstance(piece, str | int) for piece in path)
        and path not in inner
        for key, path in paths.items()
    )


def load_object(data: bytes, file: str, key: str) -> Any:
    """Return an object of a byte entry: numbers, strings, containers, tensors, numpy arrays.

    Raises:
        UnsafeCheckpointError: it needs anything else; nothing was run.
        DamagedCheckpointError: it is no torch.save archive.
    """
    where = f"{file} (entry {key!r})"

    def load() -> Any:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    return _guarded(where, load)


def _guarded(where: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:
        raise reading_error(where, error) from error


def reading_error(where: str, error: Exception) -> CheckpointError:
    """Return the error to raise for one that came up while ``where`` was read."""
    if isinstance(error, UnsafeCheckpointError):
        reason = str(error)
    elif isinstance(error, pickle.UnpicklingError) and _unsafe_reason(str(error)):
        reason = f"asks for {_unsafe_reason(str(error))}"
    elif isinstance(error, CheckpointError):
        return error
    else:
        return DamagedCheckpointError(f"{where} can't be read: {type(error).__name__}: {error}")
    return UnsafeCheckpointError(f"{where} {reason}, which no checkpoint needs: it may be hostile, and was not loaded")


def _unsafe_reason(text: str) -> str:
    for marker in (
        "Unsupported global: GLOBAL ",
        "Unsupported class ",
        "Trying to load unsupported GLOBAL ",
        "Unsupported operand ",
    ):
        if marker in text:
            return text.split(marker, 1)[1].split()[0].strip(".,")
    return ""


def _numpy_globals() -> list[Any]:
    """What a pickled numpy array or scalar is rebuilt from (an object array goes through the same list again)."""
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    reconstruct: Any = np.empty(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    return [
        np.ndarray,
        np.dtype,
        *dtypes,
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        (scalar, "numpy.core.multiarray.scalar"),
        (scalar, "numpy._core.multiarray.scalar"),
    ]
