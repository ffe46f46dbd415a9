"""What is saved: the entries of a checkpoint, collected from model, optimizer and the rest of a training run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from flashoptim_dist._version import __version__
from flashoptim_dist.checkpoint.errors import CheckpointError
from flashoptim_dist.checkpoint.layout import (
    DATALOADER,
    EXTRAS,
    FORMAT,
    MODEL,
    OPTIMIZER,
    PARAM_GROUPS,
    RNG,
    SCHEDULER,
    STATE,
    Path_,
    key_of,
)
from flashoptim_dist.checkpoint.names import parameter_names
from flashoptim_dist.checkpoint.nesting import leaves
from flashoptim_dist.checkpoint.rng import capture_rng, rng_digest
from flashoptim_dist.checkpoint.safe_unpickle import load_object
from flashoptim_dist.checkpoint.writer import save_object

LAYOUT_VERSION = 1


@dataclass
class Source:
    """The parts of a training run that a checkpoint covers, as the caller passed them."""

    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    scheduler: Any = None
    dataloader: Any = None
    extras: Mapping[str, Any] | None = None
    rng: bool = True


@dataclass
class Entries:
    """Flat entries of one rank with their nested paths."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path_] = field(default_factory=dict)

    def add(self, path: Path_, value: Any) -> None:
        """Add a tensor as it is, anything else serialized at once."""
        key = key_of(path)
        if key in self.values:
            raise CheckpointError(f"two things would be saved as {key!r}")
        self.values[key] = value if isinstance(value, torch.Tensor) else serialize(value, key)
        self.paths[key] = path


def serialize(value: Any, key: str) -> io.BytesIO:
    """Return an object in torch.save's format, after making sure that the allow-list reads it back.

    Raises:
        CheckpointError: it holds something that is no number, string, container, tensor or numpy array.
    """
    data = io.BytesIO()
    try:
        save_object(value, data)
        load_object(data.getvalue(), "it", key)
    except Exception as error:
        raise CheckpointError(
            f"{key!r} can't be saved: it holds something else than numbers, strings, lists, dictionaries, tensors and "
            f"numpy arrays ({error})"
        ) from error
    return data


def collect_tensors(source: Source, entries: Entries) -> list[dict[str, Any]]:
    """Add the model's and the optimizers' entries; return the parameter groups with parameters by name."""
    for part in source.parts:
        for name, value in get_model_state_dict(part).items():
            entries.add((MODEL, name), value)
    names = parameter_names(source.parts)
    groups: list[dict[str, Any]] = []
    for optimizer in source.optimizers:
        by_number = numbered_names(optimizer, names)
        saved = optimizer.state_dict()
        for number, state in saved[STATE].items():
            for path, value in leaves(state):
                entries.add((OPTIMIZER, STATE, by_number[number], *path), value)
        groups += [
            {**group, "params": [by_number[number] for number in group["params"]]} for group in saved[PARAM_GROUPS]
        ]
    return groups


def numbered_names(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, list[str]]) -> list[str]:
    """Return the first name of every parameter, in the order in which ``Optimizer.state_dict`` numbers them.

    Raises:
        CheckpointError: the optimizer has a parameter that the model does not have.
    """
    result = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise CheckpointError(
                    f"{type(optimizer).__name__} updates a parameter that the model does not have: number {position} "
                    f"of group {index}, shape {tuple(parameter.shape)}. Make the optimizer from this model, after "
                    "fully_shard"
                )
            result.append(names[parameter][0])
    return result


def format_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's format record; one of torch's has only its class name."""
    spec = getattr(optimizer, "format_spec", None)
    return dict(spec()) if callable(spec) else {"name": None, "optimizer": type(optimizer).__name__}


def state_of(thing: Any) -> Any:
    """Return ``state_dict()`` of an object, or of each in a list."""
    if isinstance(thing, Sequence):
        return [state_of(one) for one in thing]
    if not hasattr(thing, "state_dict"):
        raise CheckpointError(f"{type(thing).__name__} has no state_dict(), so its state can't be saved")
    return thing.state_dict()


def collect_rank_objects(source: Source, entries: Entries, rank: int) -> dict[str, str | None]:
    """Add this rank's data loader and random state; return a digest of each, to see what is the same on all ranks."""
    digests: dict[str, str | None] = {RNG: None, DATALOADER: None}
    if source.rng:
        state = capture_rng()
        digests[RNG] = rng_digest(state)
        entries.add((RNG, str(rank)), state)
    if source.dataloader is not None:
        state = state_of(source.dataloader)
        digests[DATALOADER] = repr(state)
        entries.add((DATALOADER, str(rank)), state)
    return digests


def collect_common_objects(
    source: Source, entries: Entries, groups: list[dict[str, Any]], record: dict[str, Any]
) -> None:
    """Add what is the same on all ranks; only one rank needs to."""
    entries.add((FORMAT,), record)
    for path, value in leaves(groups):
        entries.add((OPTIMIZER, PARAM_GROUPS, *path), value)
    if source.scheduler is not None:
        entries.add((SCHEDULER,), state_of(source.scheduler))


def collect_extras(source: Source, entries: Entries, common: bool) -> None:
    """Add the caller's extras: DTensors on every rank, everything else from one rank."""
    for path, value in extras_leaves(source.extras or {}):
        if isinstance(value, DTensor) or common:
            entries.add((EXTRAS, *path), value)


def extras_leaves(extras: Mapping[str, Any]) -> list[tuple[Path_, Any]]:
    """Return the extras by path: dictionaries that hold tensors are taken apart, other objects stay whole."""
    result: list[tuple[Path_, Any]] = []
    for name, value in extras.items():
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            value = value.state_dict()
        inner = leaves(value, (str(name),))
        if any(isinstance(leaf, torch.Tensor) for _, leaf in inner):
            result += inner
        else:
            result.append(((str(name),), value))
    return result


def record_of(source: Source, digests: list[dict[str, str | None]], world_size: int) -> dict[str, Any]:
    """Return the ``format`` entry: what a loader checks before it touches anything."""
    return {
        "library": "flashoptim_dist",
        "library_version": __version__,
        "torch_version": str(torch.__version__),
        "layout_version": LAYOUT_VERSION,
        "world_size": world_size,
        "optimizers": [format_of(optimizer) for optimizer in source.optimizers],
        "same_on_all_ranks": {kind: len({digest[kind] for digest in digests}) == 1 for kind in (RNG, DATALOADER)},
    }
