"""Files of safetensors, one by one or sharded with an index: headers checked, tensors read and written in rows.

The format is a length, a JSON header and the bytes (https://huggingface.co/docs/safetensors); the package of that name
writes a file from memory only, and this must not hold a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from flashoptim_dist.checkpoint.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError
from flashoptim_dist.convert.lazy import FileTensor, LazyTensor, bytes_of, in_blocks
from flashoptim_dist.convert.progress import Progress
from flashoptim_dist.convert.training_state import TrainingState

SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WAY_OUT = "the file is damaged or its download was not finished; download it again"


@dataclass(frozen=True)
class StoredTensor:
    """What a header says of one tensor; ``offset`` is that of its bytes in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a file announces.

    Raises:
        DamagedCheckpointError: the file is unreadable, cut short, or its header contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise DamagedCheckpointError(f"{path} ends within its header ({size} bytes); {_WAY_OUT}")
            header: Any = json.loads(file.read(length))
    except OSError as error:
        raise DamagedCheckpointError(f"cannot read {path} ({error.strerror or error}); {_WAY_OUT}") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} has no readable safetensors header; {_WAY_OUT}") from error
    try:
        header.pop("__metadata__", None)
        spans = {name: tuple(map(int, entry["data_offsets"])) for name, entry in header.items()}
        end = 8 + length + max((stop for _, stop in spans.values()), default=0)
        if size < end:
            raise DamagedCheckpointError(f"{path} holds {size} of {end} bytes; {_WAY_OUT}")
        stored = {
            name: StoredTensor(path, tuple(map(int, entry["shape"])), str(entry["dtype"]), 8 + length + spans[name][0])
            for name, entry in header.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} has no readable safetensors header; {_WAY_OUT}") from error
    for name, (start, stop) in spans.items():
        dtype = DTYPES.get(stored[name].dtype)
        needed = stop - start if dtype is None else math.prod(stored[name].shape) * dtype.itemsize
        if start < 0 or min(stored[name].shape, default=0) < 0 or needed != stop - start:
            raise DamagedCheckpointError(f"{path} gives tensor {name} {stop - start} bytes, and its shape another size")
    return stored


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder, those of its index where it has one.

    Raises:
        CheckpointError: there are none, or the index names one that is not there.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        files = sorted(folder.glob(f"*{SUFFIX}"))
        if not files:
            raise CheckpointError(no_files(folder))
        return files
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        unsafe = [name for name in named if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{index} is no index of safetensors files; download it again") from error
    if unsafe:
        raise CheckpointFormatError(f"{index} names {unsafe[0]!r}, which is no file of this folder")
    for name in named:
        if not (folder / name).is_file():
            raise DamagedCheckpointError(f"{index} names {name}, which is not there; download the model again")
    return [folder / name for name in named]


def no_files(folder: Path) -> str:
    """Return what to say of a folder without safetensors files."""
    other = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
    way_out = f" (only {other}); convert it with save_pretrained" if other else "; download the model's weights"
    return f"model {folder} holds no .safetensors file{way_out}"


def is_safetensors(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a folder with such and without a DCP directory's files."""
    if path.is_file():
        return path.suffix == SUFFIX
    return path.is_dir() and not (path / ".metadata").exists() and any(path.glob(f"*{SUFFIX}"))


def read_safetensors(path: Path) -> TrainingState:
    """Return the weights of a safetensors file or folder; they stay on disk.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor stands in two files or has a dtype of quantized weights.
    """
    state = TrainingState(path, "safetensors")
    for file in [path] if path.is_file() else files_of(path):
        for name, stored in read_header(file).items():
            where = f"tensor {name} in {file}"
            if name in state.weights:
                raise CheckpointFormatError(
                    f"tensor {name} stands in both {state.weights[name].where.rsplit(' in ', 1)[-1]} and {file}; keep "
                    "only the files of one model"
                )
            if stored.dtype not in DTYPES:
                raise CheckpointFormatError(
                    f"{where} is stored as {stored.dtype}; give a model with unquantized weights (bf16, fp16 or fp32)"
                )
            state.weights[name] = FileTensor(stored.shape, DTYPES[stored.dtype], file, stored.offset, where)
    return state


def split_into_files(tensors: Iterable[tuple[str, LazyTensor]], most_bytes: int) -> list[list[tuple[str, LazyTensor]]]:
    """Share tensors out over files of at most ``most_bytes``, in order; a larger tensor gets a file of its own."""
    files: list[list[tuple[str, LazyTensor]]] = [[]]
    size = 0
    for name, tensor in tensors:
        if files[-1] and size + tensor.nbytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append((name, tensor))
        size += tensor.nbytes
    return files


def file_names(count: int) -> list[str]:
    """Return the names that transformers gives to so many files."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def index_of(files: Sequence[Sequence[tuple[str, LazyTensor]]], names: Sequence[str]) -> bytes:
    """Return the index that tells which file holds which tensor."""
    placed = {name: file for file, tensors in zip(names, files, strict=True) for name, _ in tensors}
    total = sum(tensor.nbytes for tensors in files for _, tensor in tensors)
    parameters = sum(tensor.numel for tensors in files for _, tensor in tensors)
    body = {
        "metadata": {"total_parameters": parameters, "total_size": total},
        "weight_map": dict(sorted(placed.items())),
    }
    return json.dumps(body, indent=2).encode() + b"\n"


def write_file(stream: IO[bytes], tensors: Sequence[tuple[str, LazyTensor]], progress: Progress) -> None:
    """Write one file, a block of a tensor at a time.

    Raises:
        CheckpointFormatError: a dtype that safetensors does not know.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Larger elements first, so that every tensor is aligned to its own elements, as the package does it.
    tensors = sorted(tensors, key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    position = 0
    for name, tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise CheckpointFormatError(f"{tensor.where} is {tensor.dtype}, which safetensors files don't hold")
        span = [position, position + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in tensors:
        for block in in_blocks(tensor):
            stream.write(bytes_of(block))
            progress.advance(block.nbytes)
