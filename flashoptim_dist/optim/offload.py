"""States in pinned host memory, streamed through the step: while one chunk is stepped, the next is copied to the
device and the one before back.

Two buffers on the device take turns. A chunk's plan is made for its buffer; on the host its state lies where
``optimizer.state`` says. Three streams (copies in, steps, copies out) wait for each other through events; the host
waits only where it reads or writes a state (``Staging.synchronize``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashoptim_dist.optim.fused import Plan
from flashoptim_dist.optim.rules import Hyperparameters
from flashoptim_dist.optim.scaling import GradientInputs
from flashoptim_dist.optim.state import bytes_per_entry
from flashoptim_dist.optim.watch import MemoryWatch
from flashoptim_dist.sharding import local_tensor

if TYPE_CHECKING:
    from flashoptim_dist.optim.backends import StepTask
    from flashoptim_dist.optim.records import ParameterRecord

CHUNK_BYTES = 1 << 28
"""State bytes per chunk, or those of the largest parameter where it has more: 256 MB take 5 ms over PCIe 5."""

_ALIGNMENT = 256


class _Events:
    """Of one buffer: its states are in, stepped, and out again."""

    def __init__(self) -> None:
        self.filled, self.stepped, self.emptied = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()


class _Buffer:
    """Device memory for the states of one chunk at a time; on the CPU (for tests) nothing is asynchronous."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.events = _Events() if device.type == "cuda" else None

    def view(self, offset: int, like: Tensor) -> Tensor:
        """Return the memory at an offset as a tensor of the dtype and shape of another."""
        end = offset + like.numel() * like.element_size()
        return self.memory[offset:end].view(like.dtype).view(like.shape)


class Staging:
    """The two buffers of one optimizer on one device, and the streams of the copies.

    Args:
        records: of all parameters that may be stepped there.
        device: where they are stepped.
    """

    def __init__(self, records: Sequence[ParameterRecord], device: torch.device) -> None:
        sizes = [state_bytes(record) for record in records]
        self.chunk_bytes = max(CHUNK_BYTES, max(sizes, default=0))
        capacity = min(self.chunk_bytes, sum(sizes))
        self._buffers = [_Buffer(capacity, device) for _ in range(2)]
        self._turn = 0
        self.copy_in = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copy_out = torch.cuda.Stream(device) if device.type == "cuda" else None

    def chunks(self, tasks: Sequence[StepTask]) -> list[list[StepTask]]:
        """Cut tasks into runs, in order, whose states fit a buffer."""
        chunks: list[list[StepTask]] = []
        used = 0
        for task in tasks:
            size = state_bytes(task.record)
            if not chunks or used + size > self.chunk_bytes:
                chunks.append([])
                used = 0
            chunks[-1].append(task)
            used += size
        return chunks

    def next_buffer(self) -> _Buffer:
        """Return the buffers in turn."""
        self._turn += 1
        return self._buffers[self._turn % 2]

    def synchronize(self) -> None:
        """Wait until all states are in host memory."""
        if self.copy_out is not None:
            self.copy_out.synchronize()


def state_bytes(record: ParameterRecord) -> int:
    """Return the bytes that a parameter's state takes in a buffer."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in bytes_per_entry(record.entries).values())


class StagedPlan(Plan):
    """A plan whose states are copied into a buffer before the launches and back after them.

    The step counters stay on the device. Arguments are those of :class:`Plan`; the tasks' states fit the buffer.
    """

    def __init__(self, tasks: Sequence[StepTask], skipped: Tensor, counts_skips: bool, staging: Staging) -> None:
        self._staging, self._buffer = staging, staging.next_buffer()
        self._pairs: list[tuple[Tensor, Tensor]] = []
        staged: list[StepTask] = []
        offset = 0
        for task in tasks:
            state: dict[str, Any] = dict(task.state)
            for name, size in bytes_per_entry(task.record.entries).items():
                host = local_tensor(task.state[name])
                if not host.is_contiguous():
                    raise RuntimeError(
                        f"state {name!r} of parameter {task.record.name!r} of local shape {tuple(host.shape)} has "
                        f"strides {host.stride()}: make it contiguous before step()"
                    )
                state[name] = self._buffer.view(offset, host)
                offset += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
                if host.numel():
                    self._pairs.append((host, state[name]))
            staged.append(replace(task, state=state))
        super().__init__(staged, skipped, counts_skips)
        self._memory = MemoryWatch(tasks)  # of the host's states, not of the buffer

    def run(self, hyperparameters: Sequence[Hyperparameters], inputs: GradientInputs) -> None:
        """Copy the states in, launch the step on the current stream, and copy them out; nothing waits on the host."""
        copy_in, copy_out, events = self._staging.copy_in, self._staging.copy_out, self._buffer.events
        if copy_in is None or copy_out is None or events is None:
            for host, staged in self._pairs:
                staged.copy_(host)
            super().run(hyperparameters, inputs)
            for host, staged in self._pairs:
                host.copy_(staged)
            return
        with torch.cuda.stream(copy_in):
            # The buffer's last states are out; so are, in the order of that stream, this chunk's of the last step.
            copy_in.wait_event(events.emptied)
            for host, staged in self._pairs:
                staged.copy_(host, non_blocking=True)
            events.filled.record(copy_in)
        steps = torch.cuda.current_stream(self.device)
        steps.wait_event(events.filled)
        super().run(hyperparameters, inputs)
        events.stepped.record(steps)
        with torch.cuda.stream(copy_out):
            copy_out.wait_event(events.stepped)
            for host, staged in self._pairs:
                host.copy_(staged, non_blocking=True)
            events.emptied.record(copy_out)
