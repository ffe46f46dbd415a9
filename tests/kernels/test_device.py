"""The device functions alone against flashoptim_dist.formats: every 16-bit weight, every correction, every code."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from flashoptim_dist.kernels import device as functions
from flashoptim_dist.kernels.device import (
    bf16_of,
    bits_of,
    contain_weight,
    decode_momentum,
    decode_variance,
    encode_momentum,
    encode_variance,
    float_of,
    is_rare,
    merge_weight,
    momentum_scale_bits,
    noise_words,
    split_weight,
    variance_lattice,
    variance_word,
)
from torch import Tensor

from flashoptim_dist import formats
from flashoptim_dist.formats.rounding import ROTATION, as_int32, plain_weight_noise
from tests.numbers import assert_same_bits, every_16_bit, float32_of, pattern_of, spread_float32

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
COUNT = 1 << 14
SIZES = 2.0 ** (torch.arange(512) % 160 - 100)


@triton.jit
def _merge(p, e, out, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, merge_weight(tl.load(p + at), tl.load(e + at), BITS, True))


@triton.jit
def _split(w, words, p, e, TYPE: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight, correction = split_weight(
        contain_weight(tl.load(w + at), BITS), tl.load(words + at), TYPE, BITS, STOCHASTIC
    )
    tl.store(p + at, weight)
    if BITS > 0:
        tl.store(e + at, correction.to(tl.int16 if BITS == 16 else tl.int8))


@triton.jit
def _words(out, first, rotation, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, noise_words(lane, first, rotation))


@triton.jit
def _momentum(m, words, codes, scales, decoded, STOCHASTIC: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(m + at)
    bits = momentum_scale_bits(tl.max(tl.abs(value), axis=1, keep_dims=True))
    code = encode_momentum(value, float_of(bits), tl.load(words + at), STOCHASTIC)
    tl.store(codes + at, code)
    tl.store(scales + group, bf16_of(bits))
    tl.store(decoded + at, decode_momentum(code, float_of(bits) * (1.0 / 16129.0)))


@triton.jit
def _variance(v, words, codes, scales, decoded, units, inverses, STOCHASTIC: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]
    at = group * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(v + at)
    smallest = tl.min((bits_of(value) - 1).to(tl.uint32, bitcast=True), axis=1, keep_dims=True)
    word = variance_word(tl.max(value, axis=1, keep_dims=True), smallest.to(tl.int32, bitcast=True))
    base, unit, shift = variance_lattice(word)
    code, inverse = encode_variance(value, base, unit, shift, tl.load(words + at) if STOCHASTIC else tl.load(words))
    negative, twice_unit = decode_variance(code, base, unit)
    tl.store(codes + at, code)
    tl.store(scales + group, word.to(tl.int16))
    tl.store(decoded + at, 0.0 - negative)
    tl.store(units + at, twice_unit * 0.5)
    tl.store(inverses + at, inverse)


@triton.jit
def _rare(w, scale, out):
    at = tl.arange(0, 2)[:, None] * 32 + tl.arange(0, 32)[None, :]
    found = is_rare(tl.load(w + at), tl.load(scale + tl.arange(0, 2)[:, None]))
    tl.store(out, found.to(tl.int32))


def random_words(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 16])
def test_merge(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Every weight, with corrections of every kind beside it."""
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    weights = every_16_bit(dtype).repeat(4)
    corrections = torch.tensor([lowest, -1, 0, 1, highest]).repeat(-(-len(weights) // 5))[: len(weights)]
    corrections = corrections.to(formats.correction_dtype(bits))
    weights = torch.where(torch.isnan(weights), 1.0, weights).to(dtype)
    out = torch.empty(len(weights), device=device)
    _merge[(len(weights) // COUNT,)](weights.to(device), corrections.to(device), out, BITS=bits, BLOCK=COUNT)
    assert_same_bits(out.cpu(), formats.merge(weights, corrections), "master weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 16, 0])
@pytest.mark.parametrize("stochastic", [False, True])
def test_split(stochastic: bool, bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Numbers of every exponent, edges, Inf and NaN. Bit for bit: the split is integer arithmetic."""
    master = spread_float32(4 * COUNT, seed=bits)
    master[64:68] = float32_of([0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF])
    words = random_words(len(master))
    weight = torch.empty(len(master), dtype=dtype, device=device)
    correction = torch.empty(len(master), dtype=torch.int16 if bits == 16 else torch.int8, device=device)
    _split[(4,)](
        master.to(device), words.to(device), weight, correction,
        TYPE=TYPES[dtype], BITS=bits, STOCHASTIC=stochastic, BLOCK=COUNT,
    )  # fmt: skip
    if bits == 0:
        expected, nan = master.to(dtype), torch.isnan(master)
        if stochastic:
            expected = formats.round_stochastically(master, dtype, plain_weight_noise(words))
        assert torch.equal(torch.isnan(weight.cpu()), nan)
        assert_same_bits(weight.cpu()[~nan], expected[~nan], "weight")
        return
    noise = words & 0xFF if stochastic else None
    expected, expected_correction = formats.split(master, dtype, bits, noise)
    nan = torch.isnan(master)
    assert torch.isnan(weight.cpu()[nan]).all()
    assert_same_bits(weight.cpu()[~nan], expected[~nan], "weight")
    assert_same_bits(correction.cpu()[~nan], expected_correction[~nan], "correction")
    assert not correction.cpu()[nan].any()


@pytest.mark.parametrize("first_index", [0, 123, (1 << 31) - 100, (1 << 32) + 17])
def test_noise(first_index: int, device: torch.device) -> None:
    out = torch.empty(256, dtype=torch.int32, device=device)
    key, step = formats.noise_key(3, 77), 41
    first = as_int32(key + 0x9E3779B1 * first_index)
    _words[(1,)](out, first, as_int32(step * ROTATION), BLOCK=256)
    expected = formats.noise_words(torch.arange(first_index, first_index + 256), key, step)
    assert_same_bits(out.cpu(), expected, "noise words")


def companded_groups() -> Tensor:
    """Groups [512, 32] with spreads from none to many orders of magnitude, at all sizes from 2**-100 to 2**60."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(512, 1, generator=generator) * 4
    size = SIZES.unsqueeze(1)
    groups = torch.randn(512, 32, generator=generator) * 10 ** (torch.randn(512, 32, generator=generator) * spread)
    groups = groups / groups.abs().amax(1, keepdim=True)
    groups = torch.where(groups.abs() < 1e-15, 0.0, groups) * size  # smaller ones have squares that underflow
    groups[0] = 0.0
    groups[1, 5:] = 0.0
    return groups


@pytest.mark.parametrize("stochastic", [False, True])
def test_momentum_codes(stochastic: bool, device: torch.device) -> None:
    values = companded_groups()
    words = random_words(values.numel()).view(values.shape)
    codes, decoded = torch.empty_like(values, dtype=torch.int8, device=device), torch.empty_like(values, device=device)
    scales = torch.empty(len(values), dtype=torch.bfloat16, device=device)
    _momentum[(1,)](
        values.to(device), words.to(device), codes, scales, decoded, STOCHASTIC=stochastic, GROUPS=len(values)
    )
    expected, expected_scales = formats.encode_momentum(values, (words >> 8) & 0xFF if stochastic else None)
    assert_same_bits(scales.cpu(), expected_scales, "scales")
    difference = (codes.cpu().int() - expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() <= 1 / 500
    back = formats.decode_momentum(codes.cpu(), scales.cpu())
    assert torch.allclose(decoded.cpu(), back, rtol=2**-20, atol=0)


def variance_groups() -> Tensor:
    """Groups [512, 32] of v with spans from none to all of fp32, some with zeros, subnormal to 2**101."""
    generator = torch.Generator().manual_seed(0)
    top = torch.randint(1, 228 << 23, (512, 1), generator=generator)
    span = 2.0 ** (torch.rand(512, 1, generator=generator) * 15 + 15)
    pattern = top - (torch.rand(512, 32, generator=generator) * span).long()
    pattern = torch.where(torch.rand(512, 32, generator=generator) < 0.05, 0, pattern.clamp(min=0))
    pattern[0] = 0
    pattern[1, 5:] = 0
    pattern[2] = torch.arange(32)
    return float32_of(pattern)


@pytest.mark.parametrize("stochastic", [False, True])
def test_variance_codes(stochastic: bool, device: torch.device) -> None:
    """Bit for bit: codes, scales, decoded values and the momentum's unit are integer arithmetic."""
    values = variance_groups()
    words = random_words(values.numel()).view(values.shape)
    words = words if stochastic else words[:1, :1]
    codes = torch.empty_like(values, dtype=torch.uint8, device=device)
    decoded, units, inverses = (torch.empty_like(values, device=device) for _ in range(3))
    scales = torch.empty(len(values), dtype=torch.int16, device=device)
    _variance[(1,)](
        values.to(device), words.to(device), codes, scales, decoded, units, inverses, STOCHASTIC=stochastic,
        GROUPS=len(values),
    )  # fmt: skip
    expected, expected_scales = formats.encode_variance(values, words)
    assert_same_bits(scales.cpu().view(torch.bfloat16), expected_scales, "scales")
    assert_same_bits(codes.cpu(), expected, "codes")
    assert_same_bits(decoded.cpu(), formats.decode_variance(expected, expected_scales), "variance")
    assert_same_bits(units.cpu(), formats.momentum_unit(expected, expected_scales), "unit")
    assert_same_bits(inverses.cpu(), formats.momentum_unit(expected, expected_scales, inverse=True), "1 / unit")


def test_the_largest_momentum_code_never_wraps_around(device: torch.device) -> None:
    """All bf16 scales of two binades as the value itself, with the largest noise."""
    largest = torch.arange(256, 768, dtype=torch.float32).unsqueeze(1) * torch.ones(32)
    largest = largest.to(torch.bfloat16).float()
    words = torch.full(largest.shape, -1, dtype=torch.int32)
    codes = torch.empty_like(largest, dtype=torch.int8, device=device)
    decoded = torch.empty_like(largest, device=device)
    scales = torch.empty(512, dtype=torch.bfloat16, device=device)
    _momentum[(1,)](largest.to(device), words.to(device), codes, scales, decoded, STOCHASTIC=True, GROUPS=512)
    assert (codes == 127).all()


@pytest.mark.parametrize(
    "value, rare",
    [(1.0, False), (3.38e38, False), (3.3895313892515355e38, True), (float("inf"), True), (float("nan"), True)],
)
@pytest.mark.parametrize("where", ["weight", "negative weight", "scale"])
def test_is_rare(where: str, value: float, rare: bool, device: torch.device) -> None:
    weight, scale = torch.randn(2, 32), torch.rand(2)
    if where == "scale":
        scale[1] = value
    else:
        weight[1, 31] = -value if where.startswith("negative") else value
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _rare[(1,)](weight.to(device), scale.to(device), out)
    assert bool(out) is rare


def test_constants_are_the_formats() -> None:
    """The kernels restate the definition's constants."""
    assert functions.GROUP.value == formats.GROUP_SIZE
    assert as_int32(functions.HASH_STRIDE.value) == as_int32(formats.rounding.HASH_STRIDE)
    assert functions._FINEST_SHIFT.value == formats.spec.FINEST_SHIFT
    assert functions._COARSEST_SHIFT.value == formats.spec.COARSEST_SHIFT
    assert functions._LARGEST_TOP.value == formats.moments.LARGEST_TOP
    assert int(pattern_of(torch.tensor(functions._LARGEST_BF16.value))) == functions._LARGEST_BF16_BITS.value
