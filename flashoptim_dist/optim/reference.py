"""The step in pure torch, on any device: in blocks, so that temporary memory stays bounded whatever the parameter.

On CPU a block is stepped by ``eager``; anywhere else by ``definition``. Both give the same bits.
"""

from __future__ import annotations

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
    staged_blocks,
)
from flashoptim_dist.optim.rules import Rule
from flashoptim_dist.optim.scratch import scratch_of_thread

__all__ = ["CHUNK_ELEMENTS", "MomentTensors", "ParameterStep", "Rule", "step_parameter", "step_parameters"]

CHUNK_ELEMENTS = 1 << 19
"""Most elements per block: a call of a compiled kernel is dear. Working memory is some 30 bytes for each."""

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
    on_cpu = compiled.step_block if compiles else eager.step_block
    if chunk_elements is None:
        in_eager_mode = _EAGER_ELEMENTS_PER_THREAD * torch.get_num_threads()
        chunk_elements = CHUNK_ELEMENTS if compiles or not elements else min(_MOST_EAGER_ELEMENTS, in_eager_mode)

    def step(pieces: Iterable[Block], rule: Rule) -> None:
        for block in pieces:
            if block.weight.device.type == "cpu":
                on_cpu(block, rule, scratch)
            else:
                definition.step_block(block, rule)

    alike: dict[object, list[tuple[ParameterStep, Rule]]] = {}
    for task, rule in tasks:
        if task.layout.numel == 0:
            continue
        if task.layout.numel <= min(_SMALL_ELEMENTS, chunk_elements):
            alike.setdefault(_kind(task, rule), []).append((task, rule))
        else:
            step(blocks(task, chunk_elements, scratch.staging), rule)
    for group in alike.values():
        rule = group[0][1]
        together: list[tuple[ParameterStep, _Box]] = []
        for task, _ in group:
            boxes = boxes_of_small(task, chunk_elements) if len(group) > 1 else None
            if boxes is None:
                step(blocks(task, chunk_elements, scratch.staging), rule)
            else:
                together.extend((task, box) for box in boxes)
        step(staged_blocks(together, chunk_elements, scratch.staging), rule)


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
