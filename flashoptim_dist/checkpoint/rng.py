"""The random number generators of one rank: Python, numpy, torch on the CPU and on the current CUDA device."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from flashoptim_dist.checkpoint.nesting import digest_of
from flashoptim_dist.checkpoint.ranks import current_cuda_device


def capture_rng() -> dict[str, Any]:
    """Return the state of this process's generators, as plain numbers and tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    device = current_cuda_device()
    if device is not None:
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _numpy_state() -> dict[str, Any]:
    """Return the state of numpy's global generator with a tensor for its array: any torch.load reads that."""
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 the global one is meant
    words = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return {**state, "state": {**state["state"], "key": words}}


def restore_rng(state: dict[str, Any]) -> None:
    """Set this process's generators to a captured state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = state["numpy"]
    words = np.asarray(numpy_state["state"]["key"]).astype(np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": words}})  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    device = current_cuda_device()
    if device is not None and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def reseed_rng(state: dict[str, Any], rank: int, world_size: int) -> None:
    """Start new streams for a rank of another world size, the same ones each time from the same checkpoint."""
    text = f"{digest_of(state)} rank {rank} of {world_size}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
