"""Gradient release in the recipe: the same weights as without, its running norms in checkpoints, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import compare
import llama_finetune
import pytest
import torch
from llama_support.config import Config, read_command_line
from llama_support.errors import BadInput
from llama_support.metrics import RunLog
from llama_support.report import Run

from tests.pool import run_ranks
from tests.recipes.inputs import assert_same_state, saved_checkpoint, small_run, write_tiny_model
from tests.recipes.runs import CutOffError, without_report

RELEASE = {"gradient_release": True}


def _train(values: dict[str, Any], cut_at: int | None = None) -> list[str]:
    """Train on this rank; what was said, and how it ended. `cut_at` dies in that step, when its layers are stepped."""
    accumulate_gradient, say = llama_finetune.accumulate_gradient, RunLog.say
    said: list[str] = []
    steps = iter(range(1, 10**6))

    def accumulate_or_die(*arguments: Any) -> float:
        loss = accumulate_gradient(*arguments)
        if next(steps) == cut_at:
            raise CutOffError
        return loss

    def say_and_keep(log: RunLog, message: str) -> None:
        said.append(message)
        say(log, message)

    llama_finetune.accumulate_gradient = accumulate_or_die
    RunLog.say = say_and_keep  # type: ignore[method-assign]
    try:
        with without_report():
            llama_finetune.train(Config(**values))
    except CutOffError:
        said.append("cut off")
    except BadInput as error:
        said.append(str(error))
    finally:
        llama_finetune.accumulate_gradient, RunLog.say = accumulate_gradient, say  # type: ignore[method-assign]
    return said


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    values = small_run(tmp_path_factory.mktemp("inputs"))
    return {**values, "save_every": 4, "evaluate_every": 0, "sample_tokens": 0}


def _norms(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["grad_norm"] for record in records if record["kind"] == "train"]


def _on_is_off(values: dict[str, Any], folder: Path, ranks: int) -> None:
    for name, change in (("off", {}), ("on", RELEASE)):
        run_ranks(ranks, _train, {**values, **change, "clip_norm": 0.0, "output": str(folder / name)})
    assert_same_state(folder / "off", folder / "on", values["steps"])
    assert _norms(folder / "on") == pytest.approx(_norms(folder / "off"), rel=1e-5)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks": (2, {"steps": 4}),
    "one rank, nothing recomputed": (1, {"activation_checkpointing": "none", "steps": 3}),
    "four ranks in two replicas, tied embeddings": (
        4,
        {"replicate": 2, "activation_checkpointing": "selective", "global_batch": 9},
    ),
    "compiled layers": (2, {"compile": True, "steps": 2}),
}
MARKS: dict[str, list[pytest.MarkDecorator]] = {
    "two ranks": [],
    "compiled layers": [pytest.mark.full, pytest.mark.long],
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [pytest.mark.full])) for case in CASES])
def test_without_clipping_release_changes_no_bit(inputs: dict[str, Any], tmp_path: Path, case: str) -> None:
    ranks, change = CASES[case]
    if "tied" in case:
        change = {**change, "model": str(write_tiny_model(tmp_path / "tied", tie_word_embeddings=True))}
    _on_is_off({**inputs, **change}, tmp_path, ranks)


@pytest.mark.full
@pytest.mark.parametrize("clip_norm", [0.3, 0.0])
def test_a_run_that_was_cut_off_ends_with_the_same_state(
    inputs: dict[str, Any], tmp_path: Path, clip_norm: float
) -> None:
    """Also where it was cut off in the middle of a step; the running norms come out of the checkpoint."""
    values = {**inputs, **RELEASE, "clip_norm": clip_norm, "save_every": 2}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(2, _train, {**values, "output": str(whole)})
    assert run_ranks(2, _train, {**values, "output": str(cut)}, 5)[0][-1] == "cut off"
    run_ranks(2, _train, {**values, "output": str(cut)})
    assert_same_state(whole, cut, 6)
    assert _norms(cut) == _norms(whole)
    norms = [saved_checkpoint(run, 6)["extras"]["gradient_release"] for run in (whole, cut)]
    assert norms[0] == norms[1]
    assert len(norms[0]) == 5


@pytest.mark.full
def test_clipping_by_the_estimate_is_near_that_by_the_norm(inputs: dict[str, Any], tmp_path: Path) -> None:
    """At a bound that clips every step, with a last step's loss that tells."""
    values = {**inputs, "clip_norm": 0.1, "steps": 4}
    for name, change in (("exact", {}), ("estimate", RELEASE), ("none", {"clip_norm": 0.0})):
        run_ranks(2, _train, {**values, **change, "output": str(tmp_path / name)})
    exact, estimate, none = (_norms(tmp_path / name) for name in ("exact", "estimate", "none"))
    assert min(exact) > 0.1
    assert estimate == pytest.approx(exact, rel=0.05)
    assert exact[0] == pytest.approx(none[0], rel=1e-5), "the norm is that before clipping"


@pytest.mark.full
def test_release_may_be_switched_and_the_number_of_ranks_may_change(inputs: dict[str, Any], tmp_path: Path) -> None:
    values = {**inputs, "save_every": 1, "keep_last": 9, "output": str(tmp_path)}
    whole = run_ranks(2, _train, {**values, "output": str(tmp_path / "whole"), **RELEASE})
    assert not any("gradient release" in line for line in whole[0])
    assert run_ranks(2, _train, values, 2)[0][-1] == "cut off"
    on = run_ranks(2, _train, {**values, **RELEASE}, 2)[0]
    assert [line for line in on if "gradient release" in line] == [
        "gradient release is on from here on; its running norms begin anew"
    ]
    saved = saved_checkpoint(tmp_path, 2)["extras"]["gradient_release"]
    again = run_ranks(1, _train, {**values, **RELEASE}, 2)[0]
    assert not any("gradient release" in line for line in again)
    more = saved_checkpoint(tmp_path, 3)["extras"]["gradient_release"]
    assert more.keys() == saved.keys()
    for unit, (_, weight) in more.items():
        assert weight == pytest.approx(0.9 * saved[unit][1] + 0.1), "the means of two ranks go on on one"
    off = run_ranks(2, _train, values)[0]
    assert [line for line in off if "gradient release" in line] == [
        "gradient release, which was on, is off from here on"
    ]
    assert "gradient_release" not in saved_checkpoint(tmp_path, 6)["extras"]


def test_adamw_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--gradient-release"], ["--config", "llama3_8b_single_gpu"]):
        with pytest.raises(
            BadInput, match=r"^--gradient-release steps layer by layer, which --optimizer adamw cannot; "
        ):
            read_command_line([*arguments, "--optimizer", "adamw"])
    assert not read_command_line(["--config", "llama3_8b", "--no-gradient-release"]).gradient_release


def test_a_comparison_leaves_release_to_the_optimizer_that_can_do_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configs: list[Config] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        configs.append(read_command_line(command[2:]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(compare.subprocess, "run", run)
    monkeypatch.setattr(compare, "read_run", lambda folder, name: Run(name, {}))
    for optimizer in ("flash_adamw", "adamw"):
        compare.train(compare.Comparison(output=tmp_path), optimizer, ["--config", "llama3_8b"])
    assert [(config.optimizer, config.gradient_release) for config in configs] == [
        ("flash_adamw", True),
        ("adamw", False),
    ]


def test_no_more_than_two_units_have_gradients(inputs: dict[str, Any], tmp_path: Path) -> None:
    values = {**inputs, "global_batch": 4, "steps": 1}
    for most in run_ranks(2, _most_units, {**values, **RELEASE, "output": str(tmp_path / "on")}):
        assert most <= 2
    assert run_ranks(2, _most_units, {**values, "output": str(tmp_path / "off")}) == [5, 5]


def _most_units(values: dict[str, Any]) -> int:
    """The largest number of units whose gradients exist at once."""
    release_gradients, most = llama_finetune.release_gradients, 0

    def release_and_look(config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        release = release_gradients(config, model, optimizer)
        named = list(model.named_parameters())

        def look(parameter: torch.Tensor) -> None:
            nonlocal most
            alive = {name.partition("layers.")[2][:1] or name for name, p in named if p.grad is not None}
            most = max(most, len(alive))

        for _, parameter in named:
            parameter.register_post_accumulate_grad_hook(look)
        return release

    llama_finetune.release_gradients = release_and_look
    try:
        with without_report():
            llama_finetune.train(Config(**values))
    finally:
        llama_finetune.release_gradients = release_gradients
    return most
