"""Scripts that the tests start by torchrun, on several GPUs among others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
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
    return torchrun(processes or torch.cuda.device_count(), script)


def torchrun(processes: int, script: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """Run a script in so many processes of this machine and return what it printed, errors last.

    Args:
        processes: its ranks.
        script: runs from the root of the repository.
        arguments: of the script.
        variables: of the environment, beside those of this process.

    Raises:
        AssertionError: it failed; with the end of its output.
    """
    ranks = f"--nproc-per-node={processes}"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, str(script), *arguments],
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr
