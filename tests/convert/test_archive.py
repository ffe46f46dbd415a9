"""torch.save archives read without their tensors, and written block by block."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashoptim_dist.checkpoint import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from flashoptim_dist.convert import archive
from flashoptim_dist.convert.archive import open_archive
from flashoptim_dist.convert.archive_writer import write_archive
from flashoptim_dist.convert.lazy import FileTensor, LazyTensor, MemoryTensor, blocks, chunks
from flashoptim_dist.convert.progress import Silent

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool]


def _contents() -> dict[str, Any]:
    torch.manual_seed(0)
    values: dict[str, Any] = {str(dtype): (torch.randn(5, 7) * 9).to(dtype) for dtype in DTYPES}
    shared = torch.randn(6, 4)
    values |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "rows": shared[2:5], "shared": shared}
    return {"nested": {"list": [values, 1, 2.5, None, "x"], "tuple": (True, torch.ones(3))}, 7: b"raw"}


def _real(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.whole()
    if isinstance(value, dict):
        return {key: _real(inner) for key, inner in value.items()}
    return type(value)(map(_real, value)) if isinstance(value, list | tuple) else value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(_equal, left, right)) and len(left) == len(right)
    return bool(left == right)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("before", [0, 1000])
def test_both_forms_are_read_also_inside_a_file(tmp_path: Path, zipped: bool, before: int) -> None:
    data = io.BytesIO()
    torch.save(_contents(), data, _use_new_zipfile_serialization=zipped)
    (tmp_path / "a").write_bytes(b"x" * before + data.getvalue() + b"y" * before)
    value = open_archive(tmp_path / "a", before, len(data.getvalue()), "entry")
    assert _equal(_real(value), _contents())
    tensors = value["nested"]["list"][0]
    assert all(isinstance(tensor, FileTensor) for tensor in tensors.values())
    assert torch.equal(tensors["shared"].rows(1, 3), _contents()["nested"]["list"][0]["shared"][1:3])


@pytest.mark.parametrize("zipped", [True, False])
def test_what_only_torch_rebuilds_is_read_by_it(tmp_path: Path, zipped: bool) -> None:
    value = {"transposed": torch.arange(6.0).view(2, 3).t(), "array": np.arange(3), "parameter": torch.ones(2)}
    torch.save(value, tmp_path / "a", _use_new_zipfile_serialization=zipped)
    read = open_archive(tmp_path / "a")
    assert isinstance(read["transposed"], MemoryTensor)
    assert torch.equal(read["transposed"].whole(), value["transposed"])  # type: ignore[arg-type]
    assert read["array"].tolist() == [0, 1, 2]


def test_what_is_written_is_what_torch_load_reads(tmp_path: Path) -> None:
    torch.save(_contents(), tmp_path / "a")
    with open(tmp_path / "b", "wb") as stream:
        write_archive(stream, open_archive(tmp_path / "a"), Silent())
    for mmap in (False, True):
        assert _equal(torch.load(tmp_path / "b", weights_only=True, mmap=mmap), _contents())
    assert _equal(_real(open_archive(tmp_path / "b")), _contents())


class _Evil:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    "name", ["torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_parameter", "_codecs\nencode"]
)
def test_a_hostile_archive_changes_nothing_that_it_names(tmp_path: Path, name: str) -> None:
    """A pickle may set attributes of a class or function that it gets hold of; such would stay for the process."""
    known = [archive._Reference, archive._parameter, archive._bytes]
    state = pickle.dumps((None, {"mark": 1}), 2)[2:-1]
    data = b"\x80\x02" + f"c{name}\n".encode() + state + b"b."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as stream:
        stream.writestr("a/data.pkl", data)
    with pytest.raises(CheckpointError):
        open_archive(tmp_path / "a.pt")
    assert not any(hasattr(one, "mark") for one in known)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("call", ["system", "popen", "getattr"])
def test_a_hostile_archive_is_refused_by_name(tmp_path: Path, zipped: bool, call: str) -> None:
    mark = tmp_path / "mark"
    evil = {
        "system": _Evil(os.system, f"touch {mark}"),
        "popen": _Evil(subprocess.Popen, ["touch", str(mark)]),
        "getattr": _Evil(getattr, "x", "upper"),
    }[call]
    torch.save({"state": {0: evil}, "param_groups": []}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeCheckpointError, match=r"a\.pt .*asks for .*may be hostile, and was not loaded"):
        open_archive(tmp_path / "a.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointError, match=r"raw\.pt"):
        open_archive(tmp_path / "raw.pt")
    assert not mark.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_damage_is_named(tmp_path: Path, zipped: bool) -> None:
    torch.save({"a": torch.arange(4000.0)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    whole = (tmp_path / "a.pt").read_bytes()
    for size in (0, 1, 30, len(whole) // 2, len(whole) - 30):
        (tmp_path / "a.pt").write_bytes(whole[:size])
        with pytest.raises(DamagedCheckpointError, match=r"a\.pt"):
            open_archive(tmp_path / "a.pt")["a"].whole()
    with pytest.raises(DamagedCheckpointError, match=r"b\.pt is missing"):
        open_archive(tmp_path / "b.pt")


def test_random_damage_never_raises_anything_else(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(40.0), "b": [1, (2, torch.ones(3))]}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    chance = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for position in chance.integers(0, len(whole), 3):
            damaged[position] = int(chance.integers(0, 256))
        (tmp_path / "a.pt").write_bytes(damaged)
        with contextlib.suppress(CheckpointError):  # often the damage does no harm, or is in a number
            _real(open_archive(tmp_path / "a.pt"))


def test_a_tensor_larger_than_what_was_stored_is_refused(tmp_path: Path) -> None:
    """A size in the pickle that reaches beyond the storage would read whatever lies behind it."""
    torch.save({"a": torch.arange(100.0)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "a.pt").read_bytes()
    size = b"Kd\x85"  # the one-element tuple (100,)
    assert data.count(size) == 1
    (tmp_path / "a.pt").write_bytes(data.replace(size, b"K\xff\x85"))
    with pytest.raises(DamagedCheckpointError, match=r"a\.pt.* is larger than what was stored"):
        open_archive(tmp_path / "a.pt")


@pytest.mark.parametrize("shape", [(), (0,), (3,), (1, 1 << 20), (1 << 20,), (70, 5000, 3), (2, 0, 5)])
def test_blocks_and_chunks_cover_each_row_once(shape: tuple[int, ...]) -> None:
    for parts in (blocks(shape), chunks(shape)):
        assert parts[0][0] == 0
        assert parts[-1][1] == (shape[0] if shape else 1)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    assert len(chunks((1 << 40, 32))) == 16
