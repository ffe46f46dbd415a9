"""Writes that fail on one rank: every rank ends with the same error, and the checkpoint before stays whole."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import Checkpointer, CheckpointError
from flashoptim_dist.convert import convert
from tests.checkpoint.models import build, differences, flash, gathered, steps
from tests.pool import run_ranks


def _full_disk(directory: str, failing: int, limit: int, background: bool) -> tuple[str, list[str], int | None]:
    net = build()
    optimizer = flash(net)
    steps(net, optimizer, [0])
    checkpointer = Checkpointer(directory, net, optimizer, background=background)
    checkpointer.save(1)
    checkpointer.wait()
    saved = gathered(net, optimizer)
    steps(net, optimizer, [1])
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = ""
    if dist.get_rank() == failing:  # writing beyond the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        checkpointer.save(2)
        checkpointer.wait()
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    dist.barrier()
    names = sorted(os.listdir(directory))
    found = checkpointer.load()
    assert differences(saved, gathered(net, optimizer)) == []
    checkpointer.save(2)  # nothing stands in the way of the next one
    checkpointer.wait()
    return message, names, found


@pytest.mark.parametrize(
    ("failing", "limit", "background"),
    [
        (0, 100, False),
        (1, 40_000, True),
        (1, 0, False),
        pytest.param(0, 100, True, marks=pytest.mark.full),
        pytest.param(1, 40_000, False, marks=pytest.mark.full),
        pytest.param(1, 0, True, marks=pytest.mark.full),
    ],
)
def test_a_full_disk_on_one_rank_ends_all(tmp_path: Path, failing: int, limit: int, background: bool) -> None:
    results = run_ranks(2, _full_disk, str(tmp_path), failing, limit, background)
    assert results[0] == results[1]
    message, names, found = results[0]
    assert f"__{failing}_0.distcp can't be written: File too large" in message
    assert message.startswith(f"saving {tmp_path / 'step-00000002'} failed: rank {failing}: ")
    assert names == ["latest", "step-00000001"]
    assert found == 1
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001", "step-00000002"]


def _save_to(path: str, as_nobody: bool) -> str:
    net = build()
    if as_nobody:
        os.seteuid(65534)
    try:
        checkpoint.save(path, net, flash(net))
    except CheckpointError as error:
        return str(error)
    finally:
        if as_nobody:
            os.seteuid(0)
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without rights")
def test_a_read_only_folder_is_named_for_root_without_its_rights(tmp_path: Path) -> None:
    _read_only(tmp_path, as_nobody=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    _read_only(tmp_path, as_nobody=False)


def _read_only(tmp_path: Path, as_nobody: bool) -> None:
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(0o755)  # so that the one folder alone is in the way
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o555)
    messages = run_ranks(2, _save_to, str(folder / "checkpoint"), as_nobody)
    assert messages[0] == messages[1]
    assert str(folder) in messages[0]
    assert "can't be written: Permission denied" in messages[0]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    messages = run_ranks(2, _save_to, str(tmp_path / "file" / "checkpoint"), False)
    assert messages[0] == messages[1]
    assert f"{tmp_path / 'file'}" in messages[0]
    assert "can't be written: " in messages[0]


def test_an_existing_checkpoint_is_not_overwritten_unasked(tmp_path: Path) -> None:
    net = build("single")
    optimizer = flash(net)
    path = checkpoint.save(tmp_path / "checkpoint", net, optimizer)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CheckpointError, match="exists: choose another folder, or pass overwrite=True"):
        checkpoint.save(path, net, optimizer)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    steps(net, optimizer, [0])
    checkpoint.save(path, net, optimizer, overwrite=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} != before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    net = build("single")
    optimizer = flash(net)
    run = tmp_path / "run"
    checkpoint.Checkpointer(run, net, optimizer).save(1)
    (tmp_path / "home" / "letters").mkdir(parents=True)
    for path in (run, tmp_path / "home"):
        with pytest.raises(
            CheckpointError, match=f"{path} holds something else than a checkpoint, and is not replaced"
        ):
            checkpoint.save(path, net, optimizer, overwrite=True)
        with pytest.raises(
            CheckpointError, match=f"{path} holds something else than a checkpoint, and is not replaced"
        ):
            convert(run, path, "adamw", overwrite=True)
    assert (tmp_path / "home" / "letters").is_dir()
    assert sorted(path.name for path in run.iterdir()) == ["latest", "step-00000001"]
    (run / "step-00000001" / ".metadata").unlink()  # damaged, but one of ours
    checkpoint.Checkpointer(run, net, optimizer).save(1)
    assert checkpoint.Checkpointer(run, net, optimizer).load() == 1


def test_a_url_is_refused() -> None:
    net = build("single")
    with pytest.raises(CheckpointError, match="s3://bucket/x is a URL"):
        checkpoint.save("s3://bucket/x", net, flash(net))


class Unwilling:
    """A data loader whose state can't be had on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("the worker is gone")
        return {}


def _broken_loader(path: str) -> str:
    net = build()
    try:
        checkpoint.save(path, net, flash(net), dataloader=Unwilling())
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_error_in_collecting_ends_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    expected = f"saving {path} failed: rank 1: RuntimeError: the worker is gone"
    assert run_ranks(2, _broken_loader, str(path)) == [expected] * 2
    assert list(tmp_path.iterdir()) == []
