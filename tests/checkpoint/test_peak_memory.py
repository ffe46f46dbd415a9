"""Host memory: one tensor for a save, one copy for a background save, the states and one tensor for a load."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.sharding import local_tensor
from tests.pool import mesh, run_ranks

LAYERS, SIDE = 12, 1536
MIB = 1 << 20
TENSOR = SIDE * SIDE * 2  # the largest, a whole bf16 weight: a chunk of a checkpoint of one rank
SLACK = 2 * MIB
"""A file's write buffer of 1 MiB; metadata, plans and pickles of 84 entries, 0.5 MiB with what malloc keeps of them."""
M_MMAP_THRESHOLD = -3
LIBC = ctypes.CDLL(None)


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)])
    fully_shard(net, mesh=mesh(dist.get_world_size()))
    return net, fod.FlashAdamW(net.named_parameters(), lr=1e-2)


def _with_states(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    optimizer.init_state()  # type: ignore[attr-defined]
    states = [local_tensor(value) for state in optimizer.state.values() for value in state.values()]
    for value in states:
        value.fill_(1)  # zeros take no memory until they are written to
    return sum(value.nbytes for value in states)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _peak(function: Callable[[], object]) -> int:
    """Most memory, beyond what was in use, while the function ran."""
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _load_code(directory: str) -> None:
    """Save and load something tiny both ways, so that what a process imports and keeps once is not counted."""
    net = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    fully_shard(net, mesh=mesh(dist.get_world_size()))
    optimizer = fod.FlashAdamW(net.named_parameters(), lr=1e-2)
    optimizer.init_state()
    checkpoint.save(directory, net, optimizer, overwrite=True)
    checkpoint.load(directory, net, optimizer)
    checkpoint.async_save(directory, net, optimizer, overwrite=True).result()


def _measure(directory: str, what: str) -> tuple[int, int]:
    LIBC.mallopt(M_MMAP_THRESHOLD, 128 << 10)  # give tensors back to the system at once
    _load_code(f"{directory}-tiny")
    net, optimizer = _build()
    if what == "load":
        gc.collect()
        peak = _peak(lambda: checkpoint.load(directory, net, optimizer))
        return peak, _with_states(net, optimizer)
    states = _with_states(net, optimizer)
    if what == "reload":
        return _peak(lambda: checkpoint.load(directory, net, optimizer)), states
    if what == "save":
        return _peak(lambda: checkpoint.save(directory, net, optimizer)), states
    peak = _peak(lambda: checkpoint.async_save(directory, net, optimizer).result())
    return peak, states + sum(local_tensor(parameter).nbytes for parameter in net.parameters())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of a stretch of code")
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_bounds_hold(tmp_path: Path, world_size: int) -> None:
    """B23 of the collected bug reports: loading took twice the state."""
    for peak, _ in run_ranks(world_size, _measure, str(tmp_path / "a"), "save"):
        assert peak <= TENSOR + SLACK
    for peak, copy in run_ranks(world_size, _measure, str(tmp_path / "b"), "async"):
        assert peak <= copy + TENSOR + SLACK
    for after in (world_size, 3 - world_size):
        for peak, states in run_ranks(after, _measure, str(tmp_path / "a"), "load"):
            assert states > 4 * (TENSOR + SLACK)  # so that a second copy would show
            assert peak <= states + TENSOR + SLACK
    for peak, _ in run_ranks(world_size, _measure, str(tmp_path / "a"), "reload"):
        assert peak <= TENSOR + SLACK
