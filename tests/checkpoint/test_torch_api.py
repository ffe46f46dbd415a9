"""Side by side with torch's own functions: they read what is written here, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
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


def _round_trip(
    kind: str, flatten: bool, full: bool, offload: bool, from_first: bool, placement: str = "fsdp"
) -> list[str]:
    """From step 1 on, every way torch has to get and set an optimizer's state."""
    net = build(placement)
    optimizer = OPTIMIZERS[kind](net)
    _step_all(net, optimizer, range(1))
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
    net = build(placement, seed=4)
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


SPREADS = [("fsdp", 3), ("hsdp", 4), ("fsdp_tp", 4), ("fsdp_tp", 6), ("shard1", 2), ("experts", 4), ("fsdp", 8)]
WAYS = [(True, False, True, False), (False, True, False, False), (False, True, True, True)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("placement", "world_size", "flatten", "full", "offload", "from_first"),
    [
        # By turns: CI has each placement in one way, and each way for two or three placements.
        pytest.param(*spread, *way, marks=[] if (number + turn) % len(WAYS) == 0 else pytest.mark.long)
        for number, spread in enumerate(SPREADS)
        for turn, way in enumerate(WAYS)
    ],
)
def test_torchs_state_dict_options_give_right_answers_everywhere(
    placement: str, world_size: int, flatten: bool, full: bool, offload: bool, from_first: bool
) -> None:
    if from_first and placement == "experts":
        pytest.skip("torch broadcasts a full state over one mesh; the experts have another")
    if full and (placement, world_size) == ("fsdp_tp", 6):
        pytest.skip("torch can't cut whole tensors into uneven strided shards, those of the model neither")
    results = run_ranks(world_size, _round_trip, "flash", flatten, full, offload, from_first, placement)
    assert results == [[]] * world_size


def _flattened_and_full() -> list[str]:
    """torch can't load this form back, for its own AdamW either; to read it is what people do."""
    net, optimizer = _trained("flash")
    whole = gathered(net, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(net, optimizer, options=options)
    if dist.get_rank() != 0:
        return sorted(state)
    found = {key.removeprefix("state."): value for key, value in state.items() if key.startswith("state.")}
    expected = {name.removeprefix("optimizer."): v for name, v in whole.items() if name.startswith("optimizer.")}
    return differences(expected, found)


def test_a_flattened_full_state_holds_every_piece() -> None:
    assert run_ranks(2, _flattened_and_full) == [[], []]


def _never_stepped(full: bool) -> tuple[list[str], list[str]]:
    """A full state before the first step, and what a first step then makes of it."""
    net, untouched = build(), build()
    optimizer, other = OPTIMIZERS["flash"](net), OPTIMIZERS["flash"](untouched)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state = get_optimizer_state_dict(net, optimizer, options=options)
    wrong = [] if full and dist.get_rank() != 0 else _not_fresh(state)
    steps(net, optimizer, [0])
    steps(untouched, other, [0])
    return wrong, differences(gathered(net, optimizer), gathered(untouched, other))


def _not_fresh(state: dict[str, Any]) -> list[str]:
    """Names of states that are not zero, and of groups without their options."""
    wrong = []
    for name, values in state["state"].items():
        for key, value in values.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            if key != "error_bits" and bool((local != 0).any()):
                wrong.append(f"{name}.{key}")
    return wrong + [str(group) for group in state["param_groups"] if group["lr"] != 1e-2 or not group["params"]]


@pytest.mark.parametrize("full", [False, True])
def test_a_state_before_the_first_step_takes_no_step(full: bool) -> None:
    """A3 of the collected bug reports: state dictionaries before the first step, as accelerate asks for them."""
    assert run_ranks(2, _never_stepped, full) == [([], [])] * 2


def test_torch_turns_our_checkpoints_into_one_file(tmp_path: Path) -> None:
    path, file = str(tmp_path / "checkpoint"), str(tmp_path / "whole.pt")
    saved = run_ranks(2, _our_save, path, "flash")[0]
    dcp_to_torch_save(path, file)
    state = torch.load(file, weights_only=True)
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        found |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    assert differences(saved, found) == []
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-2
    assert state["format"]["world_size"] == 2


def _full_export(path: str, load: bool, placement: str = "fsdp") -> dict[str, Tensor]:
    """Save on several ranks as one whole file, load it in one process."""
    net = build("single" if load else placement, seed=4 if load else 0)
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


@pytest.mark.parametrize(
    ("placement", "world_size"),
    [("fsdp", 2), *(pytest.param(p, n, marks=pytest.mark.full) for p, n in (("fsdp_tp", 6), ("hsdp", 4), ("fsdp", 3)))],
)
def test_a_full_state_of_several_ranks_loads_on_one(tmp_path: Path, placement: str, world_size: int) -> None:
    """B19 of the collected bug reports: only local pieces were in the file."""
    path = str(tmp_path / "whole.pt")
    saved = run_ranks(world_size, _full_export, path, False, placement)[0]
    assert differences(saved, run_ranks(1, _full_export, path, True)[0]) == []
