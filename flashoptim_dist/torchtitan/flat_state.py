"""torchtitan's flat spelling of an optimizer's state, with what torchtitan's own leaves out: the format record.

    state.<name>.<entry>         the states as optimizer.state has them
    param_groups.<name>.<key>    torch's options of the parameter's group; those of the number format are not saved
    format.<name>                JSON: FlashOptimizer.format_spec() and the dtype of each entry ("entries")

torch.distributed.checkpoint reads into the tensors of a live state, casts without a word what was saved in another
dtype, and refuses a checkpoint that lacks a key. So no key depends on an option of ours, and the record tells whether
what was read means what the live tensors say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flashoptim_dist.formats import FORMAT_VERSION
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.torchtitan import groups as group_options

logger = logging.getLogger(__name__)

_NOT_SAVED = ("params", "param_names", *FlashOptimizer.group_options)

_MAY_DIFFER = ("lr", "initial_lr", *group_options.TORCH_SWITCHES)
"""What no warning is worth: schedulers set the rates of a run, and the switches choose nothing here."""


def flat_state(optimizer: FlashOptimizer) -> dict[str, Any]:
    """Return the flat state of an optimizer that has names; every trainable parameter gets state first. No
    communication.

    State is made without a step, so that parameters that come into use later begin at step 0.
    """
    optimizer.init_state()
    saved = optimizer.state_dict()
    spec = optimizer.format_spec()
    flat: dict[str, Any] = {}
    for group in saved["param_groups"]:
        options = {key: value for key, value in group.items() if key not in _NOT_SAVED}
        own = {key: group[key] for key in ("master_weight_bits", "quantize", "rounding", "seed") if key in group}
        for name, number in zip(group["param_names"], group["params"], strict=True):
            entries = saved["state"].get(number, {})
            flat |= {f"state.{name}.{entry}": value for entry, value in entries.items()}
            flat |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
            dtypes = {entry: str(value.dtype).removeprefix("torch.") for entry, value in entries.items()}
            flat[f"format.{name}"] = json.dumps({**spec, **own, "entries": dtypes}, sort_keys=True)
    return flat


def load_flat_state(optimizer: FlashOptimizer, flat: Mapping[str, Any]) -> None:
    """Load a flat state, of which other optimizers' entries may be part. No communication.

    A group takes its saved options, with a warning where they are others than the run's. It keeps its own where the
    state has none, and, with a warning, where its parameters were saved in groups that differ.

    Raises:
        ValueError: the state was saved in another form than this optimizer's, or by another kind of optimizer. The
            states may hold what was read by then: end the run, or load another checkpoint.
    """
    record = _record(optimizer, flat)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        names = group["param_names"]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        options |= _saved_options(group, flat)
        numbers = list(range(number, number + len(names)))
        groups.append({**options, "params": numbers})
        for name, parameter in zip(names, group["params"], strict=True):
            live = optimizer.state.get(parameter, {})
            saved = {entry: flat[key] for entry in live if (key := f"state.{name}.{entry}") in flat}
            if saved:
                state[number] = saved
            number += 1
    loaded: dict[str, Any] = {"state": state, "param_groups": groups}
    if record:
        loaded["format"] = record
    if not record or record["version"] != FORMAT_VERSION or not _is_live(optimizer, state):
        optimizer.load_state_dict(loaded)
        return
    # Everything was read into the live tensors: another copy of them would only cost memory.
    live = dict(optimizer.state)
    optimizer.load_state_dict({**loaded, "state": {}})
    optimizer.state.update(live)


def _saved_options(group: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that all of a group's parameters were saved with, and warn of what is another one here."""
    names = group["param_names"]
    options: dict[str, Any] = {}
    for key in [key for key in group if key not in _NOT_SAVED]:
        saved = [flat[entry] for name in names if (entry := f"param_groups.{name}.{key}") in flat]
        different = [value for value in saved if not _same(value, saved[0])]
        if different:
            logger.warning(
                f"{len(names)} parameters from {names[0]!r} on are one group in this run and were saved in several, "
                f"with {key} {saved[0]} and {different[0]}: this run's {key} {group[key]} holds for all of them"
            )
        elif saved:
            options[key] = saved[0]
            if key not in _MAY_DIFFER and not _same(saved[0], group[key]):
                logger.warning(
                    f"{key} of {len(names)} parameters from {names[0]!r} on is {saved[0]} in the checkpoint and "
                    f"{group[key]} in this run: the checkpoint's holds"
                )
    return options


def _same(left: Any, right: Any) -> bool:
    """Return whether two options are the same, betas in a list or in a tuple."""
    pair = [tuple(value) if isinstance(value, list) else value for value in (left, right)]
    return bool(pair[0] == pair[1])


def _is_live(optimizer: FlashOptimizer, state: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether numbered states are the optimizer's own tensors, all of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return all(
        {entry: id(value) for entry, value in state.get(number, {}).items()}
        == {entry: id(value) for entry, value in optimizer.state.get(parameter, {}).items()}
        for number, parameter in enumerate(parameters)
    )


def _record(optimizer: FlashOptimizer, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format record of the saved states, after comparing each parameter's with the live state."""
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            text = flat.get(f"format.{name}")
            if text is None:
                continue
            record = json.loads(text)
            _check_family(name, record, optimizer)
            _check_entries(name, record.pop("entries", None), optimizer.state.get(parameter, {}))
            if found and (found["name"], found["version"]) != (record["name"], record["version"]):
                raise ValueError(
                    f"the states of one checkpoint are of two number formats: {found['name']!r} version "
                    f"{found['version']}, and of parameter {name!r} {record['name']!r} version {record['version']}"
                )
            found = found or record
    return found


def _check_family(name: str, record: Mapping[str, Any], optimizer: FlashOptimizer) -> None:
    saved, live = str(record["optimizer"]), type(optimizer).__name__
    if saved.removesuffix("W") != live.removesuffix("W"):
        raise ValueError(
            f"the state of parameter {name!r} was saved by {saved}, and {live} keeps another one: go on with {saved}, "
            "or start its state anew with --checkpoint.exclude_from_loading optimizer"
        )


def _check_entries(name: str, saved: Mapping[str, str] | None, state: Mapping[str, Any]) -> None:
    """Refuse entries that were cast while they were read, and corrections that were left behind."""
    if saved is None:
        return
    live = {
        entry: str(value.dtype).removeprefix("torch.") for entry, value in state.items() if isinstance(value, Tensor)
    }
    for entry in sorted({*saved, *live}):
        was, needed = saved.get(entry, "not there"), live.get(entry, "not kept")
        if was != needed:
            raise ValueError(
                f"{entry!r} of parameter {name!r} is {was} in the checkpoint and {needed} in this run, and "
                "torch.distributed.checkpoint would cast it without a word. Give this run the training.dtype, "
                "master_weight_bits and quantize that the checkpoint was saved with, or start the optimizer's state "
                "anew with --checkpoint.exclude_from_loading optimizer"
            )
