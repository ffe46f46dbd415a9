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
    decode_momentum,
    decode_variance,
    encode_momentum,
    encode_variance,
    merge,
    split,
)
from flashoptim_dist.formats.rounding import (
    HASH_STRIDE,
    as_int32,
    momentum_noise,
    rotation,
    scramble,
    variance_noise,
    weight_noise,
)
from flashoptim_dist.optim.blocks import Block, MomentTensors
from flashoptim_dist.optim.rules import Rule, contain_overflow


def step_block(block: Block, rule: Rule) -> None:
    """Update the weight, the correction and the moments of a block in place."""
    words = block_noise(block)
    master = merge(block.weight, block.correction)
    gradient = block.gradient.to(torch.float32)
    if block.gradient_factor != 1.0:
        gradient = gradient * block.gradient_factor
    master, after = rule(master, gradient, tuple(map(load_moment, block.moments)), block.scalars)
    if block.compressed:
        after = contain_overflow(after)
    for moment, value in zip(block.moments, after, strict=True):
        store_moment(moment, value, words)
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


def load_moment(moment: MomentTensors) -> Tensor:
    """Return a moment's fp32 values."""
    if moment.scale is None:
        return moment.values
    decode = decode_momentum if moment.signed else decode_variance
    return decode(moment.values.view(-1, GROUP_SIZE), moment.scale).view(-1)


def store_moment(moment: MomentTensors, value: Tensor, words: Tensor | None) -> None:
    """Store fp32 values; ``words``: noise words of the block, None to round to nearest."""
    if moment.scale is None:
        moment.values.copy_(value)
        return
    noise = None
    if words is not None:
        noise = (momentum_noise(words) if moment.signed else variance_noise(words)).view(-1, GROUP_SIZE)
    codes, scale = (encode_momentum if moment.signed else encode_variance)(value.view(-1, GROUP_SIZE), noise)
    moment.values.copy_(codes.view(-1))
    moment.scale.copy_(scale)


def store_weight(block: Block, master: Tensor, words: Tensor | None) -> None:
    """Store fp32 master weights as a block's weight and correction."""
    if block.correction is None:
        block.weight.copy_(master)
        return
    noise = None if words is None else weight_noise(words)
    weight, correction = split(master, block.weight.dtype, block.correction.dtype.itemsize * 8, noise)
    block.weight.copy_(weight)
    block.correction.copy_(correction)
