"""Options that would change nothing: refused by name, since whoever gave one expects something of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.convert.fused_weights import FusedWeight
from flashoptim_dist.convert.targets import Target, target_named
from flashoptim_dist.convert.training_state import Layout, TrainingState

_FLAGS = {
    "master_weight_bits": "--master-weight-bits",
    "quantize": "--moments",
    "rounding": "--rounding",
    "seed": "--seed",
}


def check_layout(layout: Layout | None, place: Path, is_file: bool) -> None:
    """Refuse a layout of a DCP directory for a file of torch.save.

    Raises:
        CheckpointFormatError: it was given for one.
    """
    if layout is not None and is_file:
        raise CheckpointFormatError(
            f"--layout {layout} (layout=) is of a DCP directory, and {place} is a file of torch.save by its name, "
            "which has one layout: leave the option out, or give the name of a folder"
        )


def check_format_options(options: Mapping[str, Any] | None, to: str) -> Target:
    """Return the target named ``to``; refuse options of the number format for a plain optimizer, which has none.

    Raises:
        CheckpointFormatError: such options, or no target of that name.
    """
    target = target_named(to)
    if options and not target.is_flash:
        given = ", ".join(f"{_FLAGS[name]} ({name}=)" if name in _FLAGS else name for name in options)
        raise CheckpointFormatError(
            f"{given}: of the number format of this library's optimizers, and {to} keeps fp32 states: leave it out, or "
            f"convert to flash_{to}"
        )
    return target


def check_keep_fp32(keep_fp32: Sequence[str], dtype: torch.dtype | None, target: Target) -> None:
    """Refuse patterns of weights that stay in fp32 where all weights become fp32.

    Raises:
        CheckpointFormatError: they were given for that.
    """
    if keep_fp32 and (dtype == torch.float32 or (dtype is None and not target.is_flash)):
        raise CheckpointFormatError(
            f"--keep-fp32 {' '.join(keep_fp32)} (keep_fp32=) keeps some weights in fp32, and here all become fp32: "
            "leave the option out, or give the dtype of the others (--dtype bf16, dtype=)"
        )


def check_dtype(dtype: torch.dtype | None, state: TrainingState) -> None:
    """Refuse a dtype of weights where there are none.

    Raises:
        CheckpointFormatError: it was given for such a checkpoint.
    """
    if dtype is not None and not state.weights:
        raise CheckpointFormatError(
            f"--dtype (dtype=) is of the weights, and {state.path} holds none: give them (--weights, weights=), or "
            "leave the option out"
        )


def check_head_dim(head_dim: int | None, fused: Mapping[str, FusedWeight], state: TrainingState) -> None:
    """Refuse the size of an attention head that no parameter's rows were sorted by.

    Args:
        head_dim: as it was given.
        fused: the parameters whose weights stand in parts.
        state: the checkpoint.

    Raises:
        CheckpointFormatError: no parameter has fused queries, keys and values, or norms say otherwise.
    """
    if head_dim is None:
        return
    sizes = {name: weight.rows_of_parts[1] for name, weight in fused.items() if weight.rows_of_parts is not None}
    if not sizes:
        raise CheckpointFormatError(
            f"--head-dim {head_dim} (head_dim=) is for fused queries, keys and values (wqkv), and {state.path} "
            "holds none with their weights: leave the option out"
        )
    if head_dim not in sizes.values():
        name, size = next(iter(sizes.items()))
        raise CheckpointFormatError(
            f"--head-dim {head_dim} (head_dim=) contradicts the weights of {state.path}, by which {name!r} has heads "
            f"of {size} rows: leave the option out"
        )
