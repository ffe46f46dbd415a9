"""Side by side with torch's own functions: they read what is written here, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from flashoptim_dist import checkpoint
from tests.checkpoint.models import OPTIMIZERS, build, differences, gathered, steps
from tests.pool import run_ranks


def _trained(kind: str, steps_taken: int = 2) -> Any:
    net = build()
    optimizer = OPTIMIZERS[kind](net)
    _step_all(net, optimizer, range(steps_taken))
    return net, optimizer


def _step_all(net: Any, optimizer: Any, which: Any) -> None:
    """With gradients for all parameters: torch's own loader refuses states that are missing."""
    net.unused.weight.grad = torch.zeros_like(net.unused.weight)
    net.unused.bias.grad = torch.zeros_like(net.unused.bias)
    steps(net, optimizer, which)


def _dcp_load(path: str, kind: str) -> dict[str, Tensor]:
    net = build(seed=4)
    optimizer = OPTIMIZERS[kind](net)
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    return gathered(net, optimizer)


def _our_save(path: str, kind: str) -> dict[str, Tensor]:
    net, optimizer = _trained(kind)
    checkpoint.save(path, net, optimizer)
    return gathered(net, optimizer)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_plain_dcp_reads_our_checkpoints(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _our_save, path, kind)[0]
    for loaded in run_ranks(3, _dcp_load, path, kind):
        assert differences(saved, loaded) == []


def _keys(path: str, kind: str) -> tuple[list[str], list[str]]:
    net, optimizer = _trained(kind)
    checkpoint.save(path, net, optimizer)
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=path + "-plain")
    return [
        sorted(dcp.FileSystemReader(p).read_metadata().state_dict_metadata)  # type: ignore[return-value]
        for p in (path, path + "-plain")
    ]


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_the_names_on_disk_are_those_of_torch(tmp_path: Path, kind: str) -> None:
    ours, plain = run_ranks(2, _keys, str(tmp_path / "checkpoint"), kind)[0]
    assert set(ours) - set(plain) == {"format", "rng.0", "rng.1"}
    assert set(plain) <= set(ours)
    assert {"model.up.weight", "optimizer.state.up.weight.exp_avg", "optimizer.param_groups.0.lr"} <= set(plain)


def _plain_save(path: str, kind: str, flatten: bool) -> dict[str, Tensor]:
    net, optimizer = _trained(kind)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=path)
    return gathered(net, optimizer)


def _our_load(path: str, kind: str) -> tuple[dict[str, Tensor], float]:
    net = build(seed=4)
    optimizer = OPTIMIZERS[kind](net)
    optimizer.param_groups[0]["lr"] = 0.5
    loaded = checkpoint.load(path, net, optimizer)
    assert loaded.world_size is None
    return gathered(net, optimizer), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_we_read_checkpoints_of_plain_dcp(tmp_path: Path, kind: str, flatten: bool) -> None:
    """A11b of the collected bug reports: flattened states came back as zeros."""
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _plain_save, path, kind, flatten)[0]
    for loaded, rate in run_ranks(3, _our_load, path, kind):
        assert differences(saved, loaded) == []
        assert rate == 1e-2


def _round_trip(kind: str, flatten: bool, full: bool, offload: bool, from_first: bool) -> list[str]:
    """From step 1 on, every way torch has to get and set an optimizer's state."""
    net, optimizer = _trained(kind, 1)
    options = StateDictOptions(
        full_state_dict=full, cpu_offload=offload, flatten_optimizer_state_dict=flatten, broadcast_from_rank0=from_first
    )
    getting = StateDictOptions(full_state_dict=full, cpu_offload=offload, flatten_optimizer_state_dict=flatten)
    model_state = get_model_state_dict(net, options=getting)
    optimizer_state = get_optimizer_state_dict(net, optimizer, options=getting)
    before = gathered(net, optimizer)
    if full and (not offload or dist.get_rank() == 0):
        assert all(not hasattr(value, "placements") for value in model_state.values())
        name = "state.up.weight.exp_avg"
        moment = optimizer_state[name] if flatten else optimizer_state["state"]["up.weight"]["exp_avg"]
        assert torch.equal(moment, before["optimizer.up.weight.exp_avg"])
    net = build(seed=4)
    optimizer = OPTIMIZERS[kind](net)
    set_model_state_dict(net, model_state, options=options)
    set_optimizer_state_dict(net, optimizer, optimizer_state, options=options)
    return differences(before, gathered(net, optimizer))


@pytest.mark.parametrize(
    ("flatten", "full", "offload", "from_first"),
    [
        (False, False, False, False),
        (True, False, False, False),
        (False, False, True, False),
        (True, False, True, False),
        (False, True, False, False),
        (False, True, True, True),
    ],
)
def test_torchs_state_dict_options_give_right_answers(
    flatten: bool, full: bool, offload: bool, from_first: bool
) -> None:
    """B14, B16, B19 of the collected bug reports: offloaded and full states at step 1, no cast, all pieces."""
    assert run_ranks(2, _round_trip, "flash", flatten, full, offload, from_first) == [[], []]


def _full_export(path: str, load: bool) -> dict[str, Tensor]:
    """Save on 2 ranks as one whole file, load it in one process."""
    net = build("single" if load else "fsdp", seed=4 if load else 0)
    optimizer = OPTIMIZERS["flash"](net)
    if load:
        state = torch.load(path, weights_only=True)
        net.load_state_dict(state["model"])
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
    else:
        _step_all(net, optimizer, range(2))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "model": get_model_state_dict(net, options=options),
            "optimizer": get_optimizer_state_dict(net, optimizer, options=options),
        }
        if dist.get_rank() == 0:
            torch.save(state, path)
    return gathered(net, optimizer)


def test_a_full_state_of_two_ranks_loads_on_one(tmp_path: Path) -> None:
    """B19 of the collected bug reports: only local pieces were in the file."""
    path = str(tmp_path / "whole.pt")
    saved = run_ranks(2, _full_export, path, False)[0]
    assert differences(saved, run_ranks(1, _full_export, path, True)[0]) == []
