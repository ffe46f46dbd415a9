"""Host memory of conversions: blocks of a tensor, whatever the size of the model."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.convert import convert, export_hf, import_hf, verify
from tests.pool import run_ranks

LAYERS, SIDE = 5, 2048
LARGEST = SIDE * SIDE * 4  # a whole fp32 tensor
MIB = 1 << 20
BOUND = 2 * LARGEST + 14 * MIB
"""Two tensors at a time, and what libraries touch first at full size (code pages, threads' heaps): up to 8 MiB seen."""
M_MMAP_THRESHOLD = -3


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _peak(function: Callable[[], object]) -> int:
    """Most memory, beyond what was in use, while the function ran."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _make(directory: Path, side: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)])
    optimizer = fod.FlashAdamW(net.named_parameters(), lr=1e-2)
    optimizer.init_state()
    checkpoint.save(directory / "ours", net, optimizer)


WORK: dict[str, Callable[[Path], Any]] = {
    "adamw": lambda at: convert(at / "ours", at / "adamw", "adamw"),
    "export": lambda at: export_hf(at / "ours", at / "hf", dtype=torch.float32),
    "flash": lambda at: convert(at / "adamw", at / "flash", "flash_adamw"),
    "adamw.pt": lambda at: convert(at / "ours", at / "adamw.pt", "adamw"),
    "flash from a file": lambda at: convert(at / "adamw.pt", at / "flash-from-file", "flash_adamw"),
    "import": lambda at: import_hf(at / "hf", at / "imported"),
    "verify": lambda at: verify(at / "ours"),
}
"""In this order: some read what others wrote."""


def _measure(root: str, names: list[str]) -> dict[str, int]:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)  # give tensors back to the system at once
    directory = Path(root)
    _make(directory / "warm", 64)
    _make(directory, SIDE)
    for name in names:  # what is imported and kept at first use
        WORK[name](directory / "warm")
    return {name: _peak(lambda name=name: WORK[name](directory)) for name in names}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of a stretch of code")
@pytest.mark.parametrize("names", [["export"], pytest.param(list(WORK), marks=pytest.mark.full)], ids=["export", "all"])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, names: list[str]) -> None:
    assert LAYERS * LARGEST > 1.4 * BOUND  # fp32 weights alone: a copy of the model would show
    for name, peak in run_ranks(1, _measure, str(tmp_path), names)[0].items():
        assert peak <= BOUND, f"{name}: {peak / MIB:.1f} MiB"
