"""Hugging Face model folders: written with the true master weights, read so that fp32 keeps its low bits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashoptim_dist.checkpoint.errors import CheckpointError, CheckpointFormatError
from flashoptim_dist.checkpoint.files import local_path, remove_tree
from flashoptim_dist.checkpoint.ranks import Ranks, own_ranks
from flashoptim_dist.checkpoint.saving import make_staging, take_place
from flashoptim_dist.convert.api import Converted, Pathlike, refuse_existing, summary
from flashoptim_dist.convert.casting_rule import CastingRule
from flashoptim_dist.convert.converting import Choices, convert_state
from flashoptim_dist.convert.dcp_target import write_dcp
from flashoptim_dist.convert.lazy import ComputedTensor, LazyTensor, cast, same_contents
from flashoptim_dist.convert.opening import open_checkpoint
from flashoptim_dist.convert.parameters import master_weight
from flashoptim_dist.convert.progress import Progress, Silent
from flashoptim_dist.convert.safetensors_folder import (
    INDEX_NAME,
    file_names,
    index_of,
    is_safetensors,
    no_files,
    read_safetensors,
    split_into_files,
    write_file,
)
from flashoptim_dist.convert.sharing import shares
from flashoptim_dist.convert.training_state import Group, TrainingState
from flashoptim_dist.convert.unused_options import check_format_options, check_keep_fp32

CONFIG_NAME = "config.json"
SHARD_BYTES = 5_000_000_000

_COPIED = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")

Tensors = list[tuple[str, LazyTensor]]


def export_hf(
    checkpoint: Pathlike,
    folder: Pathlike,
    *,
    dtype: torch.dtype = torch.bfloat16,
    config: Pathlike | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Converted:
    """Write a checkpoint's weights as a Hugging Face model folder (all ranks must call).

    In the dtype it is trained in, a weight is written as it is, so that logits are the same; in another one it is its
    master weight (weight and correction), in fp32 exactly, else rounded to nearest. Tied weights are written once where
    the config ties them. Memory is bounded by a fraction of the largest tensor.

    Args:
        checkpoint: anything that ``convert`` reads, with weights under the names that transformers gives them.
        folder: made, with ``model.safetensors`` or several files and their index.
        dtype: of the weights; BatchNorm-like layers stay in fp32.
        config: the model folder that training began from: its config.json (with the new dtype), tokenizer and other
            small files are copied. None writes weights alone.
        shard_bytes: largest size of one file.
        overwrite: whether to replace what is there.
        progress: is told of every block.
        process_group: the ranks that write; default all.

    Raises:
        CheckpointError: on every rank, with the file or tensor and the reason; nothing is left at the target then.
    """
    ranks, place = own_ranks(process_group), local_path(folder)
    origin = None if config is None else local_path(config)
    refuse_existing(place, overwrite)

    def plan() -> tuple[list[Tensors], dict[str, Any] | None]:
        settings = None if origin is None else _read_config(origin)
        state = open_checkpoint(checkpoint)
        return split_into_files(_exported(state, dtype, settings), shard_bytes), settings

    files, settings = ranks.run(f"exporting {checkpoint}", plan)
    names = file_names(len(files))
    progress = progress or Silent()

    def write(staging: Path) -> None:
        mine = shares([_File(name, tensors) for name, tensors in zip(names, files, strict=True)], ranks.world_size)
        progress.begin(f"writing {place}", sum(file.nbytes for file in mine[ranks.rank]))
        for file in mine[ranks.rank]:
            with _durable(staging / file.name) as stream:
                write_file(stream, file.tensors, progress)
        if not ranks.is_first:
            return
        if len(files) > 1:
            _write(staging / INDEX_NAME, index_of(files, names))
        if origin is not None and settings is not None:
            _copy_small_files(origin, staging)
            _write(staging / CONFIG_NAME, json.dumps(_with_dtype(settings, dtype), indent=2).encode() + b"\n")

    _appear(place, ranks, overwrite, write)
    tensors = [tensor for of_file in files for _, tensor in of_file]
    notes = () if origin is not None else (f"{CONFIG_NAME} and the tokenizer are not there: they come with --config",)
    return Converted(
        place, len(tensors), sum(tensor.numel for tensor in tensors), sum(tensor.nbytes for tensor in tensors), notes
    )


def import_hf(
    folder: Pathlike,
    checkpoint: Pathlike,
    *,
    to: str = "flash_adamw",
    dtype: torch.dtype | None = None,
    keep_fp32: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Converted:
    """Make a checkpoint of a Hugging Face model folder, to start training from (all ranks must call).

    For one of this library's optimizers every weight gets fresh states, and what a 16-bit weight cannot hold of an fp32
    one is in its correction. The learning rate and other options of groups are those of the optimizer that loads it.
    Options that would change nothing are refused.

    Args:
        folder: with safetensors, in one file or several.
        checkpoint: a DCP directory to make.
        to: the optimizer, a key of ``targets.TARGETS``; a plain one gets weights alone.
        dtype: of the weights; default bf16 for this library's optimizers, fp32 for plain ones.
        keep_fp32: patterns on names of modules that stay in fp32, as in ``cast_model``.
        options: master_weight_bits, quantize, rounding, seed.
        overwrite: whether to replace what is there.
        progress: is told of every block.
        process_group: the ranks that write; default all.

    Raises:
        CheckpointError: on every rank, with the file or tensor and the reason; nothing is left at the target then.
    """
    ranks, place, source = own_ranks(process_group), local_path(checkpoint), local_path(folder)
    target = check_format_options(options, to)
    check_keep_fp32(keep_fp32, dtype, target)
    refuse_existing(place, overwrite)

    def plan() -> Any:
        if not source.exists():
            raise CheckpointError(f"{source} does not exist")
        if not is_safetensors(source):
            raise CheckpointError(no_files(source))
        state = read_safetensors(source)
        wanted = dtype or (torch.bfloat16 if target.is_flash else torch.float32)
        names = [name for name, weight in state.weights.items() if _is_parameter(name, weight)]
        state.groups = [Group({}, names)]
        state.aliases = _ties_of(source, state)
        result = convert_state(state, target, Choices(wanted, tuple(keep_fp32), options, fresh=True))
        result.groups = state.groups
        return result

    result = ranks.run(f"importing {source}", plan)
    write_dcp(place, result, "nested", ranks, overwrite, progress or Silent())
    return summary(place, result)


@dataclass(frozen=True)
class _File:
    name: str
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)


def _exported(state: TrainingState, dtype: torch.dtype, settings: dict[str, Any] | None) -> Tensors:
    """Return the tensors to write, by name."""
    if not state.weights:
        raise CheckpointFormatError(f"{state.path} holds no weights, only optimizer states")
    if "tok_embeddings.weight" in state.weights:
        raise CheckpointFormatError(
            f"{state.path} has torchtitan's names ('tok_embeddings.weight'), and transformers knows others: export it "
            "with torchtitan's own conversion, from a checkpoint converted --to adamw"
        )
    rule = CastingRule([*state.weights, *state.aliases], ())
    tensors: dict[str, LazyTensor] = {}
    for name, weight in state.weights.items():
        wanted = rule.dtype(name, weight.dtype, dtype)
        # In its own dtype a weight is what the model computes with. Its master, halfway between two weights in one of
        # 256, would be rounded to the even one, and logits would differ.
        tensors[name] = weight if wanted == weight.dtype else _cast(master_weight(state, name), wanted)
    tied = settings is None or bool(settings.get("tie_word_embeddings"))
    if not tied:
        tensors |= {alias: tensors[name] for alias, name in state.aliases.items()}
    else:
        for head in [name for name in tensors if name.endswith(_HEADS)]:
            embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
            if any(same_contents(state.weights[head], state.weights[name]) for name in embeddings):
                del tensors[head]  # plain DCP writes a tied weight under both of its names
    # The order of a checkpoint's entries depends on how many ranks wrote it; that of the files must not.
    return sorted(tensors.items(), key=lambda pair: [piece.zfill(9) for piece in pair[0].split(".")])


def _cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    def rows(start: int, stop: int) -> Tensor:
        return cast(tensor.rows(start, stop), dtype, tensor.where)

    return ComputedTensor(tensor.shape, dtype, tensor.where, rows)


def _is_parameter(name: str, weight: LazyTensor) -> bool:
    return weight.dtype.is_floating_point and not name.endswith(_BUFFERS)


def _ties_of(folder: Path, state: TrainingState) -> dict[str, str]:
    """Return the head's name and the embedding's where the config ties them and the files leave the head out."""
    file = folder / CONFIG_NAME
    if not file.is_file() or not _read_config(folder).get("tie_word_embeddings"):
        return {}
    embedding = next((name for name in state.weights if name.endswith(_EMBEDDINGS)), None)
    if embedding is None or any(name.endswith(_HEADS) for name in state.weights):
        return {}
    return {_HEADS[1] if embedding.endswith("embed_in.weight") else _HEADS[0]: embedding}


# ---------------------------------------------------------------------- files


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_NAME
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} can't be read ({error.strerror or error}): give a model folder") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} is no configuration of a model")
    return settings


def _with_dtype(settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a config that announces the dtype of the weights, under the key that it uses."""
    key = "torch_dtype" if "torch_dtype" in settings and "dtype" not in settings else "dtype"
    return {**settings, key: str(dtype).removeprefix("torch.")}


def _copy_small_files(source: Path, target: Path) -> None:
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and file.name != CONFIG_NAME and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
                with open(target / file.name, "rb+") as stream:
                    os.fsync(stream.fileno())


def _write(file: Path, data: bytes) -> None:
    with _durable(file) as stream:
        stream.write(data)


class _durable:
    """A file to write, on disk when it is closed."""

    def __init__(self, file: Path) -> None:
        self._stream = open(file, "wb", buffering=1 << 20)  # noqa: SIM115 closed by __exit__

    def __enter__(self) -> Any:
        return self._stream

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if error is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()


def _appear(place: Path, ranks: Ranks, overwrite: bool, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a hidden folder on all ranks, then give it its name."""
    doing = f"writing {place}"
    staging = place.with_name(ranks.on_first(doing, lambda: make_staging(place, overwrite)))
    try:
        ranks.run(doing, lambda: _with_file_errors(staging, write))
        ranks.run(doing, lambda: take_place(staging, place, overwrite) if ranks.is_first else None)
    except BaseException:
        if ranks.is_first:
            remove_tree(staging)
        raise


def _with_file_errors(staging: Path, write: Callable[[Path], None]) -> None:
    try:
        write(staging)
    except OSError as error:
        raise CheckpointError(f"{error.filename or staging} can't be written: {error.strerror or error}") from error
