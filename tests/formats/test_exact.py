"""Square roots are the correctly rounded ones, whatever torch's vector library makes of them."""

from __future__ import annotations

import pytest
import torch

from flashoptim_dist.formats import exact
from flashoptim_dist.formats.exact import square_root
from tests.numbers import assert_same_bits


def numbers() -> torch.Tensor:
    """A million positive fp32 numbers over all binades, subnormals included."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(1, 0x7F800000, (1 << 20,), generator=generator, dtype=torch.int32)
    patterns[:1000] = torch.arange(1, 1001, dtype=torch.int32)
    return patterns.view(torch.float32)


def is_nearest(root: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Whether no fp32 number is nearer to the square root of x: by squares of midpoints, exact in fp64."""
    infinity = torch.full_like(root, torch.inf)
    below, above = torch.nextafter(root, -infinity).double(), torch.nextafter(root, infinity).double()
    low, high = (root.double() + below) / 2, (root.double() + above) / 2
    return (low * low <= x.double()) & (x.double() <= high * high)


@pytest.mark.parametrize("most_threads_for_numpy", [0, 1000], ids=["by torch", "by numpy"])
def test_roots_are_correctly_rounded(monkeypatch: pytest.MonkeyPatch, most_threads_for_numpy: int) -> None:
    monkeypatch.setattr(exact, "_MOST_THREADS_FOR_NUMPY", most_threads_for_numpy)
    x = numbers()
    assert bool(is_nearest(square_root(x), x).all())


@pytest.mark.parametrize("most_threads_for_numpy", [0, 1000], ids=["by torch", "by numpy"])
def test_special_values_strides_and_out(monkeypatch: pytest.MonkeyPatch, most_threads_for_numpy: int) -> None:
    monkeypatch.setattr(exact, "_MOST_THREADS_FOR_NUMPY", most_threads_for_numpy)
    special = square_root(torch.tensor([0.0, -0.0, torch.inf, -1.0, torch.nan]))
    assert_same_bits(special[:3], torch.tensor([0.0, -0.0, torch.inf]))
    assert bool(special[3:].isnan().all())
    x = numbers().view(1024, 1024)
    expected = square_root(x)
    assert_same_bits(square_root(x.t()), expected.t().contiguous())
    assert_same_bits(square_root(x[:, 3:50]), expected[:, 3:50].contiguous())
    out = x.clone()
    assert square_root(out, out=out) is out
    assert_same_bits(out, expected)
    assert_same_bits(square_root(torch.zeros(0, 3)), torch.zeros(0, 3))


def test_other_dtypes_keep_theirs() -> None:
    assert square_root(torch.full((2,), 4.0, dtype=torch.float64)).dtype == torch.float64
    assert square_root(torch.full((2,), 4.0, dtype=torch.bfloat16)).tolist() == [2.0, 2.0]
