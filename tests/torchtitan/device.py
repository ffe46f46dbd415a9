"""torchtitan 0.3.0 on the CPU, part one: what has to be in place before it is imported. For tests only.

torchtitan looks for the device's module when it is imported, finds none for CPUs, and keeps what it found. So tests
import its names, and those of our adapter, from here.
"""

from __future__ import annotations

from tests.torchtitan_cpu import CPU, as_device, require_torchtitan

require_torchtitan("0.3")

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

assert torchtitan.tools.utils.device_type == "cpu", "something imported torchtitan before this file"
