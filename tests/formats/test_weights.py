"""The weight split, over every 16-bit weight and every correction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashoptim_dist.formats import correction_bits, correction_dtype, merge, split
from flashoptim_dist.formats.rounding import noise_key, noise_words, weight_noise
from tests.numbers import FP32_EDGES, assert_same_bits, every_16_bit, float32_of, pattern_of, spread_float32

DTYPES = (torch.bfloat16, torch.float16)
BITS = (8, 16)
PAIRS = [pytest.param(dtype, bits, id=f"{str(dtype)[6:]}-{bits}") for dtype in DTYPES for bits in BITS]
LARGEST_PATTERN = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF}
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}

SLICES = 16
"""The full tier takes all weights with all int16 corrections, 2**32 pairs, in this many tests."""

PAIRS_AT_A_TIME = 1 << 16


def value_of(weight: Tensor, correction: Tensor, bits: int) -> Tensor:
    """The master weight in exact arithmetic (fp64): weight + correction units of 2**-bits of the interval below it.

    Independent of the code: read as an integer, a floating-point pattern extended by `bits` mantissa bits counts
    units whose size is given by the exponent the extended pattern has; the result is at least 0 in magnitude.
    """
    dtype = weight.dtype
    mantissa = MANTISSA_BITS[dtype] + bits
    pattern = weight.view(torch.int16).to(torch.int64) & 0x7FFF
    extended = ((pattern << bits) + correction).clamp_(min=0)
    exponent = extended >> mantissa
    subnormal = exponent == 0
    count = (extended & ((1 << mantissa) - 1)) + torch.where(subnormal, 0, 1 << mantissa)
    units = torch.ldexp(
        torch.ones(256, dtype=torch.float64), torch.arange(256) - 1 + SMALLEST_EXPONENT[dtype] - mantissa
    )
    size = count * units[exponent + subnormal.to(torch.int64)]
    return torch.where(pattern_of(weight) < 0, -size, size)


def check_values(weight: Tensor, correction: Tensor, bits: int) -> None:
    """The merge of finite weights and corrections is the number that they define."""
    actual = merge(weight, correction).to(torch.float64)
    exact = value_of(weight, correction, bits)
    if (weight.dtype, bits) != (torch.float16, 16):
        assert torch.equal(actual, exact)
        return
    # fp32 holds 23 mantissa bits; fp16 and 16 correction bits have 26 (fewer only among fp16's subnormals). What does
    # not fit is cut off, never rounded up, since that could reach the next weight.
    lost = exact.abs() - actual.abs()
    assert bool(((lost >= 0) & (lost <= exact.abs() * 2.0**-23)).all())


def check_round_trip(weight: Tensor, correction: Tensor, bits: int) -> None:
    """Merging and splitting finite weights and corrections gives them back."""
    dtype = weight.dtype
    master = merge(weight, correction)
    again, kept = split(master, dtype, bits)
    assert_same_bits(again, weight, "weight of the split of a merge")
    if (dtype, bits) != (torch.float16, 16):
        zeroed = ((pattern_of(weight) & 0x7FFF) == 0) & (correction < 0)
        assert_same_bits(kept, torch.where(zeroed, 0, correction), "correction of the split of a merge")
        return
    assert_same_bits(merge(again, kept), master, "merge of the split of a merge")


def finite_weights(dtype: torch.dtype) -> Tensor:
    weights = every_16_bit(dtype)
    return weights[torch.isfinite(weights)]


def every_pair(weights: Tensor, corrections: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each weight with each correction, in blocks that stay in a core's cache."""
    for block in corrections.split(PAIRS_AT_A_TIME):
        for part in weights.split(max(1, PAIRS_AT_A_TIME // len(block))):
            yield part.repeat_interleave(len(block)), block.repeat(len(part))


def edge_corrections(bits: int) -> Tensor:
    """Every power of two, its neighbours, and the ends; of 16 bits also those that an 8-bit correction becomes."""
    powers = {sign * (1 << k) + d for k in range(bits) for sign in (1, -1) for d in (-1, 0, 1)}
    widened = {c << 8 for c in (-128, -127, -1, 0, 1, 127)}
    half = 1 << (bits - 1)
    return torch.tensor(sorted(c for c in powers | widened if -half <= c < half), dtype=correction_dtype(bits))


def edge_weights(dtype: torch.dtype) -> Tensor:
    """Weights of both signs at both ends of every binade and in the middle of it, zero and subnormals included."""
    step = 1 << MANTISSA_BITS[dtype]
    starts = range(0, LARGEST_PATTERN[dtype] + 1, step)
    magnitudes = sorted({m for s in starts for m in (s, s + 1, s + step // 2, s + step - 1)})
    patterns = torch.tensor([m | sign for m in magnitudes for sign in (0, 0x8000)], dtype=torch.int32)
    return patterns.to(torch.int16).view(dtype)


def every_correction(bits: int) -> Tensor:
    half = 1 << (bits - 1)
    return torch.arange(-half, half, dtype=torch.int32).to(correction_dtype(bits))


@pytest.mark.parametrize("dtype, bits", PAIRS)
def test_every_weight_with_edge_corrections(dtype: torch.dtype, bits: int) -> None:
    for pair in every_pair(finite_weights(dtype), edge_corrections(bits)):
        check_values(*pair, bits)
        check_round_trip(*pair, bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_with_every_8_bit_correction(dtype: torch.dtype) -> None:
    for pair in every_pair(finite_weights(dtype), every_correction(8)):
        check_round_trip(*pair, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_weights_with_every_16_bit_correction(dtype: torch.dtype) -> None:
    weights = edge_weights(dtype)
    # The inner binades behave alike: the first and last four, and some between.
    step = 16 if dtype == torch.bfloat16 else 4
    weights = torch.cat([weights[:32], weights[32:-32].view(-1, 8)[::step].reshape(-1), weights[-32:]])
    for pair in every_pair(weights, every_correction(16)):
        check_round_trip(*pair, 16)
    for pair in every_pair(weights[::7], every_correction(16)):
        check_values(*pair, 16)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, SLICES))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_with_every_16_bit_correction(dtype: torch.dtype, part: int) -> None:
    for pair in every_pair(finite_weights(dtype)[part::SLICES], every_correction(16)):
        check_round_trip(*pair, 16)


@pytest.mark.parametrize("dtype, bits", PAIRS)
def test_weight_is_the_nearest_one_to_its_master(dtype: torch.dtype, bits: int) -> None:
    """The correction of a split lies in half a unit of the weight: the forward pass sees the best 16-bit weight."""
    limit = torch.tensor(LARGEST_PATTERN[dtype], dtype=torch.int16).view(dtype).item()
    master = spread_float32(1 << 18, seed=1)
    if dtype == torch.float16:
        small = torch.randn(1 << 16, generator=torch.Generator().manual_seed(2)) * torch.logspace(-9, 4, 1 << 16)
        master = torch.cat([master, small])
    weight, correction = split(master, dtype, bits)
    kept = merge(weight, correction)
    inside = master.abs() <= limit
    exact, near = kept.to(torch.float64), weight.to(torch.float64)
    pattern = weight.view(torch.int16).to(torch.int32)
    for step in (-1, 1):
        magnitude = (pattern & 0x7FFF) + step
        valid = (magnitude >= 0) & (magnitude <= LARGEST_PATTERN[dtype]) & inside
        other = ((pattern & ~0x7FFF) | magnitude.clamp(0, 0x7FFF)).to(torch.int16).view(dtype).to(torch.float64)
        assert bool(((exact - near).abs() <= (exact - other).abs())[valid].all())


@pytest.mark.parametrize("dtype, bits", PAIRS)
def test_split_keeps_the_promised_bits(dtype: torch.dtype, bits: int) -> None:
    """|master - kept| is at most half a unit of the extended pattern; where that has 23 mantissa bits, it is 0."""
    master = spread_float32(1 << 18, seed=3)
    if dtype == torch.float16:
        small = torch.randn(1 << 16, generator=torch.Generator().manual_seed(4)) * torch.logspace(-9, 4, 1 << 16)
        master = torch.cat([master, small])
    largest = value_of(
        torch.tensor([LARGEST_PATTERN[dtype]], dtype=torch.int16).view(dtype), torch.tensor([2 ** (bits - 1) - 1]), bits
    )
    inside = master.abs().to(torch.float64) <= largest
    kept = merge(*split(master, dtype, bits))
    error = (kept.to(torch.float64) - master.to(torch.float64)).abs()[inside]
    size = master.to(torch.float64).abs()[inside].clamp(min=2.0 ** SMALLEST_EXPONENT[dtype])
    unit = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1 - MANTISSA_BITS[dtype] - bits)
    # Halves of fp16's subnormal units are decided after one rounding to a 32nd of the unit (a 2**-40 one at 16 bits).
    slack = 1 / 64 if dtype == torch.float16 else 0.0
    assert bool((error <= unit * (0.5 + slack)).all())
    if bits == 16:
        normal = size > 2.0 ** SMALLEST_EXPONENT[dtype] if dtype == torch.float16 else torch.ones_like(size, dtype=bool)
        assert not error[normal].any()
    assert bool((torch.signbit(kept) == torch.signbit(master)).all())


@pytest.mark.parametrize("dtype, bits", PAIRS)
def test_a_finite_master_never_becomes_infinite(dtype: torch.dtype, bits: int) -> None:
    master = float32_of([edge | sign for edge in FP32_EDGES for sign in (0, 1 << 31)])
    for noise in (None, 0, 255):
        field = None if noise is None else torch.full(master.shape, noise, dtype=torch.int32)
        weight, correction = split(master, dtype, bits, field)
        assert bool(torch.isfinite(weight).all())
        assert bool(torch.isfinite(merge(weight, correction)).all())


@pytest.mark.parametrize("dtype, bits", PAIRS)
def test_a_weight_that_is_not_finite_has_no_correction(dtype: torch.dtype, bits: int) -> None:
    master = float32_of([0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF])
    noise = torch.full(master.shape, 255, dtype=torch.int32)
    for field in (None, noise):
        weight, correction = split(master, dtype, bits, field)
        assert torch.equal(weight, master.to(dtype)) or bool(torch.isnan(weight[2:]).all())
        assert torch.equal(weight[:2].to(torch.float32), master[:2])
        assert bool(torch.isnan(weight[2:]).all())
        assert not correction.any()
    stale = torch.full((1 << 16,), -3, dtype=correction_dtype(bits))
    every = every_16_bit(dtype)
    odd = ~torch.isfinite(every)
    merged = merge(every, stale)[odd]
    assert torch.equal(torch.isnan(merged), torch.isnan(every[odd]))
    assert torch.equal(torch.isinf(merged), torch.isinf(every[odd]))


@pytest.mark.parametrize("dtype, bits", PAIRS)
def test_a_stale_correction_under_a_zero_weight_is_zero(dtype: torch.dtype, bits: int) -> None:
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    corrections = torch.full((2,), -(1 << (bits - 1)), dtype=correction_dtype(bits))
    assert_same_bits(merge(zeros, corrections), torch.tensor([0.0, -0.0]))


@pytest.mark.parametrize("bits", BITS)
def test_ties_go_away_from_zero(bits: int) -> None:
    """The bf16 weight of a value half-way between two is the larger, of either sign: one correction for each value."""
    master = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8])
    weight, correction = split(master, torch.bfloat16, bits)
    assert weight.tolist() == [1.0 + 2.0**-7, -1.0 - 2.0**-7]
    assert correction.tolist() == [-(1 << (bits - 1))] * 2
    assert_same_bits(merge(weight, correction), master)


def test_32_bit_master_of_bf16_is_lossless() -> None:
    master = spread_float32(1 << 20, seed=5)
    inside = master.abs() <= float32_of([0x7F7F7FFF])
    weight, correction = split(master, torch.bfloat16, 16)
    assert_same_bits(merge(weight, correction)[inside], master[inside])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, SLICES))])
def test_32_bit_master_of_bf16_is_lossless_for_every_fp32(part: int) -> None:
    """2**32 patterns: what cannot be kept is only Inf, NaN, and the last half unit below Inf, which saturates."""
    block = 1 << 22
    for start in range(part * (1 << 28), (part + 1) * (1 << 28), block):
        master = float32_of(torch.arange(start, start + block))
        inside = master.abs() <= float32_of([0x7F7F7FFF])
        weight, correction = split(master, torch.bfloat16, 16)
        assert_same_bits(merge(weight, correction)[inside], master[inside])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stochastic_rounding_of_the_weight_is_unbiased(dtype: torch.dtype) -> None:
    """Over its 256 values, the noise adds up to exactly the bits that are cut off: the mean kept master is the master.

    256 masters T + f units (f a multiple of 2**-8 for bf16, of 2**-5 for fp16's normals) against all 256 noises.
    """
    generator = torch.Generator().manual_seed(6)
    exponents = torch.randint(-13, 14, (4096,), generator=generator)
    master = torch.ldexp(1 + torch.rand(4096, generator=generator), exponents)
    noise = torch.arange(256, dtype=torch.int32)
    total = torch.zeros(4096, dtype=torch.float64)
    for value in noise:
        weight, correction = split(master, dtype, 8, value.expand(4096))
        total += value_of(weight, correction, 8)
    assert torch.equal(total / 256, master.to(torch.float64))


@pytest.mark.parametrize("dtype, bits", PAIRS)
def test_noise_moves_the_master_by_less_than_one_unit_and_keeps_what_is_exact(dtype: torch.dtype, bits: int) -> None:
    master = spread_float32(1 << 16, seed=7)
    exact = merge(*split(master, dtype, bits))
    words = weight_noise(noise_words(torch.arange(1 << 16), noise_key(0, 1), 3))
    weight, correction = split(exact, dtype, bits, words)
    assert_same_bits(merge(weight, correction), exact, "a master that is kept exactly, with noise")
    near, near_correction = split(master, dtype, bits)
    far, far_correction = split(master, dtype, bits, words)

    def extended(w: Tensor, c: Tensor) -> Tensor:
        return ((w.view(torch.int16).to(torch.int64) & 0x7FFF) << bits) + c

    assert int((extended(near, near_correction) - extended(far, far_correction)).abs().max()) <= 1


def test_drift_survives_below_the_resolution_of_bf16() -> None:
    """A thousand steps of 1e-5 of the weight, each far below bf16's 2**-8, add up to the exact drift (within 1 %)."""
    start = torch.linspace(0.5, 2.0, 2048)
    weight, correction = split(start, torch.bfloat16, 8)
    begin = merge(weight, correction)
    for step in range(1, 1001):
        noise = weight_noise(noise_words(torch.arange(2048), noise_key(0, 1), step))
        weight, correction = split(merge(weight, correction) + start * 1e-5, torch.bfloat16, 8, noise)
    drift = ((merge(weight, correction) - begin) / start).to(torch.float64).mean()
    assert drift.item() == pytest.approx(1e-2, rel=1e-2)


def test_which_weights_get_a_correction() -> None:
    assert [correction_bits(torch.bfloat16, bits) for bits in (24, 32, None)] == [8, 16, 0]
    assert [correction_bits(torch.float16, bits) for bits in (24, 32, None)] == [8, 16, 0]
    assert [correction_bits(torch.float32, bits) for bits in (24, 32, None)] == [0, 0, 0]
    assert (correction_dtype(8), correction_dtype(16)) == (torch.int8, torch.int16)
    weight = torch.tensor([1.5, -0.0], dtype=torch.bfloat16)
    assert_same_bits(merge(weight, None), weight.to(torch.float32))


def test_a_strided_master_is_split_as_its_copy() -> None:
    master = torch.randn(16, 24, generator=torch.Generator().manual_seed(8)).t()
    for actual, expected in zip(split(master, torch.bfloat16, 8), split(master.contiguous(), torch.bfloat16, 8)):
        assert_same_bits(actual, expected)
