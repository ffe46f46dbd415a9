"""Invariant 1 in the kernels: states gathered from several ranks are bit-equal to one rank's, for every placement.

All parameters are in one optimizer, so that one launch holds shards of every kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashoptim_dist import FlashAdamW
from tests.kernels.conftest import INTERPRETED
from tests.numbers import assert_same_bits
from tests.optim.cases import SHARDED, Case, whole_state
from tests.pool import run_ranks
from tests.several_gpus import run_on_gpus

TWO_GPUS = Path(__file__).with_name("two_gpus.py")

FEW = [
    case
    for case in SHARDED
    if case.name
    in (
        "partial groups",
        "one row",
        "convolution, channels last",
        "experts by row",
        "expert columns",
        "columns",
        "bf16 with fp32 gradient",
    )
]


def of_world(cases: list[Case], world_size: int) -> list[Case]:
    return [case for case in cases if any(torch.Size(sizes).numel() == world_size for sizes in case.meshes)]


def train(cases: list[Case], world_size: int | None, steps: int) -> dict[str, dict[str, Tensor]]:
    """Step the parameters of all cases together: sharded over the ranks of a pool, or plain (None)."""
    parameters = {case.name: case.parameter(None if world_size is None else case.mesh(world_size)) for case in cases}
    optimizer = FlashAdamW(list(parameters.items()), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(1, steps + 1):
        for case in cases:
            parameter = parameters[case.name]
            parameter.grad = case.place(case.gradient(step), None if world_size is None else case.mesh(world_size))
        optimizer.step()
    assert optimizer._stepper.plans, "the step was not taken by the kernels"
    return {name: whole_state(optimizer, parameter) for name, parameter in parameters.items()}


def assert_ranks_agree(cases: list[Case], world_size: int, steps: int) -> None:
    expected = train(cases, None, steps)
    for rank, results in enumerate(run_ranks(world_size, train, cases, world_size, steps)):
        for name, entries in expected.items():
            for entry, value in entries.items():
                assert_same_bits(results[name][entry], value, f"{entry} of {name!r} on rank {rank}")


@pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1 to run Triton's interpreter")
class TestInterpreted:
    def test_two_ranks(self) -> None:
        assert_ranks_agree(FEW, 2, steps=1)

    @pytest.mark.full
    @pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4)), 3])
    def test_all_placements(self, world_size: int) -> None:
        assert_ranks_agree(of_world(SHARDED, world_size), world_size, steps=2)


@pytest.mark.gpu
def test_two_gpus() -> None:
    """The same over NCCL on two GPUs, by torchrun."""
    printed = run_on_gpus(TWO_GPUS, 2)
    assert "bit-equal" in printed
