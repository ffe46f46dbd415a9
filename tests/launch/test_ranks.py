"""launch/ranks.py: how a failed rank is told and what code it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).resolve().parents[2] / "launch" / "ranks.py"


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        pytest.param("pass", 0, "", marks=pytest.mark.full),
        ("print('error: no such model', file=sys.stderr); sys.exit(2)", 2, "error: no such model\n"),
        pytest.param("sys.exit(3 if rank == 1 else 0)", 1, "rank 1 ended with exit code 3", marks=pytest.mark.full),
        pytest.param(
            "rank == 1 and os.kill(os.getpid(), signal.SIGKILL)",
            1,
            "rank 1 ended with SIGKILL",
            marks=pytest.mark.full,
        ),
    ],
)
def test_ending(tmp_path: Path, ending: str, code: int, told: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys\nrank = int(os.environ['RANK'])\n{ending}\n")
    command = [sys.executable, RANKS, "--standalone", "--nproc-per-node", "2", script]
    environment = {"OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", ["two", "-1", "1.5"])
def test_quickstart_names_a_number_of_ranks_that_is_none(ranks: str) -> None:
    command = ["bash", RANKS.parent / "quickstart"]
    environment = {**os.environ, "RANKS": ranks}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"quickstart: RANKS={ranks} is no number of processes; give one, such as RANKS=2\n"
