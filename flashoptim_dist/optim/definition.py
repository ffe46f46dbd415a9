"""The step of one block as the number format defines it, in pure torch, on any device.

Every operation is element-wise or a maximum over one group, so the bits do not depend on how a tensor is cut into
shards or blocks. ``eager`` and ``compiled`` do the same faster on CPU, bit for bit; the Triton kernels are tested
against this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashoptim_dist.formats import (
    GROUP_SIZE,
    decode_moments,
    encode_moments,
    merge,
    round_stochastically,
    split,
)
from flashoptim_dist.formats.rounding import (
    HASH_STRIDE,
    as_int32,
    plain_weight_noise,
    rotation,
    scramble,
    weight_noise,
)
from flashoptim_dist.formats.weights import SPLIT_DTYPES
from flashoptim_dist.optim.blocks import Block, MomentTensors
from flashoptim_dist.optim.rules import Rule, contain_overflow


def step_block(block: Block, rule: Rule) -> None:
    """Update the weight, the correction and the moments of a block in place."""
    words = block_noise(block)
    master = merge(block.weight, block.correction)
    gradient = block.gradient.to(torch.float32)
    if block.gradient_factor != 1.0:
        gradient = gradient * block.gradient_factor
    master, after = rule(master, gradient, load_moments(block.moments), block.scalars)
    store_moments(block, after, words)
    store_weight(block, master, words)


def block_noise(block: Block) -> Tensor | None:
    """Return the noise words of a block's elements, int32, or None where it rounds to nearest."""
    start, elements, device = block.noise_start, block.weight.numel(), block.weight.device
    if start is None:
        return None
    if isinstance(start, Tensor):
        x = start + torch.arange(GROUP_SIZE, dtype=torch.int32, device=device) * as_int32(HASH_STRIDE)
    else:
        x = torch.arange(elements, dtype=torch.int32, device=device) * as_int32(HASH_STRIDE) + start
    return scramble(x.view(-1), rotation(block.step))


def load_moments(moments: tuple[MomentTensors, ...]) -> tuple[Tensor, ...]:
    """Return the fp32 values of a block's moments."""
    stored = [(moment.values.view(-1, GROUP_SIZE), moment.scale) for moment in moments if moment.scale is not None]
    if not stored:
        return tuple(moment.values for moment in moments)
    return tuple(value.view(-1) for value in decode_moments(stored, [moment.signed for moment in moments]))


def store_moments(block: Block, values: tuple[Tensor, ...], words: Tensor | None) -> None:
    """Store fp32 values; ``words``: noise words of the block, None to round to nearest."""
    if not block.compressed:
        for moment, value in zip(block.moments, values, strict=True):
            moment.values.copy_(value)
        return
    grouped = [value.view(-1, GROUP_SIZE) for value in contain_overflow(values)]
    words = None if words is None else words.view(-1, GROUP_SIZE)
    stored = encode_moments(grouped, [moment.signed for moment in block.moments], words, rotation(block.step))
    for moment, (codes, scale) in zip(block.moments, stored, strict=True):
        moment.values.copy_(codes.view(-1))
        assert moment.scale is not None
        moment.scale.copy_(scale)


def store_weight(block: Block, master: Tensor, words: Tensor | None) -> None:
    """Store fp32 master weights as a block's weight and correction."""
    dtype = block.weight.dtype
    if block.correction is None:
        if words is not None and dtype in SPLIT_DTYPES:
            master = round_stochastically(master, dtype, plain_weight_noise(words))
        block.weight.copy_(master)
        return
    noise = None if words is None else weight_noise(words)
    weight, correction = split(master, dtype, block.correction.dtype.itemsize * 8, noise)
    block.weight.copy_(weight)
    block.correction.copy_(correction)
