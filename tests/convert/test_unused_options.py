"""Options that would change nothing are refused by name, with what to do instead; nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashoptim_dist.checkpoint import CheckpointFormatError
from flashoptim_dist.cli import main
from flashoptim_dist.convert import convert, import_hf, inspect
from tests.convert.inputs import save_ours, trained
from tests.convert.test_torchtitan import HEAD, _save, _trained

PLAIN = ["adamw", "adam", "lion", "sgd"]
FORMAT_OPTIONS = [
    ("--master-weight-bits", "32"),
    ("--master-weight-bits", "none"),
    ("--moments", "fp32"),
    ("--moments", "8bit"),
    ("--rounding", "nearest"),
    ("--seed", "0"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a file of optimizer states alone, torchtitan's two kinds of attention, and a model folder."""
    folder = tmp_path_factory.mktemp("sources")
    net, optimizer = trained("adamw")
    save_ours(folder / "states-and-weights", net, optimizer)
    torch.save(optimizer.state_dict(), folder / "states.pt")
    _save(folder / "fused", *_trained("adamw"))
    _save(folder / "normed", *_trained("adamw", norm=True))
    (folder / "model").mkdir()
    save_file({"layer.weight": torch.randn(4, 64)}, folder / "model" / "model.safetensors")
    return folder


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is refused, and return its one line."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("layout", ["nested", "flattened", "torchtitan"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_layout_for_a_file(
    tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str], layout: str, suffix: str
) -> None:
    place = tmp_path / f"out{suffix}"
    command = ["convert", str(sources / "states-and-weights"), str(place), "--to", "flash_adamw"]
    line = _refusal([*command, "--layout", layout], capsys)
    assert f"--layout {layout} (layout=)" in line
    assert str(place) in line
    assert "or give the name of a folder" in line
    assert list(tmp_path.iterdir()) == []


def test_without_the_layout_the_file_is_written_and_with_a_folder_the_layout_holds(
    tmp_path: Path, sources: Path
) -> None:
    command = ["convert", str(sources / "states-and-weights")]
    assert main([*command, str(tmp_path / "out.pt"), "--to", "flash_adamw"]) == 0
    assert main([*command, str(tmp_path / "out"), "--to", "flash_adamw", "--layout", "torchtitan"]) == 0
    assert inspect(tmp_path / "out").layout == "torchtitan"


@pytest.mark.parametrize("to", PLAIN)
@pytest.mark.parametrize("option", FORMAT_OPTIONS, ids="=".join)
@pytest.mark.parametrize("command", ["convert", "import-hf"])
def test_options_of_the_number_format_for_a_plain_optimizer(
    tmp_path: Path,
    sources: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: tuple[str, str],
    to: str,
) -> None:
    source = sources / ("states-and-weights" if command == "convert" else "model")
    line = _refusal([command, str(source), str(tmp_path / "out"), "--to", to, *option], capsys)
    assert line.startswith(f"error: {option[0]} (")
    assert f"{to} keeps fp32 states" in line
    assert f"or convert to flash_{to}" in line
    assert list(tmp_path.iterdir()) == []


def test_all_of_them_are_named(tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--master-weight-bits", "24", "--moments", "8bit", "--rounding", "stochastic", "--seed", "1"]
    command = ["convert", str(sources / "states-and-weights"), str(tmp_path / "out"), "--to", "adamw"]
    line = _refusal([*command, *options], capsys)
    assert all(option in line for option in options[::2])


@pytest.mark.parametrize("more", [[], ["--dtype", "fp32"]], ids=" ".join)
@pytest.mark.parametrize("command", ["convert", "import-hf"])
def test_weights_that_stay_in_fp32_where_all_become_fp32(
    tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str], command: str, more: list[str]
) -> None:
    source = sources / ("states-and-weights" if command == "convert" else "model")
    out = str(tmp_path / "out")
    for to in ["adamw", "flash_adamw"][: 2 if more else 1]:
        line = _refusal([command, str(source), out, "--to", to, "--keep-fp32", "layer", *more], capsys)
        assert "--keep-fp32 layer (keep_fp32=)" in line
        assert "give the dtype of the others (--dtype bf16" in line
    assert list(tmp_path.iterdir()) == []


def test_weights_that_stay_in_fp32_beside_others(tmp_path: Path, sources: Path) -> None:
    """The way out that the error names, for a plain optimizer."""
    options: dict[str, Any] = {"keep_fp32": ["norm"], "dtype": torch.bfloat16}
    convert(sources / "states-and-weights", tmp_path / "out", "adamw", **options)
    dtypes = {line.name: line.dtype for line in inspect(tmp_path / "out").tensors}
    assert dtypes["model.norm.weight"] == "float32"
    assert dtypes["model.up.weight"] == "bfloat16"


def test_a_dtype_of_weights_that_are_not_there(
    tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(sources / "states.pt"), str(tmp_path / "out"), "--to", "flash_adamw"]
    line = _refusal([*command, "--dtype", "bf16"], capsys)
    assert "--dtype (dtype=) is of the weights" in line
    assert f"{sources / 'states.pt'} holds none: give them (--weights" in line
    assert list(tmp_path.iterdir()) == []
    assert main(command) == 0


def test_the_size_of_a_head_where_no_heads_are_fused(
    tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(sources / "states-and-weights"), str(tmp_path / "out"), "--to", "flash_adamw"]
    line = _refusal([*command, "--head-dim", "16"], capsys)
    assert "--head-dim 16 (head_dim=) is for fused queries, keys and values (wqkv)" in line
    assert line.endswith("leave the option out")
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_a_head_that_the_weights_contradict(
    tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(sources / "normed"), str(tmp_path / "out"), "--to", "flash_adamw", "--head-dim"]
    line = _refusal([*command, str(2 * HEAD)], capsys)
    assert f"--head-dim {2 * HEAD} (head_dim=) contradicts the weights of {sources / 'normed'}" in line
    assert f"has heads of {HEAD} rows: leave the option out" in line
    assert list(tmp_path.iterdir()) == []
    assert main([*command, str(HEAD)]) == 0


def test_functions_refuse_the_same(tmp_path: Path, sources: Path) -> None:
    source = sources / "states-and-weights"
    with pytest.raises(CheckpointFormatError, match=r"\(layout=\) is of a DCP directory"):
        convert(source, tmp_path / "out.pt", "adamw", layout="nested")
    with pytest.raises(CheckpointFormatError, match=r"--moments \(quantize=\): .* adamw keeps fp32 states"):
        convert(source, tmp_path / "out", "adamw", options={"quantize": False})
    with pytest.raises(CheckpointFormatError, match=r"--seed \(seed=\): .* sgd keeps fp32 states"):
        import_hf(sources / "model", tmp_path / "out", to="sgd", options={"seed": 0})
    with pytest.raises(CheckpointFormatError, match="there is no optimizer 'muon' to convert to"):
        convert(source, tmp_path / "out", "muon", options={"seed": 0})
    assert list(tmp_path.iterdir()) == []


def test_inspect_leaves_the_list_of_tensors_out_of_json_too(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", str(sources / "states-and-weights"), "--json"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*command, "--no-tensors"]) == 0
    assert whole.pop("tensors")
    assert json.loads(capsys.readouterr().out) == whole
