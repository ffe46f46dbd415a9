"""The scales of one load, looked at together: those that the number format never writes are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flashoptim_dist.formats import find_fault, read_faults
from flashoptim_dist.formats.scale_faults import NEVER_WRITTEN

if TYPE_CHECKING:
    from flashoptim_dist.optim.records import ParameterRecord
    from flashoptim_dist.optim.state import MomentSpec


class ScaleCheck:
    """Looks at each moment's scales as they come, and waits for their device once, for all of them."""

    def __init__(self, version: int) -> None:
        """Expect scales of this version of the number format."""
        self._version = version
        self._labels: list[str] = []
        self._found: list[Tensor] = []

    def add(self, scales: Tensor, moment: MomentSpec, record: ParameterRecord) -> None:
        """Look at this rank's part of a moment's scales, bf16; those without memory (meta) hold nothing to look at."""
        if not scales.is_meta:
            shape = tuple(record.layout.global_shape)
            self._labels.append(f"{moment.scale_name!r} of parameter {record.name!r} (shape {shape})")
            self._found.append(find_fault(scales, moment.signed, self._version))

    def finish(self) -> None:
        """Raise if any scales are none. No communication.

        Raises:
            ValueError: the first such entry, with its parameter and what can be done.
        """
        faults = read_faults(self._found)
        bad = [(label, fault) for label, fault in zip(self._labels, faults, strict=True) if fault]
        if not bad:
            return
        label, fault = bad[0]
        more = f" ({len(bad)} such entries)" if len(bad) > 1 else ""
        if fault == NEVER_WRITTEN:
            # Most variances of version 1 hold scales that are none of this version.
            reason = (
                "the state is damaged, or of version 1 and no record says so. In that case load the checkpoint with "
                "flashoptim_dist.checkpoint.load, or put its record beside the state: "
                'state_dict["format"] = {"name": "fd1", "version": 1}. Else load'
            )
        else:
            reason = "the state is damaged. Load"
        raise ValueError(
            f"{label} {fault}{more}: {reason} an older state, or delete the parameter's entry from "
            'state_dict["state"]: its moments and correction then start anew'
        )
