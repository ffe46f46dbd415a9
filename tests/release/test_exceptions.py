"""A backward pass that raises (a caught out-of-memory error): the update is given up, and training goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

import flashoptim_dist as fod
from tests import pool
from tests.numbers import assert_same_bits
from tests.optim.cases import whole
from tests.pool import run_ranks

State = list[Tensor]


class _Fail(torch.autograd.Function):
    """Does nothing, and raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")


class _Layer(nn.Module):
    """Two Linears; if asked, the backward pass raises between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails:
            x = _Fail.apply(x)
        return torch.tanh(self.second(x))


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def _build(shape: tuple[int, ...] = ()) -> _Layers:
    torch.manual_seed(0)
    model = _Layers()
    if shape:
        fod.shard_model(model, pool.mesh(*shape), layers=list(model.layers))
    return model


def _batch(number: int) -> Tensor:
    return torch.randn(2, 32, generator=torch.Generator().manual_seed(number))


def _all(model: nn.Module, optimizer: fod.FlashOptimizer) -> State:
    states = [
        whole(value).clone()
        for parameter in model.parameters()
        for value in optimizer.state[parameter].values()
        if isinstance(value, Tensor)
    ]
    return [whole(parameter).detach().clone() for parameter in model.parameters()] + states


def _fail(model: _Layers, number: int, layer: int = 1, factor: float = 1.0) -> None:
    module = model.layers[layer]
    assert isinstance(module, _Layer)
    module.fails = True
    loss = model(_batch(number)) * factor
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    module.fails = False


def _counts(optimizer: fod.FlashOptimizer, layer: nn.Module) -> set[float]:
    return {float(optimizer.state[p]["step"]) for p in layer.parameters() if p in optimizer.state}


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"clip_global_norm": 1.0}])
@pytest.mark.parametrize("way", ["zero_grad", "abandon_update"])
def test_training_goes_on_after_an_exception(way: str, options: dict[str, Any]) -> None:
    """What came before the exception is stepped and stays so; the rest is dropped, and no later update has it."""
    model = _build()
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    handle = fod.enable_gradient_release(model, optimizer, **options)
    for number in range(2):
        model(_batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    norm, norms = handle.gradient_norm, handle.state_dict()
    _fail(model, 2)
    if way == "zero_grad":
        optimizer.zero_grad()
    else:
        handle.abandon_update()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [_counts(optimizer, layer) for layer in model.layers] == [{2.0}, {2.0}, {3.0}, {3.0}]
    assert handle.gradient_norm is norm
    assert handle.state_dict() == norms
    after = {name: value.clone() for name, value in model.state_dict().items()}
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]

    # A model that starts from here, and never saw the exception, goes on alike.
    other = _build()
    other.load_state_dict(after)
    other_optimizer = fod.FlashAdamW(other.named_parameters(), lr=1e-2)
    for parameter, state in zip(other.parameters(), states, strict=True):
        other_optimizer.state[parameter] = state
    other_handle = fod.enable_gradient_release(other, other_optimizer, **options)
    other_handle.load_state_dict(norms)
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        for number in range(3, 5):
            one(_batch(number)).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    for ours, expected in zip(_all(model, optimizer), _all(other, other_optimizer), strict=True):
        assert_same_bits(ours, expected, "weight or state")
    assert optimizer.skipped_steps == other_optimizer.skipped_steps == 0
    assert (handle.gradient_norm is None) == (not options)
    if handle.gradient_norm is not None:
        assert other_handle.gradient_norm is not None
        assert_same_bits(handle.gradient_norm, other_handle.gradient_norm, "the norm")


def test_accumulated_gradients_are_dropped_too() -> None:
    model = _build()
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    fod.enable_gradient_release(model, optimizer, accumulation_steps=2)
    model(_batch(0)).backward()
    _fail(model, 1)
    assert any(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    for number in range(2):
        model(_batch(number)).backward()
    optimizer.step()
    assert [_counts(optimizer, layer) for layer in model.layers] == [{1.0}, {1.0}, {2.0}, {2.0}]


def test_an_exception_in_the_first_layer_leaves_nothing() -> None:
    """Nothing was stepped: as without release, weights and states are untouched."""
    results = []
    for fails in (True, False):
        model = _build()
        optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
        fod.enable_gradient_release(model, optimizer, clip_global_norm=1.0)
        if fails:
            _fail(model, 7, layer=3)
            optimizer.zero_grad()
        for number in range(2):
            model(_batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(_all(model, optimizer))
    for ours, expected in zip(*results, strict=True):
        assert_same_bits(ours, expected, "weight or state")


def test_a_gradient_that_is_not_finite_is_forgotten() -> None:
    """Its update is given up, and neither skips nor counts a later one."""
    model = _build()
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    fod.enable_gradient_release(model, optimizer, skip_nonfinite=True)
    _fail(model, 0, factor=math.nan)
    optimizer.zero_grad()
    model(_batch(1)).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert [_counts(optimizer, layer) for layer in model.layers] == [{1.0}] * 4


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_optimizers(order: tuple[int, ...]) -> None:
    """zero_grad() of the first gives up the update of all; the others' finds nothing to refuse."""
    model = _build()
    optimizers = [fod.FlashAdamW(part.named_parameters(), lr=1e-2) for part in (model.layers[:2], model.layers[2:])]
    fod.enable_gradient_release(model, optimizers)
    _fail(model, 0)
    for number in order:
        optimizers[number].zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(_batch(1)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [_counts(optimizers[n // 2], layer) for n, layer in enumerate(model.layers)] == [{1.0}, {1.0}, {2.0}, {2.0}]


def test_both_messages_name_the_way_back() -> None:
    """An exception between two backward passes of an update looks like a forgotten step()."""
    model = _build()
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    handle = fod.enable_gradient_release(model, optimizer)
    model(_batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) came between .*handle\.abandon_update\(\)"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"got another gradient .*handle\.abandon_update\(\)"):
        model(_batch(1)).backward()
    handle.abandon_update()
    optimizer.zero_grad()
    model(_batch(2)).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) came between"):
        optimizer.zero_grad()  # the exception before is no excuse
    optimizer.step()
    optimizer.zero_grad()
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_step_after_an_exception_takes_what_there_is() -> None:
    """And zero_grad() before the step of a later backward pass is refused as ever."""
    model = _build()
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    fod.enable_gradient_release(model, optimizer)
    _fail(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    model(_batch(1)).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) came between"):
        optimizer.zero_grad()


def _sharded(shape: tuple[int, ...], fails: int, options: dict[str, Any]) -> tuple[State, list[set[float]]]:
    """All ranks raise; FSDP2 gives up its own part of the failed pass, and the loop goes on."""
    model = _build(shape)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    fod.enable_gradient_release(model, optimizer, **options)
    for number in range(4):
        if number == 1:
            _fail(model, 7, layer=fails)
            if isinstance(model, FSDPModule):
                model.reset_iter_state()
        else:
            model(_batch(number)).backward()
            optimizer.step()
        optimizer.zero_grad()
    return _all(model, optimizer), [_counts(optimizer, layer) for layer in model.layers]


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 has no way back in this torch")
@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.full)])
def test_sharded(shape: tuple[int, ...]) -> None:
    """The same bits as on one rank: all ranks have the same batch, and means of equal gradients are exact.

    FSDP2 hands over the gradients of a layer as one, so that the layer before the one that fails is not stepped yet.
    """
    expected, counts = _sharded((), 2, {})
    for state, its_counts in run_ranks(math.prod(shape), _sharded, shape, 1, {"skip_nonfinite": True}):
        assert its_counts == counts == [{3.0}, {3.0}, {3.0}, {4.0}]
        for ours, one in zip(state, expected, strict=True):
            assert_same_bits(ours, one, "weight or state")
