"""torchtitan 0.3.0 on the CPU, part one: what has to be in place before it is imported. For tests only.

torchtitan looks for the device's module when it is imported, finds none for CPUs, and keeps what it found. So tests
import its names, and those of our adapter, from here.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from unittest import mock

import pytest


def _require() -> None:
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        pytest.skip("torchtitan is not installed", allow_module_level=True)
    if not found.startswith("0.3."):
        pytest.skip(f"tests of the adapter of torchtitan 0.3; {found} is installed", allow_module_level=True)


_require()

CPU = types.SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 34),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
)
"""Stands for torch.cuda."""


@contextlib.contextmanager
def as_device() -> Iterator[None]:
    """Let torch say, for a while, that the CPU is its device."""
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=CPU),
    ):
        yield


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
