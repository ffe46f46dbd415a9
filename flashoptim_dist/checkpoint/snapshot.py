"""What is saved: the entries of a checkpoint, collected from model, optimizer and the rest of a training run."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
from flashoptim_dist.checkpoint.nesting import comes_apart, digest_of, is_plain, leaves
from flashoptim_dist.checkpoint.rng import capture_rng
from flashoptim_dist.checkpoint.safe_unpickle import load_object
from flashoptim_dist.checkpoint.writer import save_object
from flashoptim_dist.sharding import local_tensor

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

    def add(self, path: Path_, value: Any, known: bool = False) -> None:
        """Add a tensor as it is, anything else serialized at once; of what is ``known`` it is known that it loads."""
        key = key_of(path)
        if key in self.values:
            raise CheckpointError(f"two things would be saved as {key!r}")
        self.values[key] = value if isinstance(value, torch.Tensor) else serialize(value, key, known)
        self.paths[key] = path


def serialize(value: Any, key: str, known: bool = False) -> io.BytesIO:
    """Return an object in torch.save's format, after making sure, unless it is known, that the allow-list reads it.

    Raises:
        CheckpointError: it holds something that is no number, string, container, tensor or numpy array.
    """
    if is_plain(value):  # thousands of group options are such, and most of them alike
        return io.BytesIO(_plain_bytes(repr(value), value))
    failure: Exception | None = None
    for zipped in (False, True):  # tensors of some dtypes can be read from the newer form only
        data = io.BytesIO()
        try:
            save_object(value, data, zipped)
            if not known:
                load_object(data.getvalue(), "it", key)
        except Exception as error:
            failure = failure or error
        else:
            return data
    raise CheckpointError(
        f"{key!r} can't be saved: it holds something else than numbers, strings, lists, dictionaries, tensors and "
        f"numpy arrays ({failure})"
    ) from failure


@lru_cache(maxsize=4096)
def _plain_bytes(text: str, value: Any) -> bytes:
    """Return a plain value in torch.save's format. ``repr`` tells 0.0 from -0.0 and (1,) from (True,)."""
    data = io.BytesIO()
    save_object(value, data)
    return data.getvalue()


@dataclass
class Collected:
    """What the first rank needs to know of a rank's entries."""

    record: dict[str, Any]
    """This rank's ``format`` entry, still without what only all ranks together know."""
    groups: list[dict[str, Any]]
    """Parameter groups with parameters by name."""
    digests: dict[str, str | None]
    """Of the states that each rank has for itself, to see whether they are the same everywhere."""
    aliases: dict[str, str]
    """Second names of tied weights, and the entries that hold them."""


def collect(source: Source, entries: Entries, rank: int) -> Collected:
    """Add this rank's entries, and on the first rank those that are the same on all. No communication.

    Everything but tensors is as it is now, whatever happens to it later.

    Raises:
        CheckpointError: something that can't be saved, named.
    """
    names = parameter_names(source.parts)
    aliases = _collect_model(source.parts, entries, names)
    groups = _collect_optimizers(source.optimizers, entries, names)
    if rank == 0 and source.scheduler is not None:
        entries.add((SCHEDULER,), state_of(source.scheduler))
    for path, value in extras_leaves(source.extras or {}):
        if rank == 0 or isinstance(value, DTensor):
            entries.add((EXTRAS, *path), value)
    digests: dict[str, str | None] = {RNG: None, DATALOADER: None}
    if source.rng:
        state = capture_rng()
        digests[RNG] = digest_of(state)
        entries.add((RNG, str(rank)), state, known=True)
    if source.dataloader is not None:
        state = state_of(source.dataloader)
        digests[DATALOADER] = digest_of(state)
        entries.add((DATALOADER, str(rank)), state)
    return Collected(_record_of(source), groups, digests, aliases)


def add_common(entries: Entries, collected: list[Collected], world_size: int) -> None:
    """Add what follows from all ranks together; the first rank does."""
    same = {kind: len({rank.digests[kind] for rank in collected}) == 1 for kind in (RNG, DATALOADER)}
    record = {**collected[0].record, "world_size": world_size, "same_on_all_ranks": same}
    entries.add((FORMAT,), record)
    for path, value in leaves(_joined_groups([rank.groups for rank in collected])):
        entries.add((OPTIMIZER, PARAM_GROUPS, *path), value)


def _collect_model(
    parts: Sequence[nn.Module], entries: Entries, names: Mapping[torch.Tensor, list[str]]
) -> dict[str, str]:
    first_name = {name: all_names[0] for all_names in names.values() for name in all_names[1:]}
    aliases: dict[str, str] = {}
    for part in parts:
        state = get_model_state_dict(part)
        for name, value in state.items():
            first = first_name.get(name)
            if first in state and _same_memory(value, state[first]):
                aliases[key_of((MODEL, name))] = key_of((MODEL, first))
            else:
                entries.add((MODEL, name), value)
    return aliases


def _same_memory(left: Any, right: Any) -> bool:
    left, right = local_tensor(left), local_tensor(right)
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


def _collect_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], entries: Entries, names: Mapping[torch.Tensor, list[str]]
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        by_number = numbered_names(optimizer, names)
        saved = optimizer.state_dict()
        for number, state in saved[STATE].items():
            for path, value in leaves(state):
                entries.add((OPTIMIZER, STATE, by_number[number], *path), value)
        groups += [
            {**_copy(group), "params": [by_number[number] for number in group["params"]]}
            for group in saved[PARAM_GROUPS]
        ]
    return groups


def _copy(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options as they are now: a learning rate may be a tensor that is written to, on any device."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in options.items()
    }


def _joined_groups(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the groups of all ranks: those of the first, then what only other ranks (pipeline stages) hold."""
    joined = list(by_rank[0])
    seen = {tuple(group["params"]) for group in joined}
    for groups in by_rank[1:]:
        for group in groups:
            if tuple(group["params"]) not in seen:
                joined.append(group)
                seen.add(tuple(group["params"]))
    return joined


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


def extras_leaves(extras: Mapping[str, Any]) -> list[tuple[Path_, Any]]:
    """Return the extras by path: dictionaries that hold tensors are taken apart, other objects stay whole.

    Raises:
        CheckpointError: a DTensor lies in a dictionary whose keys are no strings.
    """
    result: list[tuple[Path_, Any]] = []
    for name, value in extras.items():
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            value = value.state_dict()
        inner = leaves(value, (str(name),))
        tensors = [leaf for _, leaf in inner if isinstance(leaf, torch.Tensor)]
        if not tensors:
            result.append(((str(name),), value))
        elif comes_apart(value):
            result += inner
        elif any(isinstance(leaf, DTensor) for leaf in tensors):
            raise CheckpointError(
                f"extras {name!r} can't be saved: it holds DTensors beside an empty container, or in a dictionary "
                "whose keys are no strings. Name them by strings, or pass an optimizer as one of the optimizers"
            )
        else:
            result.append(((str(name),), value))
    return result


def _record_of(source: Source) -> dict[str, Any]:
    """Return the ``format`` entry, what a loader checks before it touches anything, as far as one rank knows it."""
    return {
        "library": "flashoptim_dist",
        "library_version": __version__,
        "torch_version": str(torch.__version__),
        "layout_version": LAYOUT_VERSION,
        "optimizers": [format_of(optimizer) for optimizer in source.optimizers],
    }
