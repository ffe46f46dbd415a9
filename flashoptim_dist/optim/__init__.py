"""Optimizer classes (thin), the pure update rules, and the choice of backend."""

from flashoptim_dist.optim.adam import FlashAdamW
from flashoptim_dist.optim.base import FlashOptimizer

__all__ = ["FlashAdamW", "FlashOptimizer"]
