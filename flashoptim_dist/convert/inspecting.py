"""What a checkpoint holds, in figures; only step counters are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashoptim_dist.convert.api import Pathlike
from flashoptim_dist.convert.lazy import LazyTensor
from flashoptim_dist.convert.opening import open_checkpoint
from flashoptim_dist.convert.training_state import TrainingState
from flashoptim_dist.optim.state import STEP

FP32_ADAMW_BYTES = 12
"""Per parameter: an fp32 weight and two fp32 moments."""


@dataclass(frozen=True)
class TensorLine:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        path: of the checkpoint itself, where a folder of several was given.
        container: "dcp", "torch" or "safetensors".
        layout: of a DCP directory: "nested", "flattened" or "torchtitan".
        optimizer: its class, or what is known of it.
        state_format: "flash", "torch", "flashoptim" or None.
        formats: the format records.
        steps: the step counts that occur, ascending.
        tensors: model first, then the optimizer's, then the rest.
        aliases: second names of tied weights.
        parameters: elements of the model's weights, or of the optimizer's moments where there are no weights.
        disk_bytes: of all files.
    """

    path: Path
    container: str
    layout: str
    optimizer: str
    state_format: str | None
    formats: tuple[dict[str, Any], ...]
    steps: tuple[int, ...]
    tensors: tuple[TensorLine, ...]
    aliases: dict[str, str]
    parameters: int
    disk_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(line.nbytes for line in self.tensors)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of all tensors per parameter."""
        return self.nbytes / max(1, self.parameters)

    def to_dict(self, with_tensors: bool = True) -> dict[str, Any]:
        """Return it as plain data (JSON-serializable), ``with_tensors`` or without their list."""
        summary = {
            "path": str(self.path),
            "container": self.container,
            "layout": self.layout,
            "optimizer": self.optimizer,
            "state_format": self.state_format,
            "formats": list(self.formats),
            "steps": list(self.steps),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bytes_per_parameter": self.bytes_per_parameter,
            "disk_bytes": self.disk_bytes,
            "fp32_adamw_bytes": self.parameters * FP32_ADAMW_BYTES,
            "aliases": self.aliases,
        }
        if not with_tensors:
            return summary
        tensors = [
            {"name": line.name, "dtype": line.dtype, "shape": list(line.shape), "bytes": line.nbytes}
            for line in self.tensors
        ]
        return {**summary, "tensors": tensors}


def inspect(path: Pathlike) -> Inspection:
    """Return what a checkpoint holds (no communication).

    Raises:
        CheckpointError: there is none, or it is damaged or unsafe; the file is named.
    """
    state = open_checkpoint(path)
    return Inspection(
        state.path,
        state.container,
        state.layout,
        state.optimizer_name(),
        state.state_format(),
        tuple(dict(spec) for spec in state.specs),
        _steps(state),
        tuple(_line(name, tensor) for name, tensor in named_tensors(state)),
        dict(state.aliases),
        _parameters(state),
        _disk_bytes(state.path),
    )


def named_tensors(state: TrainingState) -> list[tuple[str, LazyTensor]]:
    """Return all tensors of a checkpoint by the names that it gives them."""
    tensors = [(f"model.{name}", weight) for name, weight in state.weights.items()]
    for name, entries in state.states.items():
        tensors += [
            (f"optimizer.state.{name}.{key}", value) for key, value in entries.items() if isinstance(value, LazyTensor)
        ]
    for path, value in state.others:
        tensors += _leaves(".".join(map(str, path)), value)
    return tensors


def _leaves(name: str, value: Any) -> list[tuple[str, LazyTensor]]:
    if isinstance(value, LazyTensor):
        return [(name, value)]
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]
    if isinstance(value, list | tuple):
        return [leaf for index, inner in enumerate(value) for leaf in _leaves(f"{name}.{index}", inner)]
    return []


def _line(name: str, tensor: LazyTensor) -> TensorLine:
    return TensorLine(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.nbytes)


def _steps(state: TrainingState) -> tuple[int, ...]:
    steps = set()
    for entries in state.states.values():
        step = entries.get(STEP)
        if isinstance(step, LazyTensor) and step.numel == 1:
            step = step.whole().item()
        if isinstance(step, int | float) and math.isfinite(step):
            steps.add(int(step))
    return tuple(sorted(steps))


def _parameters(state: TrainingState) -> int:
    if state.weights:
        return sum(weight.numel for weight in state.weights.values() if weight.dtype.is_floating_point)
    total = 0
    for entries in state.states.values():
        shapes = [value.numel for value in entries.values() if isinstance(value, LazyTensor)]
        total += max(shapes, default=0)
    return total


def _disk_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
