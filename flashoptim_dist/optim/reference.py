"""The step in pure torch, on any device: in blocks, so that temporary memory stays bounded whatever the parameter.

On CPU a block is stepped by ``eager``, or by a kernel of ``compiled``, which takes a parameter that lies in memory row
after row as it is; anywhere else by ``definition``. All give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from flashoptim_dist.optim import compiled, definition, eager
from flashoptim_dist.optim.blocks import (
    Block,
    MomentTensors,
    ParameterStep,
    _Box,
    blocks,
    boxes_of_small,
    is_addressable,
    is_flat,
    staged_blocks,
)
from flashoptim_dist.optim.rules import Rule
from flashoptim_dist.optim.scratch import scratch_of_thread

__all__ = ["CHUNK_ELEMENTS", "MomentTensors", "ParameterStep", "Rule", "step_parameter", "step_parameters"]

CHUNK_ELEMENTS = 1 << 19
"""Most elements per block, except in eager mode on CPU. Working memory is some 30 bytes for each."""

_EAGER_ELEMENTS_PER_THREAD, _MOST_EAGER_ELEMENTS = 1 << 17, 1 << 20
"""In eager mode, which passes over a block many times, more would leave the cores' caches; fewer pay torch's calls."""

_SMALL_ELEMENTS = 1 << 15
"""Up to this size, copying a parameter into a block with others costs less than torch's calls for a block of its
own.
"""


def step_parameter(task: ParameterStep, rule: Rule, chunk_elements: int | None = None) -> None:
    """Update weight, correction and moments of one parameter in place.

    Args:
        task: local tensors, all on one device.
        rule: one of ``optim.rules``; called once per block.
        chunk_elements: bound on the elements processed at a time (one group of 32 at least); None chooses.
    """
    step_parameters([(task, rule)], chunk_elements)


@torch.no_grad()
def step_parameters(tasks: Sequence[tuple[ParameterStep, Rule]], chunk_elements: int | None = None) -> None:
    """Do the same for many parameters, each with its rule, in any order; small ones of one kind share blocks."""
    scratch = scratch_of_thread()
    elements = sum(task.layout.numel for task, _ in tasks if task.weight.device.type == "cpu")
    compiles = compiled.use_compiled(elements)
    in_eager_mode = min(_MOST_EAGER_ELEMENTS, _EAGER_ELEMENTS_PER_THREAD * torch.get_num_threads())

    shares = compiled.Shares()

    def step(pieces: Iterable[Block], rule: Rule, kernel: compiled.Kernel | None) -> None:
        for block in pieces:
            if kernel is not None:
                shares.add_block(block, kernel)
                shares.run()
            elif block.weight.device.type == "cpu":
                eager.step_block(block, rule, scratch)
            else:
                definition.step_block(block, rule)

    alike: dict[tuple[object, compiled.Kernel | None, int], list[tuple[ParameterStep, Rule]]] = {}
    for task, rule in tasks:
        if task.layout.numel == 0:
            continue
        if task.gradient.is_neg():
            # Copied as it is, torch loses the sign of fp16.
            task = dataclasses.replace(task, gradient=task.gradient.resolve_neg())
        on_cpu = task.weight.device.type == "cpu"
        kernel = compiled.kernel_for(task, rule) if compiles and on_cpu else None
        addressable = on_cpu and is_addressable(task)
        if kernel is not None and addressable and is_flat(task):
            shares.add(task, kernel)
            continue
        limit = chunk_elements or (in_eager_mode if on_cpu and kernel is None else CHUNK_ELEMENTS)
        if task.layout.numel <= min(_SMALL_ELEMENTS, limit):
            alike.setdefault((_kind(task, rule), kernel, limit), []).append((task, rule))
        else:
            step(blocks(task, limit, scratch.staging, copied=kernel is not None), rule, kernel)
    for (_, kernel, limit), group in alike.items():
        rule = group[0][1]
        together: list[tuple[ParameterStep, _Box]] = []
        for task, _ in group:
            boxes = boxes_of_small(task, limit) if len(group) > 1 else None
            if boxes is None:
                step(blocks(task, limit, scratch.staging, copied=kernel is not None), rule, kernel)
            else:
                together.extend((task, box) for box in boxes)
        step(staged_blocks(together, limit, scratch.staging), rule, kernel)
    shares.run()


def _kind(task: ParameterStep, rule: Rule) -> object:
    """Return what parameters must have in common to share a block."""
    return (
        rule,
        task.scalars,
        task.gradient_factor,
        task.step,
        task.noise_key is None,
        task.weight.device,
        task.weight.dtype,
        task.gradient.dtype,
        None if task.correction is None else task.correction.dtype,
        tuple((moment.signed, moment.values.dtype, moment.scale is None) for moment in task.moments),
    )
