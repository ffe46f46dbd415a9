"""A conversion that is killed, or meets a damaged, hostile or unwritable file, leaves nothing that looks finished."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from flashoptim_dist.convert import convert, export_hf, inspect, verify
from tests.checkpoint.models import build, differences, flash, gathered, steps
from tests.convert.inputs import save_ours, trained


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ours(tmp_path_factory.mktemp("ours") / "a", *trained())


class _KillAt:
    """Kills its process after so many blocks."""

    def __init__(self, count: int) -> None:
        self.left = count

    def begin(self, what: str, total: int) -> None:
        pass

    def advance(self, count: int) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


WRITERS: dict[str, Callable[..., Any]] = {
    "dcp": lambda source, target, **options: convert(source, target / "out", "adamw", **options),
    "file": lambda source, target, **options: convert(source, target / "out.pt", "adamw", **options),
    "hf": lambda source, target, **options: export_hf(source, target / "out", **options),
}


def _killed(write: Callable[[], Any]) -> bool:
    """Run in a child; return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            write()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("kind", list(WRITERS))
def test_killed_at_any_block_it_leaves_only_hidden_names(ours: Path, tmp_path: Path, kind: str) -> None:
    write, count = WRITERS[kind], 0
    while _killed(lambda count=count: write(ours, tmp_path, progress=_KillAt(count))):
        visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
        assert visible == [], f"killed at block {count}"
        count += 5
    assert count > 10
    # The next one clears away what was left.
    assert len([path.name for path in tmp_path.iterdir() if path.name.startswith(".")]) == 0
    assert inspect(next(tmp_path.iterdir())).parameters == 73523


@pytest.mark.parametrize("kind", list(WRITERS))
def test_killed_while_replacing_it_leaves_the_older_one(ours: Path, tmp_path: Path, kind: str) -> None:
    write = WRITERS[kind]
    write(ours, tmp_path)
    (place,) = tmp_path.iterdir()
    before = inspect(place).to_dict()
    for count in (0, 7):
        assert _killed(lambda count=count: write(ours, tmp_path, progress=_KillAt(count), overwrite=True))
        assert inspect(place).to_dict() == before
        assert verify(place).problems == ()
    with pytest.raises(CheckpointError, match=f"{place.name} exists"):
        write(ours, tmp_path)
    write(ours, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


@pytest.mark.parametrize("kind", list(WRITERS))
def test_an_error_in_the_middle_leaves_nothing(ours: Path, tmp_path: Path, kind: str) -> None:
    class Fails:
        def begin(self, what: str, total: int) -> None:
            self.left = 6

        def advance(self, count: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        WRITERS[kind](ours, tmp_path, progress=Fails())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", list(WRITERS))
def test_an_interrupt_leaves_nothing(ours: Path, tmp_path: Path, kind: str) -> None:
    class Stops:
        def begin(self, what: str, total: int) -> None:
            pass

        def advance(self, count: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WRITERS[kind](ours, tmp_path, progress=Stops())
    assert list(tmp_path.iterdir()) == []


def _copy(ours: Path, tmp_path: Path) -> Path:
    shutil.copytree(ours, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("damage", ["missing", "truncated", "no manifest", "no metadata", "flipped"])
def test_a_damaged_source_is_named_and_nothing_is_written(ours: Path, tmp_path: Path, damage: str) -> None:
    copy = _copy(ours, tmp_path)
    victim = copy / "__0_0.distcp"
    if damage == "missing":
        victim.unlink()
    elif damage == "truncated":
        os.truncate(victim, victim.stat().st_size - 1)
    elif damage == "no manifest":
        victim = copy / "manifest.json"
        victim.unlink()
    elif damage == "no metadata":
        victim = copy / ".metadata"
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    if damage != "flipped":
        with pytest.raises(DamagedCheckpointError, match=f"{victim.name} (is missing|has )"):
            convert(copy, tmp_path / "out", "adamw")
    with pytest.raises(DamagedCheckpointError, match=f"{victim.name} (is missing|has |is damaged)"):
        verify(copy)
    assert not (tmp_path / "out").exists()


def test_a_hostile_source_is_refused_by_name(ours: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    copy = _copy(ours, tmp_path)
    shutil.rmtree(tmp_path / "plain", ignore_errors=True)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    metadata.planner_data = {"a": Evil()}
    (copy / "manifest.json").unlink()
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    for action in (lambda: convert(copy, tmp_path / "out", "adamw"), lambda: inspect(copy), lambda: verify(copy)):
        with pytest.raises(UnsafeCheckpointError, match=r"\.metadata asks for .*may be hostile, and was not loaded"):
            action()
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "out").exists()


def test_metadata_that_lies_about_a_tensor_is_refused(ours: Path, tmp_path: Path) -> None:
    copy = _copy(ours, tmp_path)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    saved = metadata.state_dict_metadata["model.up.weight"]
    saved.chunks[0].sizes = torch.Size((256, 64))
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    for name in ("manifest.json",):
        (copy / name).unlink()
    metadata.state_dict_metadata.pop("format", None)  # so that it counts as plain DCP's, which has no manifest
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"up\.weight.* is not the tensor that \.metadata announces"):
        convert(copy, tmp_path / "out", "adamw")
    assert not (tmp_path / "out").exists()


def test_a_target_that_can_not_be_written_is_named(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file"):
        convert(ours, tmp_path / "file" / "out", "adamw")
    with pytest.raises(CheckpointError, match=r"file"):
        convert(ours, tmp_path / "file" / "out.pt", "adamw")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("entry", "change", "message"),
    [
        ("exp_avg", lambda value: value.view(-1)[3:4].fill_(-128), "exp_avg has codes of -128"),
        ("exp_avg_scale", lambda value: value.view(-1)[3:4].fill_(float("inf")), "exp_avg_scale has scales that are"),
        ("exp_avg_sq_scale", lambda value: value.view(-1)[3:4].fill_(-1.0), "exp_avg_sq_scale has scales that are"),
        (
            "exp_avg_sq_scale",
            lambda value: value.view(torch.int16).view(-1)[3:4].bitwise_or_(7),
            "exp_avg_sq_scale has scales that number format version 2 never writes",
        ),
        ("exp_avg_scale", lambda value: value.zero_(), "exp_avg has codes other than 0 where the scale is 0"),
        ("step", lambda value: value.fill_(2.5), "step is 2.5, which is no count of steps"),
        ("weight", lambda value: value.view(-1)[3:4].fill_(float("nan")), "model.up.weight has 1 of 32768 elements"),
    ],
)
def test_verify_names_the_tensor_that_is_not_sound(tmp_path: Path, entry: str, change: Any, message: str) -> None:
    net = build("single")
    optimizer = flash(net)
    steps(net, optimizer, range(2))
    with torch.no_grad():
        change(net.up.weight if entry == "weight" else optimizer.state[net.up.weight][entry])
    checkpoint.save(tmp_path / "a", net, optimizer)
    found = verify(tmp_path / "a")
    assert len(found.problems) == 1
    assert message in found.problems[0]


def test_verify_finds_nothing_wrong_with_what_is_right(ours: Path, tmp_path: Path) -> None:
    assert verify(ours).problems == ()
    convert(ours, tmp_path / "adamw", "adamw")
    found = verify(tmp_path / "adamw")
    assert (found.problems, found.has_manifest) == ((), True)
    convert(ours, tmp_path / "again", "flash_adamw")
    net = build("single", seed=5)
    optimizer = flash(net)
    checkpoint.load(tmp_path / "again", net, optimizer, verify="full")
    assert differences(gathered(*trained()), gathered(net, optimizer)) == []
