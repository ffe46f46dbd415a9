"""The command line: what it prints, its exit codes, and one line on stderr for everything a user can mend."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashoptim_dist import checkpoint
from flashoptim_dist.cli import main
from flashoptim_dist.convert.commands import parse_size
from flashoptim_dist.convert.targets import TARGETS
from tests.convert.inputs import save_ours, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, as a training run leaves it."""
    directory = tmp_path_factory.mktemp("run")
    net, optimizer = trained()
    checkpoint.Checkpointer(directory, net, optimizer).save(5)
    return directory


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    for text in ("step-00000005", "FlashAdamW", "fd1", "73,523", "model.up.weight", "256 x 128", "of fp32 AdamW"):
        assert text in out
    assert main(["inspect", str(run), "--no-tensors"]) == 0
    assert "model.up.weight" not in capsys.readouterr().out
    assert main(["inspect", str(run / "step-00000005"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [0, 5]
    assert found["fp32_adamw_bytes"] == 12 * 73523
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["optimizer.state.up.weight.exp_avg"] == {
        "name": "optimizer.state.up.weight.exp_avg",
        "dtype": "int8",
        "shape": [256, 128],
        "bytes": 256 * 128,
    }
    assert found["bytes"] == sum(tensor["bytes"] for tensor in found["tensors"])


def test_verify(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert "files as in the manifest" in capsys.readouterr().out
    net, optimizer = trained()
    with torch.no_grad():
        net.up.weight[0, 0] = float("nan")
    bad = save_ours(tmp_path / "bad", net, optimizer)
    assert main(["verify", str(bad), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert err.startswith(f"error: {bad} is not sound: model.up.weight has 1 of 32768 elements")
    data = bytearray((bad / "__0_0.distcp").read_bytes())
    data[-1] ^= 1
    (bad / "__0_0.distcp").write_bytes(data)
    assert main(["verify", str(bad)]) == 2
    assert "__0_0.distcp is damaged: checksum" in _error(capsys)


def test_convert(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(run), str(tmp_path / "adamw"), "--to", "adamw"]) == 0
    assert "73,523 parameters" in capsys.readouterr().out
    assert main(["convert", str(run), str(tmp_path / "adamw"), "--to", "adamw"]) == 2
    assert "adamw exists: choose another name, or --force" in _error(capsys)
    assert main(["convert", str(run), str(tmp_path / "adamw"), "--to", "adamw", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 73523
    options = ["--master-weight-bits", "32", "--moments", "fp32", "--rounding", "nearest", "--seed", "7"]
    back = tmp_path / "back"
    assert main(["convert", str(tmp_path / "adamw"), str(back), "--to", "flash_adamw", *options, "--json"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(back), "--json"]) == 0
    (spec,) = json.loads(capsys.readouterr().out)["formats"]
    assert (spec["master_weight_bits"], spec["quantize"], spec["rounding"], spec["seed"]) == (32, False, "nearest", 7)


def test_hugging_face_folders(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export-hf", str(run), str(out), "--dtype", "fp32", "--max-shard-size", "100KB"]) == 0
    assert "note: config.json and the tokenizer are not there" in capsys.readouterr().out
    assert (out / "model.safetensors.index.json").is_file()
    assert main(["import-hf", str(out), str(tmp_path / "ours"), "--keep-fp32", "norm"]) == 0
    assert main(["verify", str(tmp_path / "ours")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{}/nothing"], "nothing does not exist"),
        (["verify", "{}"], "is no checkpoint"),
        (["convert", "{}/nothing", "{}/out", "--to", "adamw"], "nothing does not exist"),
        (["export-hf", "{}/nothing", "{}/out"], "nothing does not exist"),
        (["export-hf", "{}/nothing", "{}/out", "--max-shard-size", "much"], "--max-shard-size much is no size"),
        (["import-hf", "{}/nothing", "{}/out"], "nothing does not exist"),
        (["import-hf", "{}", "{}/out"], "holds no .safetensors file"),
        (["convert", "{}", "{}/out", "--to", "adamw", "--head-dim", "0"], "head_dim=0 must be at least 1"),
    ],
    ids=lambda value: "-".join(value)[:24] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([argument.replace("{}", str(tmp_path)) for argument in arguments]) == 2
    assert message in _error(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_enough_is_no_error(run: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "flashoptim_dist", "inspect", str(run), *options]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_output_that_can_not_be_written_is_one_line_and_exit_code_2(run: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "flashoptim_dist", "inspect", str(run), "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("arguments", [[], ["convert", "a", "b"], ["convert", "a", "b", "--to", "muon"], ["inspect"]])
def test_bad_usage_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_every_target_has_a_name_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert all(f"{name}," in text or f"{name}}}" in text for name in TARGETS)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2 << 30), ("1.5KB", 1500), ("77", 77)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "infGB", "nan", "5XB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "flashoptim_dist.convert.commands", raising=False)
    monkeypatch.delattr("flashoptim_dist.convert.commands", raising=False)
    assert main(["inspect", "x"]) == 2
    assert "needs the package tyro: pip install 'flashoptim-dist[cli]'" in _error(capsys)


def test_the_entry_point_and_its_extra_are_declared() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert 'flashoptim-dist = "flashoptim_dist.cli:main"' in text
    assert importlib.metadata.version("flashoptim-dist")


@pytest.mark.full
def test_under_torchrun(run: Path, tmp_path: Path) -> None:
    module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flashoptim_dist"]
    command = [sys.executable, *module, "convert", str(run), str(tmp_path / "out"), "--to", "adamw", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 73523
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 2
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert again.returncode != 0
    assert sum(line.startswith("error: ") for line in again.stderr.splitlines()) == 1
