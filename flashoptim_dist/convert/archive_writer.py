"""torch.save archives written block by block: ``torch.load`` reads them, and writing holds one block of one tensor."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import IO, Any

import torch

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.convert.archive import STORAGE_NAMES
from flashoptim_dist.convert.lazy import LazyTensor, bytes_of, in_blocks
from flashoptim_dist.convert.progress import Progress

_ROOT = "archive"
_TIME = (1980, 1, 1, 0, 0, 0)


class _StorageOf:
    """Stands for a tensor's storage while the structure is pickled."""

    def __init__(self, number: int, tensor: LazyTensor) -> None:
        self.number, self.tensor = number, tensor


class _Pickler(pickle.Pickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, protocol=2)
        self.storages: list[LazyTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _StorageOf):
            return None
        if obj.tensor.dtype not in STORAGE_NAMES:
            raise CheckpointFormatError(
                f"{obj.tensor.where} is {obj.tensor.dtype}, which is not written to files of torch.save: convert to a "
                "DCP directory"
            )
        kind = getattr(torch, STORAGE_NAMES[obj.tensor.dtype])
        return ("storage", kind, str(obj.number), "cpu", obj.tensor.numel)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, LazyTensor):
            return NotImplemented
        strides = [1] * len(obj.shape)
        for dim in range(len(obj.shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * max(1, obj.shape[dim + 1])
        storage = _StorageOf(len(self.storages), obj)
        self.storages.append(obj)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        return torch._utils._rebuild_tensor_v2, (storage, 0, obj.shape, tuple(strides), False, hooks)


def write_archive(stream: IO[bytes], value: Any, progress: Progress) -> None:
    """Write containers, numbers, strings and :class:`LazyTensor` objects as ``torch.save`` writes them and tensors."""
    structure = io.BytesIO()
    pickler = _Pickler(structure)
    pickler.dump(value)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", structure.getvalue()), ("byteorder", b"little")):
            archive.writestr(zipfile.ZipInfo(f"{_ROOT}/{name}", _TIME), data)
        for number, tensor in enumerate(pickler.storages):
            with archive.open(zipfile.ZipInfo(f"{_ROOT}/data/{number}", _TIME), "w", force_zip64=True) as entry:
                for block in in_blocks(tensor):
                    entry.write(bytes_of(block))
                    progress.advance(block.nbytes)
        archive.writestr(zipfile.ZipInfo(f"{_ROOT}/version", _TIME), b"3\n")
