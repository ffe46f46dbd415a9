"""The benchmark that loads a checkpoint of the recipe: it ends well where all loads agree, and says so where not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashoptim_dist.checkpoint.layout import step_name
from tests.pool import run_ranks
from tests.recipes.runs import train

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.long
def test_two_loads_and_an_export_agree_and_another_model_does_not(tmp_path: Path) -> None:
    run, config, logits = tmp_path / "run", tmp_path / "config.yaml", tmp_path / "logits.pt"
    config.write_text("model: debug\ndevice: cpu\n")
    values = {"output": str(run), "steps": 1, "validation_sequences": 2, "sample_tokens": 0, "device": "cpu"}
    assert run_ranks(1, train, values) == [None]
    checkpoint = run / "checkpoints" / step_name(1)
    debug_model = ROOT / "recipes" / "llama_support" / "debug_model"
    code, text = _run("-m", "flashoptim_dist", "export-hf", checkpoint, tmp_path / "hf", "--config", debug_model)
    assert code == 0, text
    load = [ROOT / "recipes" / "benchmarks" / "reload.py", config, checkpoint, "--logits", logits]
    code, text = _run(*load, "--export", tmp_path / "hf")
    assert (code, "the export's logits in transformers are equal" in text) == (0, True), text
    code, text = _run(*load)
    assert (code, "sums of states equal the first" in text) == (0, True), text
    first = torch.load(logits, weights_only=True)
    first["logits"][0, 0, 0] += 1
    torch.save(first, logits)
    code, text = _run(*load)
    assert (code, "DIFFER from the first" in text) == (1, True), text
