"""States of other algorithms: what loads is what the moments mean the same for; all else is refused by name."""

from __future__ import annotations

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
