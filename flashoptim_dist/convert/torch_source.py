"""Reading a file of torch.save: an optimizer's state_dict, a model's, or a dictionary with both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from flashoptim_dist.checkpoint.errors import CheckpointFormatError
from flashoptim_dist.checkpoint.layout import FORMAT, PARAM_GROUPS, STATE
from flashoptim_dist.convert.archive import open_archive
from flashoptim_dist.convert.lazy import LazyTensor
from flashoptim_dist.convert.training_state import Group, TrainingState
from flashoptim_dist.formats import canonical_name

MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optimizer_states")


def read_torch_file(path: Path) -> TrainingState:
    """Return the contents of a torch.save file.

    Raises:
        CheckpointError: it is none, damaged, unsafe, or holds neither a model nor an optimizer.
    """
    value = open_archive(path)
    if not isinstance(value, Mapping):
        raise CheckpointFormatError(f"{path} holds a {type(value).__name__}, no dictionary of a model or an optimizer")
    state = TrainingState(path, "torch")
    if _is_optimizer(value):
        _add_optimizer(state, value)
    elif all(isinstance(inner, LazyTensor) for inner in value.values()) and value:
        _add_model(state, value)
    else:
        _add_both(state, value)
    return state


def _add_both(state: TrainingState, value: Mapping[str, Any]) -> None:
    model_key = next((key for key in MODEL_KEYS if isinstance(value.get(key), Mapping)), None)
    optimizer_key = next((key for key in OPTIMIZER_KEYS if key in value), None)
    if model_key is None and optimizer_key is None:
        raise CheckpointFormatError(
            f"{state.path} holds {sorted(map(str, value))}: no model (under {', '.join(MODEL_KEYS)}) and no optimizer "
            f"(under {', '.join(OPTIMIZER_KEYS)})"
        )
    if isinstance(value.get(FORMAT), Mapping):
        state.record = dict(value[FORMAT])
    if model_key is not None:
        _add_model(state, value[model_key])
    if optimizer_key is not None:
        optimizer = value[optimizer_key]
        if isinstance(optimizer, list) and len(optimizer) == 1:
            optimizer = optimizer[0]
        if not isinstance(optimizer, Mapping) or not _is_optimizer(optimizer):
            raise CheckpointFormatError(f"{state.path}: {optimizer_key!r} in it is no state_dict of one optimizer")
        _add_optimizer(state, optimizer)
    taken = {model_key, optimizer_key, FORMAT}
    state.others = [((str(key),), inner) for key, inner in value.items() if key not in taken]


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    if STATE in value and PARAM_GROUPS in value:
        return True
    return any(str(key).startswith(f"{PARAM_GROUPS}.") for key in value)


def _add_model(state: TrainingState, model: Mapping[str, Any]) -> None:
    first: dict[Hashable, str] = {}
    for raw, value in model.items():
        name = canonical_name(str(raw))
        if not isinstance(value, LazyTensor):
            state.model_objects[name] = value
        elif value.numel and value.identity is not None and value.identity in first:
            state.aliases[name] = first[value.identity]
        else:
            first[value.identity] = name
            state.weights[name] = value


def _add_optimizer(state: TrainingState, optimizer: Mapping[str, Any]) -> None:
    if isinstance(optimizer.get(FORMAT), Mapping):
        state.record.setdefault("optimizers", [dict(optimizer[FORMAT])])
    if STATE not in optimizer:
        _add_flattened(state, optimizer)
        return
    groups = optimizer[PARAM_GROUPS]
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointFormatError(f"{state.path}: its {PARAM_GROUPS!r} are no list of parameter groups")
    names: dict[Any, str] = {}
    for group in groups:
        ids = list(group.get("params", []))
        given = group.get("param_names")
        has_names = given is not None and len(given) == len(ids)
        state.unnamed |= not has_names and any(isinstance(number, int) for number in ids)
        for number, name in zip(ids, given if has_names else ids, strict=True):
            names[number] = canonical_name(str(name))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        state.groups.append(Group(_plain(options), [names[number] for number in ids]))
    for number, entries in optimizer[STATE].items():
        if not isinstance(entries, Mapping):
            raise CheckpointFormatError(f"{state.path}: the optimizer state of parameter {number!r} is no dictionary")
        if entries:
            state.states[names.get(number, str(number))] = dict(entries)
    if state.unnamed and state.weights:
        _name_by_shape(state)


def _add_flattened(state: TrainingState, optimizer: Mapping[str, Any]) -> None:
    by_options: dict[str, Group] = {}
    options_of: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in optimizer.items():
        kind, _, rest = str(key).partition(".")
        name, _, last = rest.rpartition(".")
        if kind == STATE:
            state.states.setdefault(name, {})[last] = value
        elif kind == PARAM_GROUPS:
            options_of[name][last] = value
    for name, options in options_of.items():
        options = _plain(options)
        key = repr(sorted(options.items()))
        by_options.setdefault(key, Group(options, [])).names.append(name)
    state.groups = list(by_options.values())


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return group options with tensors (a learning rate may be one) read."""
    return {key: value.whole() if isinstance(value, LazyTensor) else value for key, value in options.items()}


def _name_by_shape(state: TrainingState) -> None:
    """Name the optimizer's numbered parameters after the model's entries, where shapes and order leave one way only.

    Parameters of one shape must all be in one group, and be as many as the model's entries of that shape: then both
    are in the order of the model.
    """
    group_of = state.group_of()
    numbers: dict[tuple[int, ...], list[str]] = defaultdict(list)
    stateless = [number for number in group_of if not state.states.get(number)]
    for number in group_of:
        tensors = [value for value in state.states.get(number, {}).values() if isinstance(value, LazyTensor)]
        shapes = [tensor.shape for tensor in tensors if tensor.shape]
        if shapes:
            numbers[shapes[0]].append(number)
    entries: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, weight in state.weights.items():
        entries[weight.shape].append(name)
    names: dict[str, str] = {}
    for shape, of_shape in numbers.items():
        one_group = len({group_of[number] for number in of_shape}) == 1
        if len(of_shape) != len(entries[shape]) or not one_group or stateless:
            raise CheckpointFormatError(
                f"{state.path}: its optimizer knows parameters by number only, and which of shape {shape} is which in "
                "the model can't be told. Save the state of an optimizer made from model.named_parameters(), or from "
                "get_optimizer_state_dict(model, optimizer)"
            )
        names.update(zip(of_shape, entries[shape], strict=True))
    state.states = {names.get(number, number): entries for number, entries in state.states.items()}
    for group in state.groups:
        group.names = [names.get(number, number) for number in group.names]
    state.unnamed = False
