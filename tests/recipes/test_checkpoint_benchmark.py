"""The checkpoint benchmark: that it runs, alone and under torchrun's environment, and writes what it says."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks" / "checkpoint.py"


def _run(tmp_path: Path, *launcher: str) -> dict[str, Any]:
    command = [
        sys.executable,
        *launcher,
        str(BENCHMARK),
        "--smoke",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("checkpoint-benchmark")] == []
    table = (tmp_path / "out" / "checkpoint.md").read_text()
    document: dict[str, Any] = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    assert len(document["results"]) == 4
    for row in document["results"]:
        assert f"| {row['name']} | " in table
        assert row["name"].split(",")[0] in result.stdout
    return document


def _check(document: dict[str, Any], ranks: int) -> None:
    assert document["ranks"] == ranks
    rows = {row["name"]: row for row in document["results"]}
    ours = rows["flashoptim_dist"]
    theirs = rows["torch AdamW fp32, torch DCP"]
    # Of a tiny model much is metadata, so the bounds are wide; 5.125 and 12 remain visible.
    assert 5.125 < ours["bytes_per_parameter"] < 8
    assert 12 < theirs["bytes_per_parameter"] < 16
    official = rows["flashoptim FlashAdamW, torch DCP"]
    assert "not installed" in official["error"] or "needs a GPU" in official["error"]
    for row in (ours, theirs, rows["torch AdamW fp32, flashoptim_dist.checkpoint"]):
        assert row["parameters"] == document["parameters"]
        assert min(row["save_s"], row["load_s"], row["stall_s"], row["first_stall_s"], row["background_s"]) > 0
        assert row["stall"] == pytest.approx(row["stall_s"] / row["save_s"])
        assert len(row["all_save_s"]) == len(row["all_load_s"]) == len(row["all_stall_s"]) == 2


@pytest.mark.full
def test_smoke_run_of_one_process(tmp_path: Path) -> None:
    _check(_run(tmp_path), 1)


@pytest.mark.full
@pytest.mark.long
def test_smoke_run_of_two_ranks(tmp_path: Path) -> None:
    _check(_run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), 2)


@pytest.mark.full
def test_a_run_that_ends_early_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    benchmark: Any = importlib.import_module("checkpoint")
    monkeypatch.setattr(benchmark, "measure", _interrupted_by("torch AdamW fp32, torch DCP", benchmark.measure))
    config = benchmark.Config(smoke=True, device="cpu", output=tmp_path / "out", subjects=("ours", "torch-dcp"))
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(config)
    document = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    assert [row["name"] for row in document["results"]] == ["flashoptim_dist"]
    assert document["results"][0]["save_s"] > 0
    assert "| flashoptim_dist | " in (tmp_path / "out" / "checkpoint.md").read_text()


def _interrupted_by(name: str, measure: Callable[..., object]) -> Callable[..., object]:
    def wrapped(subject: Any, *arguments: object) -> object:
        if subject.name == name:
            raise KeyboardInterrupt
        return measure(subject, *arguments)

    return wrapped
