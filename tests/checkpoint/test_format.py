"""Checkpoints of another format, optimizer or model: one clear error, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointError, CheckpointFormatError, snapshot
from tests.checkpoint.models import adamw, build, differences, flash, gathered, steps
from tests.pool import run_ranks


def _saved(path: Path, make: Any = flash, **options: Any) -> Path:
    net = build("single")
    optimizer = make(net, **options)
    steps(net, optimizer, range(2))
    return checkpoint.save(path / "checkpoint", net, optimizer)


def _refused(path: Path, net: nn.Module, optimizer: Any, match: str) -> None:
    before = gathered(net, optimizer)
    with pytest.raises(CheckpointFormatError, match=match):
        checkpoint.load(path, net, optimizer)
    assert differences(before, gathered(net, optimizer)) == []


def _with_format(change: dict[str, Any]) -> Any:
    def make(net: nn.Module) -> Any:
        optimizer = flash(net)
        spec = optimizer.format_spec() | change
        optimizer.format_spec = lambda: spec  # type: ignore[method-assign]
        return optimizer

    return make


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 3}, "format 'fd1' version 3 with groups of 32"),
        ({"version": 0}, "format 'fd1' version 0 with groups of 32"),
        ({"name": "fd9"}, "format 'fd9' version 2 with groups of 32"),
        ({"group_size": 64}, "format 'fd1' version 2 with groups of 64"),
    ],
)
def test_another_number_format_is_refused_with_both_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = _saved(tmp_path, _with_format(change))
    net = build("single")
    match = rf"{named}, and this library reads 'fd1' version 2 with groups of 32.*flashoptim-dist convert"
    _refused(path, net, flash(net), match)


def test_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as inner:
        inner.setattr(snapshot, "LAYOUT_VERSION", 7)
        path = _saved(tmp_path)
    net = build("single")
    _refused(path, net, flash(net), f"layout version 7, and this library reads version 1.*{fod.__version__}")


def test_our_states_are_no_food_for_torch(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    net = build("single")
    _refused(path, net, adamw(net), "FlashAdamW's, in format 'fd1' version 2, and AdamW can't read that.*convert")


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    net = build("single")
    lion = fod.FlashLion(net.named_parameters(), lr=1e-3)
    _refused(path, net, lion, "FlashAdamW's, and FlashLion keeps other ones.*convert")
    adam = fod.FlashAdam([(n, p) for n, p in net.named_parameters() if p.requires_grad], lr=1e-3)
    checkpoint.load(path, net, adam)  # the same states, decayed otherwise
    assert adam.state[net.up.weight]["step"] == 2


def test_other_master_bits_are_converted(tmp_path: Path) -> None:
    path = _saved(tmp_path, master_weight_bits=24)
    net = build("single", seed=1)
    optimizer = flash(net, master_weight_bits=32)
    with pytest.warns(UserWarning, match="corrections of 8 bits to 16"):
        checkpoint.load(path, net, optimizer)
    assert optimizer.state[net.up.weight]["error_bits"].dtype == torch.int16


def test_plain_adamw_states_are_quantized(tmp_path: Path) -> None:
    path = _saved(tmp_path, adamw)
    net = build("single", seed=1)
    optimizer = flash(net)
    with pytest.warns(UserWarning, match="moments to 8 bits"):
        checkpoint.load(path, net, optimizer)
    state = optimizer.state[net.up.weight]
    assert state["exp_avg"].dtype == torch.int8
    assert state["step"] == 2


class Other(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        net = build("single")
        for name, module in net.named_children():
            setattr(self, name, changes.get(name, module))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        for name, module in changes.items():
            setattr(self, name, module)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"extra": nn.Linear(3, 3)}, "from another model: it has no 'extra.weight', 'extra.bias'"),
        ({"tiny": None}, "from another model: this one has no 'tiny.weight', 'tiny.bias'"),
        (
            {"tiny": nn.Linear(5, 1, dtype=torch.bfloat16)},
            r"'tiny.weight' has shape \(1, 128\) in it, and \(1, 5\) here",
        ),
        ({"tiny": nn.Linear(128, 1)}, "'tiny.weight' is torch.bfloat16 in it, and torch.float32 here"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    path = _saved(tmp_path)
    net = Other(**changes)
    _refused(path, net, flash(net), match)


def test_a_foreign_parameter_is_named(tmp_path: Path) -> None:
    net = build("single")
    other = build("single")
    with pytest.raises(
        CheckpointError, match=r"FlashAdamW updates a parameter.*number 0 of group 0, shape \(13, 128\)"
    ):
        checkpoint.save(tmp_path / "x", net, flash(other))


def _load_with_another_model(path: str) -> str:
    net = build()
    net.extra = nn.Linear(2, 2)
    try:
        checkpoint.load(path, net, flash(net))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_error_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    messages = run_ranks(2, _load_with_another_model, str(path))
    assert messages[0] == messages[1]
    assert "has no 'extra.weight', 'extra.bias'" in messages[0]


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    net = build("single")
    with pytest.raises(CheckpointError, match=r"no checkpoint: .*nothing does not exist"):
        checkpoint.load(tmp_path / "nothing", net, flash(net))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*empty"):
        checkpoint.load(tmp_path / "empty", net, flash(net))
