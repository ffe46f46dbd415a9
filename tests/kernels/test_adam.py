"""Adam's step in the kernels against the torch definition: dtypes, master weights, roundings, L2, maximize."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashoptim_dist as fod
from tests.kernels.pairs import FLAT, RAGGED, SMALL, Case, bf16, compare, every_fifth_in_ci, fp16, fp32, step_both

DTYPES = (bf16, fp16, fp32)
OPTIONS = {
    "nearest": {"rounding": "nearest"},
    "32": {"master_weight_bits": 32},
    "none": {"master_weight_bits": None},
    "fp32 moments": {"quantize": False},
    "fp32 moments, none": {"quantize": False, "master_weight_bits": None},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}

CASES = [
    *(Case(weight=weight, gradient=gradient) for weight, gradient in itertools.product(DTYPES, DTYPES)),
    *(Case(weight=bf16, gradient=bf16, options=options) for options in OPTIONS.values()),
    Case(weight=fp16, gradient=fp16, options={"master_weight_bits": 32}),
    Case(weight=fp16, gradient=fp32, options={"master_weight_bits": None, "rounding": "nearest"}),
    Case(weight=fp32, gradient=fp32, options={"rounding": "nearest"}),
    Case(weight=fp32, gradient=fp32, options={"quantize": False}),
    Case(fod.FlashAdam, options={"weight_decay": 0.1}),
    Case(fod.FlashAdam, options={"weight_decay": 0.1, "quantize": False, "maximize": True}),
    Case(steps_before=0),
    Case(options={"lr": 0.0, "weight_decay": 0.0}),
    Case(options={"betas": (0.0, 0.0)}),
    Case(options={"betas": (0.9, 0.9999999), "eps": 1e-15}),
    # weird shapes: every tail of a row, of a block and of a task; a scalar; nothing
    Case(shapes=[(1, 33), (2, 63), (1, 256), (3, 96), (), (0, 64), (2, 3, 35)]),
    Case(shapes=[(33, 32), (1,)], options={"rounding": "nearest"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_agrees_with_the_definition(case: Case, device: torch.device) -> None:
    compare(step_both(case, device))


FULL = [
    Case(optimizer, weight, gradient, {"master_weight_bits": bits, "rounding": rounding, "quantize": quantize, **more})
    for optimizer, more in ((fod.FlashAdamW, {}), (fod.FlashAdam, {"weight_decay": 0.1}))
    for weight, gradient in itertools.product(DTYPES, DTYPES)
    for bits in (24, 32, None)
    for rounding in ("stochastic", "nearest")
    for quantize in (True, False)
    if not (weight == fp32 and bits != 24)
]


@pytest.mark.parametrize("case", every_fifth_in_ci(FULL))
def test_every_combination_agrees_with_the_definition(case: Case, device: torch.device) -> None:
    compare(step_both(case, device, seed=1))


def test_learning_rate_tensor(device: torch.device) -> None:
    shapes = [FLAT, RAGGED, SMALL]
    compare(step_both(Case(shapes=shapes, options={"lr": torch.tensor(1e-3, dtype=torch.float64)}), device))
