"""One step of the kernels beside the same step of the torch definition, from the same state: what may differ, and how
far.

Both start from bit-equal weights, corrections and moments, which two steps of the definition have made, so that
nothing adds up. fp32 numbers that the two compute in another order differ by a few roundings of 2**-24 each, at most
16 in a row (`ROUNDING`):

- a code differs by at most 1, and only where the number before rounding lies within the error of the middle between
  two codes: a momentum's is at most 127, so 127 * 2**-20 of them; a variance's unit is 2**14 units of fp32 or more, of
  which the error is 16 at most, on both sides 2**-9. Allowed: `UNEQUAL_CODES`.
- a momentum's scale is rounded up to bf16: one unit more or less where the error crosses a bf16 number. A variance's
  holds its top and its k: where the error crosses what decides them, the same lattice has other codes, or one of the
  two sides has a lattice half as fine. So a variance is compared by its decoded pattern: one unit of the coarser.
- Adam's momentum is in a unit that its variance gives. Where that is another, both sides round by one code of theirs.
- a master weight differs by the error of the update, and by one unit of its format where that crosses a middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import flashoptim_dist as fod
from flashoptim_dist.formats import decode_variance, merge, to_groups
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.conversion import dequantize
from flashoptim_dist.sharding import local_tensor

ROUNDING = 2.0**-20
UNEQUAL_CODES = 1 / 500

Unequal = tuple[int, int]
"""Codes and scales that differ; codes under other scales are not counted."""

FLAT = (17, 32)
"""Whole blocks for the flat kernel, of 256 elements interpreted and 512 compiled, and a tail of one group."""

RAGGED = (3, 40)
"""Rows that end in a partial group."""

SMALL = (5,)
"""Too small to be quantized."""

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """Optimizer, dtypes and shapes of a comparison. ``edit`` changes the gradients before the compared step."""

    optimizer: type[FlashOptimizer] = fod.FlashAdamW
    weight: torch.dtype = bf16
    gradient: torch.dtype = bf16
    options: dict[str, Any] = field(default_factory=dict)
    shapes: Sequence[tuple[int, ...]] = (FLAT, RAGGED, SMALL)
    steps_before: int = 2
    edit: Callable[[list[Tensor]], None] | None = None

    def __str__(self) -> str:
        words = [self.optimizer.__name__, *(str(d).removeprefix("torch.") for d in (self.weight, self.gradient))]
        words += [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([*words, *(["first"] if self.steps_before == 0 else [])])


def random_weights(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in shapes]


def random_gradient(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Gradients over four orders of magnitude within a group, some of them zero."""
    gradient = torch.randn(shape) * 10 ** torch.randn(shape) * 1e-3
    return torch.where(torch.rand(shape) < 0.05, 0.0, gradient).to(dtype)


def set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Set a gradient of any dtype."""
    parameter.grad = None
    if gradient.dtype != parameter.dtype:
        parameter.grad_dtype = None
    parameter.grad = gradient


def named(parameters: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"layers.{number}.weight", parameter) for number, parameter in enumerate(parameters)]


def copy_of(
    optimizer: FlashOptimizer, parameters: Sequence[Tensor], device: torch.device, **options: Any
) -> tuple[list[torch.nn.Parameter], FlashOptimizer]:
    """Parameters and an optimizer that steps them by the kernels, with the bits of the given ones; gradients too."""
    copies = [torch.nn.Parameter(p.detach().to(device, copy=True)) for p in parameters]
    other = type(optimizer)(named(copies), **options, fused=True)
    other.init_state()
    for source, copy in zip(parameters, copies, strict=True):
        for name, value in optimizer.state[source].items():
            other.state[copy][name].copy_(value)
        if source.grad is not None:
            set_gradient(copy, source.grad.to(device, copy=True))
    return copies, other


@dataclass
class Stepped:
    """A step of both sides: parameters, optimizers, and the master weights and moments before it (fp64)."""

    case: Case
    expected: list[torch.nn.Parameter]
    expected_optimizer: FlashOptimizer
    actual: list[torch.nn.Parameter]
    actual_optimizer: FlashOptimizer
    before: list[dict[str, Tensor]]


def decoded(optimizer: FlashOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Master weight and moments of a parameter, fp64 on the CPU."""
    state, record = optimizer.state[parameter], optimizer._record(parameter)
    values = {"weight": merge(local_tensor(parameter.detach()), state.get("error_bits"))}
    for moment in record.moments:
        values[moment.name] = state[moment.name]
    compressed = [moment for moment in record.moments if moment.scale_name in record.entries]
    stored = [(state[moment.name], state[moment.scale_name]) for moment in compressed]
    decoded_moments = dequantize(stored, [moment.signed for moment in compressed], record.layout)
    values.update({moment.name: value for moment, value in zip(compressed, decoded_moments, strict=True)})
    return {name: value.detach().to("cpu", torch.float64) for name, value in values.items()}


def step_both(case: Case, device: torch.device, seed: int = 0) -> Stepped:
    torch.manual_seed(seed)
    expected = random_weights(case.shapes, case.weight)
    options = {"lr": 1e-3, **case.options}
    optimizer = case.optimizer(named(expected), **options, fused=False)
    for _ in range(case.steps_before):
        for parameter in expected:
            set_gradient(parameter, random_gradient(parameter.shape, case.gradient))
        optimizer.step()
    optimizer.init_state()
    gradients = [random_gradient(parameter.shape, case.gradient) for parameter in expected]
    if case.edit is not None:
        case.edit(gradients)
    for parameter, gradient in zip(expected, gradients, strict=True):
        set_gradient(parameter, gradient)
    before = [decoded(optimizer, parameter) for parameter in expected]
    actual, other = copy_of(optimizer, expected, device, **options)
    optimizer.step()
    other.step()
    assert other._stepper.plans, "the step was not taken by the kernels"
    return Stepped(case, expected, optimizer, actual, other, before)


def compare(pair: Stepped) -> None:
    """Assert that the two sides agree as far as this module says."""
    wrong = codes = unequal_scales = 0
    for number, (a, b) in enumerate(zip(pair.expected, pair.actual, strict=True)):
        where = f"{pair.case}, tensor {number} of shape {tuple(a.shape)}"
        expected, actual = pair.expected_optimizer.state[a], pair.actual_optimizer.state[b]
        assert expected.keys() == actual.keys(), where
        assert actual["step"].item() == expected["step"].item(), where
        terms = _terms(pair, number)
        for moment in pair.expected_optimizer._record(a).moments:
            values, others = expected[moment.name], actual[moment.name].cpu()
            assert values.dtype == others.dtype
            if moment.scale_name not in expected:
                assert_close(others, values, terms[moment.name] * ROUNDING, f"{moment.name}, {where}")
                continue
            sides = [_groups(pair, a, state) for state in (expected, actual)]
            stored = [side[name] for side in sides for name in (moment.name, moment.scale_name)]
            compare_codes = _compare_momentum if moment.signed else _compare_variance
            unequal, scales = compare_codes(*stored, f"{moment.name}, {where}")
            wrong, codes, unequal_scales = wrong + unequal, codes + values.numel(), unequal_scales + scales
        new, other = decoded(pair.expected_optimizer, a), decoded(pair.actual_optimizer, b)
        bits = pair.expected_optimizer._record(a).correction_bits
        allowed_error = terms["weight"] * ROUNDING + unit_of(new["weight"], a.dtype, bits)
        assert_close(other["weight"], new["weight"], allowed_error, f"master weight, {where}")
    assert wrong <= max(1, codes * UNEQUAL_CODES), f"{pair.case}: {wrong} of {codes} codes differ"
    assert unequal_scales <= 1, f"{pair.case}: {unequal_scales} scales differ"


def _groups(pair: Stepped, parameter: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes of a state in groups [G, 32], and patterns of its scales as int32 [G, 1], on the CPU."""
    layout = pair.expected_optimizer._record(parameter).layout
    found = {}
    for name, value in state.items():
        if name.endswith("_scale"):
            found[name] = value.cpu().reshape(-1, 1).view(torch.int16).int()
        elif name + "_scale" in state:
            found[name] = to_groups(value.cpu().reshape(layout.rows, layout.length))
    return found


def _compare_variance(codes: Tensor, scales: Tensor, others: Tensor, other_scales: Tensor, what: str) -> Unequal:
    values, other_values = (
        decode_variance(c, s.short().view(bf16).squeeze(1)) for c, s in ((codes, scales), (others, other_scales))
    )
    unit = 1 << (14 + torch.maximum(scales & 7, other_scales & 7))
    difference = (values.view(torch.int32) - other_values.view(torch.int32)).abs()
    assert bool((difference <= unit).all()), f"{what}: {(difference / unit).max()} units"
    assert bool((((scales & 7) - (other_scales & 7)).abs() <= 1).all()), f"{what}: k"
    assert bool((((scales >> 3) - (other_scales >> 3)).abs() <= 1).all()), f"{what}: tops"
    unequal = (scales != other_scales).squeeze(1)
    return int((difference[~unequal] > 0).sum()), int(unequal.sum())


def _compare_momentum(codes: Tensor, scales: Tensor, others: Tensor, other_scales: Tensor, what: str) -> Unequal:
    units = (scales - other_scales).abs()
    assert bool((units <= 1).all()), f"{what}: scales"
    difference = (codes.int() - others.int()).abs()
    # One bf16 unit of the scale moves a code by 127 * 2**-8 / 2 more.
    assert bool((difference <= torch.where(units > 0, 2, 1)).all()), f"{what}: {difference.max()}"
    unequal = (units > 0).squeeze(1)
    return int((difference[~unequal] > 0).sum()), int(unequal.sum())


def assert_close(actual: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
    """Assert equality of what is not finite, and the error bound elsewhere."""
    actual, expected = actual.double(), expected.double()
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isnan(actual), torch.isnan(expected)), f"{what}: NaN at other places"
    assert torch.equal(actual[torch.isinf(expected)], expected[torch.isinf(expected)]), f"{what}: Inf"
    difference = (actual - expected).abs()[finite]
    excess = difference > error.expand_as(expected)[finite]
    assert not excess.any(), f"{what}: {int(excess.sum())} elements off, by up to {difference[excess].max():.3g}"


def unit_of(weight: Tensor, dtype: torch.dtype, correction_bits: int) -> Tensor:
    """The distance between neighbouring master weights at ``weight`` (fp64)."""
    fraction, least = {bf16: (7, -133), fp16: (10, -24), fp32: (23, -149)}[dtype]
    fraction, least = min(fraction + correction_bits, 23), max(least - correction_bits, -149)
    exponent = torch.frexp(weight.nan_to_num(0.0, 0.0, 0.0)).exponent.double() - 1
    return torch.clamp(2.0 ** (exponent - fraction), min=2.0**least)


def _terms(pair: Stepped, number: int) -> dict[str, Tensor]:
    """The sum of the sizes of all terms that make up a new weight and new moments: what rounding errors are relative
    to. Lion's sign may flip where its terms cancel."""
    before, group = pair.before[number], pair.expected_optimizer.param_groups[0]
    step = int(pair.expected_optimizer.state[pair.expected[number]]["step"])
    gradient = pair.expected[number].grad.double().abs()
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    weight = before["weight"].abs()
    if isinstance(pair.expected_optimizer, fod.FlashAdam | fod.FlashSGD):
        gradient = gradient + decay * weight
    if "exp_avg_sq" in before:
        beta1, beta2 = map(float, group["betas"])
        momentum = beta1 * before["exp_avg"].abs() + (1 - beta1) * gradient
        variance = beta2 * before["exp_avg_sq"] + (1 - beta2) * gradient**2
        root = variance.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
        update = lr / (1 - beta1**step) * momentum / root
        return {"weight": weight + update, "exp_avg": momentum, "exp_avg_sq": variance}
    if "exp_avg" in before:
        beta1, beta2 = map(float, group["betas"])
        terms = beta1 * before["exp_avg"].abs() + (1 - beta1) * gradient
        signed = beta1 * before["exp_avg"] + (1 - beta1) * pair.expected[number].grad.double()
        flips = signed.abs() <= terms * ROUNDING
        momentum = beta2 * before["exp_avg"].abs() + (1 - beta2) * gradient
        return {"weight": weight + lr + flips * (2 * lr / ROUNDING), "exp_avg": momentum}
    momentum = group["momentum"] * before.get("momentum_buffer", torch.zeros(())).abs() + gradient
    return {"weight": weight + lr * (momentum + gradient), "momentum_buffer": momentum}


def every_fifth_in_ci(cases: list[Case]) -> list[Any]:
    """Return cases of the slow tier as pytest's parameters: all of them but every fifth are of the longest tier.

    Five is coprime to the numbers of values of the options, 2 and 3, so that each value, and each pair of neighbouring
    options' values, is still among what continuous integration runs.
    """
    long = (pytest.mark.full, pytest.mark.long)
    return [
        pytest.param(case, id=str(case), marks=long if index % 5 else pytest.mark.full)
        for index, case in enumerate(cases)
    ]
