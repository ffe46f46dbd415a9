"""Constructors against those of torch.optim and of flashoptim: order, defaults, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from flashoptim_dist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashoptim_dist.optim import FlashOptimizer

ALL = [FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW]
TORCH: dict[type[FlashOptimizer], type[torch.optim.Optimizer]] = {
    FlashAdam: torch.optim.Adam,
    FlashAdamW: torch.optim.AdamW,
    FlashSGD: torch.optim.SGD,
}

_OPTIONS = {
    "quantize": True,
    "compress_state_dict": True,
    "master_weight_bits": 24,
    "check_numerics": False,
    "fused": True,
}
_ADAM: dict[str, Any] = {"params": None, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_SGD: dict[str, Any] = {"params": None, "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
FLASHOPTIM: dict[type[FlashOptimizer], dict[str, Any]] = {
    FlashAdam: {**_ADAM, "weight_decay": 0.0, **_OPTIONS},
    FlashAdamW: {**_ADAM, "weight_decay": 1e-2, "decouple_lr": False, **_OPTIONS},
    FlashLion: {
        "params": None,
        "lr": 1e-3,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "decouple_lr": False,
        **_OPTIONS,
    },
    FlashSGD: {**_SGD, "nesterov": False, **_OPTIONS},
    FlashSGDW: {**_SGD, "nesterov": False, "decouple_lr": False, **_OPTIONS},
}
"""flashoptim 0.1.4's arguments, all of them positional, in order, with their defaults (params has none)."""

OTHER = {
    "lr": 0.25,
    "betas": (0.5, 0.75),
    "eps": 1e-6,
    "weight_decay": 0.125,
    "momentum": 0.5,
    "dampening": 0.0,
    "nesterov": True,
    "decouple_lr": True,
    "quantize": False,
    "compress_state_dict": False,
    "master_weight_bits": 32,
    "check_numerics": True,
    "fused": False,
}
"""A value other than the default for each, dampening excepted, which nesterov excludes."""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16))]


def found(optimizer: FlashOptimizer, name: str) -> Any:
    """What an optimizer took for an argument."""
    if name in optimizer.defaults:
        return optimizer.defaults[name]
    if name == "check_numerics":
        return optimizer._update_check is not None
    if name in ("fused", "compress_state_dict"):
        return optimizer._fused if name == "fused" else optimizer.compress_state_dict
    return optimizer._options[name]


def positional(callable_: Any) -> dict[str, Any]:
    """Arguments that may come by position, in order, with their defaults."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(callable_).parameters.values()
    return {a.name: None if a.default is a.empty else a.default for a in arguments if a.kind in kinds}


@pytest.mark.parametrize("ours", TORCH)
def test_every_argument_of_torchs_is_taken_with_its_default(ours: type[FlashOptimizer]) -> None:
    arguments = inspect.signature(ours).parameters
    for name, argument in inspect.signature(TORCH[ours]).parameters.items():
        assert name in arguments
        assert arguments[name].default == argument.default, name


@pytest.mark.parametrize("ours", TORCH)
def test_torchs_positional_order_up_to_where_flashoptims_differs(ours: type[FlashOptimizer]) -> None:
    theirs = list(positional(TORCH[ours]))
    shared = theirs if ours is FlashSGD else theirs[:-1]
    assert theirs[len(shared) :] == ([] if ours is FlashSGD else ["amsgrad"])
    assert list(positional(ours))[: len(shared)] == shared
    values = [OTHER[name] for name in shared[1:]]
    optimizer = ours(parameters(), *values)
    assert {name: found(optimizer, name) for name in shared[1:]} == dict(zip(shared[1:], values, strict=True))


@pytest.mark.parametrize("ours", ALL)
def test_flashoptims_positional_order(ours: type[FlashOptimizer]) -> None:
    """Every prefix of its arguments, but for the one that torch means otherwise."""
    names = list(FLASHOPTIM[ours])[1:]
    for count in range(len(names) + 1):
        if ours in (FlashAdam, FlashAdamW) and count == 5:
            continue
        optimizer = ours(parameters(), *(OTHER[name] for name in names[:count]))
        assert {name: found(optimizer, name) for name in names[:count]} == {name: OTHER[name] for name in names[:count]}


@pytest.mark.parametrize("ours", ALL)
def test_flashoptims_defaults(ours: type[FlashOptimizer]) -> None:
    """But for ``fused``: None takes the kernels where there are any."""
    optimizer = ours(parameters())
    for name, default in FLASHOPTIM[ours].items():
        if name not in ("params", "fused"):
            assert found(optimizer, name) == default, name
    assert optimizer._fused is None


@pytest.mark.parametrize("ours", ALL)
def test_the_table_is_flashoptims(ours: type[FlashOptimizer]) -> None:
    try:
        flashoptim = importlib.import_module("flashoptim")
    except ImportError as error:
        pytest.skip(f"flashoptim cannot be imported: {error}")
    theirs = positional(getattr(flashoptim, ours.__name__))
    assert list(theirs) == list(FLASHOPTIM[ours])
    assert theirs == FLASHOPTIM[ours]


@pytest.mark.parametrize("value", [True, False])
def test_a_sixth_argument_of_adam_is_refused(value: bool) -> None:
    """torch: amsgrad; flashoptim: quantize. Neither value means the same for both."""
    message = f"amsgrad for torch.optim.Adam and quantize for flashoptim.FlashAdam. Pass quantize={value} by keyword"
    with pytest.raises(TypeError, match=re.escape(message)):
        FlashAdam(parameters(), 1e-3, (0.9, 0.999), 1e-8, 0.0, value)


def test_a_sixth_argument_of_adamw_is_taken_where_both_mean_the_default() -> None:
    """torch: amsgrad; flashoptim: decouple_lr. Both are False by default."""
    optimizer = FlashAdamW(parameters(), 1e-3, (0.9, 0.999), 1e-8, 0.01, False)
    assert found(optimizer, "decouple_lr") is False
    message = (
        "amsgrad for torch.optim.AdamW and decouple_lr for flashoptim.FlashAdamW. Pass decouple_lr=True by keyword"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        FlashAdamW(parameters(), 1e-3, (0.9, 0.999), 1e-8, 0.01, True)


@pytest.mark.parametrize("ours", [FlashAdam, FlashAdamW])
def test_positional_arguments_too_many_or_twice(ours: type[FlashOptimizer]) -> None:
    arguments = [OTHER[name] for name in list(FLASHOPTIM[ours])[1:]]
    with pytest.raises(TypeError, match=r"at most \d+ positional arguments"):
        ours(parameters(), *arguments, None)
    with pytest.raises(TypeError, match="got master_weight_bits by position and by keyword"):
        ours(parameters(), *arguments, master_weight_bits=None)
