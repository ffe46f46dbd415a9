"""Unusual folders: names, links, a disk that fills up at any byte, read-only folders, two runs in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError
from tests.checkpoint.models import build, differences, flash, gathered, steps
from tests.pool import run_ranks


def _small(value: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(64, 8, dtype=torch.bfloat16)
    nn.init.constant_(net.weight, value)
    return net, fod.FlashAdamW(net.named_parameters())


@pytest.mark.parametrize(
    "name", ["a b", "ü漢字", "[x]*?", "-rf", "a.b", ".hidden", "new\nline", "%s{}", "~", "x" * 200]
)
def test_names_of_folders(tmp_path: Path, name: str) -> None:
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path / name, *_small(value), overwrite=True)
        net, optimizer = _small()
        checkpoint.load(tmp_path / name, net, optimizer, verify="full")
        assert net.weight[0, 0] == value
    assert os.listdir(tmp_path) == [name]
    checkpointer = Checkpointer(tmp_path / name / "run", *_small(3.0), keep_last=1)
    checkpointer.save(1)
    checkpointer.save(2)
    assert checkpointer.load() == 2


def test_a_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"xxx.* can't be written: File name too long"):
        checkpoint.save(tmp_path / ("x" * 250), *_small())


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint.save("deep/down/x", *_small()) == tmp_path / "deep" / "down" / "x"
    handle = checkpoint.async_save("y", *_small())
    monkeypatch.chdir("/")
    assert handle.result() == tmp_path / "y"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    """Links to other disks: the folder that is meant is replaced, beside itself."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if there:
        (disk / "real").mkdir()
    (tmp_path / "link").symlink_to(disk / "real")
    for value in (1.0, 2.0, 3.0):
        checkpoint.save(tmp_path / "link", *_small(value), overwrite=True)
        net, optimizer = _small()
        checkpoint.load(tmp_path / "link", net, optimizer, verify="full")
        assert net.weight[0, 0] == value
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(disk) == ["real"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]


def test_a_run_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    checkpointer = Checkpointer(tmp_path / "run", *_small(), keep_last=1)
    checkpointer.save(1)
    checkpointer.save(2)
    assert sorted(os.listdir(tmp_path / "disk")) == ["latest", "step-00000002"]


def test_links_to_the_files_are_followed(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "x", *_small(2.0))
    (tmp_path / "y").mkdir()
    for file in path.iterdir():
        (tmp_path / "y" / file.name).symlink_to(file)
    net, optimizer = _small()
    checkpoint.load(tmp_path / "y", net, optimizer, verify="full")
    assert net.weight[0, 0] == 2.0


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_pipe_instead_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path / "x", *_small())
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedCheckpointError, match=f"{name} is no regular file"):
        checkpoint.load(path, *_small())


def _load_as_nobody(path: str) -> str:
    os.seteuid(65534)
    try:
        net, optimizer = _small()
        checkpoint.load(path, net, optimizer, verify="full")
        found = Checkpointer(Path(path).parent, net, optimizer).load()
        return f"{net.weight[0, 0].item()} {found}"
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without rights")
def test_a_folder_that_is_only_readable_loads(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(0o755)
    checkpointer = Checkpointer(tmp_path / "run", *_small(2.0))
    checkpointer.save(4)
    assert run_ranks(2, _load_as_nobody, str(tmp_path / "run" / "step-00000004")) == ["2.0 4"] * 2


def _save(checkpointer: Checkpointer, step: int) -> str:
    try:
        checkpointer.save(step)
        checkpointer.wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system can't be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_at_any_page(small_disk: Path, background: bool) -> None:
    """With every number of free pages: the save is there, or its error names a file and the one before loads."""
    page = os.sysconf("SC_PAGE_SIZE")
    run = small_disk / "run"
    checkpointer = Checkpointer(run, *_small(1.0), keep_last=2, background=background)
    checkpointer.save(1)
    checkpointer.wait()
    outcomes = []
    for free in range(24):
        filler = small_disk / "filler"
        status = os.statvfs(small_disk)
        filler.write_bytes(b"x" * max(0, status.f_bavail - free) * page)
        checkpointer = Checkpointer(run, *_small(2.0), keep_last=2, background=background)
        message = _save(checkpointer, 2)
        outcomes.append("full" if message else "saved")
        if message:
            assert str(run) in message
            assert "No space left on device" in message
        filler.unlink()
        assert [name for name in os.listdir(run) if name.startswith(".")] == []
        net, optimizer = _small()
        found = Checkpointer(run, net, optimizer).load(verify="full")
        assert found == (2 if outcomes[-1] == "saved" else 1)
        assert net.weight[0, 0] == found
        Checkpointer(run, *_small(1.0)).save(1)
        shutil.rmtree(run / "step-00000002", ignore_errors=True)
    assert outcomes[0] == "full"
    assert outcomes[-1] == "saved"
    assert outcomes == sorted(outcomes)


SAVER = """
import sys, torch, flashoptim_dist as fod
from flashoptim_dist.checkpoint import Checkpointer, CheckpointError
net = torch.nn.Linear(64, 8, dtype=torch.bfloat16)
torch.nn.init.constant_(net.weight, float(sys.argv[2]))
checkpointer = Checkpointer(sys.argv[1], net, fod.FlashAdamW(net.named_parameters()), keep_last=2)
for step in range(1, 60):
    try:
        checkpointer.save(step // 3)
    except CheckpointError as error:
        assert sys.argv[1] in str(error), error
"""


@pytest.mark.full
def test_two_runs_in_one_folder_by_accident(tmp_path: Path) -> None:
    """Some of their saves fail, with an error; whatever stands is whole and of one of them."""
    run = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "-c", SAVER, str(run)]
    processes = [subprocess.Popen([*command, value], stderr=subprocess.PIPE, text=True) for value in ("1", "2")]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    net, optimizer = _small()
    checkpointer = Checkpointer(run, net, optimizer)
    assert checkpointer.steps()
    for step in checkpointer.steps():
        checkpointer.load(step, verify="full")
        assert net.weight[0, 0] in (1.0, 2.0)
        assert net.weight.unique().numel() == 1
    assert checkpointer.load(verify="full") is not None


def _train(directory: str) -> list[dict[str, torch.Tensor]]:
    net = build()
    optimizer = flash(net)
    checkpointer = Checkpointer(directory, net, optimizer)
    states = []
    for step in range(2):
        steps(net, optimizer, [step])
        checkpointer.save(step + 1)
        states.append(gathered(net, optimizer))
    return states


def _resume(directory: str) -> tuple[int | None, dict[str, torch.Tensor]]:
    net = build(seed=3)
    optimizer = flash(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = Checkpointer(directory, net, optimizer).load(verify="full")
    return step, gathered(net, optimizer)


def test_the_checkpoint_before_a_damaged_one_loads_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    states = run_ranks(3, _train, str(tmp_path / "run"))[0]
    file = tmp_path / "run" / "step-00000002" / "__2_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for world_size in (1, 2):
        for step, state in run_ranks(world_size, _resume, str(tmp_path / "run")):
            assert step == 1
            assert differences(states[0], state) == []
