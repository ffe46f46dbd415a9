"""What a run writes of itself, and a disk that does not take it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch
from llama_support.metrics import METRICS_FILE, RunLog
from llama_support.world import World


def _train(log: RunLog, step: int) -> None:
    log.train(step, loss=2.0, lr=1e-3, grad_norm=1.0, tokens=64, phases={"data": 0.5})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_disk_that_takes_no_metrics_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, World(0, 1, torch.device("cpu"), None), step=0, last_step=3)
    _train(log, 1)
    log._file.close()
    log._file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 - closed by the log
    _train(log, 2)
    _train(log, 3)
    log.close()
    told = [line for line in capsys.readouterr().out.splitlines() if "cannot write" in line]
    assert told == [f"cannot write metrics in {tmp_path} (No space left on device); the run goes on without"]
    records = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [record["step"] for record in records] == [1]
