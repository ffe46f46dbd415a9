"""What fails on one rank fails on all, with the same words."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch.distributed as dist
from llama_support.data import Data, check_same_data
from llama_support.errors import BadInput
from llama_support.world import start_world

from tests.pool import run_ranks


def _fail(kind: str, failing: list[int]) -> tuple[str, str]:
    world = start_world("cpu")
    try:
        with world.all_or_none():
            if world.rank in failing and kind == "input":
                raise BadInput(f"file {world.rank}\n is  bad")
            if world.rank in failing and kind == "os":
                raise FileNotFoundError(2, "No such file", f"file {world.rank}")
            if world.rank in failing and kind == "bug":
                raise KeyError(f"key {world.rank}")
    except Exception as error:
        return type(error).__name__, str(error)
    return "fine", str(world.sum(1.0, world.rank))


def test_nothing_happens_where_nothing_fails() -> None:
    assert run_ranks(2, _fail, "input", []) == [("fine", "[2.0, 1.0]")] * 2


@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_bad_input_of_any_rank_is_that_of_all(failing: list[int]) -> None:
    assert run_ranks(2, _fail, "input", failing) == [("BadInput", f"file {failing[0]} is bad")] * 2
    (kind, text), other = run_ranks(2, _fail, "os", failing)
    assert (kind, text) == other
    assert kind == "BadInput"
    assert f"'file {failing[0]}'" in text


def test_a_bug_stays_one_and_is_quoted_elsewhere() -> None:
    first, second = run_ranks(2, _fail, "bug", [1])
    assert first == ("RuntimeError", "another rank failed: KeyError: 'key 1'")
    assert second == ("KeyError", "'key 1'")


def _read(alike: bool) -> str:
    world = start_world("cpu")
    fingerprint = "same" if alike else f"of rank {dist.get_rank()}"
    try:
        check_same_data(Data(loader=None, validation=[], sample=None, fingerprint=fingerprint, summary=""), world)  # type: ignore[arg-type]
    except BadInput as error:
        return str(error)
    return ""


def test_ranks_that_read_different_data_all_say_so() -> None:
    assert run_ranks(2, _read, True) == ["", ""]
    texts = run_ranks(2, _read, False)
    assert texts[0] == texts[1]
    assert "ranks 0 and 1 have read different data" in texts[0]
