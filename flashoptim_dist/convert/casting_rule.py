"""Which dtype a weight gets where only names are known: the rule of ``cast_model`` read off the names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from flashoptim_dist.checkpoint.errors import CheckpointFormatError

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

_CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by its name.

    Raises:
        CheckpointFormatError: it is none of bf16, fp16, fp32 (or their long names).
    """
    if name not in DTYPES:
        raise CheckpointFormatError(f"dtype is {name!r}, and must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


class CastingRule:
    """``cast_model`` for names: BatchNorm-like modules and those that patterns name stay in fp32."""

    def __init__(self, names: Iterable[str], keep_fp32: Sequence[str]) -> None:
        """Take the model's entries and the patterns on names of modules.

        Raises:
            CheckpointFormatError: a pattern that matches no module.
        """
        names = list(names)
        modules = {module for name in names for module in _modules(name)}
        self._kept = {module for module in modules if {f"{module}.running_mean", f"{module}.running_var"} <= set(names)}
        for pattern in keep_fp32:
            matches = {module for module in modules if fnmatchcase(module, pattern)}
            if not matches:
                close = difflib.get_close_matches(pattern, sorted(modules), n=3, cutoff=0.5)
                hint = f"; close names: {', '.join(close)}" if close else ""
                raise CheckpointFormatError(f"the pattern {pattern!r} of keep_fp32 matches no module{hint}")
            self._kept |= matches

    def dtype(self, name: str, present: torch.dtype, wanted: torch.dtype) -> torch.dtype:
        """Return the dtype of an entry that has ``present``, in a model cast to ``wanted``."""
        if present not in _CASTABLE or name.endswith("inv_freq"):
            return present
        if wanted != torch.float32 and any(module in self._kept for module in _modules(name)):
            return torch.float32
        return wanted


def _modules(name: str) -> list[str]:
    pieces = name.split(".")
    return [".".join(pieces[:count]) for count in range(1, len(pieces))]
