"""The benchmark of whole training steps: that it runs, and writes what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks" / "llama.py"


def _run(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), "--smoke", "--steps", "1", "--output", str(output), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.full
@pytest.mark.long
def test_a_case_is_measured(tmp_path: Path) -> None:
    result = _run(tmp_path, "--processes", "2", "--cases", "release", "--", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads((tmp_path / "llama.json").read_text())["results"]
    assert row["ranks"] == 2
    # The debug model has 5,181,408 parameters; 2 sequences of 64 tokens are each rank's half of the global batch.
    assert row["parameters"] == 5_181_408
    assert row["tokens_per_step_and_rank"] == 2 * 64
    assert 0 < row["loss"] < 12
    assert "| FlashAdamW, gradient release, clipping | " in (tmp_path / "llama.md").read_text()


@pytest.mark.full
@pytest.mark.long
def test_a_case_that_fails_is_told_and_counts(tmp_path: Path) -> None:
    result = _run(tmp_path, "--cases", "flash_adamw", "--", "--device", "cpu", "--model", str(tmp_path / "nothing"))
    assert result.returncode == 1
    (row,) = json.loads((tmp_path / "llama.json").read_text())["results"]
    assert "does not exist" in row["failed"]
