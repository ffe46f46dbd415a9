"""The dither: its words against a restatement in Python's integers, its fields, and what rounding with it keeps."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashoptim_dist.formats import canonical_name, noise_key, noise_words, parameter_id
from flashoptim_dist.formats.rounding import (
    leading_bits,
    momentum_noise,
    plain_weight_noise,
    round_momentum,
    weight_noise,
)

WORD = 1 << 32
U64 = st.integers(0, (1 << 64) - 1)


def key_restated(seed: int, parameter: int) -> int:
    """noise_key in Python's integers: an affine map of the seed, then two rounds of a 32-bit finalizer."""
    x = (seed * 0x9E3779B1 + 0x7F4A7C15) % WORD
    for word in (parameter % WORD, (seed >> 32) % WORD):
        x ^= word
        x ^= x >> 16
        x = x * 0x7FEB352D % WORD
        x ^= x >> 15
        x = x * 0x846CA68B % WORD
        x ^= x >> 16
    return x


def word_restated(index: int, key: int, step: int) -> int:
    """noise_words in Python's integers: a hash of (index, key), rotated by the step."""
    x = (index * 0x9E3779B1 + key) % WORD
    x ^= x >> 15
    x = x * 0x85EBCA77 % WORD
    x ^= x >> 16
    return (x + step * 0x9E379E9D) % WORD


@given(seed=U64, parameter=U64)
def test_key_is_the_restated_one(seed: int, parameter: int) -> None:
    assert noise_key(seed, parameter) % WORD == key_restated(seed, parameter)


@given(indices=st.lists(st.integers(0, (1 << 62) - 1), min_size=1, max_size=40), seed=U64, step=st.integers(0, 1 << 40))
def test_words_are_the_restated_ones(indices: list[int], seed: int, step: int) -> None:
    key = noise_key(seed, 5)
    expected = [word_restated(index, key % WORD, step) for index in indices]
    words = noise_words(torch.tensor(indices), key, step)
    assert words.dtype == torch.int32
    assert [word % WORD for word in words.tolist()] == expected
    # Only the index modulo 2**32 enters, so an index that has wrapped around in int32 will do.
    wrapped = noise_words(torch.tensor(indices).to(torch.int32), key, step)
    assert torch.equal(wrapped, words)


def test_words_leave_the_indices_alone() -> None:
    index = torch.arange(100, dtype=torch.int32)
    noise_words(index, 7, 3)
    assert torch.equal(index, torch.arange(100, dtype=torch.int32))


def variance_noise(words: Tensor) -> Tensor:
    """The 16 leading bits, which all of the variance's shifts but the two finest use."""
    return leading_bits(words, torch.tensor(16))


@given(words=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1), count=st.integers(1, 31))
def test_fields_are_the_bits_that_the_module_says(words: list[int], count: int) -> None:
    tensor = torch.tensor(words, dtype=torch.int32)
    assert weight_noise(tensor).tolist() == [word & 0xFF for word in words]
    assert momentum_noise(tensor).tolist() == [word >> 8 & 0xFF for word in words]
    assert leading_bits(tensor, torch.tensor(count)).tolist() == [word % WORD >> 32 - count for word in words]
    expected = [(word & 0xFF) << 8 | word >> 8 & 0xFF for word in words]
    assert plain_weight_noise(tensor).tolist() == expected


def test_every_element_meets_every_noise_equally_often_over_the_steps() -> None:
    """A field of j bits and the fields below it walk an odd stride: 2**(bits up to its top) steps meet all values.

    Weight: each of 256 values once in 256 steps. Momentum: each of its 256 values 256 times in 65536 steps.
    """
    index = torch.arange(3)
    key = noise_key(0, 9)
    weights = torch.stack([weight_noise(noise_words(index, key, step)) for step in range(1, 257)])
    for element in weights.unbind(1):
        assert torch.equal(element.sort().values, torch.arange(256, dtype=torch.int32))
    # The words of one element over steps are an arithmetic sequence (the test of the restatement above).
    start, stride = word_restated(0, key % WORD, 0), word_restated(0, key % WORD, 1) - word_restated(0, key % WORD, 0)
    words = ((start + torch.arange(1, 65537) * stride) % WORD).sub(1 << 31).to(torch.int32) ^ (-1 << 31)
    assert words[41].item() == noise_words(index[:1], key, 42).item()
    assert torch.equal(torch.bincount(momentum_noise(words)), torch.full((256,), 256))
    # Variance: 16 bits above 16 others, so 2**32 steps; of 65536 steps 256 +- 2 (3 + log n) fall into each 256th, by
    # the bound of the test below.
    counts = torch.bincount(variance_noise(words) >> 8, minlength=256)
    assert (counts - 256).abs().max().item() <= 2 * (3 + math.log(65536))


@pytest.mark.parametrize("steps", [16, 64, 256, 1000])
@pytest.mark.parametrize("field, bits", [(weight_noise, 8), (momentum_noise, 8), (variance_noise, 16)])
def test_steps_of_one_element_are_spread_evenly(field: object, bits: int, steps: int) -> None:
    """Golden-ratio rotation: the discrepancy over n steps falls like log(n)/n; fresh random bits' like 1/sqrt(n).

    The bound is (3 + log(n))/n plus one unit of the field, for all of 64 elements: tighter than what is proven for the
    exact ratio, (3 + 3.5 log(n))/n (Kuipers and Niederreiter, Uniform Distribution of Sequences, section 2.3).
    """
    assert callable(field)
    index = torch.arange(64)
    words = torch.stack([noise_words(index, noise_key(1, 2), step) for step in range(1, steps + 1)])
    values = field(words).to(torch.float64).sort(0).values / (1 << bits)
    rank = torch.arange(steps, dtype=torch.float64).unsqueeze(1)
    discrepancy = torch.maximum((values - rank / steps).abs(), ((rank + 1) / steps - values).abs()).max().item()
    assert discrepancy <= (3 + math.log(steps)) / steps + 1 / (1 << bits)


def test_elements_and_fields_look_independent() -> None:
    """At one step: each field uniform over elements (chi-square), neighbours, fields and parameters uncorrelated.

    65536 elements: a correlation of independent ones has deviation 1/256, and the bound is 5 of it; a chi-square with
    255 degrees of freedom has mean 255 and deviation 22.6, and the bound is 5 above. Fixed seeds: nothing is random.
    """
    count = 1 << 16
    index = torch.arange(count)
    words = noise_words(index, noise_key(0, zlib.crc32(b"layers.0.weight")), 1)
    other = noise_words(index, noise_key(0, zlib.crc32(b"layers.1.weight")), 1)
    seeded = noise_words(index, noise_key(1, zlib.crc32(b"layers.0.weight")), 1)
    fields = {
        "weight": weight_noise(words),
        "momentum": momentum_noise(words),
        "variance": variance_noise(words),
        "weight of another parameter": weight_noise(other),
        "variance of another parameter": variance_noise(other),
        "variance under another seed": variance_noise(seeded),
    }
    for name, field in fields.items():
        bins = torch.bincount(field >> 8 if "variance" in name else field, minlength=256).to(torch.float64)
        chi_square = ((bins - count / 256) ** 2 / (count / 256)).sum().item()
        assert chi_square < 255 + 5 * 22.6, name
    columns = [field.to(torch.float64) for field in fields.values()]
    columns += [columns[0].roll(shift) for shift in (1, 2, 32, 4096)]
    correlation = torch.corrcoef(torch.stack(columns)).fill_diagonal_(0.0)
    assert correlation.abs().max().item() < 5 / 256


def test_momentum_rounding_is_unbiased() -> None:
    """Over all 256 noises the mean code is the code itself, to the 1/256 that the noise resolves (exactly)."""
    code = torch.linspace(-127, 127, 4001)
    mean = torch.stack([round_momentum(code, torch.full(code.shape, n, dtype=torch.int32)) for n in range(256)]).mean(
        0, dtype=torch.float64
    )
    assert torch.equal(mean, torch.round(code.to(torch.float64) * 256) / 256)


def test_rounding_moves_less_than_one_and_keeps_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    momentum = torch.cat([torch.rand(4096, generator=generator) * 254 - 127, torch.arange(-127.0, 128.0)])
    for noise in (0, 1, 127, 128, 254, 255):
        rounded = round_momentum(momentum, torch.full(momentum.shape, noise, dtype=torch.int32))
        assert bool(((rounded - momentum).abs() < 1).all())
        assert torch.equal(rounded[4096:], momentum[4096:])


def test_nearest_rounds_half_to_even() -> None:
    code = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.25])
    expected = torch.tensor([-2.0, -2.0, -0.0, 0.0, 2.0, 2.0, 3.0])
    assert torch.equal(round_momentum(code, None), expected)


def test_parameter_id_is_the_crc_of_the_canonical_name() -> None:
    plain = "layers.0.attention.wq.weight"
    wrapped = (
        "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.attention.wq.weight",
        "_orig_mod.layers.0._orig_mod.attention.wq.weight",
        plain,
    )
    assert {canonical_name(name) for name in wrapped} == {plain}
    assert {parameter_id(name, ordinal) for ordinal, name in enumerate(wrapped)} == {zlib.crc32(plain.encode())}
    assert parameter_id(None, 17) == 17


@settings(max_examples=20)
@given(seed=U64)
def test_keys_of_parameters_and_seeds_differ(seed: int) -> None:
    """Each of the two steps of the key is a bijection of its word, so one seed's keys of 32-bit ids never collide."""
    keys = {noise_key(seed, parameter) for parameter in range(2000)}
    assert len(keys) == 2000
    assert noise_key(seed, 3) != noise_key(seed ^ 1, 3)
    assert noise_key(seed, 3) != noise_key(seed ^ (1 << 33), 3)
