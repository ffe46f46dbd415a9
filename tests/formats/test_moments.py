"""The 8-bit moments: errors within what the curves allow, for every exponent, and what special values do.

The curves: |m| = s u^2 with u = |code|/127, sqrt(v) = s u^2 with u = code/255, s the largest of the group. Rounding
moves a code by at most h (1/2 to nearest, 1 with noise), so u by at most d = h/127 or h/255, so that

    |decoded - exact| <= s ((u + d)^2 - u^2) = s (2 u d + d^2) = 2 d sqrt(s |x|) + d^2 s.

On top come a few fp32 operations, each within 2^-24 relative: at most 4 on the way to the code (an error of 4 2^-24 u,
that is of 8 2^-24 |x|) and 5 on the way back, together under 16 2^-24 relative to the larger of |x| and the decoded
value; and results below 2^-126 are multiples of 2^-149.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from flashoptim_dist.formats import decode_momentum, decode_variance, encode_momentum, encode_variance
from flashoptim_dist.formats.moments import (
    LARGEST_MOMENTUM_SCALE,
    LARGEST_VARIANCE_SCALE,
    group_scale,
    round_up_to_bf16,
)
from tests.numbers import assert_same_bits, float32_of, pattern_of, spread_float32

INFINITY, NAN, LARGEST_FP32, LARGEST_BF16 = 0x7F800000, 0x7FC00000, 0x7F7FFFFF, 0x7F7F
SUBNORMAL_UNIT = 2.0**-149
FP32_SLACK = 16 * 2.0**-24

finite_magnitudes = st.integers(0, LARGEST_FP32)
"""Patterns: uniform over exponents, subnormals included; hypothesis likes the ends and small values."""


def groups_of(patterns: st.SearchStrategy[int], *, signed: bool) -> st.SearchStrategy[Tensor]:
    """Groups of 32 whose exponents are all over the range, or close together, at one exponent chosen anywhere."""
    sign = st.sampled_from((0, 1 << 31)) if signed else st.just(0)
    anywhere = st.lists(st.builds(lambda p, s: p | s, patterns, sign), min_size=32, max_size=32)
    near = st.builds(
        lambda top, below, signs: [max(top - b, 0) | s for b, s in zip(below, signs)],
        finite_magnitudes,
        st.lists(st.integers(0, 20 << 23), min_size=32, max_size=32),
        st.lists(sign, min_size=32, max_size=32),
    )
    return st.one_of(anywhere, near).map(float32_of)


noises = st.one_of(st.none(), st.integers(0, 2**32 - 1))


def noise_field(seed: int | None, largest: int) -> Tensor | None:
    if seed is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, largest + 1, (32,), generator=generator, dtype=torch.int32)


def assert_scale_is_the_largest_rounded_up(size: Tensor, scale: Tensor, saturated: int) -> None:
    """`size`: fp32 magnitudes [32]. The scale is the smallest bf16 that is not below the largest finite one."""
    finite = size[torch.isfinite(size)]
    largest = finite.max().item() if len(finite) else 0.0
    pattern = int(pattern_of(scale))
    assert scale.dtype == torch.bfloat16
    assert 0 <= pattern <= saturated
    assert scale.item() >= largest or pattern == saturated
    if pattern > 0:
        below = torch.tensor(pattern - 1, dtype=torch.int16).view(torch.bfloat16).item()
        assert below < largest


def error_bound(exact: Tensor, decoded: Tensor, scale: Tensor, d: float) -> Tensor:
    size, s = exact.abs(), scale.to(torch.float64)
    slack = FP32_SLACK * torch.maximum(size, decoded.abs()) + 4 * SUBNORMAL_UNIT
    # Beyond the largest scale codes saturate: at 0.4 % below the largest fp32, of the variance 0.4 % below its root.
    saturated = (size - s).clamp(min=0)
    return 2 * d * torch.sqrt(s * size) + d * d * s + slack + saturated


@given(group=groups_of(finite_magnitudes, signed=True), seed=noises)
@example(group=torch.zeros(32), seed=None)
@example(group=float32_of([1] * 32), seed=None)  # nothing but the smallest subnormal
@example(group=float32_of([LARGEST_FP32] * 32), seed=1)
@example(group=float32_of([0x007FFFFF, 0x00800000] * 16), seed=1)
def test_momentum_is_within_the_bound(group: Tensor, seed: int | None) -> None:
    codes, scale = encode_momentum(group, noise_field(seed, 255))
    assert (codes.dtype, codes.shape, scale.shape) == (torch.int8, (32,), ())
    assert_scale_is_the_largest_rounded_up(group.abs(), scale, LARGEST_MOMENTUM_SCALE)
    assert int(codes.to(torch.int32).abs().max()) <= 127
    assert bool((codes.sign() * group.sign() >= 0).all())
    decoded = decode_momentum(codes, scale).to(torch.float64)
    exact = group.to(torch.float64)
    d = (0.5 if seed is None else 1.0) / 127
    assert bool(((decoded - exact).abs() <= error_bound(exact, decoded, scale, d)).all())


@given(group=groups_of(finite_magnitudes, signed=False), seed=noises)
@example(group=torch.zeros(32), seed=None)
@example(group=float32_of([1] * 32), seed=None)
@example(group=float32_of([LARGEST_FP32] * 32), seed=1)
@example(group=float32_of([0, 1, 0x00800000, LARGEST_FP32] * 8), seed=2)
def test_variance_is_within_the_bound(group: Tensor, seed: int | None) -> None:
    codes, scale = encode_variance(group, noise_field(seed, 65535))
    assert (codes.dtype, codes.shape, scale.shape) == (torch.uint8, (32,), ())
    exact = torch.sqrt(group.to(torch.float64))
    assert_scale_is_the_largest_rounded_up(torch.sqrt(group), scale, LARGEST_VARIANCE_SCALE)
    # v > 0 never has a code below 3, or m/sqrt(v) could explode; v = 0 has code 0.
    assert torch.equal(codes == 0, group == 0)
    assert not ((codes > 0) & (codes < 3)).any()
    root = torch.sqrt(decode_variance(codes, scale).to(torch.float64))
    d = (0.5 if seed is None else 1.0) / 255
    # What decodes to a subnormal v is known to 2**-149, so its root to 2**-74.5.
    bound = error_bound(exact, root, scale, d) + torch.where(root * root < 2.0**-126, 2.0**-74, 0.0)
    floor = scale.to(torch.float64) * (3 / 255) ** 2 * (1 + FP32_SLACK) + 2.0**-74
    assert bool(((root - exact).abs() <= torch.where(codes == 3, torch.maximum(bound, floor), bound)).all())


@given(group=groups_of(finite_magnitudes, signed=True))
def test_momentum_codes_decode_to_themselves(group: Tensor) -> None:
    """Encoding what was decoded gives the same codes and scale where the group's largest code is 127: nothing creeps.

    (A code below 127 at the top appears where the largest, rounded up to bf16, is more than 2 (1/2)/127 = 0.8 % larger:
    among subnormals and just above a power of two.)
    """
    codes, scale = encode_momentum(group)
    decoded = decode_momentum(codes, scale)
    if int(codes.to(torch.int32).abs().max()) != 127 or scale.item() < 2.0**-100:
        return
    again, scale_again = encode_momentum(decoded)
    assert_same_bits(scale_again, scale, "scale")
    assert_same_bits(again, codes, "codes")


@given(group=groups_of(finite_magnitudes, signed=False))
def test_variance_codes_decode_to_themselves(group: Tensor) -> None:
    codes, scale = encode_variance(group)
    if int(codes.max()) != 255 or not 2.0**-50 < scale.item() < 2.0**63:
        return
    again, scale_again = encode_variance(decode_variance(codes, scale))
    assert_same_bits(again, codes, "codes")
    # sqrt(v) of the decoded v = s^2 may come out an fp32 rounding above s, so one bf16 higher.
    assert int(pattern_of(scale_again)) - int(pattern_of(scale)) in (0, 1)


@dataclass(frozen=True)
class Curve:
    """One of the two moments, for what holds of both."""

    encode: Callable[..., tuple[Tensor, Tensor]]
    decode: Callable[..., Tensor]
    codes: Tensor
    """Every code that a positive value can have."""
    power: int
    """The largest value of a group is the scale to this power."""
    largest_scale: int
    largest_noise: int


CURVES = {
    "momentum": Curve(
        encode_momentum, decode_momentum, torch.arange(128).to(torch.int8), 1, LARGEST_MOMENTUM_SCALE, 255
    ),
    "variance": Curve(
        encode_variance, decode_variance, torch.arange(3, 256).to(torch.uint8), 2, LARGEST_VARIANCE_SCALE, 65535
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_largest_code_decodes_to_exactly_the_scale(name: str) -> None:
    """For every bf16 scale."""
    curve = CURVES[name]
    scales = torch.arange(curve.largest_scale + 1).to(torch.int16).view(torch.bfloat16)
    decoded = curve.decode(curve.codes[-1:].expand(len(scales), 1), scales).squeeze(1)
    assert_same_bits(decoded, scales.to(torch.float32) ** curve.power)
    assert bool(torch.isfinite(decoded).all())


@pytest.mark.parametrize("name", CURVES)
def test_every_code_is_its_own_rounding(name: str) -> None:
    """Larger codes decode to more, and what a code decodes to has that code again, whatever the noise.

    A code comes back as an integer but for a few units of 2^-17 (fp32 codes of 64 and more): the 8 bits of momentum's
    noise never see that, of variance's 16 the last four do, so its very ends may move a code by one.
    """
    curve = CURVES[name]
    # Scales of all exponents at which neither the smallest code nor the largest leaves fp32's normal numbers.
    scales = torch.ldexp(torch.tensor([1.0, 1.37]).repeat(25), torch.arange(-40, 60, 2)).to(torch.bfloat16)
    values = curve.decode(curve.codes.expand(len(scales), -1), scales)
    assert bool((values.diff(dim=1) > 0).all())
    # Groups of 31 codes beside the largest, so that each has the scale it came from.
    padding = -values.shape[1] % 31
    tops = values[:, -1:]
    parts = torch.cat([values, tops.expand(-1, padding)], dim=1).reshape(len(scales), -1, 31)
    groups = torch.cat([parts, tops.unsqueeze(1).expand(-1, parts.shape[1], -1)], dim=2)
    end = 0 if curve.largest_noise == 255 else 16
    for noise in (None, end, curve.largest_noise // 2, curve.largest_noise - end):
        field = None if noise is None else torch.full(groups.shape, noise, dtype=torch.int32)
        codes, _ = curve.encode(groups, field)
        kept = codes[..., :31].reshape(len(scales), -1)[:, : len(curve.codes)]
        assert torch.equal(kept, curve.codes.expand(len(scales), -1))


def with_specials(kinds: tuple[int, ...]) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, 31), st.sampled_from(kinds)), max_size=33)


@given(
    group=groups_of(finite_magnitudes, signed=True),
    specials=with_specials((INFINITY, INFINITY | 1 << 31, NAN, NAN | 1 << 31, 0x7F800001)),
    seed=noises,
)
def test_special_momentum_hurts_itself_alone(group: Tensor, specials: list[tuple[int, int]], seed: int | None) -> None:
    noise = noise_field(seed, 255)
    clean, dirty = group.clone(), group.clone()
    for place, pattern in specials:
        dirty[place] = float32_of([pattern])
        clean[place] = 0.0
    codes, scale = encode_momentum(dirty, noise)
    clean_codes, clean_scale = encode_momentum(clean, noise)
    assert_same_bits(scale, clean_scale, "scale")
    finite, infinite = torch.isfinite(dirty), torch.isinf(dirty)
    assert torch.equal(codes[finite], clean_codes[finite])
    assert torch.equal(codes[infinite].to(torch.float32), 127 * dirty[infinite].sign())
    assert not codes[torch.isnan(dirty)].any()
    assert bool(torch.isfinite(decode_momentum(codes, scale)).all())


@given(
    group=groups_of(finite_magnitudes, signed=False),
    specials=with_specials((INFINITY, NAN, NAN | 1 << 31)),
    seed=noises,
)
def test_special_variance_hurts_itself_alone(group: Tensor, specials: list[tuple[int, int]], seed: int | None) -> None:
    noise = noise_field(seed, 65535)
    clean, dirty = group.clone(), group.clone()
    for place, pattern in specials:
        dirty[place] = float32_of([pattern])
        clean[place] = 0.0
    codes, scale = encode_variance(dirty, noise)
    clean_codes, clean_scale = encode_variance(clean, noise)
    assert_same_bits(scale, clean_scale, "scale")
    finite = torch.isfinite(dirty)
    assert torch.equal(codes[finite], clean_codes[finite])
    assert bool((codes[~finite] == 255).all())
    assert bool(torch.isfinite(decode_variance(codes, scale)).all())


def test_a_group_of_nothing_but_specials_decodes_to_zero() -> None:
    for pattern in (INFINITY, NAN):
        codes, scale = encode_momentum(float32_of([pattern] * 32))
        assert scale.item() == 0.0
        assert not decode_momentum(codes, scale).any()
        codes, scale = encode_variance(float32_of([pattern] * 32))
        assert scale.item() == 0.0
        assert not decode_variance(codes, scale).any()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_all_zero_group_is_all_zero_bits(zero: float) -> None:
    for noise in (None, torch.full((32,), 255, dtype=torch.int32)):
        for encode in (encode_momentum, encode_variance):
            codes, scale = encode(torch.full((32,), zero), noise)
            assert not codes.any()
            assert int(pattern_of(scale)) == 0


def test_scales_round_up_to_bf16() -> None:
    """Over a spread of all fp32: the smallest bf16 that is not below, saturated at the largest."""
    values = spread_float32(1 << 16, seed=0).abs()
    rounded = round_up_to_bf16(values)
    patterns = pattern_of(values).to(torch.int64)
    expected = ((patterns + 0xFFFF) >> 16).clamp(max=LARGEST_BF16)
    assert torch.equal(pattern_of(rounded).to(torch.int64), expected)
    exact = float32_of(torch.arange(LARGEST_BF16 + 1) << 16)
    assert torch.equal(round_up_to_bf16(exact).to(torch.float32), exact)


def test_group_scale_works_on_every_leading_shape() -> None:
    size = torch.rand(3, 5, 32)
    size[1, 2, 7] = float("inf")
    size[2, 4] = float("nan")
    scale = group_scale(size)
    assert scale.shape == (3, 5)
    finite = torch.where(torch.isfinite(size), size, 0.0).amax(-1)
    assert_same_bits(scale, round_up_to_bf16(finite))
    assert group_scale(torch.zeros(0, 32)).shape == (0,)


@pytest.mark.parametrize("gradient_scale", [1e-12, 1e-6, 1.0, 1e12])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_no_quotient_of_the_two_moments_explodes(gradient_scale: float, spread: float) -> None:
    """Quantization alone makes |m|/sqrt(v) at most 2 times the largest exact one of the group.

    A decoded |m| is at most s_m (u + 1/127)^2 and a decoded sqrt(v) at least s_v max(3/255, u' - 1/255)^2; the worst
    quotient of the two, where |m| and sqrt(v) are both small, is one momentum step over the floor,
    (1/127)^2/(3/255)^2 = 0.448 of s_m/s_v; everywhere else the curves err by less than a factor 2 at |m| of 3 steps.
    """
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(spread * torch.randn(4096, 32, generator=generator)) * gradient_scale
    momentum = size * torch.randn(4096, 32, generator=generator)
    variance = size * size
    decoded_momentum = decode_momentum(*encode_momentum(momentum)).to(torch.float64)
    decoded_root = torch.sqrt(decode_variance(*encode_variance(variance)).to(torch.float64))
    exact = (momentum.abs().to(torch.float64) / size.to(torch.float64)).amax(-1)
    seen = (decoded_momentum.abs() / decoded_root).amax(-1)
    assert bool((seen <= 2 * exact).all())
