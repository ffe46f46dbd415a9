"""Whether a checkpoint fits the run that it is loaded into, decided before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flashoptim_dist.checkpoint.errors import CheckpointFormatError, DamagedCheckpointError
from flashoptim_dist.checkpoint.layout import FORMAT, MODEL
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.checkpoint.snapshot import LAYOUT_VERSION, format_of
from flashoptim_dist.optim.versions import check_format

_SHOWN = 5
_SPEC_KEYS = {"version", "group_size"}
"""What the record of an optimizer of this library has, beside ``name`` and ``optimizer``."""


def check_record(record: Any, path: Path) -> None:
    """Refuse a checkpoint whose layout is newer than this library knows.

    Raises:
        CheckpointFormatError: it is newer.
        DamagedCheckpointError: the ``format`` entry of the checkpoint at ``path`` holds something else.
    """
    if not _is_record(record):
        raise DamagedCheckpointError(f"{path} is damaged: its entry {FORMAT!r} is no record of a format")
    version = record.get("layout_version", LAYOUT_VERSION)
    if version != LAYOUT_VERSION:
        raise CheckpointFormatError(
            f"it has checkpoint layout version {version}, and this library reads version {LAYOUT_VERSION}. Load it "
            f"with {_writer(record)}"
        )


def _is_record(record: Any) -> bool:
    if not isinstance(record, Mapping):
        return False
    optimizers = record.get("optimizers", [])
    return (
        isinstance(optimizers, list | tuple)
        and isinstance(record.get("same_on_all_ranks", {}), Mapping)
        and all(isinstance(spec, Mapping) and isinstance(spec.get("optimizer"), str) for spec in optimizers)
        and all(
            spec.keys() >= _SPEC_KEYS and isinstance(spec["version"], int) for spec in optimizers if spec.get("name")
        )
    )


def specs_for(record: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any] | None]:
    """Return for every live optimizer the format record of the saved one, None where that was one of torch's.

    Raises:
        CheckpointFormatError: a live optimizer does not read the saved format.
    """
    saved = list(record.get("optimizers", []))
    specs: list[dict[str, Any] | None] = []
    for index, optimizer in enumerate(optimizers):
        live = format_of(optimizer)
        # Pipeline stages may be spread otherwise than they were: then go by the kind of optimizer.
        alike = [theirs for theirs in saved if _family(theirs["optimizer"]) == _family(live["optimizer"])]
        theirs = saved[index] if len(saved) == len(optimizers) else (alike or saved or [None])[0]
        if theirs is None or theirs["name"] is None:
            specs.append(None)  # plain fp32 or bf16 states: the optimizer itself says whether it takes them
            continue
        _check_pair(theirs, live, record)
        specs.append(theirs)
    return specs


def _check_pair(theirs: Mapping[str, Any], live: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    way_out = "Convert it with `flashoptim-dist convert`"
    if live["name"] is None:
        raise CheckpointFormatError(
            f"its optimizer states are {theirs['optimizer']}'s, in format {theirs['name']!r} version "
            f"{theirs['version']}, and {live['optimizer']} can't read that. {way_out}, or load it with "
            f"{theirs['optimizer']}"
        )
    try:
        check_format(theirs)
    except ValueError as error:
        raise CheckpointFormatError(
            f"its optimizer states have format {theirs['name']!r} version {theirs['version']} with groups of "
            f"{theirs['group_size']}, and this library reads {live['name']!r} version {live['version']} with groups of "
            f"{live['group_size']}. {way_out}, or load it with {_writer(record)}"
        ) from error
    if _family(theirs["optimizer"]) != _family(live["optimizer"]):
        raise CheckpointFormatError(
            f"its optimizer states are {theirs['optimizer']}'s, and {live['optimizer']} keeps other ones. {way_out}, "
            f"or load it with {theirs['optimizer']}"
        )


def _writer(record: Mapping[str, Any]) -> str:
    return f"flashoptim_dist {record.get('library_version')}, which wrote it"


def _family(optimizer: str) -> str:
    """Adam and AdamW keep the same states, and so do SGD and SGDW."""
    return optimizer.removeprefix("Flash").removesuffix("W")


def check_model(state: Mapping[str, Any], reader: SafeReader) -> None:
    """Compare names, shapes and dtypes of a model's entries with the checkpoint's.

    Raises:
        CheckpointFormatError: they differ; the first few are named.
    """
    entries = reader.metadata.state_dict_metadata
    missing = [name for name in state if f"{MODEL}.{name}" not in entries]
    if missing:
        raise CheckpointFormatError(
            f"it was saved from another model: it has no {_some(missing)}. Build the model that it was saved from"
        )
    for name, value in state.items():
        saved = entries[f"{MODEL}.{name}"]
        if not isinstance(value, torch.Tensor) or not isinstance(saved, TensorStorageMetadata):
            continue
        if tuple(saved.size) != tuple(value.shape):
            raise CheckpointFormatError(
                f"it was saved from another model: {name!r} has shape {tuple(saved.size)} in it, and "
                f"{tuple(value.shape)} here. Build the model that it was saved from"
            )
        if saved.properties.dtype != value.dtype:
            raise CheckpointFormatError(
                f"{name!r} is {saved.properties.dtype} in it, and {value.dtype} here. Bring the model to that dtype "
                "first (cast_model), or convert the checkpoint with `flashoptim-dist convert`"
            )


def check_unknown(reader: SafeReader, known: Set[str]) -> None:
    """Refuse a checkpoint with model entries that no rank's part of the model has.

    Raises:
        CheckpointFormatError: there are such; the first few are named.
    """
    names = [key.removeprefix(f"{MODEL}.") for key in reader.names() if key.startswith(f"{MODEL}.")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CheckpointFormatError(
            f"it was saved from another model: this one has no {_some(unknown)}. Build the model that it was saved from"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
