"""Gradient release on models and loops out of the ordinary: tiny uneven shards, copies, files, refused gradients."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashoptim_dist as fod
from tests import pool
from tests.numbers import assert_same_bits
from tests.pool import run_ranks
from tests.release.models import everything


class _Tiny(nn.Module):
    """Layers of 1 to 7 rows, of which most ranks hold none or one; all called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 7), nn.Linear(7, 5)])
        self.one = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(2, 5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(layer(x))
        return (x * self.one * self.frozen.sum()).sum()


def _train_tiny(shape: tuple[int, ...], keep_graph: bool, **release: Any) -> tuple[dict[str, Any], list[float]]:
    """Three updates of two backward passes each, the second from a kept graph if asked; their gradients' norms."""
    torch.manual_seed(0)
    model = _Tiny()
    fod.cast_model(model, torch.bfloat16)
    fod.shard_model(model, pool.mesh(*shape), layers=list(model.layers))
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    handle = fod.enable_gradient_release(model, optimizer, **release) if release else None
    norms = []
    for step in range(3):
        x = torch.linspace(-1.0, 1.0, 5, dtype=torch.bfloat16) * (step + 1)
        loss = model(x)
        if handle is None:
            loss.backward(retain_graph=keep_graph)
        else:
            with handle.accumulate():
                loss.backward(retain_graph=keep_graph)
        (loss if keep_graph else model(x)).backward()
        norm = fod.clip_grad_norm_(optimizer, math.inf) if handle is None else None
        optimizer.step()
        norm = norm if handle is None else handle.gradient_norm
        assert norm is not None
        norms.append(float(norm))
        optimizer.zero_grad()
    return everything(model, optimizer), norms


@pytest.mark.parametrize(
    "shape, keep_graph",
    [
        ((2, 2), False),
        pytest.param((2, 2), True, marks=pytest.mark.full),
        pytest.param((4,), True, marks=pytest.mark.full),
    ],
)
def test_shards_of_no_or_one_row(shape: tuple[int, ...], keep_graph: bool) -> None:
    """The same bits and norms as without, with the finite check and with a bound that never clips."""
    ranks = math.prod(shape)
    off = run_ranks(ranks, _train_tiny, shape, keep_graph)
    for release in ({"skip_nonfinite": True}, {"clip_global_norm": math.inf}):
        on = run_ranks(ranks, _train_tiny, shape, keep_graph, **release)
        for (state, norms), (expected, expected_norms) in zip(on, off, strict=True):
            assert norms == pytest.approx(expected_norms, rel=1e-5)
            assert state.keys() == expected.keys()
            for name, entries in expected.items():
                for entry, value in entries.items():
                    assert_same_bits(state[name][entry], value, f"{entry} of {name}")


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x))))).square().sum()


def _gradient_of_tied(sharded: bool) -> tuple[Tensor, Tensor, float]:
    """The gradient that the step applied, as SGD without momentum shows it, the one without release, and steps."""
    results = []
    for release in (True, False):
        torch.manual_seed(0)
        model = _Tied()
        if sharded:
            fod.shard_model(model, pool.mesh(2))
        before = model.first.weight.detach().clone()
        optimizer = fod.FlashSGDW(model.named_parameters(), lr=1.0, weight_decay=0.0)
        if release:
            fod.enable_gradient_release(model, optimizer)
        model(torch.linspace(-1.0, 1.0, 64).view(2, 32)).backward()
        optimizer.step()
        moved = before - model.first.weight.detach()
        results.append(moved.full_tensor() if sharded else moved)  # type: ignore[operator]
    return results[0], results[1], float(optimizer.state[model.first.weight]["step"])


@pytest.mark.parametrize("world_size", [0, 2])
def test_e53_a_tied_linear_called_twice(world_size: int) -> None:
    """TE#3437, pytorch PR 87397: the second contribution replaced the first, or was an update of its own."""
    results = run_ranks(world_size, _gradient_of_tied, True) if world_size else [_gradient_of_tied(False)]
    for released, ordinary, steps in results:
        assert_same_bits(released, ordinary, "the summed gradient")
        assert float(ordinary.norm()) > 0.0
        assert steps == 1.0


def _small(**options: Any) -> tuple[nn.Sequential, fod.FlashAdamW, fod.GradientRelease]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    return model, optimizer, fod.enable_gradient_release(model, optimizer, **options)


def test_a_copy_of_the_model_is_an_ordinary_one() -> None:
    """An average of weights, a file: neither takes the optimizer along, nor steps the model it came from."""
    model, optimizer, _ = _small(clip_global_norm=1.0)
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    file = io.BytesIO()
    torch.save(model, file)
    assert file.tell() < 3 * 4 * sum(weight.numel() for weight in weights), "weights alone"
    file.seek(0)
    average = torch.optim.swa_utils.AveragedModel(model)
    for other in (copy.deepcopy(model), average.module, torch.load(file, weights_only=False)):
        other(torch.ones(2, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert_same_bits(parameter.detach(), weight, "weight of the model")
    model(torch.ones(2, 32)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters()), "the model itself is released as before"


def test_clipping_what_is_gone_is_refused() -> None:
    """clip_grad_norm_ in an unchanged loop would find no gradient, and clip nothing in silence."""
    model, optimizer, handle = _small()
    for step in range(2):
        if step == 1:
            with handle.accumulate():
                model(torch.ones(2, 32)).sum().backward()
            fod.clip_grad_norm_(model.parameters(), 1.0)  # kept gradients are there to be clipped
        model(torch.ones(2, 32)).sum().backward()
        for target in (optimizer, list(model.parameters())):
            with pytest.raises(RuntimeError, match=r"stepped during the backward pass .*clip_global_norm=max_norm"):
                fod.clip_grad_norm_(target, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    model(torch.ones(2, 32)).sum().backward()
    assert float(fod.clip_grad_norm_(optimizer, 1.0)) > 0.0


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"clip_value": 1.0}, {"clip_global_norm": 1.0}])
def test_sparse_gradients_are_refused_by_name(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(10, 32, sparse=True), nn.Linear(32, 32))
    optimizer = fod.FlashAdamW(model.named_parameters())
    fod.enable_gradient_release(model, optimizer, **options)
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' \(10, 32\) has a sparse gradient.*sparse=False"):
        model(torch.tensor([1])).sum().backward()


def test_a_parameter_of_two_parts_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    optimizer = fod.FlashAdamW(model.named_parameters())
    with pytest.raises(ValueError, match=r"parameter '0\.weight' of model part 1 is in part 0 too"):
        fod.enable_gradient_release([model, model], optimizer)


@pytest.mark.parametrize("value", [[math.nan, 0.1], [-1.0, 0.1], [1.0, math.inf], [1.0]])
def test_running_norms_that_cannot_be_are_refused(value: list[float]) -> None:
    model, optimizer, handle = _small(clip_global_norm=1.0)
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    before = handle.state_dict()
    assert before.keys() == {"0", "2"}
    with pytest.raises(ValueError, match=r"the running norm of unit '2' is .* leave it out of the state"):
        handle.load_state_dict({**before, "2": value})
    assert handle.state_dict() == before
    handle.load_state_dict({"2": before["2"], "of another model": [1.0, 0.1]})
    assert handle.state_dict() == {"2": before["2"]}
