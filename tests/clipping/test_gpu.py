"""Norms and clipping over several GPUs with NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.gpu
def test_norms_over_several_gpus_are_the_whole_model_s() -> None:
    """All layouts of two_gpus.py, by torchrun, in a process group that is bound to its device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    script = Path(__file__).with_name("two_gpus.py")
    ranks = f"--nproc-per-node={torch.cuda.device_count() // 2 * 2}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, str(script)]
    done = subprocess.run(command, cwd=script.parents[2], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "the whole model's on cuda" in done.stdout
