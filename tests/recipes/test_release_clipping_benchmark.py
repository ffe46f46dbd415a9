"""The benchmark of clipping under gradient release: that it runs, and that its figures tell the three ways apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"))

import pytest
import release_clipping

from tests.pool import run_ranks
from tests.recipes.inputs import write_rows, write_tiny_model


def _measure(options: dict[str, Any]) -> dict[str, Any]:
    return release_clipping.main(release_clipping.Benchmark(**options))


@pytest.mark.full
def test_smoke_run_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    options = {
        "model": str(write_tiny_model(tmp_path / "tiny")),
        "data": str(write_rows(tmp_path / "rows.jsonl")),
        "sequence_length": 48,
        "clip_norm": 0.01,
        "seeds": (3,),
        "smoke": True,
        "output": tmp_path / "results",
    }
    [document] = run_ranks(1, _measure, options)
    written = json.loads((tmp_path / "results" / "release_clipping.json").read_text())
    assert written["rows"] == document["rows"]
    exact, estimate, none = document["rows"]
    assert [row["mode"] for row in document["rows"]] == list(release_clipping.MODES)
    assert exact["loss_apart_largest"] == 0.0
    assert min(estimate["loss_apart_largest"], none["loss_apart_largest"]) > 0.0
    assert all(row["seed"] == 3 and row["steps_above_bound"] == 1.0 for row in document["rows"])
    assert (tmp_path / "results" / "release_clipping.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "results" / "release_clipping.md").read_text().splitlines()
    assert len(table) == 5
    assert table[3].startswith("| 3 | estimate, release |")
    again = run_ranks(1, _measure, options)[0]
    assert again["rows"] == document["rows"], "runs that are there are not trained again"
