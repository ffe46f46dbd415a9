"""Runs of torchtitan 0.2.2's Trainer with ``--model.name llama3_flash``: checkpoints by its own CheckpointManager."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from flashoptim_dist.convert import convert, inspect, verify
from tests.pool import run_ranks
from tests.torchtitan_v0_2.debug_run import ADAMW, FLASH, Run, differences, run

TP = ("--parallelism.tensor_parallel_degree", "2")
HSDP = ("--parallelism.data_parallel_replicate_degree", "2")


def _steps(count: int, interval: int = 3) -> tuple[str, ...]:
    return ("--training.steps", str(count), "--checkpoint.interval", str(interval))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Three steps on two ranks, saved."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(2, run, str(folder), *FLASH, *_steps(3))[0]


def _same_runs(parts: list[Run], whole: list[Run], losses: list[dict[int, float]]) -> None:
    for rank, (part, other) in enumerate(zip(parts, whole, strict=True)):
        assert part.step == other.step == 4
        assert losses[rank] | part.losses == other.losses
        assert differences(part.state, other.state) == []


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_ranks(2, run, str(tmp_path / "whole"), *FLASH, *_steps(4, 100))
    for mode in ("disabled", "async"):
        folder, arguments = tmp_path / mode, (*FLASH, "--checkpoint.async_mode", mode)
        first = run_ranks(2, run, str(folder), *arguments, *_steps(3, 2))
        shutil.rmtree(folder / "checkpoint" / "step-3")  # written by waiting; step 2 by the mode in question
        rest = run_ranks(2, run, str(folder), *arguments, *_steps(4, 100))
        _same_runs(rest, whole, [one.losses for one in first])
        assert min(rest[0].losses) == 3
    assert whole[0].optimizers == ["FlashAdamW"]
    assert whole[0].state["layers.0.attention.wq.weight"].dtype == torch.bfloat16
    assert whole[0].state["layers.0.attention.wq.weight.exp_avg"].dtype == torch.int8


@pytest.mark.parametrize(("world_size", "options"), [(1, ()), (2, TP)], ids=["one", "tp"])
def test_so_it_is_on_other_meshes(tmp_path: Path, world_size: int, options: tuple[str, ...]) -> None:
    whole = run_ranks(world_size, run, str(tmp_path / "whole"), *FLASH, *options, *_steps(4, 100))
    first = run_ranks(world_size, run, str(tmp_path / "parts"), *FLASH, *options, *_steps(2))
    rest = run_ranks(world_size, run, str(tmp_path / "parts"), *FLASH, *options, *_steps(4))
    _same_runs(rest, whole, [one.losses for one in first])


@pytest.mark.parametrize(
    ("world_size", "options"), [(1, ()), (4, ()), (4, TP), (4, HSDP)], ids=["one", "fsdp", "tp", "hsdp"]
)
def test_a_checkpoint_loads_on_another_mesh(
    trained: tuple[Path, Run], world_size: int, options: tuple[str, ...]
) -> None:
    folder, saved = trained
    for loaded in run_ranks(world_size, run, str(folder), *FLASH, *options, *_steps(3), train=False):
        assert differences(loaded.state, saved.state) == []
        assert loaded.step == 3


def test_twenty_steps_learn_what_adamw_learns(tmp_path: Path) -> None:
    arguments = ("--checkpoint.no-enable", *_steps(20), "--optimizer.lr", "1e-2")
    flash = run_ranks(1, run, str(tmp_path / "flash"), *FLASH, *arguments)[0]
    adamw = run_ranks(1, run, str(tmp_path / "adamw"), *ADAMW, *arguments)[0]
    assert adamw.optimizers == ["AdamW"]
    assert flash.losses[1] == pytest.approx(adamw.losses[1], abs=0.1)
    assert flash.losses[20] < flash.losses[1] - 1
    assert flash.losses[20] == pytest.approx(adamw.losses[20], abs=0.3)


def test_fp32_weights_train_too(tmp_path: Path) -> None:
    arguments = [option if option != "bfloat16" else "float32" for option in FLASH]
    done = run_ranks(1, run, str(tmp_path), *arguments, *_steps(2))[0]
    name = "layers.0.attention.wq.weight"
    assert done.state[name].dtype == torch.float32
    assert done.state[f"{name}.exp_avg"].dtype == torch.int8
    assert f"{name}.error_bits" not in done.state


def test_adamws_checkpoint_converts_and_goes_on_with_ours(tmp_path: Path) -> None:
    theirs = run_ranks(2, run, str(tmp_path / "adamw"), *ADAMW, *_steps(3))[0]
    source, target = (tmp_path / name / "checkpoint" / "step-3" for name in ("adamw", "flash"))
    assert inspect(source).layout == "torchtitan"
    convert(source, target, "flash_adamw")
    assert verify(target).problems == ()
    for world_size in (1, 2):
        loaded = run_ranks(world_size, run, str(tmp_path / "flash"), *FLASH, *_steps(3), train=False)[0]
        assert loaded.step == 3
        for name, master in loaded.masters.items():
            assert bool(((master - theirs.state[name]).abs() <= theirs.state[name].abs() * 2.0**-16).all()), name
            assert float(loaded.state[f"{name}.step"]) == 3.0
    longer = run_ranks(2, run, str(tmp_path / "flash"), *FLASH, *_steps(4))[0]
    assert list(longer.losses) == [4]


def test_our_checkpoint_converts_and_goes_on_with_adamw(trained: tuple[Path, Run], tmp_path: Path) -> None:
    folder, saved = trained
    source, target = (place / "checkpoint" / "step-3" for place in (folder, tmp_path))
    assert json.loads(json.dumps(inspect(source).to_dict()))["formats"][0]["optimizer"] == "FlashAdamW"
    convert(source, target, "adamw")
    loaded = run_ranks(2, run, str(tmp_path), *ADAMW, *_steps(3), train=False)[0]
    assert loaded.optimizers == ["AdamW"]
    weights = {name: value for name, value in loaded.state.items() if name in saved.masters}
    assert differences(weights, saved.masters) == []
    assert list(run_ranks(2, run, str(tmp_path), *ADAMW, *_steps(4))[0].losses) == [4]
    convert(target, tmp_path / "again" / "checkpoint" / "step-3", "flash_adamw")
    again = run_ranks(2, run, str(tmp_path / "again"), *FLASH, *_steps(3), train=False)[0]
    assert differences(again.masters, saved.masters) == []
