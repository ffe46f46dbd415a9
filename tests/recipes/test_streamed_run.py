"""The recipe on streamed data from end to end, and workers that are killed or told to stop."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch
from llama_support.config import Config
from llama_support.data import load_data
from llama_support.model import DEBUG_MODEL, load_tokenizer
from llama_support.world import World, start_world

from tests.pool import run_ranks
from tests.recipes.inputs import ROOT, assert_same_state, small_run, write_rows
from tests.recipes.runs import train

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    values = small_run(folder)
    (folder / "shards").mkdir()
    lines = write_rows(folder / "rows.jsonl", 200).read_text().splitlines(keepends=True)
    for number in range(4):
        (folder / "shards" / f"{number}.jsonl").write_text("".join(lines[number::4]))
    return {**values, "data": str(folder / "shards")}


def _losses(run: Path) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["kind"], record["step"], record["loss"]) for record in records]


def test_a_streamed_run_that_was_cut_off_ends_with_the_same_state(inputs: dict[str, Any], tmp_path: Path) -> None:
    whole, cut, other = (tmp_path / name for name in ("whole", "cut", "other"))
    assert run_ranks(2, train, {**inputs, "output": str(whole)}) == [None, None]
    assert run_ranks(2, train, {**inputs, "output": str(cut)}, 6) == ["cut off", "cut off"]
    assert run_ranks(2, train, {**inputs, "output": str(cut), "data_workers": 2}) == [None, None]
    assert_same_state(whole, cut, 6)
    assert _losses(cut) == _losses(whole)
    # On another number of ranks the steps see the same rows; sums over ranks round otherwise.
    assert run_ranks(2, train, {**inputs, "output": str(other)}, 3) == ["cut off", "cut off"]
    assert run_ranks(1, train, {**inputs, "output": str(other)}) == [None]
    for (kind, step, loss), expected in zip(_losses(other), _losses(whole), strict=True):
        assert (kind, step) == expected[:2]
        assert loss == pytest.approx(expected[2], rel=2e-3)


def test_changed_shards_and_another_batch_are_refused_on_every_rank(inputs: dict[str, Any], tmp_path: Path) -> None:
    values = {**inputs, "steps": 2, "output": str(tmp_path / "run")}
    assert run_ranks(2, train, values) == [None, None]
    texts = run_ranks(2, train, {**values, "global_batch": 4})
    assert len(set(texts)) == 1
    assert "give --global-batch 6" in str(texts[0])
    shard = Path(inputs["data"]) / "2.jsonl"
    text = shard.read_text()
    try:
        shard.write_text(text.replace("even", "EVEN", 1))
        texts = run_ranks(2, train, values)
        assert len(set(texts)) == 1
        assert "shard 2.jsonl has changed" in str(texts[0])
        assert "\n" not in str(texts[0])
    finally:
        shard.write_text(text)


def _lose_a_worker(values: dict[str, Any]) -> str:
    """Take two steps, kill the worker of rank 1, and go on until something is raised."""
    world = start_world("cpu")
    data = load_data(Config(**values), load_tokenizer(DEBUG_MODEL), 4096, world.rank, world.size)
    steps = data.steps(world)
    next(steps)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    if world.rank == 1:
        os.kill(worker.pid, signal.SIGKILL)
    try:
        for _ in range(100):
            next(steps)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_worker_that_is_killed_ends_every_rank(inputs: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    first, second = run_ranks(2, _lose_a_worker, {**inputs, "output": str(tmp_path / "run")})
    assert "another rank failed: RuntimeError: DataLoader worker" in first
    assert second.startswith("DataLoader worker")


def test_workers_go_on_when_their_rank_is_told_to_end(inputs: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    config = Config(**{**inputs, "output": str(tmp_path / "run")})
    alone = World(0, 1, torch.device("cpu"), None)
    steps = load_data(config, load_tokenizer(DEBUG_MODEL), 4096, 0, 1).steps(alone)
    next(steps)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    for _ in range(10):
        next(steps)
    assert worker.is_alive()


def test_python_ends_with_workers_that_are_still_there(inputs: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "recipes")!r})
import torch
from llama_support.config import Config
from llama_support.data import load_data
from llama_support.model import DEBUG_MODEL, load_tokenizer
from llama_support.world import World
config = Config(**{ {**inputs, "output": str(tmp_path / "run")}!r})
steps = load_data(config, load_tokenizer(DEBUG_MODEL), 4096, 0, 1).steps(World(0, 1, torch.device("cpu"), None))
next(steps)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=280).returncode == 0
