"""Lion's and SGD's step in the kernels against the torch definition, every form of SGD."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashoptim_dist as fod
from tests.kernels.pairs import Case, bf16, compare, every_fifth_in_ci, fp16, fp32, step_both

SGD_FORMS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]

CASES = [
    *(Case(fod.FlashLion, weight, gradient, {"weight_decay": 0.1}) for weight, gradient in (
        (bf16, bf16), (bf16, fp32), (fp16, fp16), (fp32, fp32),
    )),
    Case(fod.FlashLion, options={"rounding": "nearest", "maximize": True}),
    Case(fod.FlashLion, options={"master_weight_bits": 32}),
    Case(fod.FlashLion, options={"master_weight_bits": None, "quantize": False}),
    Case(fod.FlashLion, options={"quantize": False}),
    *(Case(fod.FlashSGD, options={"lr": 1e-2, **form}) for form in SGD_FORMS),
    *(Case(fod.FlashSGDW, options={"lr": 1e-2, **form}) for form in SGD_FORMS[1:]),
    Case(fod.FlashSGD, options={"momentum": 0.9, "dampening": 0.5}, steps_before=0),
    Case(fod.FlashSGD, fp16, fp32, {"momentum": 0.9, "maximize": True, "quantize": False}),
    Case(fod.FlashSGDW, fp32, fp32, {"momentum": 0.9, "rounding": "nearest", "weight_decay": 0.1}),
    Case(fod.FlashSGDW, bf16, bf16, {"master_weight_bits": None, "weight_decay": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_agrees_with_the_definition(case: Case, device: torch.device) -> None:
    compare(step_both(case, device))


FULL = [
    Case(optimizer, weight, gradient, {"master_weight_bits": bits, "rounding": rounding, "quantize": quantize, **form})
    for optimizer, form in [
        (fod.FlashLion, {"weight_decay": 0.1}),
        (fod.FlashSGD, {"weight_decay": 0.1, "momentum": 0.9}),
        (fod.FlashSGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
        (fod.FlashSGDW, {"weight_decay": 0.1}),
    ]
    for weight, gradient in itertools.product((bf16, fp16, fp32), repeat=2)
    for bits in (24, 32, None)
    for rounding in ("stochastic", "nearest")
    for quantize in (True, False)
    if not (weight == fp32 and bits != 24)
]


@pytest.mark.parametrize("case", every_fifth_in_ci(FULL))
def test_every_combination_agrees_with_the_definition(case: Case, device: torch.device) -> None:
    compare(step_both(case, device, seed=1))
