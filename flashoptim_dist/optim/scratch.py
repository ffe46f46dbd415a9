"""Working memory of the step on CPU: buffers that are kept, so that a step allocates next to nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashoptim_dist.formats import GROUP_SIZE
from flashoptim_dist.formats.rounding import HASH_STRIDE, as_int32
from flashoptim_dist.optim.blocks import Staging

_MOST_SIZES = 64


@dataclass(frozen=True)
class Views:
    """Buffers for a block of one length, flat. ``_bits`` names are the int32 patterns of the fp32 buffer before.

    ``size`` shares memory with ``gradient``: a step is done with the gradient when it encodes. ``ramp``: the hash
    inputs of elements 0, 1, 2, ...; ``lanes``: its first 32. ``groups``, ``index``, ``base``, ``smallest``: one int32
    per group; ``lattices``: five.
    """

    words: Tensor
    words_grouped: Tensor
    spare: Tensor
    spare_float: Tensor
    master: Tensor
    master_bits: Tensor
    gradient: Tensor
    size: Tensor
    size_bits: Tensor
    size_grouped: Tensor
    size_bits_grouped: Tensor
    size_array: np.ndarray[Any, Any]
    moments: tuple[Tensor, ...]
    moments_grouped: tuple[Tensor, ...]
    groups: Tensor
    groups_array: np.ndarray[Any, Any]
    index: Tensor
    base: Tensor
    smallest: Tensor
    smallest_array: np.ndarray[Any, Any]
    lattices: Tensor
    scales_grouped: Tensor
    ramp: Tensor
    lanes: Tensor


class Scratch:
    """The buffers of one thread."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._capacity = 0
        self._buffers: list[Tensor] = []
        self._ramp = self._groups = torch.empty(0)
        self._views: dict[tuple[int, int], Views] = {}

    def views(self, elements: int, moments: int) -> Views:
        """Return buffers for a block of this many elements and moments."""
        found = self._views.get((elements, moments))
        if found is None:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                found = self._make(elements, moments)
        return found

    def _make(self, elements: int, moments: int) -> Views:
        padded = -(-elements // GROUP_SIZE) * GROUP_SIZE
        if padded > self._capacity:
            self._capacity = padded
            self._buffers = []
            self._views = {}
            self._ramp = torch.arange(padded, dtype=torch.int32, device="cpu") * as_int32(HASH_STRIDE)
            self._groups = torch.empty(9, padded // GROUP_SIZE, dtype=torch.int32, device="cpu")
        while len(self._buffers) < 4 + moments:
            self._buffers.append(torch.empty(self._capacity, dtype=torch.int32, device="cpu"))
        if len(self._views) >= _MOST_SIZES:
            self._views.pop(next(iter(self._views)))
        groups = elements // GROUP_SIZE
        words, spare, master, size, *values = (buffer[:elements] for buffer in self._buffers)
        floats = [value.view(torch.float32) for value in values[:moments]]
        group_bits, index, base, smallest = (row[:groups] for row in self._groups[:4])

        def grouped(tensor: Tensor) -> Tensor:
            return tensor[: groups * GROUP_SIZE].view(groups, GROUP_SIZE)

        views = Views(
            words=words,
            words_grouped=grouped(words),
            spare=spare,
            spare_float=spare.view(torch.float32),
            master=master.view(torch.float32),
            master_bits=master,
            gradient=size.view(torch.float32),
            size=size.view(torch.float32),
            size_bits=size,
            size_grouped=grouped(size.view(torch.float32)),
            size_bits_grouped=grouped(size),
            size_array=size.view(torch.float32).numpy(),
            moments=tuple(floats),
            moments_grouped=tuple(map(grouped, floats)),
            groups=group_bits,
            groups_array=group_bits.numpy(),
            index=index,
            base=base,
            smallest=smallest,
            smallest_array=smallest.numpy(),
            lattices=self._groups[4:].view(-1)[: 5 * groups].view(groups, 5),
            scales_grouped=group_bits.view(torch.float32).view(-1, 1),
            ramp=self._ramp[:elements],
            lanes=self._ramp[:GROUP_SIZE],
        )
        self._views[(elements, moments)] = views
        return views


_threads = threading.local()


def scratch_of_thread() -> Scratch:
    """Return the scratch memory of the calling thread."""
    scratch: Scratch | None = getattr(_threads, "scratch", None)
    if scratch is None:
        scratch = _threads.scratch = Scratch()
    return scratch
