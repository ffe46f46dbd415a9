"""Options of the format that are changed in a live group: the next step goes by them, and converts the state that is
there as a load would. ``rounding`` and ``seed`` take effect without a trace in the state.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from flashoptim_dist.formats import FORMAT_VERSION
from flashoptim_dist.formats.weights import SPLIT_DTYPES
from flashoptim_dist.optim.checks import check_decoupling, check_options
from flashoptim_dist.optim.loading import load_correction, load_moments, say
from flashoptim_dist.optim.state import ERROR_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashoptim_dist.optim.base import FlashOptimizer
    from flashoptim_dist.optim.records import ParameterRecord


def options_of_groups(optimizer: FlashOptimizer) -> list[tuple[Any, ...]]:
    """Return the options of the format as they hold for each group."""
    shared, names = optimizer._options, optimizer.group_options
    return [tuple([group.get(name, shared[name]) for name in names]) for group in optimizer.param_groups]


def follow_options(optimizer: FlashOptimizer) -> None:
    """Have records and states go by the groups' options as they are now. No communication.

    Raises:
        ValueError: an option out of range, with its group. Nothing is changed.
        RuntimeError: a group was appended to ``param_groups`` by hand.
    """
    options = options_of_groups(optimizer)
    if options == optimizer._followed:
        return
    known = len(optimizer._first_lr)
    if len(optimizer.param_groups) > known:
        raise RuntimeError(
            f"param_groups holds {len(optimizer.param_groups)} groups where the constructor and add_param_group made "
            f"{known}: groups must be added with optimizer.add_param_group(group), not by changing the list"
        )
    for index, group in enumerate(optimizer.param_groups):
        where = f"parameter group {index}: "
        check_options(group, where)
        initial_lr = float(group.get("initial_lr", optimizer._first_lr[index]))
        decouples, decoupled = optimizer._option(group, "decouple_lr"), optimizer._decay_is_decoupled(group)
        check_decoupling(decouples, decoupled, initial_lr, where)
    optimizer._renew_records()
    convert_states(optimizer)
    optimizer._followed = options


def convert_states(optimizer: FlashOptimizer) -> None:
    """Bring the states into the form that the records of their parameters ask for, and say so. No communication."""
    conversions: Counter[str] = Counter()
    for parameter, record in optimizer._records.items():
        state = optimizer.state.get(parameter)
        if not state or _fits(state, record):
            continue
        present = [moment for moment in record.moments if moment.name in state]
        replaced = {ERROR_BITS, *(name for moment in present for name in (moment.name, moment.scale_name))}
        converted = {name: value for name, value in state.items() if name not in replaced}
        load_moments(converted, present, parameter, record, state, FORMAT_VERSION, conversions)
        if record.weight_dtype in SPLIT_DTYPES:
            load_correction(converted, parameter, record, state, conversions)
        optimizer.state[parameter] = converted
    say(conversions, "the optimizer state was converted to options that were changed in its groups")


def _fits(state: Mapping[str, Any], record: ParameterRecord) -> bool:
    """Return whether a state is in the form of a record, whatever moments it lacks (momentum switched on just now)."""
    moments = [moment for moment in record.moments if moment.name in state]
    names = [ERROR_BITS, *(name for moment in moments for name in (moment.name, moment.scale_name))]
    held = {name: state[name].dtype for name in names if name in state}
    return held == {name: record.entries[name].dtype for name in names if name in record.entries}
