"""Damaged checkpoints: the last good one loads, or the error names the file, on every rank alike."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError
from tests.checkpoint.models import build, differences, flash, gathered, steps
from tests.pool import run_ranks


def _delete(file: Path) -> None:
    file.unlink()


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGE = {"delete": _delete, "truncate": _truncate, "flip": _flip, "empty": _empty}
FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"]


def _save(path: str) -> dict[str, torch.Tensor]:
    net = build()
    optimizer = flash(net)
    steps(net, optimizer, range(2))
    checkpoint.save(path, net, optimizer)
    return gathered(net, optimizer)


def _load(path: str, verify: Any) -> str:
    net = build()
    try:
        checkpoint.load(path, net, flash(net), verify=verify)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "checkpoint"
    run_ranks(2, _save, str(path))
    return path


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", list(DAMAGE))
def test_the_error_names_the_file_on_every_rank(tmp_path: Path, good: Path, kind: str, file: str) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(good, path)
    DAMAGE[kind](path / file)
    errors = run_ranks(2, _load, str(path), "full")
    assert len(set(errors)) == 1
    assert errors[0].startswith("DamagedCheckpointError")
    assert str(path / file) in errors[0]


def _save_with_an_odd_scale(path: str, key: str, value: int) -> None:
    net = build()
    optimizer = flash(net)
    steps(net, optimizer, range(2))
    if dist.get_rank() == 1:
        optimizer.state[net.up.weight][key].to_local().view(torch.int16)[0, 0] = value
    checkpoint.save(path, net, optimizer)


SIGN, NAN, NEVER_WRITTEN = -(1 << 15), 0x7FC0, 7


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("exp_avg_sq_scale", SIGN | 0x3F80, "negative or not finite"),
        ("exp_avg_sq_scale", NEVER_WRITTEN, "never writes"),
        ("exp_avg_sq_scale", SIGN, "never writes"),
        ("exp_avg_scale", NAN, "negative or not finite"),
    ],
)
def test_scales_that_no_size_tells_of_are_named(tmp_path: Path, key: str, value: int, fault: str) -> None:
    """A step would take them for others, make everything NaN, or end with an IndexError."""
    path = str(tmp_path / "checkpoint")
    run_ranks(2, _save_with_an_odd_scale, path, key, value)
    for world_size in (2, 3):
        errors = run_ranks(world_size, _load, path, "size")
        assert len(set(errors)) == 1
        assert errors[0].startswith("DamagedCheckpointError")
        assert f"{path} is damaged: 'optimizer.state.up.weight.{key}' has scales that" in errors[0]
        assert fault in errors[0]


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
def test_a_flipped_bit_passes_only_the_quick_check(tmp_path: Path, good: Path, file: str) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(good, path)
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1  # inside the last tensor
    (path / file).write_bytes(data)
    assert run_ranks(2, _load, str(path), "size") == ["", ""]
    assert str(path / file) in run_ranks(2, _load, str(path), "full")[0]


def test_any_flipped_bit_is_found(good: Path, tmp_path: Path) -> None:
    """Every 97th byte of every file, one bit each."""
    path = tmp_path / "checkpoint"
    shutil.copytree(good, path)
    net = build("single")
    missed = []
    for name in FILES:
        whole = (path / name).read_bytes()
        for position in range(0, len(whole), max(97, len(whole) // 40)):
            data = bytearray(whole)
            data[position] ^= 1 << (position % 8)
            (path / name).write_bytes(data)
            try:
                checkpoint.load(path, net, flash(net), verify="full")
                missed.append((name, position))
            except CheckpointError as error:
                assert str(path / name) in str(error)  # noqa: PT017
        (path / name).write_bytes(whole)
    assert missed == []
    checkpoint.load(path, net, flash(net), verify="full")


def test_a_wrong_way_to_verify_is_refused(good: Path) -> None:
    net = build("single")
    with pytest.raises(CheckpointError, match="verify='fast' must be 'size' or 'full'"):
        checkpoint.load(good, net, flash(net), verify="fast")  # type: ignore[arg-type]


def _train(directory: str, until: int) -> list[dict[str, torch.Tensor]]:
    net = build()
    optimizer = flash(net)
    checkpointer = Checkpointer(directory, net, optimizer)
    states = []
    for step in range(until):
        steps(net, optimizer, [step])
        checkpointer.save(step + 1)
        states.append(gathered(net, optimizer))
    return states


def _resume(directory: str, verify: Any) -> tuple[int | None, dict[str, torch.Tensor], list[str]]:
    net = build(seed=3)
    optimizer = flash(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = Checkpointer(directory, net, optimizer).load(verify=verify)
    return step, gathered(net, optimizer), [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    "kind, file",
    [
        pytest.param(kind, file, marks=[] if number == place else pytest.mark.full)
        for number, kind in enumerate(DAMAGE)
        for place, file in enumerate(FILES)
    ],
)
def test_the_last_good_checkpoint_loads(tmp_path: Path, trained: Any, kind: str, file: str) -> None:
    origin, states = trained
    directory = tmp_path / "run"
    shutil.copytree(origin, directory)
    damaged = directory / "step-00000003" / file
    DAMAGE[kind](damaged)
    for step, state, messages in run_ranks(2, _resume, str(directory), "full"):
        assert step == 2
        assert differences(state, states[1]) == []
        assert any(str(damaged) in message for message in messages)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    directory = tmp_path_factory.mktemp("trained") / "run"
    return directory, run_ranks(2, _train, str(directory), 3)[0]


def _remove_newest(directory: Path) -> None:
    shutil.rmtree(directory / "step-00000003")


def _garble_latest(directory: Path) -> None:
    (directory / "latest").write_bytes(b"\xff\xfe\x00")


def _no_latest(directory: Path) -> None:
    (directory / "latest").unlink()


def _move_latest_back(directory: Path) -> None:
    (directory / "latest").write_text("step-00000002\n")


@pytest.mark.parametrize(
    "change, expected", [(_remove_newest, 2), (_garble_latest, 3), (_no_latest, 3), (_move_latest_back, 2)]
)
def test_latest_decides_where_it_can(
    tmp_path: Path, trained: Any, change: Callable[[Path], None], expected: int
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(trained[0], directory)
    change(directory)
    for step, state, _ in run_ranks(2, _resume, str(directory), "size"):
        assert step == expected
        assert differences(state, trained[1][expected - 1]) == []


def test_no_whole_checkpoint_at_all_is_an_error(tmp_path: Path, trained: Any) -> None:
    directory = tmp_path / "run"
    shutil.copytree(trained[0], directory)
    for step in (1, 2, 3):
        _truncate(directory / f"step-0000000{step}" / "__1_0.distcp")
    net = build("single")
    with (
        pytest.warns(UserWarning, match="Trying the checkpoint before it"),
        pytest.raises(DamagedCheckpointError, match=r"no checkpoint is whole.*step-00000003.*step-00000001"),
    ):
        Checkpointer(directory, net, flash(net)).load()


def test_a_checkpoint_that_stepped_aside_comes_back(tmp_path: Path, trained: Any) -> None:
    """Killed between the two renames of a save that replaces a checkpoint."""
    directory = tmp_path / "run"
    shutil.copytree(trained[0], directory)
    (directory / "step-00000003").rename(directory / ".step-00000003.replaced")
    for step, state, _ in run_ranks(2, _resume, str(directory), "full"):
        assert step == 3
        assert differences(state, trained[1][2]) == []
    assert (directory / "step-00000003").is_dir()
