"""The recipe from end to end: runs, runs that were cut off, runs that must not start, and runs that must stop."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import llama_finetune
import pytest
import torch
from llama_support.interrupts import SIGNALS

from flashoptim_dist.checkpoint import format_check
from tests.pool import run_ranks
from tests.recipes.inputs import ROOT, assert_same_state, saved_checkpoint, saved_tensors, small_run, write_tiny_model
from tests.recipes.runs import train, without_report


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_run(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run that has ended after two steps; the tests that start it again must leave it as it is."""
    values = {**inputs, "output": str(tmp_path_factory.mktemp("finished")), "steps": 2}
    assert run_ranks(2, train, values) == [None, None]
    return values


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_was_cut_off_ends_with_the_same_state(inputs: dict[str, Any], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_ranks(2, train, {**inputs, "output": str(whole)}, report=True) == [None, None]
    assert run_ranks(2, train, {**inputs, "output": str(cut)}, 6) == ["cut off", "cut off"]
    assert not (cut / "checkpoints" / "step-00000006").exists()
    assert run_ranks(2, train, {**inputs, "output": str(cut)}) == [None, None]
    assert_same_state(whole, cut, 6)

    def values(run: Path) -> list[tuple[str, int, float]]:
        return [(record["kind"], record["step"], record["loss"]) for record in _metrics(run)]

    assert values(cut) == values(whole)
    assert [record["step"] for record in _metrics(whole) if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    validation = [record for record in _metrics(whole) if record["kind"] == "validation"]
    assert [record["step"] for record in validation] == [0, 4, 6]
    assert validation[-1]["loss"] < validation[0]["loss"]
    assert sorted(path.name for path in (whole / "checkpoints").glob("step-*")) == ["step-00000004", "step-00000006"]
    assert list((whole / "tensorboard").iterdir())
    assert (whole / "report.html").exists()


def test_a_finished_run_goes_on_with_a_new_schedule_or_stops(inputs: dict[str, Any], tmp_path: Path) -> None:
    values = {**inputs, "steps": 2, "output": str(tmp_path)}
    assert run_ranks(2, train, values) == [None, None]
    assert run_ranks(2, train, {**values, "when_finished": "stop"}) == [None, None]
    assert [record["step"] for record in _metrics(tmp_path) if record["kind"] == "train"] == [1, 2]
    assert run_ranks(2, train, values) == [None, None]
    training = [record for record in _metrics(tmp_path) if record["kind"] == "train"]
    assert [record["step"] for record in training] == [1, 2, 3, 4]
    assert [record["lr"] for record in training[:2]] == [record["lr"] for record in training[2:]]


def test_a_run_goes_on_with_another_number_of_ranks(inputs: dict[str, Any], tmp_path: Path) -> None:
    of_two, mixed = tmp_path / "two", tmp_path / "mixed"
    assert run_ranks(2, train, {**inputs, "output": str(of_two)}) == [None, None]
    assert run_ranks(2, train, {**inputs, "output": str(mixed)}, 3) == ["cut off", "cut off"]
    assert run_ranks(1, train, {**inputs, "output": str(mixed)}) == [None]
    for one, other in zip(_metrics(of_two), _metrics(mixed), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)


@pytest.mark.parametrize("optimizer", ["flash_adamw", pytest.param("adamw", marks=pytest.mark.full)])
def test_options_may_change_on_resuming(inputs: dict[str, Any], tmp_path: Path, optimizer: str) -> None:
    values = {**inputs, "steps": 4, "optimizer": optimizer, "output": str(tmp_path)}
    assert run_ranks(2, train, values, 3) == ["cut off", "cut off"]
    changes = {"weight_decay": 0.5, "betas": (0.8, 0.9), "activation_checkpointing": "none", "global_batch": 4}
    assert run_ranks(2, train, {**values, **changes}) == [None, None]
    groups = saved_checkpoint(tmp_path, 4)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert [tuple(group["betas"]) for group in groups] == [(0.8, 0.9)] * 2


def test_both_optimizers_train_alike(inputs: dict[str, Any], tmp_path: Path) -> None:
    for optimizer in ("flash_adamw", "adamw"):
        run = {**inputs, "optimizer": optimizer, "output": str(tmp_path / optimizer)}
        assert run_ranks(2, train, run) == [None, None]
    flash, plain = (_metrics(tmp_path / name) for name in ("flash_adamw", "adamw"))
    assert flash[0]["loss"] == plain[0]["loss"]
    assert flash[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=0.01)
    size = {name: _bytes(tmp_path / name / "checkpoints" / "step-00000006") for name in ("flash_adamw", "adamw")}
    assert size["adamw"] > 2 * size["flash_adamw"]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_weights_that_are_not_finite_stop_the_run_before_it_starts(inputs: dict[str, Any], tmp_path: Path) -> None:
    spoiled = write_tiny_model(tmp_path / "spoiled", spoil=True)
    texts = run_ranks(2, train, {**inputs, "model": str(spoiled), "output": str(tmp_path / "run")})
    assert len(set(texts)) == 1
    assert "validation after step 0 has loss nan" in str(texts[0])
    assert "the weights of --model or the data are at fault" in str(texts[0])


def test_a_step_that_goes_nan_names_the_last_good_checkpoint(inputs: dict[str, Any], tmp_path: Path) -> None:
    values = {**inputs, "output": str(tmp_path)}
    assert run_ranks(2, train, values, 5) == ["cut off", "cut off"]
    texts = run_ranks(2, train, {**values, "lr": 1e38})
    assert len(set(texts)) == 1
    assert f"the last good checkpoint is step 4 in {tmp_path / 'checkpoints'}" in str(texts[0])
    assert run_ranks(2, train, {**values, "resume": "4"}) == [None, None]


@pytest.mark.full
def test_a_checkpoint_of_weights_that_failed_is_not_called_good(inputs: dict[str, Any], tmp_path: Path) -> None:
    values = {**inputs, "output": str(tmp_path), "save_every": 1, "evaluate_every": 0}
    assert run_ranks(2, train, values, 3) == ["cut off", "cut off"]
    # Step 3 leaves weights near the largest bf16: finite, so they are saved, and too large to train on.
    texts = run_ranks(2, train, {**values, "lr": 1e38})
    assert len(set(texts)) == 1
    assert "step 6, after 2 that were left out, has" in str(texts[0])
    assert "the last good checkpoint is step 2" in str(texts[0])
    assert run_ranks(2, train, {**values, "resume": "2"}) == [None, None]


def _train_as_layout(version: int, values: dict[str, Any]) -> str | None:
    """Train where checkpoints have this layout version."""
    kept = format_check.LAYOUT_VERSION
    format_check.LAYOUT_VERSION = version
    try:
        return train(values)
    finally:
        format_check.LAYOUT_VERSION = kept


def test_a_checkpoint_of_another_format_version_is_refused(finished: dict[str, Any]) -> None:
    texts = run_ranks(2, _train_as_layout, format_check.LAYOUT_VERSION + 1, finished)
    assert len(set(texts)) == 1
    assert "layout version" in str(texts[0])
    assert "another --output" in str(texts[0])


def _spoil_row(inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    data = folder / "rows.jsonl"
    data.write_text(Path(inputs["data"]).read_text() + '\n{"prompt": "no completion"}\n')
    return {"data": str(data)}


def _block_output(inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "file").write_text("in the way")
    return {"output": str(folder / "file" / "run")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs, folder: {"model": str(folder / "none")}, "none does not exist"),
        (lambda inputs, folder: {"data": str(folder / "none.jsonl")}, "none.jsonl does not exist"),
        (_spoil_row, "rows.jsonl, line 61: has the fields"),
        (lambda inputs, folder: {"sequence_length": 2, "long_rows": "skip"}, "none of the"),
        (lambda inputs, folder: {"sequence_length": 512}, "--sequence-length 512 is more than the 256 positions"),
        (_block_output, "cannot write in the run folder"),
        (lambda inputs, folder: {"resume": "3"}, "--resume 3"),
    ],
    ids=["model", "data", "row", "context", "positions", "output", "resume"],
)
def test_bad_input_is_one_line_on_every_rank(inputs: dict[str, Any], tmp_path: Path, change: Any, message: str) -> None:
    values = {**inputs, "output": str(tmp_path / "run"), **change(inputs, tmp_path)}
    texts = run_ranks(2, train, values)
    assert len(set(texts)) == 1
    assert message in str(texts[0])
    assert "\n" not in str(texts[0])


@pytest.mark.parametrize("change", [{"optimizer": "adamw"}, {"model": "other"}, {"sequence_length": 40}])
def test_a_checkpoint_of_another_run_is_refused_and_stays(
    finished: dict[str, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    run = Path(finished["output"])
    before = saved_tensors(run, 2)
    if "model" in change:
        change = {"model": str(write_tiny_model(tmp_path / "other", num_hidden_layers=3))}
    texts = run_ranks(2, train, {**finished, **change})
    assert len(set(texts)) == 1
    assert "another --output" in str(texts[0])
    after = saved_tensors(run, 2)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_never_resuming_does_not_replace_checkpoints(finished: dict[str, Any]) -> None:
    texts = run_ranks(2, train, {**finished, "resume": "never"})
    assert "holds checkpoints (newest: step 2)" in str(texts[0])


def _torchrun(arguments: list[str], ranks: int = 2) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *(str(ROOT / "recipes" / "llama_finetune.py"), *arguments),
    ]


def _options(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def _run(arguments: list[str], ranks: int = 2, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = _torchrun(arguments, ranks)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def _from_command_line(arguments: list[str]) -> str:
    """What the recipe prints on this rank."""
    printed, given, handlers = io.StringIO(), sys.argv, {kind: signal.getsignal(kind) for kind in SIGNALS}
    sys.argv = ["llama_finetune.py", *arguments]
    try:
        with contextlib.redirect_stdout(printed), without_report():
            llama_finetune.main()
    finally:
        sys.argv = given
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    return printed.getvalue()


def test_the_command_line_trains_and_saves(inputs: dict[str, Any], tmp_path: Path) -> None:
    """As torchrun starts it, on ranks that are there already."""
    printed = run_ranks(2, _from_command_line, _options({**inputs, "steps": 2, "output": str(tmp_path)}))[0]
    assert "step 2: validation loss" in printed
    assert "bytes/param" in printed
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-00000002"


@pytest.mark.full
@pytest.mark.long  # CI runs ./launch/quickstart, which does the same
def test_torchrun_trains_and_saves(inputs: dict[str, Any], tmp_path: Path) -> None:
    done = _run(_options({**inputs, "steps": 2, "output": str(tmp_path)}))
    assert done.returncode == 0, done.stderr
    assert "step 2: validation loss" in done.stdout
    assert "bytes/param" in done.stdout
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-00000002"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        *([], ["--optimizer", "adamw"], ["--gradient-release"], ["--gradient-release", "--compile"]),
        *(["--replicate", "2"], ["--replicate", "2", "--gradient-release"]),
    ],
    ids=lambda options: " ".join(options) or "as it is",
)
def test_all_gpus_train_save_and_go_on(inputs: dict[str, Any], tmp_path: Path, options: list[str]) -> None:
    if "--replicate" in options and torch.cuda.device_count() % 2:
        pytest.skip("two replicas need an even number of GPUs")
    values = {**inputs, "steps": 4, "device": "cuda", "output": str(tmp_path)}
    for _ in range(2):
        done = _run([*_options(values), *options], torch.cuda.device_count())
        assert done.returncode == 0, done.stderr
    training = [record for record in _metrics(tmp_path) if record["kind"] == "train"]
    assert [record["step"] for record in training] == list(range(1, 9))
    assert training[-1]["loss"] < training[0]["loss"]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_default_run_learns_and_both_optimizers_agree(tmp_path: Path) -> None:
    for optimizer in ("flash_adamw", "adamw"):
        options = _options({"optimizer": optimizer, "device": "cpu", "output": str(tmp_path / optimizer)})
        done = _run(options, timeout=850)
        assert done.returncode == 0, done.stderr
    flash, plain = (_metrics(tmp_path / optimizer) for optimizer in ("flash_adamw", "adamw"))
    assert flash[-1]["loss"] <= 0.75 * flash[0]["loss"]
    assert flash[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=0.01)
    parameters = 5_181_408
    step = f"step-{flash[-1]['step']:08d}"
    assert _bytes(tmp_path / "flash_adamw" / "checkpoints" / step) <= 5.2 * parameters
    assert _bytes(tmp_path / "adamw" / "checkpoints" / step) >= 12 * parameters


@pytest.mark.full
@pytest.mark.long
def test_bad_input_ends_every_rank_with_exit_code_2(inputs: dict[str, Any], tmp_path: Path) -> None:
    done = _run(_options({**inputs, "data": str(tmp_path / "none.jsonl"), "output": str(tmp_path / "run")}))
    assert done.returncode != 0
    assert done.stderr.count("error: data file") == 1
    assert done.stderr.count("exitcode  : 2") == 2


@pytest.mark.full
@pytest.mark.long  # CI kills a rank of a run that torchrun starts again, in test_interrupts
def test_a_run_whose_rank_is_killed_ends_with_the_same_state(inputs: dict[str, Any], tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    values = {**inputs, "steps": 12, "save_every": 3}
    assert run_ranks(2, train, {**values, "output": str(whole)}) == [None, None]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = _torchrun(_options({**values, "output": str(killed)}))
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        metrics = killed / "metrics.jsonl"
        while not (metrics.exists() and '"step": 5' in metrics.read_text()):
            assert running.poll() is None
            time.sleep(0.02)
        os.kill(_child_ranks(running.pid)[1], signal.SIGKILL)
        assert running.wait(timeout=120) != 0
    assert not (killed / "checkpoints" / "step-00000012").exists()
    assert _run(_options({**values, "output": str(killed)})).returncode == 0
    assert_same_state(whole, killed, 12)


def _child_ranks(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"llama_finetune.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
