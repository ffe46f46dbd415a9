"""torchtitan 0.3.0 on the CPU, part one: what has to be in place before it is imported. For tests only.

torchtitan looks for the device's module when it is imported, finds none for CPUs, and keeps what it found. So tests
import its names, and those of our adapter, from here. In a process with TORCHTITAN_TEST_DEVICE=cuda it is a GPU.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed.fsdp

from tests.torchtitan_cpu import CPU, require_torchtitan
from tests.torchtitan_cpu import as_device as cpu_as_device

require_torchtitan("0.3")

ON_GPU = os.environ.get("TORCHTITAN_TEST_DEVICE") == "cuda"
as_device = contextlib.nullcontext if ON_GPU else cpu_as_device

if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    # torch 2.11 lacks the name, which only the spmd_types backend uses.
    @dataclass
    class DataParallelMeshDims:
        """Stands for torch's."""

        shard: Any = None
        replicate: Any = None

    torch.distributed.fsdp.DataParallelMeshDims = DataParallelMeshDims  # type: ignore[attr-defined]

with as_device():
    import torchtitan.tools.utils
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
        default_adamw,
    )
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides

    from flashoptim_dist.torchtitan.checkpointer import FlashCheckpointManager
    from flashoptim_dist.torchtitan.container import FlashOptimizersContainer
    from flashoptim_dist.torchtitan.flat_state import flat_state, load_flat_state

__all__ = [
    "CPU",
    "ON_GPU",
    "CheckpointManager",
    "Configurable",
    "FlashCheckpointManager",
    "FlashOptimizersContainer",
    "LRSchedulersContainer",
    "OptimizersContainer",
    "OverrideConfig",
    "ParamGroupConfig",
    "apply_overrides",
    "as_device",
    "default_adamw",
    "flat_state",
    "load_flat_state",
]

_EXPECTED = "cuda" if ON_GPU else "cpu"
assert torchtitan.tools.utils.device_type == _EXPECTED, "something imported torchtitan before this file"
