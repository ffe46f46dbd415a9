"""torchtitan 0.2.2 on the CPU, part one: what has to be in place before it is imported. For tests only.

torchtitan looks for the device's module when it is imported, finds none for CPUs, and keeps what it found. So tests
import its names, and those of our adapter, from here.
"""

from __future__ import annotations

from tests.torchtitan_cpu import as_device, require_torchtitan

require_torchtitan("0.2")

with as_device():
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
