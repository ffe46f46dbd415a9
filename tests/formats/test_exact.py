"""Square roots that are correctly rounded on every path."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flashoptim_dist.formats.exact import square_root
from tests.numbers import assert_same_bits, float32_of, spread_float32


@pytest.fixture(params=[1, 8], ids=["one thread", "eight threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Few threads and many take different paths."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def values() -> torch.Tensor:
    """All exponents, and the squares of numbers around which rounding is decided."""
    roots = torch.rand(1 << 15, generator=torch.Generator().manual_seed(0)) + 1
    return torch.cat([spread_float32(1 << 16, seed=9).abs(), roots * roots, float32_of([0x7F800000, 0x80000000, 0])])


def test_roots_are_correctly_rounded(threads: int) -> None:
    """x lies between the squares of the midpoints around its root; fp64 holds those exactly (25 bits squared)."""
    x = values()
    root = square_root(x)
    finite = torch.isfinite(x) & (x > 0)
    wide, r = x[finite].to(torch.float64), root[finite].numpy()
    below = (np.nextafter(r, np.float32(0)).astype(np.float64) + r) / 2
    above = (np.nextafter(r, np.float32(np.inf)).astype(np.float64) + r) / 2
    assert bool((torch.from_numpy(below * below) <= wide).all())
    assert bool((wide <= torch.from_numpy(above * above)).all())
    assert_same_bits(root[-3:], float32_of([0x7F800000, 0x80000000, 0]))


def test_of_negative_numbers_it_is_nan(threads: int) -> None:
    assert bool(torch.isnan(square_root(torch.tensor([-1.0, -1e-45, float("-inf"), float("nan")]))).all())


def test_out_may_be_new_or_the_argument_itself(threads: int) -> None:
    x = values()
    expected = square_root(x)
    out = torch.empty_like(x)
    assert square_root(x, out=out) is out
    assert_same_bits(out, expected)
    assert square_root(x, out=x) is x
    assert_same_bits(x, expected)


def test_any_strides_and_dtypes(threads: int) -> None:
    x = torch.rand(30, 40, generator=torch.Generator().manual_seed(1))
    assert_same_bits(square_root(x.t()), square_root(x).t())
    assert_same_bits(square_root(x[:, ::2]), square_root(x)[:, ::2])
    assert_same_bits(square_root(x.to(torch.float64)), torch.sqrt(x.to(torch.float64)))
    assert square_root(torch.zeros(0, 32)).shape == (0, 32)
