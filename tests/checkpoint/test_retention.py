"""Which checkpoints stay."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashoptim_dist.checkpoint import Checkpointer, files, layout, saving
from flashoptim_dist.checkpoint.retention import steps_to_drop
from tests.checkpoint.models import build, flash


@pytest.mark.parametrize(
    ("steps", "newest", "keep_last", "keep_every", "dropped"),
    [
        ([1, 2, 3], 3, None, None, []),
        ([1, 2, 3], 3, None, 2, []),
        ([1, 2, 3], 3, 1, None, [1, 2]),
        ([1, 2, 3, 4], 4, 2, None, [1, 2]),
        ([10, 20, 30, 40, 50], 50, 2, 20, [10, 30]),
        ([0, 5, 7], 7, 1, 5, []),
        ([3, 2, 1], 3, 2, None, [1]),
        # Taken up again at 5 of a run that had come to 9: what is beyond stays until it is replaced.
        ([4, 5, 6, 8, 9], 6, 2, None, [4]),
        ([9], 3, 1, None, []),
    ],
)
def test_what_is_dropped(
    steps: list[int], newest: int, keep_last: int | None, keep_every: int | None, dropped: list[int]
) -> None:
    assert steps_to_drop(steps, newest, keep_last, keep_every) == dropped


def test_old_checkpoints_go_and_leftovers_too(tmp_path: Path) -> None:
    net = build("single")
    checkpointer = Checkpointer(tmp_path, net, flash(net), keep_last=2, keep_every=4)
    for step in range(1, 8):
        checkpointer.save(step)
    assert checkpointer.steps() == [4, 6, 7]
    (tmp_path / ".step-00000009.saving-abc").mkdir()
    (tmp_path / ".step-00000001.deleting").mkdir()  # of an earlier release
    (tmp_path / ".step-00000001.replaced.deleting-abc").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    checkpointer.save(8)
    assert sorted(os.listdir(tmp_path)) == ["latest", "notes.txt", "step-00000004", "step-00000007", "step-00000008"]
    checkpointer.save(8)
    assert checkpointer.steps() == [4, 7, 8]


def test_a_checkpoint_that_cannot_be_deleted_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("single")
    checkpointer = Checkpointer(tmp_path, net, flash(net), keep_last=1)
    checkpointer.save(1)
    rename = os.rename

    def stubborn(source: Path, target: Path) -> None:
        if ".deleting-" in str(target):
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    with monkeypatch.context() as inner:
        inner.setattr(os, "rename", stubborn)
        with pytest.warns(UserWarning, match="step-00000001 can't be deleted: Operation not permitted"):
            checkpointer.save(2)
    assert checkpointer.load() == 2
    checkpointer.save(3)
    assert checkpointer.steps() == [3]


def test_a_save_that_a_second_run_clears_away_does_not_appear_half_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run takes it for what a killed process left, and is in the middle of deleting it."""
    target = tmp_path / "step-00000001"
    staging = target.with_name(saving.make_staging(target, overwrite=True))
    (staging / ".metadata").write_bytes(b"x")
    (staging / "__0_0.distcp").write_bytes(b"x")
    appeared = []

    def slowly(directory: Path, **_: object) -> None:
        (directory / ".metadata").unlink()
        with pytest.raises(OSError, match="saving-"):
            saving.take_place(staging, target, overwrite=True)
        appeared.append(target.exists())
        shutil.rmtree(directory)

    monkeypatch.setattr(files, "shutil", SimpleNamespace(rmtree=slowly))
    second = saving.make_staging(target, overwrite=True)
    assert appeared == [False]
    assert os.listdir(tmp_path) == [second]


def test_what_could_not_be_deleted_keeps_its_hidden_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-00000001").mkdir()
    with monkeypatch.context() as inner:
        inner.setattr(files, "shutil", SimpleNamespace(rmtree=lambda directory, **_: None))
        files.remove_tree(tmp_path / "step-00000001")
        (hidden,) = os.listdir(tmp_path)
        files.remove_tree(tmp_path / hidden)
    assert os.listdir(tmp_path) == [hidden]
    assert layout.leftovers(tmp_path / "step-00000001") == [tmp_path / hidden]


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": -1}])
def test_impossible_numbers_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    net = build("single")
    with pytest.raises(ValueError, match="must be at least 1, or None"):
        Checkpointer(tmp_path, net, flash(net), **options)
    with pytest.raises(ValueError, match="step=-1 must not be negative"):
        Checkpointer(tmp_path, net, flash(net)).save(-1)
