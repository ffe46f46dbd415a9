"""A copy of a rank's state in host memory, taken before training goes on; the memory is kept for the next save."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch

from flashoptim_dist.checkpoint.planners import SnapshotPlanner

_ALIGNMENT = 64


class Staging:
    """One block of host memory for one rank's part of a checkpoint, page-locked where CUDA is in use.

    It is allocated at the first save, at the exact size, and again only when more is needed.
    """

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._block: mmap.mmap | None = None
        self._size = 0
        self._unpin: weakref.finalize[Any, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._size

    def stage(self, planner: SnapshotPlanner) -> torch.cuda.Event | None:
        """Replace the planner's tensors by copies. The copies hold the values of all work submitted before the call.

        Returns:
            An event to wait for before the copies are read, None where they are complete already.
        """
        tensors = {index: value for index, value in planner.local.items() if isinstance(value, torch.Tensor)}
        offsets: dict[Any, int] = {}
        total = 0
        for index, tensor in tensors.items():
            offsets[index] = total
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        self._reserve(total, pin=on_cuda)
        for index, tensor in tensors.items():
            copy = self._view(offsets[index], tensor)
            copy.copy_(tensor.detach(), non_blocking=on_cuda)
            planner.local[index] = copy
        if not on_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def release(self) -> None:
        """Give the memory back."""
        if self._unpin is not None:
            self._unpin()
        self._block, self._size, self._unpin = None, 0, None

    def _view(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assert self._block is not None
        # A storage of its own size for each tensor: torch.save writes whole storages.
        flat = torch.frombuffer(self._block, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
        return flat.view(tensor.dtype).view(tensor.shape)

    def _reserve(self, size: int, pin: bool) -> None:
        if self._block is not None and size <= self._size and (self._unpin is not None or not pin):
            return
        self.release()
        if size == 0:
            return
        self._block = mmap.mmap(-1, size)
        self._size = size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._block.madvise(mmap.MADV_HUGEPAGE)  # the first copy is bound by page faults: 512 times fewer
        if pin:
            self._unpin = _pin(self._block)


def _pin(block: mmap.mmap) -> weakref.finalize[Any, Any] | None:
    """Page-lock a block, so that copies from the device run beside the host; None where the driver refuses."""
    runtime: Any = torch.cuda.cudart()
    address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
    if int(runtime.cudaHostRegister(address, len(block), 0)) != 0:
        return None
    unpin = weakref.finalize(block, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # the CUDA context may be gone by then
    return unpin
