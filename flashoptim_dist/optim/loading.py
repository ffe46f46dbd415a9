"""Loading optimizer state: matching by name or order, and entries into the form that the parameter needs.

``torch.optim.Optimizer.load_state_dict`` casts every tensor to the parameter's dtype, int8 codes included, and cannot
be told otherwise; so the load is done here, hooks and checks of torch's kept.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashoptim_dist.formats import FORMAT_VERSION, canonical_name
from flashoptim_dist.formats.weights import CORRECTION_DTYPES
from flashoptim_dist.optim.algorithms import check_algorithm
from flashoptim_dist.optim.checks import check_torch_options
from flashoptim_dist.optim.conversion import convert_correction, dequantize, local_part, quantize
from flashoptim_dist.optim.scale_check import ScaleCheck
from flashoptim_dist.optim.state import ERROR_BITS, STEP, MomentSpec, new_entry, new_step
from flashoptim_dist.optim.versions import check_format, decoder
from flashoptim_dist.sharding import ShardLayout, local_tensor, shard_layout

if TYPE_CHECKING:
    from flashoptim_dist.optim.base import FlashOptimizer
    from flashoptim_dist.optim.records import ParameterRecord


def load_state(optimizer: FlashOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Implement ``FlashOptimizer.load_state_dict``; see there. Nothing is changed where an error is raised."""
    loaded: dict[str, Any] = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = hook(optimizer, loaded)
        if result is not None:
            loaded = result
    version = check_format(loaded.get("format"))
    saved_groups = deepcopy(loaded["param_groups"])
    _check_groups(optimizer, saved_groups)
    saved_of = _match(optimizer, saved_groups)
    groups = [_merge_group(optimizer, *pair) for pair in zip(optimizer.param_groups, saved_groups, strict=True)]
    # What a parameter keeps follows from the loaded hyperparameters (SGD's momentum), not from the present ones.
    records = optimizer._new_records(groups)
    state: dict[Any, Any] = {}
    spec = loaded.get("format") or {}
    conversions = _option_changes(optimizer, spec)
    scale_check = ScaleCheck(version)
    says_quantized = optimizer.compress_state_dict or spec.get("quantize") is False
    for parameter, saved_id in saved_of.items():
        entries = _present(loaded["state"].get(saved_id))
        if entries:
            record = records[parameter]
            state[parameter] = _load_parameter(
                optimizer,
                parameter,
                record,
                entries,
                version,
                conversions,
                scale_check,
                says_quantized=says_quantized,
            )
    # After the last redistribution, which the other ranks take part in, and before anything changes.
    scale_check.finish()
    matched = set(saved_of.values())
    state.update({key: deepcopy(value) for key, value in loaded["state"].items() if key not in matched})
    optimizer.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
    optimizer._set_records(records)
    say(conversions, "the loaded optimizer state was converted to this optimizer's options")
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _check_groups(optimizer: FlashOptimizer, saved_groups: list[dict[str, Any]]) -> None:
    groups = optimizer.param_groups
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state has {len(saved_groups)} parameter groups and this optimizer {len(groups)}")
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"parameter group {index} of the state has {len(saved['params'])} parameters and this optimizer's has "
                f"{len(group['params'])}; build the optimizer with the groups it was saved with"
            )
        check_algorithm(optimizer, index, saved)
        check_torch_options({"differentiable": saved.get("differentiable")}, f"parameter group {index} of the state: ")


def _merge_group(optimizer: FlashOptimizer, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a group with the saved hyperparameters, and its own parameters, names and options of the format."""
    own = {"params": group["params"]}
    for name in ("param_names", *optimizer.group_options):
        saved.pop(name, None)
        if name in group:
            own[name] = group[name]
    return {**group, **saved, **own}


def _match(optimizer: FlashOptimizer, saved_groups: list[dict[str, Any]]) -> dict[Tensor, Any]:
    """Return the saved id of each parameter: by name where both sides have names, else by order.

    Ids that are strings are names, as torch's checkpoint helpers write them: of the model, which may be others than the
    optimizer's; then the helpers put them in live order. ``param_names`` beside them is in saved order and must not be
    read.
    """
    live = [(parameter, name and canonical_name(name)) for parameter, name, _, _ in optimizer._named()]
    saved_ids = [saved_id for group in saved_groups for saved_id in group["params"]]
    saved_names = [canonical_name(name) for group in saved_groups for name in group.get("param_names", ())]
    if all(isinstance(saved_id, str) for saved_id in saved_ids):
        ids_are_names = {canonical_name(saved_id) for saved_id in saved_ids} == {name for _, name in live}
        saved_names = [canonical_name(saved_id) for saved_id in saved_ids] if ids_are_names else []
    if len(saved_names) != len(saved_ids) or any(name is None for _, name in live):
        return {parameter: saved_id for (parameter, _), saved_id in zip(live, saved_ids, strict=True)}
    by_name = dict(zip(saved_names, saved_ids, strict=True))
    missing = [name for _, name in live if name not in by_name]
    if missing:
        raise ValueError(f"the state has no parameter named {missing[0]!r} ({len(missing)} missing in all)")
    return {parameter: by_name[name] for parameter, name in live if name is not None}


def _load_parameter(
    optimizer: FlashOptimizer,
    parameter: Tensor,
    record: ParameterRecord,
    saved: Mapping[str, Any],
    version: int,
    conversions: Counter[str],
    scale_check: ScaleCheck,
    *,
    says_quantized: bool,
) -> dict[str, Any]:
    """Return the state of one parameter from saved entries, each in the dtype and layout this parameter needs."""
    _check_entries(optimizer, record, saved)
    new = new_step(parameter)
    new.fill_(_saved_step(optimizer, saved))
    state: dict[str, Any] = {STEP: new}
    present = [moment for moment in record.moments if saved.get(moment.name) is not None]
    load_moments(
        state, present, parameter, record, saved, version, conversions, scale_check, says_quantized=says_quantized
    )
    for moment in record.moments:
        if moment not in present and not bool(new):
            state.update({name: new_entry(record.entries[name], parameter) for name in _names(moment, record)})
        # else SGD's momentum was switched on after the last step: the next one makes it, as in torch.
    load_correction(state, parameter, record, saved, conversions)
    return state


def _present(entries: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries without those that torch's helpers make up: {} where a flattened state lacks a live entry."""
    return {name: v for name, v in (entries or {}).items() if not (isinstance(v, Mapping) and not v)}


def _names(moment: MomentSpec, record: ParameterRecord) -> list[str]:
    return [name for name in (moment.name, moment.scale_name) if name in record.entries]


def _check_entries(optimizer: FlashOptimizer, record: ParameterRecord, saved: Mapping[str, Any]) -> None:
    """Refuse entries of another kind of optimizer; those that say nothing (None) are none."""
    known = {STEP, ERROR_BITS}
    for moment in optimizer.moment_specs:
        known |= {moment.name, moment.scale_name}
    present = {str(name) for name, value in saved.items() if value is not None}
    missing = {moment.name for moment in record.moments} - present
    if STEP not in present and not all(moment.signed for moment in record.moments):
        missing.add(STEP)  # bias correction needs it
    unstepped = _saved_step(optimizer, saved) == 0.0 and STEP in present
    if present - known or (missing and not unstepped and not optimizer.moments_are_optional):
        hint = " (flashoptim's: flashoptim-dist convert reads it)" if any("::" in name for name in present) else ""
        raise ValueError(
            f"the state of parameter {record.name!r} holds {sorted(present)}, and {type(optimizer).__name__} keeps "
            f"{sorted(known)}; it was saved by another kind of optimizer{hint}"
        )


def _saved_step(optimizer: FlashOptimizer, saved: Mapping[str, Any]) -> float:
    """Return the step count. torch's SGD saves none: with a momentum it has taken one step at least."""
    step = saved.get(STEP)
    if step is not None:
        return float(local_tensor(step)) if isinstance(step, Tensor) else float(step)
    return 1.0 if any(saved.get(moment.name) is not None for moment in optimizer.moment_specs) else 0.0


def load_correction(
    state: dict[str, Any],
    parameter: Tensor,
    record: ParameterRecord,
    saved: Mapping[str, Any],
    conversions: Counter[str],
) -> None:
    """Put the correction into ``state``, as wide as the parameter needs it, if it needs one."""
    if ERROR_BITS not in record.entries:
        if ERROR_BITS in saved:
            conversions["weights with a correction to weights without"] += 1
        return
    target = state[ERROR_BITS] = new_entry(record.entries[ERROR_BITS], parameter)
    if ERROR_BITS not in saved:
        conversions["16-bit weights without correction to weights with one"] += 1
        return
    correction = _placed(saved[ERROR_BITS], parameter, record, ERROR_BITS)
    if correction.is_floating_point():
        raise ValueError(
            f"{ERROR_BITS!r} of parameter {record.name!r} was saved as {correction.dtype}: a torch optimizer carried "
            "it along unread and may have moved the weight since, or flashoptim saved it. Delete it from the state to "
            "go on with the weights as they are; flashoptim-dist convert reads flashoptim's"
        )
    _check_dtype(correction, tuple(CORRECTION_DTYPES.values()), ERROR_BITS, record)
    dtype = record.entries[ERROR_BITS].dtype
    if correction.dtype != dtype:
        conversions[f"corrections of {correction.dtype.itemsize * 8} bits to {dtype.itemsize * 8}"] += 1
    local_tensor(target).copy_(convert_correction(correction, dtype))


def load_moments(
    state: dict[str, Any],
    moments: Sequence[MomentSpec],
    parameter: Tensor,
    record: ParameterRecord,
    saved: Mapping[str, Any],
    version: int,
    conversions: Counter[str],
    scale_check: ScaleCheck | None = None,
    *,
    says_quantized: bool = True,
) -> None:
    """Put moments (and their scales) into ``state``, quantized or decoded as the parameter needs them.

    All together: a momentum is in the unit that its variance gives it. ``scale_check`` is shown the scales; None where
    they are this optimizer's own. ``says_quantized``: whether it is worth a word that floating-point moments were
    quantized; it is not where that is how the optimizer's own state is saved.
    """
    layout, signed = record.layout, [moment.signed for moment in moments]
    scales = [saved.get(moment.scale_name) for moment in moments]
    if any(scale is not None for scale in scales) and not layout.quantized:
        layout = shard_layout(parameter, record.name)  # with the scales that this optimizer goes without
    placed = [
        _placed_moment(moment, scale, parameter, record, layout, saved)
        for moment, scale in zip(moments, scales, strict=True)
    ]
    if scale_check is not None:
        for moment, (_, scale) in zip(moments, placed, strict=True):
            if scale is not None:
                scale_check.add(scale, moment, record)
    stored = [(values, scale) for values, scale in placed if scale is not None]
    wants = any(moment.scale_name in record.entries for moment in moments)
    if stored and len(stored) < len(placed):
        raise ValueError(
            f"of the moments of parameter {record.name!r} some were saved as codes and some in floating point; it "
            "needs all in one form"
        )
    if not stored or not wants or version != FORMAT_VERSION:
        values = [value for value, _ in placed]
        if stored:
            values = dequantize(stored, signed, layout, decoder(version))
            if version != FORMAT_VERSION:
                conversions[f"moments of format version {version} to version {FORMAT_VERSION}"] += 1
            if not wants:
                conversions["8-bit moments to fp32"] += len(moments)
        elif wants and says_quantized:
            conversions["floating-point moments to 8 bits"] += len(moments)
        placed = list(quantize(values, signed, layout)) if wants else [(value, None) for value in values]
    for moment, (codes, scale) in zip(moments, placed, strict=True):
        for name, local in ((moment.name, codes), (moment.scale_name, scale)):
            if local is not None:
                state[name] = new_entry(record.entries[name], parameter)
                local_tensor(state[name]).copy_(local)


def _placed_moment(
    moment: MomentSpec,
    scale: Any,
    parameter: Tensor,
    record: ParameterRecord,
    layout: ShardLayout,
    saved: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's part of a saved moment and of its scales, if it has any; checked."""
    values = _placed(saved[moment.name], parameter, record, moment.name)
    if scale is not None:
        _check_dtype(values, (moment.code_dtype,), moment.name, record)
        label = f"{moment.scale_name!r} of parameter {record.name!r}"
        scale = local_part(scale, parameter, layout.scale_global_shape, layout.scale_local_shape, label)
        _check_dtype(scale, (torch.bfloat16,), moment.scale_name, record)
    elif not values.is_floating_point():
        raise ValueError(
            f"{moment.name!r} of parameter {record.name!r} was saved as {values.dtype} and {moment.scale_name!r} is "
            "missing: codes mean nothing without their scales. (torch's flattened form passes over entries that this "
            "optimizer does not keep: load with quantize=True, or in the nested form)"
        )
    return values, scale


def _check_dtype(value: Tensor, dtypes: Sequence[torch.dtype], name: str, record: ParameterRecord) -> None:
    """Refuse an entry whose bits mean something else: copied into another dtype they would load, and be wrong."""
    if value.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(
            f"{name!r} of parameter {record.name!r} was saved as {value.dtype}, and this number format has {wanted}: "
            "it is of another one"
        )


def _placed(value: Any, parameter: Tensor, record: ParameterRecord, name: str) -> Tensor:
    label = f"{name!r} of parameter {record.name!r}"
    return local_part(value, parameter, record.layout.global_shape, record.layout.local_shape, label)


def _option_changes(optimizer: FlashOptimizer, spec: Mapping[str, Any]) -> Counter[str]:
    """Return what differs in options that leave no trace in the entries."""
    live = optimizer.format_spec()
    changed = "rounding" in spec and spec["rounding"] != live["rounding"]
    return Counter([f"rounding {spec['rounding']!r} to {live['rounding']!r}"] if changed else [])


def say(conversions: Counter[str], opening: str) -> None:
    """Warn of conversions, if there were any, in one sentence that begins with ``opening``."""
    if conversions:
        done = "; ".join(f"{what} ({count}x)" for what, count in conversions.items())
        warnings.warn(
            f"{opening}: {done}. Nothing needs to be done; what fewer bits cannot hold was rounded to nearest",
            stacklevel=4,
        )
