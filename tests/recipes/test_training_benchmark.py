"""recipes/benchmarks/training.py: its pieces, and a run of seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks" / "training.py"


@pytest.mark.full
@pytest.mark.long
def test_a_smoke_run_writes_losses_a_table_and_a_plot(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((tmp_path / "training.json").read_text())["results"]
    assert [row["case"] for row in rows][:3] == ["reference", "nearest", "stochastic"]
    for row in rows:
        assert len(row["losses"]) == 4
        # A few steps from a random start: near the logarithm of the vocabulary's size, 8.3.
        assert 7.5 < row["validation_loss"] < 8.6
    first = [row["losses"][0] for row in rows]
    assert max(first) - min(first) < 0.05, "all runs begin with the same weights and text"
    assert len((tmp_path / "training.md").read_text().splitlines()) == 2 + len(rows)
    assert (tmp_path / "training.png").stat().st_size > 10_000
