"""The 8-bit moments: errors within what the formats allow, for every exponent, and what special values do.

Momentum: |x| = s u^2 with u = |code|/127, s the largest of the group. Rounding moves a code by at most h (1/2 to
nearest, 1 with noise), so u by at most d = h/127, so that

    |decoded - exact| <= s ((u + d)^2 - u^2) = s (2 u d + d^2) = 2 d sqrt(s |x|) + d^2 s.

On top come a few fp32 operations, each within 2^-24 relative: at most 4 on the way to the code (an error of 4 2^-24 u,
that is of 8 2^-24 |x|) and 5 on the way back, together under 16 2^-24 relative to the larger of |x| and the decoded
value; and results below 2^-126 are multiples of 2^-149.

Variance: integers only. A pattern moves to a multiple of 2^k next to it, half of 2^k at most to nearest, k as small as
the group allows; a variance that is too small for that becomes the smallest that the codes hold.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from flashoptim_dist.formats import (
    are_variance_scales,
    decode_moments,
    decode_momentum,
    decode_variance,
    encode_moments,
    encode_momentum,
    encode_variance,
    momentum_unit,
)
from flashoptim_dist.formats.moments import (
    LARGEST_MOMENTUM_SCALE,
    LARGEST_TOP,
    encode_known_momentum,
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


LARGEST_PATTERN = LARGEST_TOP << 19


def word_field(seed: int | None) -> Tensor | None:
    if seed is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (32,), generator=generator, dtype=torch.int64).to(torch.int32)


def fields_of(scale: Tensor) -> tuple[int, int]:
    """(top pattern, k) of a stored scale, as the module states them."""
    word = int(pattern_of(scale))
    return word >> 3 << 19, (word & 7) + 14


@given(group=groups_of(finite_magnitudes, signed=False), seed=noises)
@example(group=torch.zeros(32), seed=None)
@example(group=float32_of([1] * 32), seed=None)
@example(group=float32_of([LARGEST_FP32] * 32), seed=1)
@example(group=float32_of([0, 1, 0x00800000, LARGEST_FP32] * 8), seed=2)
@example(group=float32_of([LARGEST_PATTERN, LARGEST_PATTERN + 1] * 16), seed=None)
def test_variance_is_a_neighbour_on_the_finest_lattice_that_holds_the_group(group: Tensor, seed: int | None) -> None:
    codes, scale = encode_variance(group, word_field(seed))
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (torch.uint8, (32,), torch.bfloat16, ())
    top, k = fields_of(scale)
    assert 14 <= k <= 20
    assert torch.equal(codes == 0, group == 0)  # v > 0 never becomes 0, and 0 stays 0
    exact = pattern_of(group).to(torch.int64)
    decoded = pattern_of(decode_variance(codes, scale)).to(torch.int64)
    assert not (decoded % (1 << k)).any()
    assert bool((decoded <= LARGEST_PATTERN).all())
    if not group.any():
        assert int(pattern_of(scale)) == 0
        return
    # The smallest that the codes hold: where 255 of them end below the top, but never 0.
    last = -(-top // (1 << k))
    floor = max(last - 254, 1) << k
    within = exact.clamp(max=LARGEST_PATTERN)
    error = (decoded - within).abs()[group > 0]
    allowed = (1 << k) // 2 if seed is None else (1 << k) - 1
    if k < 20:  # all fits, but for what lies below the lattice's first unit
        assert bool(((error <= allowed) | (within[group > 0] < 1 << k)).all())
        # A finer lattice would not do: it spans 255 units; 253 are used, and rounding and tops take 3 more.
        smallest = int(within[group > 0].min())
        assert k == 14 or int(within.max()) + (1 << 19) - smallest > 249 << (k - 1)
    assert bool(((error <= allowed) | (decoded[group > 0] == floor)).all())
    assert bool((decoded[group > 0] >= floor).all())
    # A group's top is the next sixteenth of an octave; to nearest, of what was rounded.
    assert top - (1 << 19) < (int(within.max()) if seed is not None else int(decoded.max())) <= top


@given(group=groups_of(finite_magnitudes, signed=False), seed=st.integers(0, 2**32 - 1))
def test_variance_is_rounded_without_bias(group: Tensor, seed: int) -> None:
    """Over 2^k noises, one for all elements as in rounding="nearest", the mean pattern is the exact one.

    k may be 20, so 64 evenly spaced noises stand for all: exact to 2^k / 64.
    """
    top, k = fields_of(encode_variance(group, word_field(seed))[1])
    noises = ((torch.arange(64) * (1 << 26)) - (1 << 31) + (1 << 25)).to(torch.int32)
    codes, scales = encode_variance(group.expand(64, 32), noises.unsqueeze(1))
    assert bool((pattern_of(scales) == pattern_of(scales)[0]).all())
    mean = pattern_of(decode_variance(codes, scales)).to(torch.float64).mean(0)
    exact = pattern_of(group).clamp(max=LARGEST_PATTERN).to(torch.float64)
    floor = max(-(-top // (1 << k)) - 254, 1) << k
    held = (exact >= floor) & (group > 0)
    assert bool(((mean - exact).abs() <= (1 << k) / 64)[held].all())


@given(group=groups_of(finite_magnitudes, signed=False), seed=st.integers(0, 2**32 - 1), place=st.integers(0, 31))
def test_a_new_largest_moves_no_other_variance(group: Tensor, seed: int, place: int) -> None:
    """While the group's span keeps its k: the lattice does not hang on the top."""
    words = word_field(seed)
    codes, scale = encode_variance(group, words)
    higher = group.clone()
    higher[place] = float32_of([min(int(pattern_of(group).max()) + (5 << 19), LARGEST_PATTERN)])[0]
    new_codes, new_scale = encode_variance(higher, words)
    if fields_of(scale)[1] != fields_of(new_scale)[1]:
        return
    before, after = decode_variance(codes, scale), decode_variance(new_codes, new_scale)
    floor = after[after > 0].min() if fields_of(scale)[1] == 20 else torch.zeros(())
    others = (torch.arange(32) != place) & (after > floor)
    assert_same_bits(after[others], before[others])


@given(
    momentum=groups_of(st.integers(0, 0x5F000000), signed=True),
    variance=groups_of(finite_magnitudes, signed=False),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_was_decoded_is_encoded_to_itself(momentum: Tensor, variance: Tensor, seed: int) -> None:
    """fp32 states of ours load as the very numbers, whatever step wrote them; from then on codes stay the same too."""
    momentum = torch.where(variance > 0, momentum, 0.0)
    momentum = torch.minimum(torch.maximum(momentum, -(2**12) * variance.sqrt()), 2**12 * variance.sqrt())
    signed = [True, False]
    stored = encode_moments([momentum, variance], signed, word_field(seed))
    if stored[0][1].item() < 2.0**-90:  # what is that small beside sqrt(v) falls among the subnormals
        return
    values = decode_moments(stored, signed)
    loaded = encode_moments(values, signed)
    again = decode_moments(loaded, signed)
    small = values[0].abs() < 2.0**-100
    assert_same_bits(torch.where(small, 0.0, again[0]), torch.where(small, 0.0, values[0]), "momentum")
    assert_same_bits(again[1], values[1], "variance")
    if not small.any():
        assert_same_bits(loaded[0][0], stored[0][0], "codes of the momentum")
        for one, other in zip(encode_moments(again, signed), loaded, strict=True):
            assert_same_bits(one[0], other[0], "codes")
            assert_same_bits(one[1], other[1], "scales")


@given(group=groups_of(finite_magnitudes, signed=False), seed=noises)
def test_the_unit_of_a_momentum_is_next_to_the_root_of_its_variance(group: Tensor, seed: int | None) -> None:
    codes, scale = encode_variance(group, word_field(seed))
    unit, inverse = momentum_unit(codes, scale), momentum_unit(codes, scale, inverse=True)
    assert torch.equal(unit * inverse, torch.ones(32))
    root = decode_variance(codes, scale).to(torch.float64).sqrt()
    quotient = (root * 2.0**63 / unit)[root >= 2.0**-63]  # of normal v
    rounding = 1 + 2.0**-50  # of a root in fp64
    assert bool(((quotient * rounding >= 0.5**0.5) & (quotient < 2**0.5 * rounding)).all())


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


@given(group=groups_of(finite_magnitudes, signed=True), seed=st.integers(0, 2**32 - 1))
def test_known_momentum_goes_back_to_its_codes(group: Tensor, seed: int) -> None:
    """Noise may leave 126 as a group's largest code; its scale is found all the same."""
    codes, scale = encode_momentum(group, noise_field(seed, 255))
    if not 2.0**-100 < scale.item() < 2.0**127:
        return
    again, scale_again = encode_known_momentum(decode_momentum(codes, scale))
    assert_same_bits(scale_again, scale, "scale")
    assert_same_bits(again, codes, "codes")


def test_the_largest_momentum_code_decodes_to_exactly_the_scale() -> None:
    """For every bf16 scale."""
    scales = torch.arange(LARGEST_MOMENTUM_SCALE + 1).to(torch.int16).view(torch.bfloat16)
    decoded = decode_momentum(torch.full((len(scales), 1), 127, dtype=torch.int8), scales).squeeze(1)
    assert_same_bits(decoded, scales.to(torch.float32))


def test_every_variance_code_of_every_scale_decodes_to_more_than_the_one_below() -> None:
    tops = torch.arange(1, LARGEST_TOP + 1).repeat_interleave(7)
    words = (tops << 3) + torch.arange(7).repeat(LARGEST_TOP)
    codes = torch.arange(256).to(torch.uint8).expand(len(words), 256)
    decoded = decode_variance(codes, words.to(torch.int16).view(torch.bfloat16))
    assert not decoded[:, 0].any()
    assert bool((decoded.diff(dim=1) > 0).all())
    ends = pattern_of(decoded[:, 255]).to(torch.int64)
    # The last code reaches the top, or, where a group lies within 255 units of 0, beyond it.
    assert bool((ends >= tops << 19).all())
    assert bool(torch.isfinite(decoded).all())


def test_the_scales_of_a_variance_are_told_from_all_other_numbers() -> None:
    words = torch.arange(-(2**15), 2**15)
    tops, shifts = words >> 3, words & 7
    expected = (words == 0) | ((tops >= 1) & (tops <= LARGEST_TOP) & (shifts <= 6))
    scales = words.to(torch.int16).view(torch.bfloat16)
    assert torch.equal(are_variance_scales(scales), expected)
    assert are_variance_scales(scales[expected].reshape(-1, 1).expand(-1, 2)[::3]).all()


@given(groups_of(st.integers(0, (1 << 31) - 1), signed=False), noises)
def test_every_scale_that_is_written_counts_as_one(group: Tensor, seed: int | None) -> None:
    words = None if seed is None else torch.full((32,), seed, dtype=torch.int64).to(torch.int32)
    assert are_variance_scales(encode_variance(group, words)[1]).all()


def test_every_momentum_code_is_its_own_rounding() -> None:
    """Larger codes decode to more, and what a code decodes to has that code again, whatever the noise."""
    every = torch.arange(128).to(torch.int8)
    scales = torch.ldexp(torch.tensor([1.0, 1.37]).repeat(25), torch.arange(-40, 60, 2)).to(torch.bfloat16)
    values = decode_momentum(every.expand(len(scales), -1), scales)
    assert bool((values.diff(dim=1) > 0).all())
    # Groups of 31 codes beside the largest, so that each has the scale it came from.
    tops = values[:, -1:]
    parts = torch.cat([values, tops.expand(-1, -128 % 31)], dim=1).reshape(len(scales), -1, 31)
    groups = torch.cat([parts, tops.unsqueeze(1).expand(-1, parts.shape[1], -1)], dim=2)
    for noise in (None, 0, 127, 255):
        field = None if noise is None else torch.full(groups.shape, noise, dtype=torch.int32)
        codes, _ = encode_momentum(groups, field)
        kept = codes[..., :31].reshape(len(scales), -1)[:, :128]
        assert torch.equal(kept, every.expand(len(scales), -1))


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
    words = word_field(seed)
    clean, dirty = group.clone(), group.clone()
    for place, pattern in specials:
        dirty[place] = float32_of([pattern])
        clean[place] = 0.0
    codes, scale = encode_variance(dirty, words)
    clean_codes, clean_scale = encode_variance(clean, words)
    assert_same_bits(scale, clean_scale, "scale")
    finite = torch.isfinite(dirty)
    assert torch.equal(codes[finite], clean_codes[finite])
    decoded = decode_variance(codes, scale)
    assert bool(torch.isfinite(decoded).all())
    if clean.any() and not finite.all():
        # The group's top, which is at most a sixteenth of an octave above the largest, rounded like all others: with
        # noise to either of two neighbouring codes, so that the largest may come to lie one code above it.
        lowest = int(codes[finite].max()) - (seed is not None)
        assert bool((codes[~finite].int() >= lowest).all())


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
    zeros = torch.full((32,), zero)
    for noise in (None, torch.full((32,), 255, dtype=torch.int32), torch.full((32,), -1, dtype=torch.int32)):
        for codes, scale in (
            encode_momentum(zeros, None if noise is None else noise & 255),
            encode_variance(zeros, noise),
        ):
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


@pytest.mark.parametrize("gradient_scale", [1e-14, 1e-12, 1e-6, 1.0, 1e12])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", [None, 0])
def test_no_quotient_of_the_two_moments_explodes(gradient_scale: float, spread: float, seed: int | None) -> None:
    """No quotient m/sqrt(v) grows by more than 7 %, and 3 % of the group's largest.

    With k <= 20 a decoded v is above v / (1 + 2^-3), and 1.125^(1/2) = 1.061. (It may be far above where v lies more
    than 31 octaves below the largest: then the quotient shrinks.) x = m / unit is within 2 d sqrt(s x) + d^2 s,
    d = 1/127: at most 2 * 1.0079 / 127 + 1/127^2 = 0.016 of the largest x, and unit is within sqrt(2) of sqrt(v) either
    way: 0.032.
    """
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(spread * torch.randn(4096, 32, generator=generator)) * gradient_scale
    momentum = size * torch.randn(4096, 32, generator=generator)
    variance = size * size
    words = None if seed is None else torch.randint(-(1 << 31), (1 << 31) - 1, (4096, 32), generator=generator).int()
    decoded = decode_moments(encode_moments([momentum, variance], [True, False], words), [True, False])
    exact = momentum.double() / variance.double().sqrt()
    seen = decoded[0].double() / decoded[1].double().sqrt()
    largest = exact.abs().amax(-1, keepdim=True)
    assert bool((seen.abs() <= 1.07 * exact.abs() + 0.034 * largest).all())
