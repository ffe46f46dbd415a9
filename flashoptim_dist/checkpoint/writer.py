"""Writing the files of a DCP directory: one file per rank, checksums on the way, on disk when a call returns."""

from __future__ import annotations

import io
import os
import pickle
import uuid
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flashoptim_dist.checkpoint.errors import CheckpointError
from flashoptim_dist.checkpoint.layout import METADATA
from flashoptim_dist.checkpoint.manifest import FileRecord

_IN_OLDER_FORM = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""What torch.load reads from its older form; float8 and wider unsigned integers it writes there and can't read."""


class _CheckedFile(io.RawIOBase):
    """A file being written: counts and sums up its bytes, and keeps the error that torch.save would hide."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._size = 0
        self._crc32 = 0
        self._error: OSError | None = None
        try:
            self._stream = open(file, "wb", buffering=1 << 20)  # noqa: SIM115 closed by __exit__
        except OSError as error:
            raise _cannot_write(file, error) from error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            written = self._stream.write(data)
        except OSError as error:
            self._error = error
            raise
        self._crc32 = zlib.crc32(data, self._crc32)
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    @property
    def record(self) -> FileRecord:
        """Size and checksum of what was written so far."""
        return FileRecord(self._size, self._crc32)

    def __enter__(self) -> _CheckedFile:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Write everything to disk and close, or say which error kept it from the disk."""
        try:
            if error is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        except OSError as late:
            self._error = late
        try:
            self._stream.close()
        except OSError as late:  # what was buffered did not fit either
            self._error = self._error or late
        if self._error is not None and (error is None or isinstance(error, Exception)):
            raise _cannot_write(self._file, self._error) from self._error


class CheckedWriter(StorageWriter):
    """Writes what torch's ``FileSystemReader`` reads; ``records`` tells size and checksum of each file.

    Unlike torch's writer it lets go of each tensor once that is written, so that a save from a GPU needs one tensor of
    host memory. Entries are in torch.save's older form, which is as good to torch.load and 1.2 kB smaller: for a model
    of some million parameters that is a twentieth of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        """Write into ``directory``, which exists."""
        self._directory = directory
        self._file_name = ""
        self._save_id = str(uuid.uuid4())
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this rank's number from the keyword ``rank``."""
        self._file_name = f"__{kwargs.get('rank', 0)}_0.distcp"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, objects first; a rank without anything to write makes no file."""
        results: list[WriteResult] = []
        if plan.items:
            with _CheckedFile(self._directory / self._file_name) as file:
                for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                    start = file.tell()
                    _write(file, planner.resolve_data(item))
                    length = file.tell() - start
                    results.append(WriteResult(item.index, length, _StorageInfo(self._file_name, start, length)))
            self.records[self._file_name] = file.record
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, on the first rank."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        with _CheckedFile(self._directory / METADATA) as file:
            file.write(pickle.dumps(metadata))
        self.records[METADATA] = file.record

    def storage_meta(self) -> StorageMeta:
        """Return the save's id; torch's own writer also records the folder, which here is a temporary one."""
        return StorageMeta(save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be written there: to a path, not a URL."""
        return "://" not in os.fspath(checkpoint_id)


def save_object(value: Any, stream: Any, zipped: bool = False) -> None:
    """Write an object or CPU tensor in torch.save's older, compact form, or in the newer, which knows all dtypes."""
    torch.save(value, stream, _use_new_zipfile_serialization=zipped)


def _write(file: _CheckedFile, data: torch.Tensor | io.BytesIO) -> None:
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    data = data.detach().cpu()
    if not data.is_contiguous() or data.untyped_storage().size() != data.nbytes:
        data = data.clone(memory_format=torch.contiguous_format)  # torch.save would write the whole storage
    save_object(data, file, zipped=data.dtype not in _IN_OLDER_FORM)


def _cannot_write(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file} can't be written: {error.strerror or error}")
