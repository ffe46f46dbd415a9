"""Gradient release on is gradient release off, bit for bit, where nothing is clipped."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import flashoptim_dist as fod
from tests.numbers import assert_same_bits
from tests.pool import run_ranks
from tests.release.models import batch, build, everything, loss_of, train

Result = tuple[dict[str, dict[str, Tensor]], list[float]]


def _optimizer(model: nn.Module, kind: str, fused: bool | None = None) -> Any:
    named = list(model.named_parameters())
    matrices = [pair for pair in named if pair[1].ndim > 1]
    others = [pair for pair in named if pair[1].ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    options: dict[str, Any] = {"momentum": 0.9} if kind == "FlashSGDW" else {}
    return getattr(fod, kind)(groups, lr=1e-2, fused=fused, **options)


def _run(
    release: bool,
    *,
    sharded: bool = True,
    kind: str = "FlashAdamW",
    micro_batches: int = 1,
    how: str = "steps",
    fused: bool | None = None,
    steps: int = 3,
    **model_options: Any,
) -> Result:
    world_size = dist.get_world_size() if sharded else 0
    model = build(world_size, **model_options)
    optimizer = _optimizer(model, kind, fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    around: Any = None
    last = micro_batches - 1
    if how == "no_sync":
        assert isinstance(model, FSDPModule)

        def around(micro: int) -> Any:
            model.set_requires_gradient_sync(micro == last)
            return contextlib.nullcontext()

    if release:
        handle = fod.enable_gradient_release(
            model, optimizer, accumulation_steps=micro_batches if how == "steps" else 1
        )
        if how == "context":

            def around(micro: int) -> Any:
                return handle.accumulate() if micro < last else contextlib.nullcontext()

    losses = train(model, optimizer, range(steps), micro_batches=micro_batches, scheduler=scheduler, around=around)
    assert all(parameter.grad is None for parameter in model.parameters())
    return everything(model, optimizer), losses


def _both(world_size: int, **options: Any) -> None:
    off = run_ranks(world_size, _run, False, **options)
    on = run_ranks(world_size, _run, True, **options)
    for (state, losses), (expected, expected_losses) in zip(on, off, strict=True):
        assert losses == expected_losses
        _assert_equal(state, expected)


def _assert_equal(state: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert state.keys() == expected.keys()
    for name, entries in expected.items():
        assert state[name].keys() == entries.keys()
        for entry, value in entries.items():
            assert_same_bits(state[name][entry], value, f"{entry} of {name}")


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {"sharded": False}),
    "plain, tied": (1, {"sharded": False, "tied": True}),
    "plain, accumulation": (1, {"sharded": False, "micro_batches": 3}),
    "plain, compiled layers": (1, {"sharded": False, "compiled": True}),
    "plain, checkpointing": (1, {"sharded": False, "checkpointing": True}),
    "plain, kernels": (1, {"sharded": False, "fused": True, "layers": 2, "steps": 2}),
    "W=1": (1, {}),
    "W=2": (2, {}),
    "W=4": (4, {}),
    "W=2, tied": (2, {"tied": True}),
    "W=2, Lion": (2, {"kind": "FlashLion"}),
    "W=2, SGD": (2, {"kind": "FlashSGDW"}),
    "W=2, accumulation": (2, {"micro_batches": 2}),
    "W=2, accumulation by context": (2, {"micro_batches": 3, "how": "context"}),
    "W=2, accumulation without synchronization": (2, {"micro_batches": 2, "how": "no_sync"}),
    "W=2, checkpointing": (2, {"checkpointing": True}),
    "W=2, compiled layers": (2, {"compiled": True}),
    "W=4, HSDP": (4, {"hybrid": True}),
    "W=4, HSDP, tied, accumulation, checkpointing": (
        4,
        {"hybrid": True, "tied": True, "micro_batches": 2, "checkpointing": True},
    ),
    "W=2, kernels": (2, {"fused": True, "layers": 2, "steps": 2}),
    "W=2, fp32": (2, {"dtype": torch.float32}),
}


QUICK = ("plain", "plain, tied", "W=2", "W=2, accumulation", "W=4, HSDP, tied, accumulation, checkpointing")


MARKS: dict[str, list[pytest.MarkDecorator]] = {
    **{case: [] for case in QUICK},
    "plain, kernels": [pytest.mark.full, pytest.mark.long],  # as on two ranks, which CI has
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [pytest.mark.full])) for case in CASES])
def test_on_is_off(case: str) -> None:
    """pytorch PR 87397, TE#3437 (E53): also with weights tied, modules called twice, unused and frozen parameters."""
    world_size, options = CASES[case]
    _both(world_size, **options)


def test_any_number_of_ranks() -> None:
    expected, _ = run_ranks(1, _run, True)[0]
    for world_size in (2, 4):
        for state, _ in run_ranks(world_size, _run, True):
            _assert_equal(state, expected)


def _units_at_once() -> tuple[int, int]:
    """The largest number of units whose gradients lived at once, and how many parameters had been stepped by then."""
    model = build(dist.get_world_size(), layers=4)
    optimizer = _optimizer(model, "FlashAdamW")
    fod.enable_gradient_release(model, optimizer)
    most, stepped = 0, 0

    def look(parameter: Tensor) -> None:
        nonlocal most, stepped
        alive = {name.partition("layers.")[2][:1] or name for name, p in model.named_parameters() if p.grad is not None}
        most = max(most, len(alive))
        stepped = max(stepped, len(optimizer.state))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(look)
    loss_of(model, batch(0)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    return most, stepped


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_two_units_live_at_once(world_size: int) -> None:
    for most, stepped in run_ranks(world_size, _units_at_once):
        assert most <= 2
        assert stepped >= 20, "most parameters are stepped before the backward ends"
