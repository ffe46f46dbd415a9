"""States of other optimizers, and ours in theirs: what loads is what means the same; all else is refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashoptim_dist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashoptim_dist.optim import FlashOptimizer
from tests.numbers import assert_same_bits

Make = Callable[..., torch.optim.Optimizer]
OURS: dict[str, tuple[type[FlashOptimizer], dict[str, Any], str]] = {
    "FlashAdamW": (FlashAdamW, {}, "Adam"),
    "FlashAdam": (FlashAdam, {}, "Adam"),
    "FlashLion": (FlashLion, {}, "Lion"),
    "FlashSGD": (FlashSGD, {"momentum": 0.9}, "SGD"),
    "FlashSGD without momentum": (FlashSGD, {}, "SGD"),
    "FlashSGDW": (FlashSGDW, {"momentum": 0.9}, "SGD"),
}
"""The class, its options, and the algorithm of its moments."""

THEIRS: dict[str, tuple[Make, dict[str, Any], str]] = {
    "Adam": (torch.optim.Adam, {}, "Adam"),
    "AdamW": (torch.optim.AdamW, {}, "Adam"),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}, ""),
    "SGD": (torch.optim.SGD, {}, "SGD"),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9}, "SGD"),
    "RAdam": (torch.optim.RAdam, {}, ""),
    "NAdam": (torch.optim.NAdam, {}, ""),
    "Adamax": (torch.optim.Adamax, {}, ""),
    "Adagrad": (torch.optim.Adagrad, {}, ""),
    "Adadelta": (torch.optim.Adadelta, {}, ""),
    "RMSprop": (torch.optim.RMSprop, {}, ""),
    "RMSprop, momentum": (torch.optim.RMSprop, {"momentum": 0.9}, ""),
    "ASGD": (torch.optim.ASGD, {}, ""),
    "Rprop": (torch.optim.Rprop, {}, ""),
    "LBFGS": (torch.optim.LBFGS, {}, ""),
    **({"Muon": (torch.optim.Muon, {}, "")} if hasattr(torch.optim, "Muon") else {}),
    **({"Adafactor": (torch.optim.Adafactor, {}, "")} if hasattr(torch.optim, "Adafactor") else {}),
    **OURS,
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(4, 64, generator=generator).bfloat16())]


def saved_by(kind: str, steps: int) -> dict[str, Any]:
    make, options, _ = THEIRS[kind]
    held = parameters()
    optimizer = make(held, lr=0.5, **options)
    for step in range(steps):
        held[0].grad = torch.full_like(held[0], 0.25 + step)
        optimizer.step(lambda: torch.zeros(()))
    return optimizer.state_dict()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("ours", OURS)
def test_a_state_loads_where_its_moments_are_the_same(ours: str, theirs: str, steps: int) -> None:
    """Also of an optimizer that has not stepped, whose groups alone say what it is."""
    make, options, algorithm = OURS[ours]
    optimizer = make(parameters(), lr=1e-3, **options)
    saved = saved_by(theirs, steps)
    if THEIRS[theirs][2] == algorithm:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.5
        return
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=rf"(parameter group 0|parameter '#0').*{make.__name__}") as caught:
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] == before
    assert not optimizer.state
    if theirs == "AdamW, amsgrad" and algorithm == "Adam":
        assert "max_exp_avg_sq" in str(caught.value)


def test_an_amsgrad_state_loads_the_way_its_refusal_says() -> None:
    saved = saved_by("AdamW, amsgrad", 2)
    saved["param_groups"][0]["amsgrad"] = False
    moment = saved["state"][0]["exp_avg"].clone()
    del saved["state"][0]["max_exp_avg_sq"]
    optimizer = FlashAdamW(parameters(), quantize=False, master_weight_bits=None)
    optimizer.load_state_dict(saved)
    (state,) = optimizer.state.values()
    assert_same_bits(state["exp_avg"], moment.float())


def test_groups_without_hyperparameters_keep_the_optimizers_own() -> None:
    """A state dict made by hand, with the state alone."""
    saved = saved_by("FlashAdamW", 2)
    optimizer = FlashAdamW(parameters(), lr=1e-3)
    optimizer.load_state_dict({"state": saved["state"], "param_groups": [{"params": [0]}]})
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_key_of_the_live_group_is_no_sign_of_another_algorithm() -> None:
    """Groups may hold what they like, as in torch, and the optimizer's own state then holds it too."""
    held = parameters()
    optimizer = FlashAdamW([{"params": held, "momentum": 0.5}])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["momentum"] == 0.5


# ---------------------------------------------------------------------------------------------- uncompressed

PEERS = [name for name, (_, _, algorithm) in OURS.items() if algorithm != "Lion"]


def peer_of(name: str, held: list[nn.Parameter]) -> torch.optim.Optimizer:
    make, options, _ = OURS[name]
    theirs = {FlashAdamW: torch.optim.AdamW, FlashAdam: torch.optim.Adam}.get(make, torch.optim.SGD)  # type: ignore[call-overload]
    return theirs(held, lr=0.5, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PEERS)
def test_torchs_optimizers_load_uncompressed_state(name: str, dtype: torch.dtype) -> None:
    """They get the moments, decoded and cast as they cast all state, and pass over the weight's correction."""
    make, options, _ = OURS[name]
    held = [nn.Parameter(parameters()[0].to(dtype))]
    optimizer = make(held, lr=1e-2, compress_state_dict=False, **options)
    for step in range(3):
        held[0].grad = torch.full_like(held[0], 0.25 + step)
        optimizer.step()
    saved = optimizer.state_dict()
    entries = saved["state"][0]
    moments = {"momentum_buffer"} if options else set() if "SGD" in name else {"exp_avg", "exp_avg_sq"}
    assert entries.keys() == {"step", *moments, *(["error_bits"] if dtype == torch.bfloat16 else [])}
    stepped = []
    for kept in (entries, {n: value for n, value in entries.items() if n != "error_bits"}):
        weights = [nn.Parameter(held[0].detach().clone())]
        peer = peer_of(name, weights)
        peer.load_state_dict(copy.deepcopy({**saved, "state": {0: kept}}))
        for moment in moments:
            assert_same_bits(peer.state[weights[0]][moment], entries[moment].to(dtype), moment)
        weights[0].grad = torch.full_like(weights[0], -1.0)
        peer.step()
        assert not torch.equal(weights[0], held[0])
        stepped.append(weights[0])
    assert torch.equal(*stepped)
    if dtype == torch.bfloat16:  # what they carried along belongs to the weight of then
        with pytest.raises(ValueError, match=r"'error_bits' of parameter '#0' was saved as torch.bfloat16: a torch"):
            make(held, **options).load_state_dict(
                {**saved, "state": {0: {**entries, "error_bits": entries["error_bits"].bfloat16()}}}
            )


@pytest.mark.parametrize("name", OURS)
def test_uncompressed_state_keeps_every_master_and_is_not_spoken_of(name: str) -> None:
    make, options, _ = OURS[name]
    held = parameters()
    optimizer = make(held, lr=1e-2, compress_state_dict=False, **options)
    for step in range(3):
        held[0].grad = torch.full_like(held[0], 0.25 + step)
        optimizer.step()
    other_held = [nn.Parameter(held[0].detach().clone())]
    other = make(other_held, lr=1e-2, compress_state_dict=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.master_weight(held[0]), other.master_weight(other_held[0]))
    assert not torch.equal(optimizer.master_weight(held[0]), held[0].float())
