"""Scheduler, data loader, random states and extras out of a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from flashoptim_dist.checkpoint.errors import CheckpointFormatError, DamagedCheckpointError
from flashoptim_dist.checkpoint.layout import DATALOADER, EXTRAS, RNG
from flashoptim_dist.checkpoint.nesting import nest
from flashoptim_dist.checkpoint.ranks import Ranks
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.checkpoint.rng import reseed_rng, restore_rng
from flashoptim_dist.checkpoint.snapshot import extras_leaves


def load_state(reader: SafeReader, key: str, thing: Any) -> None:
    """Load an entry into an object with ``load_state_dict``, or into each of a list."""
    if thing is None:
        return
    if not reader.is_object(key):
        raise CheckpointFormatError(f"it holds no {key}: it was saved without one. Pass {key}=None to load the rest")
    apply_state(thing, reader.object(key), key)


def apply_state(thing: Any, state: Any, key: str) -> None:
    """Hand a state to an object, or one each to the objects of a list."""
    if not isinstance(thing, Sequence):
        thing.load_state_dict(state)
        return
    if not isinstance(state, list) or len(state) != len(thing):
        count = len(state) if isinstance(state, list) else 1
        raise CheckpointFormatError(f"it holds {count} {key} states, and {len(thing)} are to be loaded")
    for one, inner in zip(thing, state, strict=True):
        apply_state(one, inner, key)


def load_dataloader(reader: SafeReader, record: Mapping[str, Any], dataloader: Any, ranks: Ranks) -> None:
    """Give each rank its own data position back.

    Raises:
        CheckpointFormatError: the number of ranks differs from that at the save, and the ranks' positions differ.
    """
    if dataloader is None:
        return
    saved = record.get("world_size")
    if saved != ranks.world_size and not record.get("same_on_all_ranks", {}).get(DATALOADER):
        raise CheckpointFormatError(
            f"it holds the data positions of {saved} ranks, and {ranks.world_size} are loading: what each rank would "
            f"read next is not defined. Load on {saved} ranks, or pass dataloader=None and start the data anew"
        )
    rank = ranks.rank if saved == ranks.world_size else 0
    key = f"{DATALOADER}.{rank}"
    if not reader.is_object(key):
        raise CheckpointFormatError(
            "it holds no data position: it was saved without a data loader. Pass dataloader=None to load the rest"
        )
    apply_state(dataloader, reader.object(key), DATALOADER)


def load_rng(reader: SafeReader, record: Mapping[str, Any], ranks: Ranks) -> None:
    """Restore the random states; on another number of ranks start new ones that repeat at each load.

    Raises:
        DamagedCheckpointError: the entry holds something else.
    """
    saved = record.get("world_size")
    same_ranks = saved == ranks.world_size and reader.is_object(f"{RNG}.{ranks.rank}")
    key = f"{RNG}.{ranks.rank if same_ranks else 0}"
    if not reader.is_object(key):
        return
    state = reader.object(key)
    if not same_ranks and not record.get("same_on_all_ranks", {}).get(RNG):
        warnings.warn(
            f"the checkpoint holds the random states of {saved} ranks, and {ranks.world_size} are loading: each "
            "starts a new, repeatable stream",
            stacklevel=2,
        )
        reseed_rng(state, ranks.rank, ranks.world_size)
        return
    try:
        restore_rng(state)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{reader.directory} (entry {key!r}) holds no random states ({type(error).__name__}: {error}); pass "
            "rng=False to load the rest"
        ) from error


class ExtrasLoad:
    """The extras of one load: tensors go where the caller's own are, everything else is made anew."""

    def __init__(self, reader: SafeReader, extras: MutableMapping[str, Any] | None) -> None:
        """Match the saved extras with the caller's; nothing is read or changed yet."""
        paths = reader.metadata.planner_data or {}
        self._reader = reader
        self._extras = extras
        self._saved = {
            key: path[1:] for key in reader.names() if len(path := paths.get(key, ())) > 1 and path[0] == EXTRAS
        }
        live = {path: value for path, value in extras_leaves(extras or {}) if isinstance(value, torch.Tensor)}
        self._tensors = {
            key: live[path] for key, path in self._saved.items() if path in live and not reader.is_object(key)
        }

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return the caller's tensors by key."""
        return self._tensors

    def finish(self) -> dict[str, Any]:
        """Return all extras, and hand them to the caller's dictionary and objects."""
        found = nest((path, self._value(key)) for key, path in self._saved.items())
        for name, value in found.items():
            live = None if self._extras is None else self._extras.get(name)
            if live is not None and hasattr(live, "load_state_dict"):
                live.load_state_dict(value)
            elif self._extras is not None:
                self._extras[name] = value
        return found

    def _value(self, key: str) -> Any:
        if self._reader.is_object(key):
            return self._reader.object(key)
        return self._tensors[key] if key in self._tensors else self._reader.small_tensor(key)
