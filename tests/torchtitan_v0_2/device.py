"""torchtitan 0.2.2 on the CPU, part one: what has to be in place before it is imported. For tests only.

torchtitan looks for the device's module when it is imported, finds none for CPUs, and keeps what it found. So tests
import its names, and those of our adapter, from here.
"""

from __future__ import annotations

import types
from importlib.metadata import PackageNotFoundError, version
from unittest import mock

import pytest


def _require() -> None:
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        pytest.skip("torchtitan is not installed; ./launch/test torchtitan-0.2 installs it", allow_module_level=True)
    if not found.startswith("0.2."):
        pytest.skip(f"tests of the adapter of torchtitan 0.2; {found} is installed", allow_module_level=True)


_require()

_CPU = types.SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 34),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
)
"""Stands for torch.cuda."""

with (
    mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
    mock.patch("torch._utils._get_device_module", return_value=_CPU),
):
    import torchtitan.tools.utils
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer, build_optimizers_with_moe_load_balancing
    from torchtitan.config import ConfigManager
    from torchtitan.config import Optimizer as TheirOptimizer
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    from flashoptim_dist.torchtitan import v0_2

__all__ = [
    "BaseDataLoader",
    "ConfigManager",
    "OptimizersContainer",
    "TheirOptimizer",
    "Trainer",
    "build_lr_schedulers",
    "build_optimizers_with_moe_load_balancing",
    "train_spec",
    "v0_2",
]

assert torchtitan.tools.utils.device_type == "cpu", "something imported torchtitan before this file"
