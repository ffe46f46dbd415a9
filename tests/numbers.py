"""Comparing numbers by their bits, and making tensors that hold every kind of number."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

FP32_EDGES = (
    0x00000000,  # zero
    0x00000001,  # smallest subnormal
    0x007FFFFF,  # largest subnormal
    0x00800000,  # smallest normal
    0x3F7FFFFF,  # just below one
    0x3F800000,  # one
    0x3F800001,
    0x477FE000,  # 65504, the largest fp16
    0x477FF000,  # 65520, where fp16 rounds to Inf
    0x7F7F0000,  # the largest bf16
    0x7F7F7FFF,  # the largest master weight
    0x7F7FFFFF,  # the largest fp32
)
"""Magnitude patterns of finite fp32 numbers where something changes."""


def pattern_of(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor as integers: tells -0 from 0 and one NaN from another."""
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not torch.equal(pattern_of(actual), pattern_of(expected)):
        wrong = pattern_of(actual) != pattern_of(expected)
        first = int(wrong.reshape(-1).nonzero()[0])
        raise AssertionError(
            f"{what} of shape {tuple(actual.shape)}: {int(wrong.sum())} of {wrong.numel()} elements differ, the first "
            f"at {first}: {actual.reshape(-1)[first].item()!r}, expected {expected.reshape(-1)[first].item()!r}"
        )


def float32_of(patterns: Tensor | list[int] | tuple[int, ...]) -> Tensor:
    """fp32 tensor of these 32-bit patterns."""
    integers = torch.as_tensor(patterns, dtype=torch.int64)
    return torch.where(integers >= 1 << 31, integers - (1 << 32), integers).to(torch.int32).view(torch.float32)


def every_16_bit(dtype: torch.dtype) -> Tensor:
    """All 65536 numbers of a 16-bit floating dtype, in the order of their patterns as unsigned integers."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def spread_float32(count: int, seed: int, *, finite: bool = True) -> Tensor:
    """fp32 numbers uniform over bit patterns, so over all exponents and subnormals, with all edges in front."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 1 << 32, (count,), generator=generator, dtype=torch.int64)
    if finite:
        magnitude = patterns & 0x7FFFFFFF
        patterns = torch.where(magnitude >= 0x7F800000, patterns & 0x807FFFFF, patterns)
    edges = torch.tensor([edge | sign for edge in FP32_EDGES for sign in (0, 1 << 31)])
    patterns[: len(edges)] = edges
    return float32_of(patterns)
