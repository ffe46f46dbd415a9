"""Clipping, finite checks and loss scales under gradient release."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import flashoptim_dist as fod
from flashoptim_dist.sharding import local_tensor
from tests.numbers import assert_same_bits
from tests.optim.cases import whole
from tests.pool import run_ranks
from tests.release.models import batch, build, everything, loss_of, train

State = dict[str, dict[str, Tensor]]


def _assert_equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    for name, entries in expected.items():
        for entry, value in entries.items():
            assert_same_bits(state[name][entry], value, f"{entry} of {name}")


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 0


# ---------------------------------------------------------------------- exact: values and parameters' norms


def _clip_values(model: nn.Module, bound: float) -> None:
    nn.utils.clip_grad_value_(model.parameters(), bound)


def _clip_each_parameter(model: nn.Module, bound: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm = whole(parameter.grad).double().square().sum().sqrt()
            coefficient = (bound / (norm + 1e-6)).clamp(max=1.0).float()
            local_tensor(parameter.grad).mul_(coefficient)


def _exact(kind: str, release: bool, fused: bool | None) -> State:
    """fp32 throughout: there, multiplying a gradient beforehand gives the bits of a factor inside the step."""
    model = build(_world(), dtype=torch.float32, layers=2)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2, fused=fused)
    before: Callable[[], None] | None = None
    if release and kind == "value":
        fod.enable_gradient_release(model, optimizer, clip_value=1e-3)
    elif release:
        fod.enable_gradient_release(model, optimizer, clip_parameter_norm=0.02)
    else:
        clip = _clip_values if kind == "value" else _clip_each_parameter

        def before() -> None:
            clip(model, 1e-3 if kind == "value" else 0.02)

    train(model, optimizer, range(2), before_step=before)
    return everything(model, optimizer)


@pytest.mark.parametrize(
    "world_size, fused, kind",
    [
        (2, None, "value"),
        (2, None, "parameter norm"),
        pytest.param(4, None, "value", marks=pytest.mark.full),
        pytest.param(4, None, "parameter norm", marks=pytest.mark.full),
        pytest.param(2, True, "value", marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param(2, True, "parameter norm", marks=[pytest.mark.full, pytest.mark.long]),
    ],
)
def test_values_and_parameter_norms_are_clipped_exactly(kind: str, world_size: int, fused: bool | None) -> None:
    on, off = (run_ranks(world_size, _exact, kind, release, fused) for release in (True, False))
    for state, expected in zip(on, off, strict=True):
        if fused and kind == "parameter norm":  # the kernels fold the factor with 1 - beta
            for name, entries in expected.items():
                torch.testing.assert_close(state[name]["weight"], entries["weight"], rtol=1e-6, atol=1e-6)
        else:
            _assert_equal(state, expected)


# ---------------------------------------------------------------------- the global norm, by its rule


def _units(model: nn.Module) -> dict[str, list[str]]:
    """The parameters of each unit, in the order of the backward pass."""
    units: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name != "unused":
            parts = name.split(".")
            units.setdefault(".".join(parts[:2]) if parts[0] == "layers" else parts[0], []).append(name)
    return dict(reversed(units.items()))


def _rule(max_norm: float, norms: list[dict[str, float]], count: int) -> list[dict[str, float]]:
    """The coefficients of each step, restated from the rule in the documentation; of plain numbers."""
    means: dict[str, tuple[float, float]] = {}
    found = []
    for step in norms:
        coefficients, so_far = {}, 0.0
        for unit, norm in step.items():
            so_far += norm**2
            if unit in means:
                r = {name: math.sqrt(total / weight) for name, (total, weight) in means.items()}
                estimate = max(math.hypot(*r.values()) * norm / r[unit], math.sqrt(so_far))
            else:
                estimate = norm * math.sqrt(count)
            coefficients[unit] = min(1.0, max_norm / (estimate + 1e-6))
        for unit, norm in step.items():
            total, weight = means.get(unit, (0.0, 0.0))
            means[unit] = (0.9 * total + 0.1 * norm**2, 0.9 * weight + 0.1)
        found.append(coefficients)
    return found


def _running_norm(max_norm: float) -> tuple[list[dict[str, float]], list[dict[str, float]], list[float], float]:
    """Four steps; of each the norms of the units, the coefficients used, and the global norm that was reported."""
    model = build(_world(), layers=2)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    handle = fod.enable_gradient_release(model, optimizer, clip_global_norm=max_norm)
    units = _units(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    unit_of = {name: unit for unit, members in units.items() for name in members}
    inner, norms, used, reported = optimizer._step, [], [], []

    def step(inputs: Any, subset: Any = None) -> None:
        if subset is not None:
            unit = unit_of[names[subset.parameters[0]]]
            squares = [float(whole(p.grad).double().square().sum()) for p in subset.parameters if p.grad is not None]
            norms[-1][unit] = math.sqrt(sum(squares))
            used[-1][unit] = float(inputs.coefficient)
        inner(inputs, subset)

    optimizer._step = step  # type: ignore[method-assign]
    for number in range(4):
        norms.append({})
        used.append({})
        loss = loss_of(model, batch(number)) * (1.0, 3.0, 0.5, 20.0)[number]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert handle.gradient_norm is not None
        reported.append(float(handle.gradient_norm))
    return norms, used, reported, sum(1 for _ in handle.state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_global_norm_is_clipped_by_its_rule(world_size: int) -> None:
    """Also: reported exactly; the first update is clipped as a whole; a common factor is seen at once."""
    max_norm = 0.5
    results = run_ranks(world_size, _running_norm, max_norm)
    norms, used, reported, known = results[0]
    # embedding, two layers, head; the root holds what is not in them, of which nothing got a gradient
    assert known == 4
    for step, norm in zip(norms, reported, strict=True):
        assert norm == pytest.approx(math.hypot(*step.values()), rel=1e-6)
    for ours, expected in zip(used, _rule(max_norm, norms, 5), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    assert math.hypot(*(norms[0][unit] * used[0][unit] for unit in norms[0])) <= max_norm
    last = math.hypot(*(norms[3][unit] * used[3][unit] for unit in norms[3]))
    assert last == pytest.approx(max_norm, rel=0.5), "twenty times the loss leaves a norm of about the bound"
    for other in results[1:]:
        assert other[1] == used, "all ranks clip alike"


def _resumed_norms() -> None:
    def fresh() -> tuple[Any, Any, fod.GradientRelease]:
        model = build(_world(), layers=2)
        optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
        return model, optimizer, fod.enable_gradient_release(model, optimizer, clip_global_norm=0.3)

    model, optimizer, handle = fresh()
    train(model, optimizer, range(2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states, norms = optimizer.state_dict(), handle.state_dict()
    states = {**states, "state": {k: {n: v.clone() for n, v in s.items()} for k, s in states["state"].items()}}
    train(model, optimizer, range(2, 4))
    expected = everything(model, optimizer)
    model, optimizer, handle = fresh()
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    handle.load_state_dict(norms)
    assert handle.state_dict() == norms
    train(model, optimizer, range(2, 4))
    _assert_equal(everything(model, optimizer), expected)


def test_running_norms_are_saved_and_loaded() -> None:
    run_ranks(2, _resumed_norms)


# ---------------------------------------------------------------------- what is not finite


def _one_bad_gradient(bad_rank: int, fused: bool | None) -> tuple[dict[str, float], dict[str, float], int, float]:
    """An Inf in a part of the second layer that one rank holds, in the second of three updates."""
    model = build(_world(), layers=3)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2, fused=fused)
    handle = fod.enable_gradient_release(model, optimizer, skip_nonfinite=True)
    parameters = dict(model.named_parameters())
    target = parameters["layers.1.down.weight"]
    step = 0

    def spoil(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        if step == 1 and dist.get_rank() == bad_rank:
            parameter.grad._local_tensor[0, 0] = math.inf

    target.register_post_accumulate_grad_hook(spoil)
    counts = []
    for step in range(3):
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append({n: float(optimizer.state[p]["step"]) for n, p in parameters.items() if p in optimizer.state})
        if step == 1:
            assert handle.gradient_norm is not None
            assert math.isinf(float(handle.gradient_norm))
    finite = all(bool(whole(parameter).isfinite().all()) for parameter in parameters.values())
    return counts[1], counts[2], optimizer.skipped_steps, float(finite)


@pytest.mark.parametrize("fused", [None, pytest.param(True, marks=pytest.mark.full)])
def test_d50_a_unit_that_is_not_finite_is_skipped_on_all_ranks_with_all_that_follow(fused: bool | None) -> None:
    results = run_ranks(2, _one_bad_gradient, 1, fused)
    assert results[0] == results[1]
    second, third, skipped, finite = results[0]
    assert (skipped, finite) == (1, 1.0)
    for name, count in second.items():
        came_before = name.startswith(("head", "layers.2"))
        assert count == (2.0 if came_before else 1.0), name
    assert all(third[name] == second[name] + 1.0 for name in third)


# ---------------------------------------------------------------------- GradScaler


def _scaled(release: bool, spoil: bool) -> tuple[State, float, int]:
    model = build(_world(), dtype=torch.float16, layers=2)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    if release:
        fod.enable_gradient_release(model, optimizer, grad_scaler=scaler)
    for step in range(3):
        factor = math.inf if spoil and step == 1 else 1.0
        scaler.scale(loss_of(model, batch(step)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return everything(model, optimizer), scaler.get_scale(), optimizer.skipped_steps


@pytest.mark.parametrize("spoil", [False, True])
def test_grad_scaler_as_without_release(spoil: bool) -> None:
    """An Inf in the loss is in every unit, so that the update is skipped as a whole, as without release."""
    for (state, scale, skipped), (expected, expected_scale, expected_skipped) in zip(
        run_ranks(2, _scaled, True, spoil), run_ranks(2, _scaled, False, spoil), strict=True
    ):
        assert (scale, skipped) == (expected_scale, expected_skipped) == ((8.0, 1) if spoil else (16.0, 0))
        _assert_equal(state, expected)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("told_of_another", [False, True])
def test_a_grad_scaler_that_release_does_not_know_of_is_refused(
    told_of_another: bool, accumulate: bool, unscale: bool
) -> None:
    """Also where nothing was stepped yet, because all of the update ran under accumulate()."""
    model = nn.Linear(32, 32)
    optimizer = fod.FlashAdamW(model.named_parameters())
    other = torch.amp.GradScaler("cpu", init_scale=4.0) if told_of_another else None
    handle = fod.enable_gradient_release(model, optimizer, grad_scaler=other)
    scaler = torch.amp.GradScaler("cpu")
    with handle.accumulate() if accumulate else nullcontext():
        scaler.scale(model(torch.ones(1, 32)).sum()).backward()
    before = model.weight.detach().clone()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"enable_gradient_release\(\.\.\., grad_scaler=scaler\)"):
        scaler.step(optimizer)
    assert torch.equal(model.weight, before)


# ---------------------------------------------------------------------- all of an update under accumulate()


def _accumulated(release: bool, scaled: bool, unscale: bool, clip: bool, spoil: bool) -> tuple[State, list[int], float]:
    """Two optimizers, three updates of two micro-batches; nothing is stepped before step()."""
    model = build(_world(), layers=2)
    named = list(model.named_parameters())
    optimizers = [fod.FlashAdamW(named[:5], lr=1e-3), fod.FlashAdamW(named[5:], lr=1e-3)]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000, enabled=scaled)
    handle = fod.enable_gradient_release(model, optimizers, grad_scaler=scaler) if release else None
    norm = torch.zeros(())
    for step in range(3):
        with nullcontext() if handle is None else handle.accumulate():
            for micro in range(2):
                factor = math.inf if spoil and step == 1 else 1.0
                scaler.scale(loss_of(model, batch(step, micro)) * factor).backward()
        if unscale:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if clip:
            norm = fod.clip_grad_norm_(optimizers, 0.25)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    state = {**everything(model, optimizers[0]), **everything(model, optimizers[1])}
    return state, [optimizer.skipped_steps for optimizer in optimizers], float(norm)


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize(
    "scaled, unscale, clip",
    [
        (True, True, True),
        *(
            pytest.param(*c, marks=pytest.mark.full)
            for c in [(False, False, True), (True, False, False), (True, True, False)]
        ),
    ],
)
def test_an_update_that_is_all_accumulated_is_that_without_release(
    scaled: bool, unscale: bool, clip: bool, spoil: bool
) -> None:
    """clip_grad_norm_ and unscale_ see all gradients then, and what they did to them counts in step()."""
    on, off = (run_ranks(2, _accumulated, release, scaled, unscale, clip, spoil) for release in (True, False))
    for (state, skipped, norm), (expected, expected_skipped, expected_norm) in zip(on, off, strict=True):
        assert skipped == expected_skipped == ([1, 1] if spoil else [0, 0])
        assert norm == expected_norm
        assert norm > 0.25 or not clip
        _assert_equal(state, expected)
