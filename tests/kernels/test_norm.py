"""The norm kernel against fp64: any alignment, strides, dtypes and buckets; NaN and Inf; the same bits every time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashoptim_dist.optim.norms import NormPlan
from tests.numbers import assert_same_bits


def _gradients(device: torch.device) -> tuple[list[Tensor], list[int]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    line = normal(20011).to(device)
    pairs: list[tuple[Tensor, int]] = [
        (normal(17, 32).bfloat16(), 0),
        (line[3:19000], 1),  # begins 12 bytes behind a multiple of 16
        (line[1:3], 1),
        (normal(40).half()[1:], 0),
        (torch.zeros(0, 3), 2),
        (normal(7, 9).t(), 1),
        (normal(8, 8)[:, ::2], 0),
        (normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), 3),
        (torch.full((300,), 1e-25), 4),
        (torch.full((300,), 1e30), 5),
        (torch.zeros(5000), 2),
    ]
    return [gradient.to(device) for gradient, _ in pairs], [bucket for _, bucket in pairs]


def _expected(gradients: list[Tensor], buckets: list[int], infinity: bool) -> list[float]:
    totals = [0.0] * 7
    for gradient, bucket in zip(gradients, buckets, strict=True):
        wide = gradient.double()
        if infinity:
            totals[bucket] = max(totals[bucket], float(wide.abs().max()) if wide.numel() else 0.0)
        else:
            totals[bucket] += float(wide.square().sum())
    return totals


@pytest.mark.parametrize("infinity", [False, True])
def test_sums_per_bucket(infinity: bool, device: torch.device) -> None:
    gradients, buckets = _gradients(device)
    plan = NormPlan(gradients, buckets, 7, device, infinity=infinity, fused=True)
    assert plan._kernels is not None, "the kernels were not taken"
    sums = plan.sums(gradients)
    # Squares are added in fp32 eight at a time, then in fp64.
    assert sums.tolist() == pytest.approx(_expected(gradients, buckets, infinity), rel=8 * 2.0**-24)
    assert_same_bits(plan.sums(gradients), sums, "sums of the same gradients")
    elsewhere = [gradient.clone(memory_format=torch.preserve_format) for gradient in gradients]
    other = NormPlan(elsewhere, buckets, 7, device, infinity=infinity, fused=True).sums(elsewhere)
    assert other.tolist() == pytest.approx(sums.tolist(), rel=8 * 2.0**-24)
    if plan.fits(elsewhere, buckets, 7):
        assert_same_bits(plan.sums(elsewhere), other, "sums of gradients that moved")


@pytest.mark.parametrize("infinity", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_through(infinity: bool, bad: float, device: torch.device) -> None:
    gradients, buckets = _gradients(device)
    gradients[1][100] = bad
    sums = NormPlan(gradients, buckets, 7, device, infinity=infinity, fused=True).sums(gradients).tolist()
    assert math.isnan(sums[1]) if math.isnan(bad) else sums[1] == math.inf
    assert all(math.isfinite(value) for bucket, value in enumerate(sums) if bucket != 1)


def test_no_gradient_at_all(device: torch.device) -> None:
    assert NormPlan([], [], 2, device, infinity=False, fused=True).sums([]).tolist() == [0.0, 0.0]
