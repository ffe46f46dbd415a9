"""Optimizer classes (thin), the pure update rules, and the choice of backend."""

from flashoptim_dist.optim.adam import FlashAdam, FlashAdamW
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.compiled import cpu_backend
from flashoptim_dist.optim.lion import FlashLion
from flashoptim_dist.optim.sgd import FlashSGD, FlashSGDW
from flashoptim_dist.optim.update_check import NumericsReport

__all__ = [
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashOptimizer",
    "FlashSGD",
    "FlashSGDW",
    "NumericsReport",
    "cpu_backend",
]
