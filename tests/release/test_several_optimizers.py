"""Several optimizers of one model: their parameters make one update, with one norm and one decision to skip it."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import flashoptim_dist as fod
from tests import pool
from tests.numbers import assert_same_bits
from tests.optim.cases import whole
from tests.pool import run_ranks

Layers = list[nn.Module]


def _build(shape: tuple[int, ...], lr: float = 1e-2) -> tuple[Layers, list[fod.FlashOptimizer], nn.Sequential]:
    """Two layers, each with its optimizer, sharded if there is a shape of a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    if shape:
        fod.shard_model(model, pool.mesh(*shape), layers=list(model))
    optimizers: list[fod.FlashOptimizer] = [fod.FlashAdamW(layer.named_parameters(), lr=lr) for layer in model]
    return list(model), optimizers, model


def _weights(model: nn.Module) -> list[Tensor]:
    return [whole(parameter).clone() for parameter in model.parameters()]


def _two_passes(model: nn.Sequential, factor: float) -> None:
    """The last of two micro-batches reaches the first layer alone."""
    x = torch.linspace(-1.0, 1.0, 64).view(2, 32)
    model(x).square().sum().backward()
    (model[0](x).square().sum() * factor).backward()


def _update(shape: tuple[int, ...], order: tuple[int, ...], factor: float) -> tuple[list[float], list[int], list[bool]]:
    """One update; the norm after each step(), the skipped steps, and which layers moved."""
    layers, optimizers, model = _build(shape)
    handle = fod.enable_gradient_release(model, optimizers, accumulation_steps=2, skip_nonfinite=True)
    before = [_weights(layer) for layer in layers]
    _two_passes(model, factor)
    norms = []
    for number in order:
        optimizers[number].step()
        assert handle.gradient_norm is not None
        norms.append(float(handle.gradient_norm))
    moved = [
        any(bool((new != old).any()) for new, old in zip(_weights(layer), weights, strict=True))
        for layer, weights in zip(layers, before, strict=True)
    ]
    for optimizer in optimizers:
        optimizer.zero_grad()
    return norms, [optimizer.skipped_steps for optimizer in optimizers], moved


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_norm_is_that_of_the_whole_update(order: tuple[int, ...]) -> None:
    _, _, model = _build(())
    _two_passes(model, 1.0)
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    expected = math.sqrt(float(sum(squares)))
    norms, skipped, moved = _update((), order, 1.0)
    assert norms == pytest.approx([expected, expected], rel=1e-6)
    assert (skipped, moved) == ([0, 0], [True, True])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_update_is_skipped_for_all_optimizers(order: tuple[int, ...]) -> None:
    """The second layer got its gradient from the first micro-batch; the loss of the last is NaN."""
    norms, skipped, moved = _update((), order, math.nan)
    assert all(math.isnan(norm) for norm in norms)
    assert (skipped, moved) == ([1, 1], [False, False])


def _both_orders(shape: tuple[int, ...], factor: float) -> list[tuple[list[float], list[int], list[bool]]]:
    return [_update(shape, order, factor) for order in ((0, 1), (1, 0))]


@pytest.mark.parametrize("factor", [1.0, math.nan])
@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.full)])
def test_sharded(shape: tuple[int, ...], factor: float) -> None:
    expected, _, _ = _update((), (0, 1), factor)
    for results in run_ranks(math.prod(shape), _both_orders, shape, factor):
        for norms, skipped, moved in results:
            assert norms == pytest.approx(expected, rel=1e-6, nan_ok=True)
            assert (skipped, moved) == (([0, 0], [True, True]) if factor == 1.0 else ([1, 1], [False, False]))


def _trained(release: bool, lrs: list[float], **options: Any) -> list[Tensor]:
    _, optimizers, model = _build(())
    if release:
        fod.enable_gradient_release(model, optimizers, accumulation_steps=2, **options)
    for number, lr in enumerate(lrs):
        for optimizer in optimizers[:: 1 if number % 2 else -1]:
            for group in optimizer.param_groups:
                group["lr"] = lr
        _two_passes(model, 1.0)
        for optimizer in optimizers[:: 1 if number % 2 else -1]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    states = [
        value
        for optimizer in optimizers
        for parameter in optimizer.state
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor)
    ]
    return [*_weights(model), *states]


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}])
@pytest.mark.parametrize("lrs", [[1e-2, 1e-2, 1e-2], [0.0, 1e-2, 1e-2]])
def test_the_same_bits_as_without_release(lrs: list[float], options: dict[str, Any]) -> None:
    """The orders of step() take turns, and learning rates may begin at 0."""
    for ours, expected in zip(_trained(True, lrs, **options), _trained(False, lrs), strict=True):
        assert_same_bits(ours, expected, "weight or state")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_first_step_with_a_learning_rate_of_0_is_no_template(order: tuple[int, ...]) -> None:
    """The second layer's optimizer has no state yet, as for a template; its gradients are the update's all the same."""
    _, optimizers, model = _build((), lr=0.0)
    handle = fod.enable_gradient_release(model, optimizers, accumulation_steps=2, skip_nonfinite=True)
    _two_passes(model, math.nan)
    for number in order:
        optimizers[number].step()
        assert handle.gradient_norm is not None
        assert math.isnan(float(handle.gradient_norm))
    assert [optimizer.skipped_steps for optimizer in optimizers] == [1, 1]
    assert {float(s["step"]) for optimizer in optimizers for s in optimizer.state.values()} == {0.0}


def test_a_template_does_not_step_what_others_accumulate() -> None:
    layers, optimizers, model = _build(())
    handle = fod.enable_gradient_release(model, optimizers)
    weights = _weights(model)
    with handle.accumulate():
        layers[1](torch.ones(2, 32)).sum().backward()
    get_optimizer_state_dict(layers[0], optimizers[0])
    assert len(optimizers[0].state) == 2
    assert not optimizers[1].state
    assert all(parameter.grad is not None for parameter in layers[1].parameters())
    for ours, expected in zip(_weights(model), weights, strict=True):
        assert_same_bits(ours, expected, "weight")


@pytest.mark.parametrize("kept", [True, False])
def test_what_one_step_takes_is_not_taken_again(kept: bool) -> None:
    """step() of one optimizer ends the update of all: an optimizer that is stepped more seldom is refused by name."""
    _, optimizers, model = _build(())
    handle = fod.enable_gradient_release(model, optimizers)
    with handle.accumulate():
        model(torch.ones(2, 32)).sum().backward()
    optimizers[0].step()
    assert all(parameter.grad is None for parameter in model.parameters())

    def again() -> None:
        with handle.accumulate() if kept else contextlib.nullcontext():
            model(torch.ones(2, 32)).sum().backward()
        optimizers[0].step()

    with pytest.raises(RuntimeError, match=r"parameter '1\.(weight|bias)' got another gradient"):
        again()
