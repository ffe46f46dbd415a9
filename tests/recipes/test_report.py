"""The report of a run folder, the comparison of two, and the sample."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import compare
import numpy as np
import pytest
import torch
from llama_support.encode import Document
from llama_support.loss import LlamaWithLoss
from llama_support.metrics import METRICS_FILE, RUN_FILE, RunLog, StepClock
from llama_support.report import read_run, summary, write_report
from llama_support.sampling import continue_greedily, prompt_of
from llama_support.world import World
from torch import nn
from transformers import LlamaConfig

from flashoptim_dist import FlashAdamW, memory_report
from tests.recipes.inputs import ROOT, write_rows, write_tiny_model

PNG = b"\x89PNG\r\n\x1a\n"


def _write_run(folder: Path, losses: list[float]) -> None:
    folder.mkdir()
    model = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    world = World(0, 1, torch.device("cpu"), None)
    log = RunLog(folder, world, step=0, last_step=len(losses))
    log.run({"memory": memory_report(model, FlashAdamW(model.parameters())).to_dict(), "device": "CPU"})
    log.validation(0, 9.0)
    for step, loss in enumerate(losses, 1):
        phases = {"data": 0.0, "forward_and_backward": 2e-4, "optimizer": 1e-4}
        log.train(step, loss=loss, lr=1e-3, grad_norm=1.0, tokens=64, phases=phases)
    log.validation(len(losses), 2.0)
    log.close()


class _Pictures(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if tag == "img" and name == "src"]


def test_a_report_shows_the_figures_of_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "a <run>"
    _write_run(folder, [5.0, 4.0, 3.25])
    run = read_run(folder)
    shown = summary(run)
    assert shown["training loss, last step"] == "3.2500"
    assert shown["perplexity"] == "7.39"  # e^2
    assert shown["optimizer step, median"] == "0.1 ms"
    assert shown["bytes per parameter, weights and states"] == "5.125"
    page = write_report(folder, [run], title=folder.name)
    text = page.read_text()
    assert "a &lt;run&gt;" in text
    assert "<run>" not in text
    pictures = _Pictures()
    pictures.feed(text)
    assert len(pictures.sources) == 3
    assert all((folder / source).read_bytes().startswith(PNG) for source in pictures.sources)


def test_memory_parts_add_up_to_the_measured_peak(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _write_run(folder, [1.0])
    run = read_run(folder)
    parts = run.memory_parts()
    assert parts["weight"] == 64 * 32 * 2 / 2**30
    assert parts["moments"] == 64 * 32 * 2 / 2**30
    assert sum(parts.values()) == pytest.approx(run.train[-1]["memory_gib"])


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=RUN_FILE):
        read_run(tmp_path)


def test_phases_are_counted_once_and_begin_anew() -> None:
    clock = StepClock(torch.device("cpu"))
    with clock.phase("a"):
        pass
    with clock.phase("b"), clock.phase("a"):
        pass
    first = clock.read()
    assert list(first) == ["a", "b"]
    assert all(seconds > 0 for seconds in first.values())
    assert clock.read() == {}


def test_the_prompt_of_a_row_ends_where_training_begins() -> None:
    tokens = np.arange(40, dtype=np.int32)
    assert prompt_of(Document(tokens, tokens >= 5)) == [0, 1, 2, 3, 4]
    assert prompt_of(Document(tokens, tokens >= 1)) == list(range(16))  # a text: only its first token has no label
    long = np.arange(400, dtype=np.int32)
    assert prompt_of(Document(long, long >= 300)) == list(range(172, 300))


def test_the_continuation_is_what_transformers_generates() -> None:
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="sdpa", bos_token_id=0, eos_token_id=59, pad_token_id=59,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaWithLoss(config)
    prompt = [3, 14, 15, 9, 2]
    device = torch.device("cpu")
    written = continue_greedily(model, prompt, 12, longest=100, stop=None, device=device)
    assert len(written) == 12
    assert model.training
    model.eval()
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 5), max_new_tokens=12, do_sample=False, eos_token_id=None
    )  # fmt: skip
    assert prompt + written == expected[0].tolist()
    assert continue_greedily(model, prompt, 12, longest=8, stop=None, device=device) == written[:3]
    stopped = continue_greedily(model, prompt, 12, longest=100, stop=written[4], device=device)
    assert stopped == written[: written.index(written[4])]


@pytest.mark.full
def test_compare_lays_two_runs_over_each_other(tmp_path: Path) -> None:
    model, data, output = write_tiny_model(tmp_path / "tiny"), write_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    options = ["--model", str(model), "--data", str(data), "--sequence-length", "48", "--steps", "3", "--device", "cpu"]
    command = [sys.executable, str(ROOT / "recipes" / "compare.py"), "--output", str(output), "--", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compared: dict[str, Any] = json.loads((output / "comparison.json").read_text())
    assert compared["flash_adamw"]["optimizer"] == "FlashAdamW"
    assert compared["adamw"]["bytes per parameter, weights and states"].startswith("12.0")
    losses = [
        [json.loads(line)["loss"] for line in (output / name / METRICS_FILE).read_text().splitlines()]
        for name in ("flash_adamw", "adamw")
    ]
    assert losses[0][0] == losses[1][0]  # the validation loss before the first step: the same weights and data
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert (output / "report.html").is_file()
    assert (output / "flash_adamw" / "report.html").is_file()
    refused = subprocess.run([*command, "--model", str(tmp_path / "none")], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "the run with flash_adamw ended with exit code 2" in refused.stderr


def test_compare_refuses_a_number_of_processes_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare.sys, "argv", ["compare.py", "--processes", "0"])
    assert compare.main() == 2
    assert "--processes 0" in capsys.readouterr().err
