"""Loading optimizer state: matching by name or order, and entries into the form that the parameter needs.

``torch.optim.Optimizer.load_state_dict`` casts every tensor to the parameter's dtype, int8 codes included, and cannot
be told otherwise; so the load is done here, hooks and checks of torch's kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from flashoptim_dist.formats import (
    canonical_name,
    decode_momentum,
    decode_variance,
    encode_momentum,
    encode_variance,
    from_groups,
    to_groups,
)
from flashoptim_dist.optim.state import ERROR_BITS, STEP, MomentSpec, new_entry, new_step
from flashoptim_dist.sharding import ShardLayout, local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.base import FlashOptimizer, ParameterRecord


def load_state(optimizer: FlashOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Implement ``FlashOptimizer.load_state_dict``; see there. Nothing is changed where an error is raised."""
    loaded: dict[str, Any] = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = hook(optimizer, loaded)
        if result is not None:
            loaded = result
    saved_groups = deepcopy(loaded["param_groups"])
    _check_groups(optimizer, saved_groups)
    saved_of = _match(optimizer, saved_groups)
    state: dict[Any, Any] = {}
    owner = {id(p): g for p, _, _, g in optimizer._named()}
    for parameter, saved_id in saved_of.items():
        entries = loaded["state"].get(saved_id)
        if entries:
            record = optimizer._record(parameter)
            moments = optimizer._moments_of(owner[id(parameter)])
            state[parameter] = _load_parameter(parameter, record, moments, entries)
    matched = set(saved_of.values())
    state.update({key: deepcopy(value) for key, value in loaded["state"].items() if key not in matched})
    groups = []
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        merged = {**group, **saved, "params": group["params"]}
        if "param_names" in group:
            merged["param_names"] = group["param_names"]
        else:
            merged.pop("param_names", None)
        groups.append(merged)
    optimizer.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
    optimizer._forget_weights()
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


def _match(optimizer: FlashOptimizer, saved_groups: list[dict[str, Any]]) -> dict[Tensor, Any]:
    """Return the saved id of each parameter: by name where both sides have names, else by order.

    Ids that are strings are names that torch's checkpoint helpers put there in live order; ``param_names`` beside
    them is in saved order and must not be read.
    """
    live = [(parameter, name) for parameter, name, _, _ in optimizer._named()]
    saved_ids = [saved_id for group in saved_groups for saved_id in group["params"]]
    saved_names = [name for group in saved_groups for name in group.get("param_names", ())]
    integer_ids = all(isinstance(saved_id, int) for saved_id in saved_ids)
    if integer_ids and len(saved_names) == len(saved_ids) and all(name is not None for _, name in live):
        by_name = {canonical_name(name): saved_id for name, saved_id in zip(saved_names, saved_ids, strict=True)}
        missing = [name for _, name in live if name is not None and canonical_name(name) not in by_name]
        if missing:
            raise ValueError(f"the state has no parameter named {missing[0]!r} ({len(missing)} missing in all)")
        return {parameter: by_name[canonical_name(name)] for parameter, name in live if name is not None}
    return {parameter: saved_id for (parameter, _), saved_id in zip(live, saved_ids, strict=True)}


def _load_parameter(
    parameter: Tensor, record: ParameterRecord, moments: tuple[MomentSpec, ...], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of one parameter from saved entries, each in the dtype and layout this parameter needs."""
    step = saved.get(STEP, 0)
    new = new_step(parameter)
    new.fill_(float(local_tensor(step) if isinstance(step, Tensor) else step))
    state: dict[str, Any] = {STEP: new}
    for moment in moments:
        if moment.name not in saved:
            raise ValueError(
                f"the state of parameter {record.name!r} has no {moment.name!r} (it has {sorted(saved)}); it "
                "was saved by another kind of optimizer"
            )
        codes = _placed(saved[moment.name], parameter, record, moment.name)
        scale = saved.get(moment.scale_name)
        if scale is not None:
            scale = _placed(scale, parameter, record, moment.scale_name)
        wants = moment.scale_name in record.entries
        if wants and scale is None:
            codes, scale = _quantize(codes, record.layout, moment)
        elif not wants and scale is not None:
            codes, scale = _dequantize(codes, scale, record.layout, moment), None
        _put(state, moment.name, codes, parameter, record)
        if scale is not None:
            _put(state, moment.scale_name, scale, parameter, record)
    if ERROR_BITS in record.entries:
        target = new_entry(record.entries[ERROR_BITS], parameter)
        if ERROR_BITS in saved:
            local_tensor(target).copy_(
                _convert_correction(
                    _placed(saved[ERROR_BITS], parameter, record, ERROR_BITS), record.entries[ERROR_BITS].dtype
                )
            )
        state[ERROR_BITS] = target
    return state


def _put(state: dict[str, Any], name: str, local: Tensor, parameter: Tensor, record: ParameterRecord) -> None:
    spec = record.entries[name]
    target = new_entry(spec, parameter)
    if local.dtype != spec.dtype and (local.dtype.is_floating_point != spec.dtype.is_floating_point):
        raise ValueError(
            f"{name!r} of parameter {record.name!r} was saved as {local.dtype}, unreadable as {spec.dtype}: it is "
            "of another number format"
        )
    local_tensor(target).copy_(local)
    state[name] = target


def _placed(value: Any, parameter: Tensor, record: ParameterRecord, name: str) -> Tensor:
    """Return this rank's part of a saved entry: a DTensor's local tensor, or the slice of a whole tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name!r} of parameter {record.name!r} is no tensor but {type(value).__name__}")
    is_scale = name.endswith("_scale")
    global_shape = record.layout.scale_global_shape if is_scale else record.layout.global_shape
    local_shape = record.layout.scale_local_shape if is_scale else record.layout.local_shape
    if isinstance(value, DTensor):
        if tuple(value.shape) != tuple(global_shape):
            raise ValueError(_shape_message(name, record, tuple(value.shape), global_shape))
        if isinstance(parameter, DTensor) and value.placements != parameter.placements:
            value = value.redistribute(parameter.device_mesh, parameter.placements)
        elif not isinstance(parameter, DTensor):
            value = value.full_tensor()
        return local_tensor(value)
    if tuple(value.shape) == tuple(global_shape) and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        device = local_tensor(parameter).device
        return local_tensor(distribute_tensor(value.to(device), mesh, parameter.placements, src_data_rank=None))
    if tuple(value.shape) != tuple(local_shape):
        raise ValueError(_shape_message(name, record, tuple(value.shape), global_shape))
    return value


def _shape_message(name: str, record: ParameterRecord, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return (
        f"{name!r} of parameter {record.name!r} has shape {found} in the state and needs {tuple(wanted)}; it is of "
        "another model"
    )


def _quantize(values: Tensor, layout: ShardLayout, moment: MomentSpec) -> tuple[Tensor, Tensor]:
    """Encode this rank's part of a floating moment, to nearest."""
    encode = encode_momentum if moment.signed else encode_variance
    rows = values.to(torch.float32).reshape(layout.rows, layout.length)
    codes, scales = encode(to_groups(rows))
    return from_groups(codes, layout.rows, layout.length).reshape(layout.local_shape), scales.view(
        layout.scale_local_shape
    )


def _dequantize(codes: Tensor, scales: Tensor, layout: ShardLayout, moment: MomentSpec) -> Tensor:
    """Decode this rank's part of a compressed moment to fp32."""
    decode = decode_momentum if moment.signed else decode_variance
    rows = codes.reshape(layout.rows, layout.length)
    return from_groups(decode(to_groups(rows), scales.reshape(-1)), layout.rows, layout.length).reshape(
        layout.local_shape
    )


def _convert_correction(correction: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a correction in another width: int8 gains 8 zero bits, int16 is rounded to its upper 8."""
    if correction.dtype == dtype:
        return correction
    if dtype == torch.int16:
        return correction.to(torch.int16) << 8
    return ((correction.to(torch.int32) + 128) >> 8).clamp(-128, 127).to(torch.int8)
