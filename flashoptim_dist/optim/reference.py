"""The step in pure torch, on any device: in blocks, so that temporary memory stays bounded whatever the parameter.

On CPU a block is stepped by ``eager``; anywhere else by ``definition``. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
from flashoptim_dist.optim.scratch import Scratch, scratch_of_thread

__all__ = ["CHUNK_ELEMENTS", "MomentTensors", "ParameterStep", "Rule", "step_parameter", "step_parameters"]

CHUNK_ELEMENTS = 1 << 18
"""Elements per block: working memory of some 8 bytes each per buffer stays near the cores; see docs/performance.md."""

_SMALL_ELEMENTS = 1 << 15
"""Up to this size, copying a parameter into a block with others costs less than torch's calls for a block of its
own.
"""


def step_parameter(task: ParameterStep, rule: Rule, chunk_elements: int = CHUNK_ELEMENTS) -> None:
    """Update weight, correction and moments of one parameter in place.

    Args:
        task: local tensors, all on one device.
        rule: one of ``optim.rules``; called once per block.
        chunk_elements: bound on the elements processed at a time (one group of 32 at least).
    """
    step_parameters([(task, rule)], chunk_elements)


@torch.no_grad()
def step_parameters(tasks: Sequence[tuple[ParameterStep, Rule]], chunk_elements: int = CHUNK_ELEMENTS) -> None:
    """Do the same for many parameters, each with its rule, in any order; small ones of one kind share blocks."""
    scratch, on_cpu = scratch_of_thread(), _stepper(tasks)

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


def _stepper(tasks: Sequence[tuple[ParameterStep, Rule]]) -> Callable[[Block, Rule, Scratch], None]:
    """Return what steps the blocks of tasks on CPU."""
    elements = sum(task.layout.numel for task, _ in tasks if task.weight.device.type == "cpu")
    return compiled.step_block if compiled.use_compiled(elements) else eager.step_block
