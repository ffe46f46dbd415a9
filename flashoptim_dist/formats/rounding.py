"""Rounding of codes: nearest, or by a dither that depends on (seed, parameter, global element index, step) alone.

Stochastic rounding adds noise, uniform over one unit, before rounding down, so that the expected code is the exact
value and a moving average never stalls. The noise of one element is a *rotated dither*: a hash of its index, advanced
by a golden-ratio step every optimizer step, so that over the steps of one element the noise is spread more evenly
than fresh random bits would be (0.7 of their error). Because only the global index enters, the bits do not depend on
the world size or the placement, and replicas stay identical.

One 32-bit word per element holds three fields: bits 0-7 for the weight, 8-15 for the momentum, and for the variance,
which drops k = 14 to 20 bits, the k highest. (Where k > 16 the last of those are the momentum's first: they weigh less
than 2**-16 of the variance's unit.) One 32-bit addition of ``step * ROTATION`` advances all: the low 8, 16 and 32 bits
of ROTATION are each odd and near the golden ratio of their range: each field sees a golden-ratio sequence of its own.

With rounding="nearest" the weight and the momentum go to nearest. The variance is rounded by one word for all elements,
``step * ROTATION``: a true nearest would let it stall, as it moves by less than half a unit per step.

All words live in int32 tensors with wrap-around arithmetic. Indices enter modulo 2**32: elements 2**32 apart share
noise, which harms nothing.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

HASH_STRIDE = 0x9E3779B1
HASH_MULTIPLIER = 0x85EBCA77
HASH_SHIFTS = (15, 16)
ROTATION = 0x9E379E9D

WEIGHT_NOISE_BITS = 8
MOMENTUM_NOISE_BITS = 8

_MASK32 = 0xFFFFFFFF
_WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def as_int32(value: int) -> int:
    """Return the signed 32-bit integer with the same low 32 bits as ``value``."""
    value &= _MASK32
    return value - (1 << 32) if value >= 1 << 31 else value


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes that FSDP, checkpointing and torch.compile wrappers add."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def parameter_id(name: str | None, ordinal: int) -> int:
    """Return the number by which the noise knows a parameter: CRC-32 of its canonical name, else its ordinal."""
    return zlib.crc32(canonical_name(name).encode()) if name is not None else ordinal


def noise_key(seed: int, parameter: int) -> int:
    """Mix the optimizer's seed and a parameter id into the 32-bit key of that parameter's noise (as a signed int32)."""
    x = (seed * 0x9E3779B1 + 0x7F4A7C15) & _MASK32
    for word in (parameter & _MASK32, (seed >> 32) & _MASK32):
        x ^= word
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
        x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
        x ^= x >> 16
    return as_int32(x)


def noise_words(index: Tensor, key: int, step: int) -> Tensor:
    """Return the noise words of elements at a step.

    Args:
        index: global linear element indices, any integer dtype, any shape.
        key: from :func:`noise_key`.
        step: the optimizer step the codes belong to (1 for the first update).

    Returns:
        int32 tensor of the same shape.
    """
    return scramble(index.to(torch.int32) * as_int32(HASH_STRIDE) + key, rotation(step))


def rotation(step: int) -> int:
    """Return what a step adds to every word, as a signed int32."""
    return as_int32(step * ROTATION)


def scramble(x: Tensor, added: int | Tensor) -> Tensor:
    """Turn hash inputs ``index * HASH_STRIDE + key`` (int32, wrapped around, any shape) into noise words.

    ``added`` is :func:`rotation` of the step. The input is overwritten.
    """
    first, second = HASH_SHIFTS
    x ^= (x >> first) & ((1 << (32 - first)) - 1)
    x *= as_int32(HASH_MULTIPLIER)
    x ^= (x >> second) & ((1 << (32 - second)) - 1)
    x += added
    return x


def weight_noise(words: Tensor) -> Tensor:
    """Return the weight field of noise words: int32 in [0, 255]."""
    return words & 0xFF


def plain_weight_noise(words: Tensor) -> Tensor:
    """Return the noise of a weight without correction, int32 in [0, 65535]: the weight's field, then the momentum's."""
    return ((words & 0xFF) << 8) | ((words >> 8) & 0xFF)


def momentum_noise(words: Tensor) -> Tensor:
    """Return the momentum field of noise words: int32 in [0, 255]."""
    return (words >> 8) & 0xFF


def leading_bits(words: Tensor, count: Tensor) -> Tensor:
    """Return the ``count`` highest bits of noise words, int32 in [0, 2**count - 1]; count 1 to 31, broadcast."""
    return (words >> (32 - count)) & ((1 << count) - 1)


def round_momentum(code: Tensor, noise: Tensor | None) -> Tensor:
    """Round momentum codes to integers: half to even, or up by ``noise`` in [0, 255] (floor(code + (noise + 1/2)/256)).

    ``code`` is fp32 with magnitude at most 127; an exact integer stays itself for every noise. Returns fp32.
    """
    if noise is None:
        return torch.round(code)
    fixed = torch.round(code * 256.0).to(torch.int32)
    return ((fixed + noise) >> MOMENTUM_NOISE_BITS).to(torch.float32)
