"""A copy of a rank's state in host memory, taken before training goes on; the memory is kept for the next save."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_ALIGNMENT = 64
_PIECE_BYTES = 8 << 20
_MOST_THREADS = 8


class Staging:
    """One block of host memory for one rank's part of a checkpoint, page-locked where CUDA is in use.

    It is allocated at the first save, at the exact size, and again only when more is needed.
    """

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._block: mmap.mmap | None = None
        self._size = 0
        self._unpin: weakref.finalize[Any, Any] | None = None
        self._for_cuda = False  # whether page-locking was tried
        self._form: list[tuple[str, torch.dtype, torch.Size]] = []
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._size

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
        """Copy tensors to host memory. The copies hold the values of all work submitted before the call.

        Returns:
            The copies, and an event to wait for before they are read; None where they are complete already.
        """
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        form = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if form != self._form or (on_cuda and not self._for_cuda):
            self._lay_out(tensors, on_cuda)
            self._form = form
        copies = self._copies
        on_host = []
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                copies[name].copy_(tensor.detach(), non_blocking=True)
            else:
                on_host.append((copies[name], tensor.detach()))
        _copy_on_host(on_host)
        if not on_cuda:
            return copies, None
        event = torch.cuda.Event()
        event.record()
        return copies, event

    def release(self) -> None:
        """Give the memory back."""
        if self._unpin is not None:
            self._unpin()
        self._block, self._size, self._unpin, self._for_cuda = None, 0, None, False
        self._form, self._copies = [], {}

    def _lay_out(self, tensors: Mapping[str, torch.Tensor], pin: bool) -> None:
        """Find a place for each tensor."""
        offsets: dict[str, int] = {}
        total = 0
        for name, tensor in tensors.items():
            offsets[name] = total
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._reserve(total, pin)
        self._copies = {name: self._view(offsets[name], tensor) for name, tensor in tensors.items()}

    def _view(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assert self._block is not None
        # A storage of its own size for each tensor: torch.save writes whole storages.
        flat = torch.frombuffer(self._block, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
        return flat.view(tensor.dtype).view(tensor.shape)

    def _reserve(self, size: int, pin: bool) -> None:
        if self._block is not None and size <= self._size and (self._for_cuda or not pin):
            return
        self.release()
        if size == 0:
            return
        self._block = mmap.mmap(-1, size)
        self._size = size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._block.madvise(mmap.MADV_HUGEPAGE)  # the first copy is bound by page faults: 512 times fewer
        if pin:
            self._unpin, self._for_cuda = _pin(self._block), True


def _copy_on_host(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, by as many threads as this rank has cores.

    torchrun gives every rank one thread, and one core copies at a fraction of the memory's speed.
    """
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in pairs:
        if source.is_contiguous() and source.nbytes > _PIECE_BYTES:
            step = _PIECE_BYTES // source.element_size()
            pieces += zip(target.view(-1).split(step), source.view(-1).split(step), strict=True)
        else:
            pieces.append((target, source))
    threads = min(_threads(), sum(target.nbytes for target, _ in pieces) // _PIECE_BYTES)
    if threads <= 1:
        _copy_all(pieces)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="staging") as pool:
        # Interleaved: neighbours are of like size. The results are asked for, so that an error surfaces.
        list(pool.map(_copy_all, [pieces[first::threads] for first in range(threads)]))


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def _threads() -> int:
    """Return this rank's share of the cores that its process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, cores // max(ranks, 1)))


def _pin(block: mmap.mmap) -> weakref.finalize[Any, Any] | None:
    """Page-lock a block, so that copies from the device run beside the host; None where the driver refuses."""
    runtime: Any = torch.cuda.cudart()
    address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
    if int(runtime.cudaHostRegister(address, len(block), 0)) != 0:
        return None
    unpin = weakref.finalize(block, runtime.cudaHostUnregister, address)
    unpin.atexit = False  # the CUDA context may be gone by then
    return unpin
