"""The torchtitan benchmark as far as it goes without torchtitan: its plan, its text, its tables, jobs that fail.

That its ranks train is tested where torchtitan 0.2.2 is installed, by `tests/torchtitan_v0_2`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]

import torchtitan_runs  # noqa: E402
from torchtitan_support import cases, corpus, report  # noqa: E402
from torchtitan_support.cases import Case, Job, Settings  # noqa: E402

WORKER = """
import json, pathlib, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
for case in job["cases"]:
    if case["seed"] == 1:
        print("WARNING - Error of no weight\\n[rank1]: ValueError: no weights")
        print("E1128 torch/distributed/elastic/multiprocessing/api.py:986] failed\\nChildFailedError:")
        raise SystemExit(3)
    while case["seed"] == 2:
        time.sleep(1)
    name = "{model}-{parallelism}-{optimizer}-seed{seed}.json".format(**case)
    row = {**case, "losses": [3.0, 2.0], "peak_active_gib": 1.0, "peak_reserved_gib": 2.0}
    part = pathlib.Path(job["settings"]["folder"]) / "part"
    part.write_text(json.dumps({**row, "tokens_per_second_per_process": 5.0, "seconds_per_step": 0.5}))
    part.replace(part.parent / name)
"""


def _settings(folder: Path) -> Settings:
    return Settings(
        processes=2,
        steps=100,
        local_batch=2,
        sequence_length=2048,
        checkpointing="full",
        corpus=folder / "corpus.pt",
        folder=folder,
    )


def _row(case: Case, losses: list[float], **changes: Any) -> dict[str, Any]:
    row = {**asdict(case), "losses": losses, "alone": True, "tokens_per_second_per_process": 1234.0}
    return {**row, "seconds_per_step": 0.25, "peak_active_gib": 10.5, "peak_reserved_gib": 12.0, **changes}


def test_every_case_runs_once_and_what_is_timed_comes_first_and_alone() -> None:
    jobs = cases.plan(("debug", "1b"), ("fsdp", "tp"), (0, 1, 2))
    everything = [case for job in jobs for case in job.cases]
    assert len(everything) == len(set(everything)) == 2 * 2 * 2 * 3
    first = [Case("1b", parallelism, one, 0) for parallelism in ("fsdp", "tp") for one in ("adamw", "flash_adamw")]
    assert [job.cases for job in jobs[:4]] == [(case,) for case in first]
    assert all(job.alone == (job.cases[0].model == "1b") for job in jobs)
    assert [job.cases[0].model for job in jobs[4:]] == ["debug"] * 4 + ["1b"] * 2
    assert [job.cases for job in cases.plan(("1b",), ("tp",), (7,))] == [
        (Case("1b", "tp", optimizer, 7),) for optimizer in ("adamw", "flash_adamw")
    ]


def test_both_parallelisms_train_on_as_many_sequences(tmp_path: Path) -> None:
    def options(case: Case) -> dict[str, str]:
        given = cases.torchtitan_arguments(case, _settings(tmp_path))[:-1]
        return dict(zip(given[::2], given[1::2], strict=True))

    fsdp, tp = (options(Case("1b", parallelism, "adamw", 3)) for parallelism in ("fsdp", "tp"))
    assert (fsdp["--training.local_batch_size"], tp["--training.local_batch_size"]) == ("2", "4")
    assert tp["--parallelism.tensor_parallel_degree"] == "2"
    assert fsdp["--debug.seed"] == "3"
    flash = options(Case("1b", "fsdp", "flash_adamw", 3))
    assert {name for name in fsdp if fsdp[name] != flash[name]} == {
        "--model.name",
        "--training.dtype",
        "--job.dump_folder",
    }


def test_the_text_is_the_same_for_a_seed_and_in_another_order_for_another(tmp_path: Path) -> None:
    lengths = [3, 5, 2, 6, 4, 7, 3, 2]
    torch.save({"tokens": torch.arange(32, dtype=torch.int32), "lengths": lengths}, tmp_path / "corpus.pt")
    first, again, other = (corpus.read_sequences(tmp_path / "corpus.pt", seed, 4) for seed in (0, 0, 1))
    assert first.shape == (8, 4)
    assert first.dtype == torch.int64
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for sequences in (first, other):
        assert sorted(sequences.flatten().tolist()) == list(range(32))
    assert corpus.read_sequences(tmp_path / "corpus.pt", 0, 5).shape == (6, 5)


def test_the_corpus_is_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llama_support.stdlib_corpus.stdlib_functions", lambda: [("def f():\n", "Does it."), ("x", "y")]
    )
    count = corpus.write_corpus(tmp_path / "corpus.pt")
    content = torch.load(tmp_path / "corpus.pt", weights_only=True)
    assert len(content["tokens"]) == sum(content["lengths"]) == count
    assert len(content["lengths"]) == 2
    first = content["tokens"][: content["lengths"][0]].tolist()
    assert (first[0], first[-1]) == (0, 1)  # <|begin|> and <|end|>
    monkeypatch.setattr("llama_support.stdlib_corpus.stdlib_functions", list)
    with pytest.raises(FileNotFoundError, match="without its sources"):
        corpus.write_corpus(tmp_path / "corpus.pt")


def test_noise_and_difference() -> None:
    adamw = [_row(Case("1b", "tp", "adamw", seed), [9.0] * 5 + [level] * 10) for seed, level in ((0, 2.0), (1, 2.5))]
    flash = [
        _row(Case("1b", "tp", "flash_adamw", seed), [8.0] * 5 + [level] * 10) for seed, level in ((0, 2.3), (1, 2.4))
    ]
    found = report.compare([*adamw, *flash], "1b", "tp")
    assert found is not None
    assert (found["adamw"], found["flash_adamw"]) == (pytest.approx(2.25), pytest.approx(2.35))
    assert found["noise"] == pytest.approx(0.5)
    assert found["difference"] == pytest.approx(0.1)
    assert found["largest_pair"] == pytest.approx(0.3)
    assert found["curve_noise"] == pytest.approx(0.5 * 10 / 15)
    assert found["curve_difference"] == pytest.approx((5 * 1.0 + 10 * 0.1) / 15)
    fewer = report.compare([*adamw, flash[1]], "1b", "tp")  # a seed of AdamW alone counts for the noise
    assert fewer is not None
    assert (fewer["seeds"], fewer["noise"]) == (1, pytest.approx(0.5))
    assert fewer["difference"] == pytest.approx(-0.1)
    assert report.compare(adamw, "1b", "tp") is None
    assert report.compare([*adamw, *flash], "1b", "fsdp") is None


def test_tables_and_plot(tmp_path: Path) -> None:
    case = Case("1b", "fsdp", "adamw", 0)
    rows = [
        _row(case, [3.0, 2.0]),
        _row(replace(case, optimizer="flash_adamw"), [3.1, 2.2], peak_active_gib=6.25),
        _row(replace(case, model="debug"), [5.0, 4.0], alone=False),
        {**asdict(replace(case, seed=1)), "failed": "exit code 1: no memory"},
    ]
    text = report.tables(rows)
    assert "| 1b | fsdp | torchtitan AdamW, fp32 weights | 1 | 2.5000 | 1,234 | 250.0 | 10.50 | 12.00 |" in text
    assert "| 1b | fsdp | FlashAdamW, bf16 weights | 1 | 2.6500 | 1,234 | 250.0 | 6.25 | 12.00 |" in text
    assert "| debug | fsdp | torchtitan AdamW, fp32 weights | 1 | 4.5000 |  |  | 10.50 | 12.00 |" in text
    assert "| 1b | fsdp | 1 | 2.5000 | 2.6500 | +0.1500 | 0.0000 | 0.1500 |" in text
    assert "- 1b fsdp adamw seed 1: exit code 1: no memory" in text
    pytest.importorskip("matplotlib")
    report.plot(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    report.plot(rows[3:], tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()


def _run(jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float = 1e9) -> list[dict[str, Any]]:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(torchtitan_runs, "command", lambda job, processes: [sys.executable, str(worker), str(job)])
    options = torchtitan_runs.Options(output=tmp_path / "out", limit_seconds=limit)
    torchtitan_runs.run(jobs, _settings(tmp_path), options, torchtitan_runs.Results(options))
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out" / "torchtitan_runs.json").read_text())["results"]
    assert (tmp_path / "out" / "torchtitan_runs.md").exists()
    return rows


def test_a_case_that_fails_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job(tuple(Case("debug", "fsdp", one, seed) for seed in (0, 1, 3)), False) for one in cases.OPTIMIZERS]
    rows = _run([*jobs, Job((Case("1b", "tp", "adamw", 0),), True)], tmp_path, monkeypatch)
    assert len(rows) == 7
    failed = [row for row in rows if "failed" in row]
    assert {(row["optimizer"], row["seed"]) for row in failed} == {("adamw", 1), ("flash_adamw", 1)}
    assert {row["failed"] for row in failed} == {"exit code 3: [rank1]: ValueError: no weights"}
    assert {row["alone"] for row in rows if row["model"] == "1b"} == {True}
    shown = capsys.readouterr().out
    assert "debug-fsdp-adamw-seed1 failed; the end of its log:\nWARNING - Error of no weight\n[rank1]" in shown
    assert "ChildFailedError" not in shown
    assert (tmp_path / "out" / "torchtitan_runs.log").read_text().count("=== ") == 5


def test_at_the_time_limit_what_runs_is_stopped_and_the_rest_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchtitan_runs, "GRACE_SECONDS", 0.2)
    jobs = [Job((Case("1b", parallelism, "adamw", 2),), True) for parallelism in ("fsdp", "tp")]
    rows = _run(jobs, tmp_path, monkeypatch, limit=0.1)
    assert [(row["parallelism"], row["failed"]) for row in rows] == [
        ("fsdp", "stopped by the time limit"),
        ("tp", "not started: the time limit"),
    ]


def test_jobs_that_want_to_be_alone_are() -> None:
    class Started:
        def __init__(self, alone: bool) -> None:
            self.job = Job((), alone)

    def may(alone: bool, *running: bool) -> bool:
        return torchtitan_runs.may_start(Job((), alone), [Started(one) for one in running], 2)  # type: ignore[arg-type]

    assert may(True)
    assert may(False, False)
    assert not may(False, False, False)
    assert not may(True, False)
    assert not may(False, True)


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert torchtitan_runs.main(["--smoke"]) == 2
    assert "needs as many GPUs, and there are 1" in capsys.readouterr().err


def test_figures_are_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [_row(Case("debug", "tp", "adamw", 0), [3.0, 2.0])]
    (tmp_path / "torchtitan_runs.json").write_text(json.dumps({"results": rows}))
    assert torchtitan_runs.main(["--draw", "--output", str(tmp_path)]) == 0
    assert report.tables(rows) in capsys.readouterr().out
    assert (tmp_path / "torchtitan_runs.md").read_text() == report.tables(rows)
