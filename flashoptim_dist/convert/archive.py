"""torch.save archives read without their tensors: those stay on disk and are read in rows.

Both forms that torch.save writes, zip and the older stream, as files of their own and as entries of a DCP file. The
pickle goes through a list of a few harmless names; an archive that needs more is left to ``torch.load`` with
``weights_only=True``, which refuses by name what no checkpoint needs.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from flashoptim_dist.checkpoint.errors import CheckpointError, DamagedCheckpointError
from flashoptim_dist.checkpoint.safe_unpickle import load_object
from flashoptim_dist.convert.lazy import FileTensor, LazyTensor, MemoryTensor

_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}


class NeedsTorchLoad(Exception):
    """The archive holds something that only ``torch.load`` rebuilds."""


class _Storage:
    __slots__ = ("dtype", "key", "numel")

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype, self.key, self.numel = dtype, key, numel


class _Reference:
    __slots__ = ("offset", "size", "storage", "stride")

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _bytes(text: Any, encoding: Any = "latin1") -> bytes:
    """Rebuild bytes as pickle's older protocols write them: as text."""
    if encoding != "latin1" or not isinstance(text, str):
        raise NeedsTorchLoad("an encoded text")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Rebuilds containers, numbers and references to tensors; asks for anything else are refused."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): tuple,
            # New ones each time: a pickle can set attributes of what it gets hold of, and on the real ones they stay.
            ("torch._utils", "_rebuild_tensor_v2"): partial(_Reference),
            ("torch._utils", "_rebuild_parameter"): partial(_parameter),
            ("_codecs", "encode"): partial(_bytes),
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise NeedsTorchLoad(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
            raise NeedsTorchLoad("a reference of unknown kind")
        if len(pid) == 6 and pid[5] is not None:
            raise NeedsTorchLoad("a view of a storage")
        return _Storage(pid[1], str(pid[2]), int(pid[4]))


def open_archive(file: Path, offset: int = 0, length: int | None = None, label: str = "") -> Any:
    """Return what torch.save wrote, each tensor a :class:`LazyTensor`.

    Args:
        file: the file.
        offset: where in it the archive begins, in bytes.
        length: its bytes; default up to the end of the file.
        label: what errors call it, beside the file.

    Raises:
        DamagedCheckpointError: it is no torch.save archive, or not whole.
        UnsafeCheckpointError: it asks for code or classes that no checkpoint needs; nothing of it was run.
    """
    where = f"{file} (entry {label!r})" if label else str(file)
    try:
        size = file.stat().st_size
        if length is None:
            length = size - offset
        if size < offset + length:
            raise DamagedCheckpointError(f"{file} has {size} bytes, and {where} ends at byte {offset + length}")
        with open(file, "rb") as stream:
            view = _View(stream, offset, length)
            try:
                read = _read_zip if view.read(2) == b"PK" else _read_stream
                view.seek(0)
                value, offset_of = read(view)
                return _resolve(value, offset_of, file, offset, length, where)
            except NeedsTorchLoad:
                view.seek(0)
                return _in_memory(load_object(view.read(), str(file), label or "the whole file"), where)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{where} is no whole torch.save archive: {_reason(error)}") from error


class _View(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, stream: Any, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._position = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._offset + self._position)
        count: int = self._stream.readinto(memoryview(buffer)[: max(0, self._length - self._position)])
        self._position += count
        return count


def _read_zip(view: _View) -> tuple[Any, Callable[[_Storage], int]]:
    archive = zipfile.ZipFile(view)
    entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        raise NeedsTorchLoad("another byte order")
    with archive.open(entries["data.pkl"]) as stream:
        value = _Unpickler(io.BytesIO(stream.read())).load()

    def offset_of(storage: _Storage) -> int:
        info = entries[f"data/{storage.key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise NeedsTorchLoad("a compressed archive")
        if info.file_size < storage.numel * storage.dtype.itemsize:
            raise ValueError(f"storage {storage.key} has {info.file_size} bytes")
        view.seek(info.header_offset)
        header = view.read(30)
        if header[:4] != b"PK\x03\x04":
            raise ValueError(f"storage {storage.key} has no header")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        return info.header_offset + 30 + name_length + extra_length

    return value, offset_of


def _read_stream(view: _View) -> tuple[Any, Callable[[_Storage], int]]:
    stream = io.BufferedReader(view)
    if _Unpickler(stream).load() != MAGIC_NUMBER or _Unpickler(stream).load() != PROTOCOL_VERSION:
        raise ValueError("it begins otherwise")
    if not _Unpickler(stream).load().get("little_endian", True):
        raise NeedsTorchLoad("another byte order")
    storages: dict[str, _Storage] = {}
    unpickler = _Recording(stream, storages)
    value = unpickler.load()
    position_of: dict[str, int] = {}
    keys = _Unpickler(stream).load()
    position = stream.tell()
    for key in keys:
        storage = storages[str(key)]
        view.seek(position)
        (numel,) = struct.unpack("<q", view.read(8))
        if numel != storage.numel:
            raise ValueError(f"storage {key} has {numel} elements")
        position_of[str(key)] = position + 8
        position += 8 + numel * storage.dtype.itemsize
    return value, lambda storage: position_of[storage.key]


class _Recording(_Unpickler):
    def __init__(self, stream: Any, storages: dict[str, _Storage]) -> None:
        super().__init__(stream)
        self._storages = storages

    def persistent_load(self, pid: Any) -> Any:
        storage = super().persistent_load(pid)
        return self._storages.setdefault(storage.key, storage)


def _resolve(
    value: Any, offset_of: Callable[[_Storage], int], file: Path, base: int, length: int, where: str, name: str = ""
) -> Any:
    """Replace the references to tensors by tensors on disk, after checking that they lie inside the archive."""
    if isinstance(value, _Reference):
        return _lazy(value, offset_of, file, base, length, f"{where} {name!r}" if name else where)
    if isinstance(value, Mapping):
        return {
            key: _resolve(inner, offset_of, file, base, length, where, f"{name}.{key}" if name else str(key))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(
            _resolve(inner, offset_of, file, base, length, where, f"{name}.{index}" if name else str(index))
            for index, inner in enumerate(value)
        )
    if isinstance(value, _Storage):
        raise NeedsTorchLoad("a storage without a tensor")
    return value


def _lazy(
    reference: _Reference, offset_of: Callable[[_Storage], int], file: Path, base: int, length: int, where: str
) -> LazyTensor:
    storage, size, stride = reference.storage, tuple(reference.size), tuple(reference.stride)
    numbers = (reference.offset, *size, *stride)
    if not isinstance(storage, _Storage) or any(not isinstance(number, int) or number < 0 for number in numbers):
        raise ValueError("a tensor in it is not one")
    expected = []
    for dim in range(len(size)):
        expected.append(math.prod(size[dim + 1 :]))
    strides_matter = [step for step, length_ in zip(stride, size, strict=True) if length_ > 1]
    contiguous = [step for step, length_ in zip(expected, size, strict=True) if length_ > 1]
    if math.prod(size) and strides_matter != contiguous:
        raise NeedsTorchLoad("a tensor that is not contiguous")
    itemsize = storage.dtype.itemsize
    start = offset_of(storage) + reference.offset * itemsize
    if reference.offset + math.prod(size) > storage.numel or start + math.prod(size) * itemsize > length:
        raise ValueError(f"tensor {where} of shape {size} is larger than what was stored")
    return FileTensor(size, storage.dtype, file, base + start, where)


def _in_memory(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        return MemoryTensor(value.detach(), where)
    if isinstance(value, Mapping):
        return {key: _in_memory(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_in_memory(inner, where) for inner in value)
    return value


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
