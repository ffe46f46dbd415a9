"""The conversions as functions; the command line is a thin layer over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flashoptim_dist.checkpoint.errors import CheckpointError, CheckpointFormatError
from flashoptim_dist.checkpoint.files import local_path
from flashoptim_dist.checkpoint.layout import MODEL
from flashoptim_dist.checkpoint.ranks import own_ranks
from flashoptim_dist.convert.converting import Choices, convert_state
from flashoptim_dist.convert.dcp_target import write_dcp
from flashoptim_dist.convert.opening import open_checkpoint
from flashoptim_dist.convert.progress import Progress, Silent
from flashoptim_dist.convert.result import Result
from flashoptim_dist.convert.torch_target import SUFFIXES, write_torch_file
from flashoptim_dist.convert.training_state import Layout, TrainingState
from flashoptim_dist.convert.unused_options import check_dtype, check_format_options, check_keep_fp32, check_layout

Pathlike = str | Path


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote."""

    path: Path
    tensors: int
    parameters: int
    nbytes: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data (JSON-serializable)."""
        return {
            "path": str(self.path),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "notes": list(self.notes),
        }


def convert(
    source: Pathlike,
    target: Pathlike,
    to: str,
    *,
    layout: Layout | None = None,
    weights: Pathlike | None = None,
    dtype: torch.dtype | None = None,
    keep_fp32: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    head_dim: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Converted:
    """Convert a checkpoint's optimizer states, and its weights with them, for another optimizer (all ranks must call).

    Memory is bounded by a fraction of the largest tensor: everything is read, converted and written in blocks. Where
    torch.distributed is initialized the ranks share out the parameters. The target appears when all of it is on disk.
    Options that would change nothing are refused.

    Args:
        source: a DCP directory (this library's, plain torch's nested or flattened, torchtitan's, the official
            flashoptim's), a folder of this library's checkpoints (the newest one), or a file of torch.save.
        target: a folder for a DCP directory, or a file name ending in .pt, .pth, .bin or .ckpt.
        to: the optimizer, a key of ``targets.TARGETS``.
        layout: of a DCP directory; default that of the source.
        weights: where the weights are, for a source that holds optimizer states alone.
        dtype: of the weights; default fp32 (the master weights) for a plain optimizer, bf16 for one of this library's
            where they were fp32, unless the checkpoint tells what they were before.
        keep_fp32: patterns on names of modules that stay in fp32, as in ``cast_model``.
        options: master_weight_bits, quantize, rounding, seed of the result; default as they were, else the optimizers'.
        head_dim: size of an attention head, for checkpoints of torchtitan 0.3 whose attention keeps queries, keys and
            values in one parameter, ``wqkv``; it is refused by name where it is needed and missing.
        overwrite: whether to replace what is there.
        progress: is told of every block.
        process_group: the ranks that convert; default all.

    Raises:
        CheckpointError: on every rank, with the file or tensor and the reason; nothing is left at the target then.
    """
    if head_dim is not None and head_dim < 1:
        raise CheckpointFormatError(f"head_dim={head_dim} must be at least 1")
    ranks, place = own_ranks(process_group), local_path(target)
    is_file = place.suffix in SUFFIXES
    check_layout(layout, place, is_file)
    target_optimizer = check_format_options(options, to)
    check_keep_fp32(keep_fp32, dtype, target_optimizer)
    refuse_existing(place, overwrite)

    def plan() -> tuple[Result, Layout]:
        state = open_checkpoint(source)
        if weights is not None:
            _add_weights(state, weights)
        if not state.has_states and not state.groups:
            raise CheckpointFormatError(
                f"{state.path} holds no optimizer states. import-hf makes a checkpoint of a model's weights"
            )
        check_dtype(dtype, state)
        choices = Choices(dtype, tuple(keep_fp32), options, head_dim=head_dim)
        return convert_state(state, target_optimizer, choices), layout or state.layout

    result, chosen = ranks.run(f"converting {source}", plan)
    if is_file:
        write_torch_file(place, result, ranks, overwrite, progress or Silent())
    else:
        write_dcp(place, result, chosen, ranks, overwrite, progress or Silent())
    return summary(place, result)


def summary(place: Path, result: Result) -> Converted:
    """Return what is to be said of a result that was written."""
    outputs = [output for unit in result.units for output in unit.outputs]
    weights = [output for output in outputs if output.path[0] == MODEL and output.dtype.is_floating_point]
    parameters = sum(torch.Size(output.shape).numel() for output in weights)
    return Converted(place, len(outputs), parameters, result.nbytes, tuple(result.notes))


def refuse_existing(place: Path, overwrite: bool) -> None:
    """Refuse a target that is there already.

    Raises:
        CheckpointError: it is, and is not to be replaced.
    """
    there = place.exists() and not (place.is_dir() and not any(place.iterdir()))
    if there and not overwrite:
        raise CheckpointError(f"{place} exists: choose another name, or --force (overwrite=True) to replace it")


def _add_weights(state: TrainingState, weights: Pathlike) -> None:
    given = open_checkpoint(weights)
    if not given.weights:
        raise CheckpointFormatError(f"{given.path} holds no weights")
    if state.weights:
        raise CheckpointFormatError(f"{state.path} holds weights of its own: leave --weights out")
    if state.unnamed:
        raise CheckpointFormatError(
            f"{state.path} knows its parameters by number only, so weights can't be matched with them. Save the state "
            "of an optimizer made from model.named_parameters()"
        )
    state.weights, state.aliases, state.model_objects = given.weights, given.aliases, given.model_objects
