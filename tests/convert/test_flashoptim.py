"""States that the official flashoptim 0.1.4 wrote (data/make_flashoptim.py) become what it decodes them to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointFormatError
from flashoptim_dist.convert import convert, inspect

DATA = Path(__file__).with_name("data") / "flashoptim_0.1.4"
TARGET = {"lion": "lion", "sgd": "sgd"}
CASES = ["adamw_24", "adamw_32", "adamw_fp16", "adamw_uncompressed", "lion", "sgd"]


def _check(converted: Path, expected: dict[str, Any]) -> None:
    state = torch.load(converted, weights_only=True)
    names = state["optimizer"]["param_groups"][0]["param_names"]
    assert set(names) == set(expected)
    for number, name in enumerate(names):
        assert torch.equal(state["model"][name], expected[name]["master"]), name
        for key, value in expected[name].items():
            assert key == "master" or torch.equal(state["optimizer"]["state"][number][key], value), (name, key)


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_it_becomes_what_it_decodes(tmp_path: Path, case: str) -> None:
    expected = torch.load(DATA / f"{case}.pt", weights_only=True)["expected"]
    assert inspect(DATA / f"{case}.pt").state_format == "flashoptim"
    convert(DATA / f"{case}.pt", tmp_path / "plain.pt", TARGET.get(case, "adamw"))
    _check(tmp_path / "plain.pt", expected)
    step = torch.load(tmp_path / "plain.pt", weights_only=True)["optimizer"]["state"][0].get("step")
    assert (step is None) == (case in TARGET)
    if step is not None:
        assert (step.dtype, float(step)) == (torch.float32, 3.0)


def test_its_sharded_checkpoint_becomes_what_each_rank_decodes(tmp_path: Path) -> None:
    """A4 of the collected bug reports: groups begin anew in each rank's shard, here of 24 elements."""
    convert(DATA / "sharded", tmp_path / "plain.pt", "adamw")
    _check(tmp_path / "plain.pt", torch.load(DATA / "sharded_expected.pt", weights_only=True))


def _net(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(40, 6), nn.Linear(6, 33, bias=False), nn.LayerNorm(33)).to(dtype)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_on_in_our_optimizer(tmp_path: Path, case: str) -> None:
    saved = torch.load(DATA / f"{case}.pt", weights_only=True)
    expected = saved["expected"]
    bits = 32 if case == "adamw_32" else 24
    to = f"flash_{TARGET.get(case, 'adamw')}"
    convert(DATA / f"{case}.pt", tmp_path / "ours", to, options={"master_weight_bits": bits})
    net = _net(torch.float16 if case == "adamw_fp16" else torch.bfloat16)
    kind: Any = {"flash_adamw": fod.FlashAdamW, "flash_lion": fod.FlashLion, "flash_sgd": fod.FlashSGD}[to]
    options = {"momentum": 0.9} if to == "flash_sgd" else {}
    optimizer = kind(net.named_parameters(), master_weight_bits=bits, **options)
    checkpoint.load(tmp_path / "ours", net, optimizer, verify="full")
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert "master_bytewidth" not in optimizer.param_groups[0]
    for name, master in optimizer.get_master_weights(net).items():
        torch.testing.assert_close(master, expected[name]["master"], rtol=2.0**-16, atol=1e-9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in net.parameters())


def test_its_optimizer_state_without_weights_asks_for_them(tmp_path: Path) -> None:
    saved = torch.load(DATA / "adamw_24.pt", weights_only=True)
    torch.save(saved["optimizer"], tmp_path / "optimizer.pt")
    torch.save(saved["model"], tmp_path / "model.pt")
    with pytest.raises(CheckpointFormatError, match=r"corrections to a weight that is not there.*--weights"):
        convert(tmp_path / "optimizer.pt", tmp_path / "plain.pt", "adamw")
    convert(tmp_path / "optimizer.pt", tmp_path / "plain.pt", "adamw", weights=tmp_path / "model.pt")
    _check(tmp_path / "plain.pt", saved["expected"])


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """What its own loader takes in silence: scales of other shards than the codes."""
    saved = torch.load(DATA / "adamw_24.pt", weights_only=True)
    entries = saved["optimizer"]["state"][0]
    entries["exp_avg::scales"] = entries["exp_avg::scales"][:-1].clone()
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(CheckpointFormatError, match=r"exp_avg::quantized.* has 240 codes and 7 scales"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "adamw")


def test_a_copy_of_its_sharded_checkpoint_is_read_wherever_it_lies(tmp_path: Path) -> None:
    shutil.copytree(DATA / "sharded", tmp_path / "moved")
    assert inspect(tmp_path / "moved").steps == (3,)
