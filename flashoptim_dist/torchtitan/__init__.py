"""torchtitan adapters: FlashOptim by one option. docs/torchtitan.md says how.

The names below belong to the adapter of torchtitan 0.3. They are imported where that release is installed; with an
older one, or none, the package imports without them (the adapter of 0.2.2 is a module of its own in here).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_MODULES = {
    "FlashCheckpointManager": "checkpointer",
    "FlashOptimizersContainer": "container",
    "FlashTrainer": "trainer",
    "export_master_weights": "overrides",
    "flash_adam": "overrides",
    "flash_adamw": "overrides",
    "flash_lion": "overrides",
    "flash_sgdw": "overrides",
    "master_weights_in_model": "checkpointer",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import the adapter of torchtitan 0.3 when one of its names is asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def _has_overrides() -> bool:
    """Return whether the installed torchtitan is one that knows overrides: 0.3."""
    if importlib.util.find_spec("torchtitan") is None:
        return False
    try:
        return importlib.util.find_spec("torchtitan.config.override") is not None
    except ImportError:  # torchtitan is there and lacks something that its configuration imports
        return False


if _has_overrides():
    # torchtitan imports this package and then looks the overrides up in its registry, which importing them fills.
    importlib.import_module(f"{__name__}.overrides")
