"""Checkpoints in the layouts of torchtitan 0.3 and 0.2.2: fused projections, and the format record of each parameter.

Small ones, made here as torchtitan makes them (its own are in tests/torchtitan_v0_2 and tests/torchtitan).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist.checkpoint import CheckpointFormatError
from flashoptim_dist.checkpoint.reader import SafeReader
from flashoptim_dist.cli import main
from flashoptim_dist.convert import convert, inspect, verify
from tests.convert.inputs import expected_plain
from tests.numbers import assert_same_bits

DIM, HEAD, QUERY_HEADS, KEY_HEADS = 48, 6, 8, 4
ROWS = (QUERY_HEADS + 2 * KEY_HEADS) * HEAD
ATTENTION = "layers.0.attention.qkv_linear"


class Fused(nn.Module):
    """The parameters of one layer, by torchtitan's names; its state_dict has the fused ones in parts."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        attention: dict[str, nn.Module] = {"qkv_linear": nn.Module(), "wo": nn.Linear(DIM, DIM, bias=False)}
        attention["qkv_linear"].wqkv = nn.Linear(DIM, ROWS)
        if norm:
            attention["q_norm"] = nn.RMSNorm(HEAD)
        feed_forward, experts = nn.Module(), nn.Module()
        feed_forward.w13 = nn.Parameter(torch.randn(10, 2, DIM))
        experts.w13 = nn.Parameter(torch.randn(3, 10, 2, DIM))
        layer = nn.ModuleDict({"attention": nn.ModuleDict(attention), "feed_forward": feed_forward})
        layer["moe"] = nn.ModuleDict({"experts": experts})
        self.layers = nn.ModuleDict({"0": layer})

    def saved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights by parameter as the model's hooks save them."""
        result = {}
        for name, weight in weights.items():
            prefix, _, end = name.rpartition(".")
            if prefix.endswith("wqkv"):
                heads = weight.reshape(KEY_HEADS, -1, HEAD, *weight.shape[1:])
                above = prefix.removesuffix("wqkv")
                ratio = QUERY_HEADS // KEY_HEADS
                for part, chosen in (("wq", heads[:, :ratio]), ("wk", heads[:, ratio]), ("wv", heads[:, ratio + 1])):
                    result[f"{above}{part}.{end}"] = chosen.reshape(-1, *weight.shape[1:]).clone()
            elif end == "w13" and weight.ndim == 3:
                result |= {f"{prefix}.w1.weight": weight[:, 0].clone(), f"{prefix}.w3.weight": weight[:, 1].clone()}
            elif end == "w13":
                result |= {f"{prefix}.w1_EFD": weight[:, :, 0].clone(), f"{prefix}.w3_EFD": weight[:, :, 1].clone()}
            else:
                result[name] = weight
        return result


def _trained(kind: str, *, norm: bool = False, **options: Any) -> tuple[Fused, Any]:
    torch.manual_seed(0)
    net = Fused(norm=norm).to(torch.bfloat16 if kind == "flash" else torch.float32)
    decayed = [item for item in net.named_parameters() if item[1].ndim > 1]
    groups = [{"params": decayed}, {"params": [item for item in net.named_parameters() if item[1].ndim == 1]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    for group in groups:
        group |= {"fused": False, "foreach": False, "initial_lr": 1e-2}  # type: ignore[dict-item]
    make: Any = fod.FlashAdamW if kind == "flash" else torch.optim.AdamW
    optimizer = make(groups, lr=1e-2, **options)
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return net, optimizer


def _save(path: Path, net: Fused, optimizer: Any) -> Path:
    """As torchtitan's CheckpointManager lays it out; ours with the record that its adapter keeps for each parameter."""
    saved = optimizer.state_dict()
    flat: dict[str, Any] = {}
    for group in saved["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            state = saved["state"][number]
            flat |= {f"state.{name}.{key}": value for key, value in state.items()}
            flat |= {
                f"param_groups.{name}.{key}": v for key, v in group.items() if key not in ("params", "param_names")
            }
            if isinstance(optimizer, fod.FlashAdamW):
                entries = {key: str(value.dtype).removeprefix("torch.") for key, value in state.items()}
                flat[f"format.{name}"] = json.dumps({**optimizer.format_spec(), "entries": entries})
    weights = net.saved({name: parameter.detach() for name, parameter in net.named_parameters()})
    whole = {
        **weights,
        "optimizer": flat,
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"position", "world_size": 1},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(99)},
    }
    dcp.save(whole, checkpoint_id=path, no_dist=True)
    return path


def _read(path: Path) -> dict[str, Any]:
    reader = SafeReader(path)
    tensors = {
        key: torch.empty(tuple(saved.size), dtype=saved.properties.dtype)
        for key, saved in reader.metadata.state_dict_metadata.items()
        if not reader.is_object(key)
    }
    reader.read_tensors(tensors)
    return {**tensors, **{key: reader.object(key) for key in reader.names() if reader.is_object(key)}}


def _loaded(path: Path, **options: Any) -> tuple[Fused, Any]:
    """A model and our optimizer with a converted checkpoint in them, by torchtitan's names."""
    net, found = Fused().bfloat16(), _read(path)
    optimizer = fod.FlashAdamW(net.named_parameters(), **options)
    whole = optimizer.state_dict()
    for number, (name, parameter) in enumerate(net.named_parameters()):
        prefix = f"optimizer.state.{name}."
        whole["state"][number] = {
            key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)
        }
        # The fused weight whose parts are those in the file: the hooks only move rows.
        places = net.saved({name: torch.arange(parameter.numel()).reshape(parameter.shape)})
        flat = torch.empty(parameter.numel(), dtype=found[next(iter(places))].dtype)
        for part, place in places.items():
            flat[place.flatten()] = found[part].flatten()
        parameter.data = flat.reshape(parameter.shape)
    optimizer.load_state_dict(whole)
    return net, optimizer


def test_adamw_becomes_what_our_optimizer_makes_of_the_fused_parameter(tmp_path: Path) -> None:
    net, optimizer = _trained("adamw")
    done = convert(_save(tmp_path / "adamw", net, optimizer), tmp_path / "ours", "flash_adamw", head_dim=HEAD)
    assert done.parameters == sum(parameter.numel() for parameter in net.parameters())
    assert verify(tmp_path / "ours").problems == ()
    loaded, loaded_optimizer = _loaded(tmp_path / "ours")
    expected = Fused().bfloat16()
    expected_optimizer = fod.FlashAdamW(expected.named_parameters())
    expected_optimizer.init_state()
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    state = {"state": optimizer.state_dict()["state"], "param_groups": [expected_optimizer.param_groups[0] | {}]}
    state["param_groups"][0] |= {"params": list(range(len(names))), "param_names": names}
    expected_optimizer.load_state_dict(state)
    expected_optimizer.set_master_weights({n: p.detach() for n, p in net.named_parameters()}, expected)
    for (name, left), right in zip(loaded.named_parameters(), expected.parameters(), strict=True):
        assert_same_bits(left.detach(), right.detach())
        assert loaded_optimizer.state[left].keys() == expected_optimizer.state[right].keys(), name
        for key, value in expected_optimizer.state[right].items():
            assert_same_bits(loaded_optimizer.state[left][key], value)


@pytest.mark.parametrize("bits", [24, 32])
def test_ours_becomes_the_true_masters_and_comes_back_bit_for_bit(tmp_path: Path, bits: int) -> None:
    net, optimizer = _trained("flash", master_weight_bits=bits)
    source = _save(tmp_path / "ours", net, optimizer)
    assert inspect(source).formats[0]["master_weight_bits"] == bits
    convert(source, tmp_path / "adamw", "adamw", head_dim=HEAD)
    plain, expected = _read(tmp_path / "adamw"), expected_plain(net, optimizer)
    masters = {name: optimizer.master_weight(parameter) for name, parameter in net.named_parameters()}
    for name, value in net.saved(masters).items():
        assert_same_bits(plain[name], value)
    for name, _ in net.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_same_bits(plain[f"optimizer.state.{name}.{key}"], expected[f"{name}.{key}"])
    assert not any(key.startswith("optimizer.format.") for key in plain)
    convert(tmp_path / "adamw", tmp_path / "again", "flash_adamw")  # knows the size of a head now
    before, after = _read(source), _read(tmp_path / "again")
    for key, value in before.items():
        if isinstance(value, Tensor) and "exp_avg" not in key:
            assert_same_bits(after[key], value)
    assert set(before) <= set(after)


def test_what_torchtitan_asks_for_is_there(tmp_path: Path) -> None:
    """Its loader refuses a checkpoint that lacks a key of the live optimizer's; the rest of the run comes along."""
    net, optimizer = _trained("adamw")
    convert(_save(tmp_path / "adamw", net, optimizer), tmp_path / "ours", "flash_adamw", head_dim=HEAD)
    ours = _read(tmp_path / "ours")
    assert set(_read(_save(tmp_path / "flash", *_trained("flash")))) <= set(ours)
    assert ours["dataloader.dp_rank_0"] == b"position"
    assert (ours["lr_scheduler.last_epoch"], int(ours["train_state.ntokens_seen"])) == (3, 99)
    assert ours["optimizer.param_groups.layers.0.attention.wo.weight.weight_decay"] == 1e-2
    assert ours[f"optimizer.param_groups.{ATTENTION}.wqkv.bias.weight_decay"] == 0.0
    record = json.loads(ours[f"optimizer.format.{ATTENTION}.wqkv.weight"])
    kinds = {"exp_avg": "int8", "exp_avg_scale": "bfloat16", "exp_avg_sq": "uint8", "exp_avg_sq_scale": "bfloat16"}
    assert record.pop("entries") == {**kinds, "error_bits": "int8", "step": "float32"}
    assert record == fod.FlashAdamW([nn.Parameter(torch.zeros(1))]).format_spec()
    convert(tmp_path / "flash", tmp_path / "plain", "adamw", head_dim=HEAD)
    assert set(_read(tmp_path / "adamw")) <= set(_read(tmp_path / "plain"))


def test_states_of_version_1_are_told_by_the_record_of_a_parameter(tmp_path: Path) -> None:
    net, optimizer = _trained("flash")
    spec = {**optimizer.format_spec(), "version": 1}
    optimizer.format_spec = lambda: spec
    convert(_save(tmp_path / "ours", net, optimizer), tmp_path / "adamw", "adamw", head_dim=HEAD)
    state = optimizer.state[net.layers["0"]["attention"]["wo"].weight]
    scale = state["exp_avg_sq_scale"].float().repeat_interleave(32, dim=1)[:, :DIM]
    root = (state["exp_avg_sq"].float() / 255).square() * scale
    found = _read(tmp_path / "adamw")["optimizer.state.layers.0.attention.wo.weight.exp_avg_sq"]
    torch.testing.assert_close(found, root.square(), rtol=1e-5, atol=0.0)


def test_the_size_of_a_head_is_asked_for_where_nothing_tells_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _save(tmp_path / "adamw", *_trained("adamw"))
    with pytest.raises(CheckpointFormatError, match=r"'layers.0.attention.qkv_linear.wqkv.*--head-dim"):
        convert(source, tmp_path / "ours", "flash_adamw")
    with pytest.raises(CheckpointFormatError, match=r"heads of 5 rows .* 48, 24 and 24 rows"):
        convert(source, tmp_path / "ours", "flash_adamw", head_dim=5)
    assert not (tmp_path / "ours").exists()
    assert main(["convert", str(source), str(tmp_path / "ours"), "--to", "flash_adamw", "--head-dim", str(HEAD)]) == 0
    assert "wrote" in capsys.readouterr().out
    source = _save(tmp_path / "normed", *_trained("adamw", norm=True))
    convert(source, tmp_path / "by-norm", "flash_adamw")
    one, other = _read(tmp_path / "ours"), _read(tmp_path / "by-norm")
    assert one.keys() == {key for key in other if "q_norm" not in key}


def test_parts_of_a_fused_parameter_have_one_dtype(tmp_path: Path) -> None:
    source = _save(tmp_path / "adamw", *_trained("adamw"))
    with pytest.raises(CheckpointFormatError, match=r"wq.weight.*are one parameter.*keep_fp32"):
        convert(source, tmp_path / "ours", "flash_adamw", head_dim=HEAD, keep_fp32=["*.wq"])
    convert(source, tmp_path / "ours", "flash_adamw", head_dim=HEAD, keep_fp32=["*.qkv_linear"])
    found = _read(tmp_path / "ours")
    assert found[f"{ATTENTION}.wq.weight"].dtype == torch.float32
    assert f"optimizer.state.{ATTENTION}.wqkv.weight.error_bits" not in found
    assert found["layers.0.attention.wo.weight"].dtype == torch.bfloat16
