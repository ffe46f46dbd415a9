"""Rounding of codes: nearest, or by a dither that depends on (seed, parameter, global element index, step) alone.

Stochastic rounding adds noise, uniform over one unit, before rounding down, so that the expected code is the exact
value and a moving average never stalls. The noise of one element is a *rotated dither*: a hash of its index, advanced
by a golden-ratio step every optimizer step, so that over the steps of one element the noise is spread more evenly
than fresh random bits would be (0.7 of their error). Because only the global index enters, the bits do not depend on
the world size or the placement, and replicas stay identical.

One 32-bit word per element holds three disjoint fields: bits 0-7 for the weight, 8-15 for the momentum, 16-31 for the
variance. One 32-bit addition of ``step * ROTATION`` advances all three: the low 8, 16 and 32 bits of ROTATION are
each odd and near the golden ratio of their range, so each field sees a golden-ratio sequence of its own.

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
VARIANCE_NOISE_BITS = 16
VARIANCE_FRACTION_BITS = 15
"""What an fp32 mantissa holds beside a code below 256; the 16th noise bit decides between two such fractions."""

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


def momentum_noise(words: Tensor) -> Tensor:
    """Return the momentum field of noise words: int32 in [0, 255]."""
    return (words >> 8) & 0xFF


def variance_noise(words: Tensor) -> Tensor:
    """Return the variance field of noise words: int32 in [0, 65535]."""
    return (words >> 16) & 0xFFFF


def round_momentum(code: Tensor, noise: Tensor | None) -> Tensor:
    """Round momentum codes to integers: half to even, or up by ``noise`` in [0, 255] (floor(code + (noise + 1/2)/256)).

    ``code`` is fp32 with magnitude at most 127; an exact integer stays itself for every noise. Returns fp32.
    """
    if noise is None:
        return torch.round(code)
    fixed = torch.round(code * 256.0).to(torch.int32)
    return ((fixed + noise) >> MOMENTUM_NOISE_BITS).to(torch.float32)


def round_variance(code: Tensor, noise: Tensor | None) -> Tensor:
    """Round variance codes in [0, 255] to integers: half to even, or with ``noise`` in [0, 65535]. Returns fp32."""
    if noise is None:
        return torch.round(code)
    fixed = torch.round(code * float(1 << VARIANCE_FRACTION_BITS)).to(torch.int32)
    return ((fixed * 2 + noise) >> VARIANCE_NOISE_BITS).to(torch.float32)
