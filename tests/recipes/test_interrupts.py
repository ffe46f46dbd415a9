"""Runs that are asked to end, runs whose rank is killed, and steps that are left out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import llama_finetune
import pytest
import torch
from llama_support.config import Config
from llama_support.errors import BadInput
from llama_support.interrupts import SIGNALS, Interrupted, Interrupts
from llama_support.progress import after_resume

from tests.pool import run_ranks
from tests.recipes.inputs import ROOT, assert_same_state, saved_tensors, small_run
from tests.recipes.runs import train, without_report

RECIPE = ROOT / "recipes" / "llama_finetune.py"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**small_run(tmp_path_factory.mktemp("inputs")), "save_every": 4, "evaluate_every": 0, "sample_tokens": 0}


@contextmanager
def _at_each_step(act: Any) -> Iterator[None]:
    """Call `act(step)` between the backward pass of each step, counted from 1, and the clipping."""
    accumulate_gradient, steps = llama_finetune.accumulate_gradient, iter(range(1, 10**6))

    def accumulate_and_act(*arguments: Any) -> float:
        loss = accumulate_gradient(*arguments)
        act(next(steps))
        return loss

    llama_finetune.accumulate_gradient = accumulate_and_act
    try:
        yield
    finally:
        llama_finetune.accumulate_gradient = accumulate_gradient


def _train_and_signal(values: dict[str, Any], rank_asked: int, step_asked: int, number: int) -> tuple[str, bool]:
    """Train; the rank sends itself a signal in a step after its losses are summed, so that it counts in the next."""
    interrupts = Interrupts()
    before = {kind: signal.getsignal(kind) for kind in SIGNALS}

    def act(step: int) -> None:
        if torch.distributed.get_rank() == rank_asked and step == step_asked:
            os.kill(os.getpid(), number)

    try:
        interrupts.listen()
        with _at_each_step(act), without_report():
            llama_finetune.train(Config(**values), interrupts)
    except Interrupted as ended:
        return str(ended), interrupts.asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    return "trained to the end", interrupts.asked


@pytest.mark.parametrize(
    "number, release",
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, False, marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param(signal.SIGTERM, True, marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.full),
    ],
)
def test_a_signal_to_one_rank_saves_the_same_step_on_all(
    inputs: dict[str, Any], tmp_path: Path, number: signal.Signals, release: bool
) -> None:
    values = {**inputs, "gradient_release": release}
    whole, parts = {**values, "output": str(tmp_path / "whole")}, {**values, "output": str(tmp_path / "parts")}
    assert run_ranks(2, _train_and_signal, whole, -1, 0, number) == [("trained to the end", False)] * 2
    told = "interrupted: step 3 of 6 is saved; the same command goes on"
    assert run_ranks(2, _train_and_signal, parts, 1, 2, number) == [(told, False), (told, True)]
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").glob("step-*")) == ["step-00000003"]
    assert run_ranks(2, _train_and_signal, parts, -1, 0, number) == [("trained to the end", False)] * 2
    assert_same_state(tmp_path / "whole", tmp_path / "parts", 6)


def test_a_signal_in_the_last_step_changes_nothing(inputs: dict[str, Any], tmp_path: Path) -> None:
    values = {**inputs, "steps": 2, "output": str(tmp_path)}
    asked = run_ranks(2, _train_and_signal, values, 0, 2, signal.SIGTERM)
    assert asked == [("trained to the end", True), ("trained to the end", False)]


def _train_with_bad_gradients(values: dict[str, Any], steps: list[int], asked_after: int = 0) -> str | None:
    """Train; in these steps of this start, rank 1's part of every gradient has an Inf.

    `asked_after`: the step after which rank 0 is asked to end; the ranks agree on that in the next.
    """
    release_gradients = llama_finetune.release_gradients
    step = 1

    def spoil(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if step in steps and torch.distributed.get_rank() == 1:
            parameter.grad.to_local().view(-1)[:1] = float("inf")  # type: ignore[attr-defined]

    def release_and_spoil(config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        release = release_gradients(config, model, optimizer)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(spoil)
        return release

    interrupts = Interrupts()

    def act(done: int) -> None:
        nonlocal step
        step = done + 1
        if done == asked_after and torch.distributed.get_rank() == 0:
            interrupts._receive(signal.SIGTERM, None)

    llama_finetune.release_gradients = release_and_spoil
    try:
        with _at_each_step(act), without_report():
            llama_finetune.train(Config(**values), interrupts)
    except (BadInput, Interrupted) as error:
        return str(error)
    finally:
        llama_finetune.release_gradients = release_gradients
    return None


@pytest.mark.parametrize(
    "change",
    [
        {},
        pytest.param({"gradient_release": True}, marks=pytest.mark.full),
        pytest.param({"gradient_release": True, "clip_norm": 0.0}, marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param({"clip_norm": 0.0}, marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param({"optimizer": "adamw"}, marks=pytest.mark.full),
    ],
    ids=lambda change: ", ".join(f"{name} {value}" for name, value in change.items()) or "as it is",
)
def test_single_skips_pass_and_repeated_ones_stop(
    inputs: dict[str, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    values = {**inputs, **change, "steps": 8, "save_every": 1, "keep_last": 9, "output": str(tmp_path)}
    assert run_ranks(2, _train_with_bad_gradients, {**values, "steps": 6}, [2, 4, 5]) == [None, None]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001", "step-00000003", "step-00000006"]
    applied = {name: value for name, value in saved_tensors(tmp_path, 6).items() if name.endswith("/step")}
    assert len(applied) > 10
    assert all(float(steps) == 3 for steps in applied.values())
    told = run_ranks(2, _train_with_bad_gradients, {**values, "resume": "3"}, [2, 3, 4])
    assert told[0] == told[1]
    assert "step 7, after 2 that were left out, has loss" in str(told[0])
    assert "the last good checkpoint is step 3" in str(told[0])
    told = run_ranks(2, _train_with_bad_gradients, {**values, "resume": "3", "steps": 4}, [1])
    assert "step 4 has loss" in str(told[0])  # the last one can't be made up for


@pytest.mark.full
@pytest.mark.parametrize("release", [False, True])
def test_a_run_asked_to_end_does_not_save_a_step_that_is_left_out(
    inputs: dict[str, Any], tmp_path: Path, release: bool
) -> None:
    values = {**inputs, "gradient_release": release, "output": str(tmp_path)}
    told = run_ranks(2, _train_with_bad_gradients, values, [3], 2)
    assert told == ["interrupted: step 4 of 6 is saved; the same command goes on"] * 2
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]


def test_a_finished_run_is_not_begun_anew_by_a_restart() -> None:
    saved = {"first": 0, "steps": 6}
    assert after_resume(6, saved, Config(steps=6)).last == 12
    assert after_resume(6, saved, Config(steps=6), same_launch=True).last == 6
    assert after_resume(3, saved, Config(steps=6), same_launch=True).last == 6


def _options(values: dict[str, Any]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step}' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        pytest.param([sys.executable], signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param([sys.executable], signal.SIGTERM, 143, marks=pytest.mark.long),
        (
            [sys.executable, str(ROOT / "launch" / "ranks.py"), "--standalone", "--nproc-per-node", "2"],
            signal.SIGTERM,
            143,
        ),
    ],
)
def test_exit_code_of_a_run_that_was_asked_to_end(
    inputs: dict[str, Any], tmp_path: Path, launcher: list[str], number: signal.Signals, code: int
) -> None:
    values = {**inputs, "steps": 2000, "save_every": 0, "output": str(tmp_path)}
    process = _start([*launcher, str(RECIPE), *_options(values)])
    _wait_for_step(tmp_path, 2, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert "is saved; the same command goes on" in errors
    [saved] = (tmp_path / "checkpoints").glob("step-*")
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == saved.name


def _tree(pid: int) -> list[int]:
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [pid, *(each for child in children for each in _tree(child))]


@pytest.mark.full
@pytest.mark.parametrize("whole_tree", [False, True], ids=["the launcher twice", "every process"])
def test_a_streamed_run_that_is_told_to_end_more_than_once_saves(
    inputs: dict[str, Any], tmp_path: Path, whole_tree: bool
) -> None:
    (tmp_path / "shards").mkdir()
    shutil.copy(inputs["data"], tmp_path / "shards" / "0.jsonl")
    data = {"data": str(tmp_path / "shards"), "output": str(tmp_path / "run")}
    values = {**inputs, "steps": 3000, "save_every": 0, **data}
    launcher = [sys.executable, str(ROOT / "launch" / "ranks.py"), "--standalone", "--nproc-per-node", "2"]
    process = _start([*launcher, str(RECIPE), *_options(values)])
    _wait_for_step(tmp_path / "run", 3, process)
    if whole_tree:
        tree = _tree(process.pid)
        assert len(tree) == 5  # the launcher, two ranks and a worker of each
        for pid in tree:
            os.kill(pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert "is saved; the same command goes on" in errors
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == saved.name


@pytest.mark.full
@pytest.mark.parametrize(
    "release", [False, pytest.param(True, marks=pytest.mark.long)], ids=["as it is", "gradient release"]
)
def test_a_killed_rank_is_started_again_and_ends_with_the_same_weights(
    inputs: dict[str, Any], tmp_path: Path, release: bool
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    values = {**inputs, "steps": 12, "save_every": 3}
    options = ["--gradient-release"] if release else []
    assert run_ranks(2, train, {**values, "gradient_release": release, "output": str(whole)}) == [None, None]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "2", str(RECIPE), *options]
    process = _start([*command, *_options({**values, "output": str(killed)})])
    _wait_for_step(killed, 5, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"llama_finetune.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ranks[1], signal.SIGKILL)
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 0, errors
    assert "from step 3 to 12" in output
    assert_same_state(whole, killed, 12)
