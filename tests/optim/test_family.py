"""Every optimizer of the family, from one table: against torch's, against exact arithmetic, and over world sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashoptim_dist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashoptim_dist.optim import FlashOptimizer
from tests.optim import exact
from tests.optim.cases import Case
from tests.optim.test_world_sizes import assert_same_states, train
from tests.pool import run_ranks

LR = 1e-2
STEPS = 5


@dataclass(frozen=True)
class Member:
    """One row of the table. ``peer``: the same in torch, where torch has it; ``step``: in fp64 (see ``exact``)."""

    ours: type[FlashOptimizer]
    peer: Callable[..., torch.optim.Optimizer] | None
    options: dict[str, Any] = field(default_factory=dict)

    def step(self, weight: Tensor, gradient: Tensor, moments: exact.Moments, step: int) -> Tensor:
        o: dict[str, Any] = {**self.ours([nn.Parameter(torch.zeros(1))], lr=LR, **self.options).defaults}
        gradient = -gradient if o["maximize"] else gradient
        if issubclass(self.ours, FlashLion):
            return exact.lion(weight, gradient, moments, o)
        if issubclass(self.ours, (FlashSGD, FlashSGDW)):
            return exact.sgd(weight, gradient, moments, step, o, decoupled=self.ours is FlashSGDW)
        decoupled = self.ours is FlashAdamW or o["decoupled_weight_decay"]
        return exact.adam(weight, gradient, moments, step, o, decoupled)


class _TorchSGDW(torch.optim.SGD):
    """torch's SGD behind a decay by hand: what decoupled means."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float = 0.0, **options: Any) -> None:
        super().__init__(params, lr=lr, **options)
        self.keep = 1.0 - lr * weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(self.keep)
        super().step(closure)


MOMENTUM = {"momentum": 0.9}
DECAY = {"weight_decay": 0.1}
ADAMW, ADAM = torch.optim.AdamW, torch.optim.Adam
SGD = torch.optim.SGD
FAMILY = {
    "AdamW": Member(FlashAdamW, ADAMW),
    "AdamW, decay, maximize": Member(FlashAdamW, ADAMW, DECAY | {"maximize": True}),
    "AdamW, other betas": Member(FlashAdamW, ADAMW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "AdamW, no momentum": Member(FlashAdamW, ADAMW, {"betas": (0.0, 0.9)}),
    "Adam": Member(FlashAdam, ADAM),
    "Adam, L2, maximize": Member(FlashAdam, ADAM, DECAY | {"maximize": True}),
    "Adam, decoupled": Member(FlashAdam, ADAM, DECAY | {"decoupled_weight_decay": True}),
    "Lion": Member(FlashLion, None),
    "Lion, decay, maximize": Member(FlashLion, None, DECAY | {"betas": (0.95, 0.98), "maximize": True}),
    "SGD": Member(FlashSGD, SGD),
    "SGD, L2": Member(FlashSGD, SGD, DECAY),
    "SGD, momentum": Member(FlashSGD, SGD, MOMENTUM),
    "SGD, dampening, L2": Member(FlashSGD, SGD, MOMENTUM | DECAY | {"dampening": 0.3}),
    "SGD, Nesterov, L2, maximize": Member(FlashSGD, SGD, MOMENTUM | DECAY | {"nesterov": True, "maximize": True}),
    "SGDW": Member(FlashSGDW, _TorchSGDW, DECAY),
    "SGDW, dampening": Member(FlashSGDW, _TorchSGDW, MOMENTUM | DECAY | {"dampening": 0.5}),
    "SGDW, Nesterov": Member(FlashSGDW, _TorchSGDW, MOMENTUM | DECAY | {"nesterov": True}),
}

SHAPES = {"matrix": (6, 70), "vector": (70,), "convolution": (5, 4, 3, 3), "scalar": (), "empty": (0, 64)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP32 = torch.float32


def case_of(shape: str, dtype: str) -> Case:
    return Case(f"{shape} {dtype}", SHAPES[shape], None, dtype=DTYPES[dtype], gradient_dtype=FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("member", FAMILY)
def test_like_torch_to_rounding(member: str, shape: str, dtype: str) -> None:
    """fp32 moments, and weights that lose no bit: fp32 ones, or 16-bit ones with 16 bits of correction.

    Bound. A step rounds the weight at most 3 times in either program (decay, product, difference): 3 ulps of 2^-23 of
    the weight's size between the two. The update, at most a few lr in size (for SGD: the gradient's), comes from under
    16 operations, each off by 2^-24 of the largest operand; for m with its cancellation that operand is sqrt(v)-sized
    (|m| <= sqrt(v) / sqrt(1 - beta2) times sqrt(1 - beta1), under 10). So per step 3 |w| + 16 * 10 * |update| ulps.
    fp16 weights below 2^-14 are held to 2^-40.
    """
    row, case = FAMILY[member], case_of(shape, dtype)
    parameter = case.parameter()
    optimizer = row.ours([parameter], lr=LR, quantize=False, master_weight_bits=32, **row.options)
    start = parameter.detach().float().clone()
    peer_weight = nn.Parameter(start.clone())
    peer = row.peer([peer_weight], lr=LR, **row.options) if row.peer else None
    weight = start.double()
    names = [spec.name for spec in optimizer.moment_specs]
    moments = {name: torch.zeros_like(weight) for name in names}
    size = weight.abs()
    update = torch.zeros_like(weight)
    for step in range(1, STEPS + 1):
        case.step(optimizer, parameter, step)
        gradient = case.gradient(step)
        before = weight
        weight = row.step(weight, gradient.double(), moments, step)
        if peer is not None:
            peer_weight.grad = gradient.clone()
            peer.step()
        size = torch.maximum(size, weight.abs())
        update = torch.maximum(update, (weight - before).abs())
    bound = STEPS * 2.0**-23 * (3 * size + 160 * update) + 2.0**-40
    found = optimizer.master_weight(parameter).double()
    reference = weight if peer is None else peer_weight.detach().double()
    assert bool(((found - reference).abs() <= bound).all())
    assert bool(((found - weight).abs() <= bound).all())
    for name in names if row.options.get("momentum") or "exp_avg" in names else ():
        held = optimizer.state[parameter][name]
        assert held.dtype == torch.float32
        largest = moments[name].abs().amax() if held.numel() else 0.0
        assert bool(((held.double() - moments[name]).abs() <= 2.0**-20 * largest).all())
    if weight.numel() > 1:
        assert bool(((weight - start).abs() > 100 * bound).any()), "the bound would hide the whole run"


QUANTIZED = {
    "stochastic": {},
    "nearest": {"rounding": "nearest"},
    "32-bit masters": {"master_weight_bits": 32},
    "no masters": {"master_weight_bits": None},
}
PAIRS = [("bf16", options) for options in QUANTIZED] + [("fp16", "stochastic"), ("fp32", "nearest")]


@pytest.mark.parametrize("dtype, options", PAIRS)
@pytest.mark.parametrize("shape", ["matrix", "convolution"])
@pytest.mark.parametrize("member", FAMILY)
def test_every_step_is_exact_but_for_one_rounding(member: str, shape: str, dtype: str, options: str) -> None:
    """Each step from the state as it is stored, in fp64, to what is stored after it: one rounding to the format each.

    The bounds are those of ``exact``, widened by 2^-18 for fp32 arithmetic (a dozen operations of 2^-24 each).
    """
    row, case, given = FAMILY[member], case_of(shape, dtype), QUANTIZED[options]
    parameter = case.parameter()
    optimizer = row.ours([("weight", parameter)], lr=LR, **given, **row.options)
    optimizer.init_state()
    state = optimizer.state[parameter]
    unit = 0.5 if given.get("rounding") == "nearest" else 1.0
    bits = given.get("master_weight_bits", 24)
    correction = 0 if bits is None or dtype == "fp32" else bits - 16
    weight_unit = 0.5 if correction == 16 or dtype == "fp32" else unit  # 32 bits hold all there is
    for step in range(1, STEPS + 1):
        names = [name for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in state]
        moments = {name: exact.ungrouped(exact.decoded(state, name), state[name]) for name in names}
        weight = optimizer.master_weight(parameter).double()
        case.step(optimizer, parameter, step)
        target = row.step(weight, case.gradient(step).double(), moments, step)
        for name in names:
            held, wanted = exact.decoded(state, name), exact.grouped(moments[name])
            bound = exact.moment_bound(state, name, wanted, unit)
            slack = 2.0**-18 * wanted.abs().amax(dim=-1, keepdim=True)
            assert bool(((held - wanted).abs() <= bound + slack).all()), (name, step)
        move = (target - weight).abs()
        bound = exact.weight_bound(target, DTYPES[dtype], correction, weight_unit)
        arithmetic = 2.0**-18 * move + 3 * 2.0**-24 * torch.maximum(target.abs(), weight.abs())
        found = optimizer.master_weight(parameter).double()
        # sqrt(v) may be tiny where m is not: m's cancellation counts against the largest update.
        assert bool(((found - target).abs() <= bound + arithmetic + 2.0**-20 * LR).all()), step
    assert ("error_bits" in state) == bool(correction)


WORLD_CASES = [
    Case("family matrix", (7, 100)),
    Case("family convolution", (4, 5, 3, 3), dtype=torch.float16, gradient_dtype=FP32),
    Case("family fp32 vector", (37,), dtype=FP32),
]


@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 2)), 3])
@pytest.mark.parametrize("case", WORLD_CASES, ids=str)
def test_same_bits_over_world_sizes(case: Case, world_size: int) -> None:
    """Every row of the table, under both roundings; more placements of fewer options are in test_world_sizes."""
    kinds = {
        f"{name}, {rounding}": (row.ours, row.options | {"rounding": rounding})
        for name, row in FAMILY.items()
        for rounding in ("stochastic", "nearest")
    }
    expected = train(case, kinds, None)
    assert expected is not None
    assert_same_states(run_ranks(world_size, train, case, kinds, world_size)[0], expected)


# ---------------------------------------------------------------------------------------------- particular promises


@pytest.mark.parametrize("optimizer_type", [FlashSGD, FlashSGDW])
def test_no_momentum_keeps_no_moments(optimizer_type: type[FlashOptimizer]) -> None:
    case = case_of("matrix", "bf16")
    parameter = case.parameter()
    optimizer = optimizer_type([parameter], lr=LR)
    case.step(optimizer, parameter, 1)
    assert set(optimizer.state[parameter]) == {"step", "error_bits"}


def test_dampening_is_skipped_on_the_first_step() -> None:
    """The gradient enters a fresh momentum whole, also where the momentum is switched on in mid-run; then dampened."""
    case = case_of("vector", "fp32")
    parameter = case.parameter()
    optimizer = FlashSGD([parameter], lr=LR, momentum=0.9, dampening=0.75)
    case.step(optimizer, parameter, 1)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], case.gradient(1))
    case.step(optimizer, parameter, 2)
    expected = 0.9 * case.gradient(1).double() + 0.25 * case.gradient(2).double()
    torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"].double(), expected, rtol=1e-6, atol=1e-8)

    later = case.parameter()
    optimizer = FlashSGD([later], lr=LR)
    case.step(optimizer, later, 1)
    optimizer.param_groups[0].update(momentum=0.9, dampening=0.75)
    case.step(optimizer, later, 2)
    assert torch.equal(optimizer.state[later]["momentum_buffer"], case.gradient(2))


@pytest.mark.parametrize("member", [name for name in FAMILY if "maximize" not in name])
def test_maximize_is_the_step_of_the_negated_gradient(member: str) -> None:
    row, case = FAMILY[member], case_of("matrix", "bf16")
    up, down = case.parameter(), case.parameter()
    ascent = row.ours([("w", up)], lr=LR, maximize=True, **row.options)
    descent = row.ours([("w", down)], lr=LR, **row.options)
    for step in range(1, STEPS + 1):
        up.grad, down.grad = case.gradient(step), -case.gradient(step)
        ascent.step()
        descent.step()
    assert torch.equal(ascent.master_weight(up), descent.master_weight(down))
    assert not torch.equal(up, case.weight())
