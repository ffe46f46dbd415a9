"""A Hugging Face folder's safetensors: checked by their headers, then read straight into shards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from flashoptim_dist.checkpoint import CheckpointError
from flashoptim_dist.convert import safetensors_folder
from flashoptim_dist.convert.safetensors_folder import DTYPES, INDEX_NAME, StoredTensor
from flashoptim_dist.formats import canonical_name

from .errors import BadInput

_DTYPES = {"F64", "F32", "F16", "BF16"}
_COMPUTED = "rotary_emb.inv_freq"  # which early Llama folders store, and every model computes


def check_weights(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check, from the headers alone, that the folder's safetensors files hold `expected` (name to global shape).

    Raises BadInput that names the file or tensor: no safetensors, one missing or cut short, a tensor missing, of
    another shape, of a quantized type, or in two files, or one of the Llama that `expected` has no place for.
    """
    stored: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        for name, tensor in read_header(path).items():
            if name in expected and name in stored:
                raise BadInput(
                    f"tensor {name} stands in both {stored[name].file} and {path}; keep only the files of one model"
                )
            stored[name] = tensor
    for name, shape in expected.items():
        if name not in stored:
            raise BadInput(f"model {folder} lacks the tensor {name} in its safetensors files; download it again")
        if stored[name].shape != shape:
            raise BadInput(
                f"tensor {name} in {stored[name].file} has the shape {stored[name].shape}, but config.json asks for"
                f" {shape}; weights and config.json are of different models"
            )
        if stored[name].dtype not in _DTYPES:
            raise BadInput(
                f"tensor {name} in {stored[name].file} is stored as {stored[name].dtype}; give a model with"
                " unquantized weights (bf16, fp16 or fp32)"
            )
    # Layers or biases that config.json forgets would be dropped in silence, and another model trained.
    for name, tensor in stored.items():
        if name.startswith("model.") and name not in expected and not name.endswith(_COMPUTED):
            raise BadInput(
                f"tensor {name} in {tensor.file} has no place in the model of config.json; weights and config.json are"
                " of different models"
            )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file announces. BadInput where the file is unreadable, cut short or too long."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise BadInput(f"{path} is not a file; download the model again")
    try:
        stored = safetensors_folder.read_header(path)
    except CheckpointError as error:
        raise BadInput(str(error)) from error
    ends = [
        tensor.offset + math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        for tensor in stored.values()
        if tensor.dtype in DTYPES
    ]
    if len(ends) == len(stored) and ends and path.stat().st_size > max(ends):
        raise BadInput(
            f"{path} holds {path.stat().st_size} bytes, and its header tells of {max(ends)}; the file is damaged;"
            " download it again"
        )
    return stored


def read_into_shards(folder: Path, parameters: dict[str, Tensor]) -> None:
    """Fill `parameters` (plain tensors or DTensors, by their names in the files) in place. All ranks must call.

    Each rank reads the bytes of its own shards only, converting to the parameter's dtype. Raises BadInput on every
    rank where one cannot read.
    """
    try:
        with torch.no_grad():
            dcp.load(parameters, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:  # which is no Exception, and raised on every rank
        rank, (reason, _) = min(error.failures.items())
        raise BadInput(f"rank {rank} could not read the weights of {folder} ({reason}); download them again") from error


def stored_parameters(model: nn.Module, tied: bool) -> dict[str, Tensor]:
    """A model's parameters and persistent buffers by their names on disk, a tied head left out."""
    state = model.state_dict().items()
    tensors = {canonical_name(name): value for name, value in state if isinstance(value, Tensor)}
    if tied:
        tensors.pop("lm_head.weight", None)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in named if not (folder / name).is_file()]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise BadInput(f"{index} is no index of safetensors files; download it again") from error
        if missing:
            raise BadInput(f"{index} names {missing[0]}, which is not there; download the model again")
    if not files:
        other = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
        raise BadInput(
            f"model {folder} holds no .safetensors file"
            + (f" (only {other}); convert it with save_pretrained" if other else "; download the model's weights")
        )
    return files
