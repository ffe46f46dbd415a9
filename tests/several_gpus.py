"""Scripts for several GPUs, which the tests start by torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def run_on_gpus(script: Path, processes: int | None = None) -> str:
    """Run a script by torchrun and return what it printed; skip the test where there are fewer than two GPUs.

    Args:
        script: below the repository, from whose root it runs.
        processes: one per GPU; None: as many as there are GPUs.

    Raises:
        AssertionError: it failed; with the end of its output.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = f"--nproc-per-node={processes or torch.cuda.device_count()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
