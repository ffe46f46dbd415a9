"""The two launches of a norm: partial results of all tasks, then their sum per bucket. See ``kernels.norm``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flashoptim_dist.kernels.device import INTERPRETED
from flashoptim_dist.kernels.launching import Launcher
from flashoptim_dist.kernels.norm import BFLOAT16, FLOAT16, FLOAT32, norm_finish_kernel, norm_kernel

_ALIGNMENT = 16
_CODES: dict[torch.dtype, int] = {
    torch.bfloat16: BFLOAT16.value,
    torch.float16: FLOAT16.value,
    torch.float32: FLOAT32.value,
}
_WARPS = 8
_FINISH_BLOCK = 1024
_NORM, _FINISH = Launcher(norm_kernel), Launcher(norm_finish_kernel)


def norm_segments(run: Tensor) -> list[tuple[int, int, int]]:
    """Return (offset in bytes, elements, code of the dtype) of the segments of one run of memory.

    Two where it does not begin on 16 bytes: what comes before them, and the rest, which is read in whole vectors.

    Raises:
        TypeError: a dtype that is not bf16, fp16 or fp32.
    """
    if run.dtype not in _CODES:
        raise TypeError(f"norms of bfloat16, float16 and float32 gradients are supported, not of {run.dtype}")
    code, size = _CODES[run.dtype], run.element_size()
    head = min(-run.data_ptr() % _ALIGNMENT // size, run.numel())
    segments = [(0, head, code), (head * size, run.numel() - head, code)]
    return [segment for segment in segments if segment[1]]


class NormLaunch:
    """Both launches over fixed tables.

    Args:
        segments: int64 [segments, NORM_COLUMNS] on the device; its contents may change between runs.
        tasks: int32 [programs, TASK_COLUMNS] on the device.
        ranges: int32 [buckets, 2] on the host: the tasks of each bucket.
        infinity: the largest magnitude instead of the sum of squares.
    """

    block: ClassVar[int] = 256 if INTERPRETED else 4096
    blocks_per_task: ClassVar[int] = 8

    def __init__(self, segments: Tensor, tasks: Tensor, ranges: np.ndarray, infinity: bool) -> None:
        device = tasks.device
        table = torch.from_numpy(ranges)
        self._ranges = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        self._segments, self._tasks, self._infinity = segments, tasks, infinity
        self._partials = torch.zeros(tasks.shape[0], dtype=torch.float64, device=device)
        self._prepared: Callable[[], None] | None = None

    def run(self) -> Tensor:
        """Launch; return the result per bucket: fp64 [buckets]."""
        device = self._tasks.device
        results = torch.empty(self._ranges.shape[0], dtype=torch.float64, device=device)
        # Triton launches on the current device, wherever the tensors are.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if self._prepared is not None:
                self._prepared()
            else:
                constants = {"INFINITY_NORM": self._infinity, "BLOCK": self.block}
                launch = ((device, self._infinity), (self._tasks.shape[0],))
                arguments = (self._segments, self._tasks, self._partials)
                _NORM(*launch, arguments, constants, _WARPS)
                self._prepared = _NORM.prepared(*launch, arguments, constants)
            constants = {"INFINITY_NORM": self._infinity, "BLOCK": _FINISH_BLOCK}
            finish = (self._partials, self._ranges, results)
            _FINISH((device, self._infinity), (self._ranges.shape[0],), finish, constants, 4)
        return results
