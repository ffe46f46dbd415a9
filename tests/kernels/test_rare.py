"""The rare path: gradients that are not finite or overflow, weights near the largest, corrections that went stale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashoptim_dist as fod
from tests.kernels.pairs import (
    FLAT,
    RAGGED,
    ROUNDING,
    SMALL,
    Case,
    bf16,
    compare,
    copy_of,
    decoded,
    fp16,
    fp32,
    named,
    random_gradient,
    random_weights,
    set_gradient,
    step_both,
    unit_of,
)
from tests.numbers import assert_same_bits


def spoil(*values: float) -> Callable[[list[Tensor]], None]:
    """Put these values into every gradient, in a flat block and in tails and ragged rows, both signs."""

    def edit(gradients: list[Tensor]) -> None:
        for gradient in gradients:
            flat = gradient.view(-1)
            for number, value in enumerate(values):
                flat[number] = value
                flat[-1 - number] = -value

    return edit


SHAPES = [(16, 32), (1, 40), SMALL]
INF, NAN = float("inf"), float("nan")
GRADIENTS = {
    "Inf": spoil(INF), "NaN": spoil(NAN), "1e20": spoil(1e20), "1e19": spoil(1e19), "3e38": spoil(3e38, 1e38),
    "all": spoil(NAN, INF),
}  # fmt: skip
OPTIMIZERS = {
    "AdamW": (fod.FlashAdamW, {}),
    "Adam": (fod.FlashAdam, {"weight_decay": 0.1}),
    "AdamW fp32 moments": (fod.FlashAdamW, {"quantize": False}),
    "AdamW 32": (fod.FlashAdamW, {"master_weight_bits": 32, "rounding": "nearest"}),
    "AdamW none": (fod.FlashAdamW, {"master_weight_bits": None}),
    "Lion": (fod.FlashLion, {}),
    "Lion fp32 moments": (fod.FlashLion, {"quantize": False}),
    "Lion fp32 moments, none": (fod.FlashLion, {"quantize": False, "master_weight_bits": None}),
    "SGD": (fod.FlashSGD, {"momentum": 0.9, "lr": 1e-3}),
    "SGD fp32 moments, none": (fod.FlashSGD, {"momentum": 0.9, "quantize": False, "master_weight_bits": None}),
    "SGD plain": (fod.FlashSGDW, {"weight_decay": 0.1}),
}
FAST = {("1e20", "AdamW"), ("all", "AdamW"), ("all", "Lion"), ("all", "SGD")}


def _marks(gradient: str, optimizer: str) -> list[pytest.MarkDecorator]:
    """CI has every optimizer with two kinds of gradients, by turns."""
    if (gradient, optimizer) in FAST:
        return []
    in_turn = (list(GRADIENTS).index(gradient) + list(OPTIMIZERS).index(optimizer)) % 3 == 0
    return [pytest.mark.full] if in_turn else [pytest.mark.full, pytest.mark.long]


@pytest.mark.parametrize(
    "gradient, optimizer", [pytest.param(g, o, marks=_marks(g, o)) for g in GRADIENTS for o in OPTIMIZERS]
)
def test_gradients_that_are_not_finite_or_overflow(gradient: str, optimizer: str, device: torch.device) -> None:
    kind, options = OPTIMIZERS[optimizer]
    compare(step_both(Case(kind, bf16, bf16, options, shapes=SHAPES, edit=GRADIENTS[gradient]), device))


@pytest.mark.parametrize(
    "weight, gradient",
    [(bf16, fp32), pytest.param(fp32, fp32, marks=pytest.mark.full), pytest.param(fp16, fp32, marks=pytest.mark.full)],
)
def test_other_dtypes(weight: torch.dtype, gradient: torch.dtype, device: torch.device) -> None:
    compare(step_both(Case(weight=weight, gradient=gradient, shapes=SHAPES, edit=spoil(NAN, 1e20, INF)), device))


def test_inf_or_nan_hurts_its_element_alone(device: torch.device) -> None:
    """All others get the bits that they get with a zero in its place."""

    def states(value: float) -> tuple[Tensor, dict[str, Tensor]]:
        pair = step_both(Case(shapes=[FLAT], edit=spoil(value)), device)
        return pair.actual[0].detach(), pair.actual_optimizer.state[pair.actual[0]]

    weight, state = states(0.0)
    spoilt_weight, spoilt = states(NAN)
    first, last = 0, -1
    for name in ("exp_avg", "exp_avg_sq", "error_bits"):
        assert_same_bits(spoilt[name].view(-1)[1:-1], state[name].view(-1)[1:-1], name)
    assert_same_bits(spoilt_weight.view(-1)[1:-1], weight.view(-1)[1:-1], "weight")
    assert spoilt_weight.view(-1)[[first, last]].isnan().all()


@pytest.mark.parametrize("bits", [24, pytest.param(32, marks=pytest.mark.full)])
def test_weights_saturate_below_inf(bits: int, device: torch.device) -> None:
    """A weight that would pass the largest master weight stays there; an Inf stays Inf."""
    torch.manual_seed(0)
    weights = random_weights([FLAT, RAGGED], bf16)
    largest = torch.finfo(bf16).max
    with torch.no_grad():
        for weight in weights:
            weight.view(-1)[:4] = torch.tensor([largest, -largest, INF, -INF])
    options = {"lr": 1e37, "momentum": 0.0, "master_weight_bits": bits}
    optimizer = fod.FlashSGD(named(weights), **options, fused=False)
    optimizer.init_state()
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1)[:4] = torch.tensor([-0.05, 0.05, 0.0, 0.0])
    copies, other = copy_of(optimizer, weights, device, **options)
    optimizer.step()
    other.step()
    for weight, copy in zip(weights, copies, strict=True):
        assert_same_bits(copy.detach().cpu(), weight.detach(), "weight")
        assert weight.view(-1)[:4].tolist() == [largest, -largest, INF, -INF]
        assert torch.equal(decoded(other, copy)["weight"], decoded(optimizer, weight)["weight"])


@pytest.mark.parametrize(
    "kind, dtype",
    [
        (fod.FlashAdamW, bf16),
        (fod.FlashLion, fp16),
        pytest.param(fod.FlashAdam, bf16, marks=pytest.mark.full),
        pytest.param(fod.FlashAdamW, fp16, marks=pytest.mark.full),
        pytest.param(fod.FlashLion, bf16, marks=pytest.mark.full),
    ],
)
def test_stale_corrections(kind: type, dtype: torch.dtype, device: torch.device) -> None:
    """Under a zero weight a negative correction counts as zero, under Inf any."""
    torch.manual_seed(0)
    weights = random_weights([FLAT, RAGGED], dtype)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    optimizer = kind(named(weights), **options, fused=False)
    optimizer.init_state()
    for weight in weights:
        with torch.no_grad():
            weight.view(-1)[:3] = torch.tensor([0.0, -0.0, INF])
        optimizer.state[weight]["error_bits"].view(-1)[:3] = -100
        set_gradient(weight, random_gradient(weight.shape, dtype))
    copies, other = copy_of(optimizer, weights, device, **options)
    optimizer.step()
    other.step()
    for weight, copy in zip(weights, copies, strict=True):
        a, b = decoded(optimizer, weight)["weight"], decoded(other, copy)["weight"]
        assert torch.equal(torch.isfinite(a), torch.isfinite(b))
        finite = torch.isfinite(a)
        # The first update is lr in size.
        allowed = unit_of(a, dtype, 8) + ROUNDING * (a.abs() + options["lr"])
        assert ((a - b).abs() <= allowed)[finite].all()
        assert torch.equal(torch.isnan(a), torch.isnan(b))


def test_constant_gradients_keep_the_largest_codes(device: torch.device) -> None:
    """The largest of a group has a largest code whatever the noise: rounded up past it, it would wrap around to 0.

    Tops are multiples of 2**19, 32 units of the finest lattice, so a variance on its own has a code above 255 - 33. A
    momentum that is a bf16 number itself is 127 before rounding, give or take the error of a few operations; where
    noise takes its variance across a power of four, its unit is twice the others', and its code 127 sqrt(1/2) = 89.8.
    """
    torch.manual_seed(0)
    scales = torch.arange(256, 256 + 256, dtype=torch.float64) / 256  # 8 significant bits: all bf16 numbers of a binade
    weight = torch.nn.Parameter(torch.zeros(256, 32, device=device))
    optimizer = fod.FlashAdamW(named([weight]), betas=(0.0, 0.0), fused=True)
    for _ in range(1 if device.type == "cpu" else 50):
        weight.grad = (scales.float().unsqueeze(1) * torch.ones(32)).to(device)
        optimizer.step()
        assert optimizer.state[weight]["exp_avg_sq"].min() > 255 - 33
        codes = optimizer.state[weight]["exp_avg"]
        assert bool(((codes >= 126) | (codes == 89) | (codes == 90)).all())
        assert bool((codes >= 126).any(1).all())
