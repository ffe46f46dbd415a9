"""Checkpoints from anybody: pickles that ask for code are refused by name, and nothing of them runs."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import shutil
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as metadata_module
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from flashoptim_dist.checkpoint.manifest import FileRecord, write_manifest
from flashoptim_dist.checkpoint.safe_unpickle import load_metadata, load_object
from flashoptim_dist.convert import inspect
from tests.checkpoint.models import build, flash, steps
from tests.pool import run_ranks


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


CALLS = {
    "system": (os.system, "touch {}"),
    "eval": (eval, "open('{}', 'w')"),
    "popen": (subprocess.Popen, "touch {}"),
    "torch.load": (torch.load, "{}"),
    "getattr": (getattr, "{}", "upper"),
}


def _evil(kind: str, mark: Path) -> Evil:
    call, *arguments = CALLS[kind]
    return Evil(call, *(argument.format(mark) for argument in arguments))  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    net = build("single")
    optimizer = flash(net)
    steps(net, optimizer, [0])
    dcp.save(_plain_state(net, optimizer), checkpoint_id=tmp_path / "plain", no_dist=True)
    return tmp_path / "plain"


def _plain_state(net: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "extras": {"a": 1},
    }


def _load(path: Path) -> str:
    net = build("single")
    with pytest.raises(UnsafeCheckpointError) as caught:
        checkpoint.load(path, net, flash(net), extras={})
    return str(caught.value)


@pytest.mark.parametrize("kind", list(CALLS))
def test_a_hostile_metadata_file_is_refused(saved: Path, tmp_path: Path, kind: str) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = {"model.up.weight": _evil(kind, tmp_path / "mark")}
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    message = _load(saved)
    assert str(saved / ".metadata") in message
    assert "may be hostile, and was not loaded" in message
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("key", ["extras.a", "optimizer.param_groups.0.lr", "model.up.weight"])
@pytest.mark.parametrize("kind", ["system", "eval"])
def test_a_hostile_entry_is_refused(saved: Path, tmp_path: Path, kind: str, key: str, zipped: bool) -> None:
    data = io.BytesIO()
    torch.save(_evil(kind, tmp_path / "mark"), data, _use_new_zipfile_serialization=zipped)
    (saved / "evil.distcp").write_bytes(data.getvalue())
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        metadata.storage_data[index] = _StorageInfo("evil.distcp", 0, len(data.getvalue()))
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    message = _load(saved)
    assert str(saved / "evil.distcp") in message
    assert "may be hostile, and was not loaded" in message
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "..", ""])
def test_a_file_outside_the_checkpoint_is_refused(saved: Path, name: str) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path=name)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    assert f"refers to {name!r}, which is no file of this checkpoint" in _load(saved)


NAMED = [
    (metadata_module, "Metadata"),
    (metadata_module, "MetadataIndex"),
    (metadata_module, "_MEM_FORMAT_ENCODING"),
    (filesystem, "_StorageInfo"),
    (pathlib, "PosixPath"),
    (torch.serialization, "_get_layout"),
]


@pytest.mark.parametrize(("module", "name"), NAMED, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("slots", [False, True])
def test_a_hostile_metadata_file_changes_no_class(module: Any, name: str, slots: bool) -> None:
    """A pickle may set attributes of a class or function that it names; such would stay for the whole process."""
    state = pickle.dumps((None, {"mark": 1}) if slots else {"mark": 1}, 2)[2:-1]
    data = b"\x80\x02" + f"c{module.__name__}\n{name}\n".encode() + state + b"b."
    with pytest.raises(CheckpointError):
        load_metadata(data, "file")
    assert not hasattr(getattr(module, name), "mark")


def _without_a_field(metadata: Any) -> None:
    del metadata.state_dict_metadata["model.up.weight"].__dict__["properties"]


def _with_a_word_for_a_size(metadata: Any) -> None:
    metadata.state_dict_metadata["model.up.weight"].size = "large"


def _with_a_chunk_of_other_dimensions(metadata: Any) -> None:
    metadata.state_dict_metadata["model.up.weight"].chunks[0].sizes = torch.Size([3])


def _with_something_else_for_an_entry(metadata: Any) -> None:
    metadata.state_dict_metadata["model.up.weight"] = "x"


def _with_a_negative_offset(metadata: Any) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = replace(metadata.storage_data[index], offset=-5)


def _with_a_chunk_that_sticks_out(metadata: Any) -> None:
    metadata.state_dict_metadata["model.up.weight"].chunks[0].offsets = torch.Size([7, 0])


def _with_a_number_for_a_name(metadata: Any) -> None:
    metadata.state_dict_metadata[7] = metadata.state_dict_metadata.pop("model.up.weight")


def _with_a_number_for_a_place(metadata: Any) -> None:
    metadata.planner_data["model.up.weight"] = 7


def _with_a_place_inside_another(metadata: Any) -> None:
    metadata.planner_data["extras.a"] = ("model", "up.weight", "a")


@pytest.mark.parametrize(
    "change",
    [
        _with_a_chunk_that_sticks_out,
        _with_a_number_for_a_name,
        _with_a_number_for_a_place,
        _with_a_place_inside_another,
        _without_a_field,
        _with_a_word_for_a_size,
        _with_a_chunk_of_other_dimensions,
        _with_something_else_for_an_entry,
        _with_a_negative_offset,
    ],
)
def test_incomplete_metadata_is_told_with_its_file(saved: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    net = build("single")
    with pytest.raises(DamagedCheckpointError, match=f"{saved / '.metadata'} is damaged: it holds incomplete"):
        checkpoint.load(saved, net, flash(net))
    with pytest.raises(DamagedCheckpointError, match=f"{saved / '.metadata'} is damaged: it holds incomplete"):
        inspect(saved)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 7, "is damaged: its entry 'format' is no record of a format"),
        ("format", {"optimizers": 7}, "is damaged: its entry 'format' is no record of a format"),
        (
            "format",
            {"optimizers": [{"optimizer": "FlashAdamW", "name": "fd1", "version": []}]},
            "is no record of a for",
        ),
        ("optimizer.param_groups.0.params", 7, "is damaged: parameter groups in it name no parameters"),
        ("optimizer.param_groups.0.params", [{}], "is damaged: parameter groups in it name no parameters"),
        ("rng.0", {"python": 7}, "(entry 'rng.0') holds no random states"),
    ],
)
def test_an_entry_that_holds_something_else_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    net = build("single")
    optimizer = flash(net)
    steps(net, optimizer, [0])
    path = checkpoint.save(tmp_path / "saved", net, optimizer)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    torch.save(value, path / "other.distcp")
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("other.distcp", 0, (path / "other.distcp").stat().st_size)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    files = (path / name for name in (".metadata", "other.distcp", "__0_0.distcp"))
    write_manifest(path, {file.name: FileRecord(file.stat().st_size, zlib.crc32(file.read_bytes())) for file in files})
    with pytest.raises(DamagedCheckpointError) as caught:
        checkpoint.load(path, net, flash(net))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    if key != "rng.0":  # nothing but a load has a use for those
        with pytest.raises(DamagedCheckpointError) as caught:
            inspect(path)
        assert message in str(caught.value)


def test_an_entry_without_a_place_is_named(saved: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for index in [index for index in metadata.storage_data if index.fqn == "optimizer.state.up.weight.step"]:
        del metadata.storage_data[index]
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    net = build("single")
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata does not say where 'optimizer.state.up.weight.step'"):
        checkpoint.load(saved, net, flash(net))


def _load_on_ranks(path: str) -> str:
    net = build()
    try:
        checkpoint.load(path, net, flash(net))
    except CheckpointError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_all_ranks_refuse_alike(saved: Path, tmp_path: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(_evil("system", tmp_path / "mark")))
    messages = run_ranks(2, _load_on_ranks, str(saved))
    assert messages[0] == messages[1]
    assert messages[0].startswith("UnsafeCheckpointError")
    assert not (tmp_path / "mark").exists()


def test_what_checkpoints_hold_passes() -> None:
    values = [
        {"a": [1, 2.5, "x", None, True, (1, 2)], "b": b"raw"},
        {"tensor": torch.arange(6).view(2, 3), "bf16": torch.ones(3, dtype=torch.bfloat16)},
        {"array": np.arange(4, dtype=np.uint32), "scalar": np.float64(0.5), "names": np.array(["a", "bc"])},
    ]
    for value in values:
        for zipped in (True, False):
            data = io.BytesIO()
            torch.save(value, data, _use_new_zipfile_serialization=zipped)
            assert repr(load_object(data.getvalue(), "file", "key")) == repr(value)


def test_metadata_of_torch_itself_passes(saved: Path) -> None:
    expected = pickle.loads((saved / ".metadata").read_bytes())
    assert load_metadata((saved / ".metadata").read_bytes(), "file") == expected
    shutil.rmtree(saved)
