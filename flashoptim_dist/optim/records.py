"""What an optimizer knows of a parameter beside its state; derived from the parameter and its group, never saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashoptim_dist.formats import canonical_name, correction_bits, noise_key, parameter_id
from flashoptim_dist.optim.state import EntrySpec, MomentSpec, entry_specs
from flashoptim_dist.sharding import ShardLayout, local_tensor, shard_layout


@dataclass
class ParameterRecord:
    """One parameter: how errors call it, where its local part lies, what its state holds, and its noise.

    ``seen``: fingerprint of the weight that the correction belongs to, None while it belongs to whatever is there.
    ``checked_state``: the state dict that was found complete.
    """

    name: str
    layout: ShardLayout
    moments: tuple[MomentSpec, ...]
    entries: dict[str, EntrySpec]
    weight_dtype: torch.dtype
    correction_bits: int
    noise_key: int | None
    seen: tuple[Any, ...] | None = field(default=None)
    checked_state: Mapping[str, Any] | None = field(default=None)

    def fits(self, parameter: Tensor) -> bool:
        """Return whether the record still describes the parameter (a model may be resharded or cast in place)."""
        return self.weight_dtype == parameter.dtype and self.layout.local_shape == tuple(local_tensor(parameter).shape)

    def describe(self) -> str:
        """Return its precisions in words."""
        dtype = str(self.weight_dtype).removeprefix("torch.")
        weight = f"{dtype} with {16 + self.correction_bits}-bit master weights" if self.correction_bits else dtype
        if not self.moments:
            return f"{weight}, no moments"
        compressed = self.moments[0].scale_name in self.entries
        return f"{weight}, {'8-bit' if compressed else 'fp32'} moments"


def new_record(
    parameter: Tensor,
    name: str | None,
    ordinal: int,
    moments: tuple[MomentSpec, ...],
    options: Mapping[str, Any],
) -> ParameterRecord:
    """Return the record of a parameter.

    Args:
        parameter: plain tensor or DTensor.
        name: its name in the model, or None.
        ordinal: its number among the optimizer's parameters.
        moments: what its group keeps.
        options: master_weight_bits, quantize, rounding and seed, as they hold for its group, and offload_states.

    Raises:
        ShardingError: a placement that the number format cannot follow.
    """
    label = canonical_name(name) if name is not None else f"#{ordinal}"
    layout = shard_layout(parameter, label, quantize=options["quantize"])
    bits = correction_bits(parameter.dtype, options["master_weight_bits"])
    key = noise_key(options["seed"], parameter_id(name, ordinal)) if options["rounding"] == "stochastic" else None
    entries = entry_specs(
        layout, moments, quantize=options["quantize"], correction_bits=bits, offload=options["offload_states"]
    )
    return ParameterRecord(label, layout, moments, entries, parameter.dtype, bits, key)


def fingerprint(parameter: Tensor) -> tuple[Any, ...]:
    """Return what tells, for free and at best effort, that a weight's memory was written or replaced."""
    local = local_tensor(parameter)
    return (local.data_ptr(), parameter._version, local._version)
