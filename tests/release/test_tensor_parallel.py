"""Gradient release with tensor parallelism: matrices over both dimensions of a mesh, norms over one, or no FSDP2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashoptim_dist as fod
from tests import pool
from tests.numbers import assert_same_bits
from tests.optim.cases import whole, whole_state
from tests.pool import run_ranks

State = dict[str, dict[str, Tensor]]
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _model(sharded: bool) -> nn.Sequential:
    """Three blocks over two or four ranks, two of them for each matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).bfloat16()
    world = dist.get_world_size()
    mesh = pool.mesh(world // 2, 2, names=("dp", "tp")) if sharded else None
    for block in model:
        line = pool.mesh(2) if mesh is None else mesh["tp"]
        parallelize_module(block, line, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mesh is not None:
        fod.shard_model(model, mesh["dp"], layers=list(model))
    return model


def _run(sharded: bool, release: bool, options: dict[str, Any]) -> tuple[State, list[tuple[float, float]], int]:
    """Three steps; after each the norm that release reports, and the exact one."""
    model = _model(sharded)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    handle = fod.enable_gradient_release(model, optimizer, **options) if release else None
    squares: list[float] = []
    if handle is not None:
        inner = optimizer._step

        def step(inputs: Any, subset: Any = None) -> None:
            if subset is not None:
                squares.extend(float(whole(p.grad).double().square().sum()) for p in subset.parameters)
            inner(inputs, subset)

        optimizer._step = step  # type: ignore[method-assign]
    norms = []
    for number in range(3):
        squares.clear()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None and handle.gradient_norm is not None:
            norms.append((float(handle.gradient_norm), math.sqrt(sum(squares))))
    return {n: whole_state(optimizer, p) for n, p in model.named_parameters()}, norms, optimizer.skipped_steps


@pytest.mark.parametrize("world_size, sharded", [(2, False), (4, True), pytest.param(2, True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "options",
    [{"clip_global_norm": 1e9}, *(pytest.param(o, marks=pytest.mark.full) for o in ({}, {"skip_nonfinite": True}))],
    ids=str,
)
def test_on_is_off(world_size: int, sharded: bool, options: dict[str, Any]) -> None:
    """Also with norms that are taken and clip nothing: each parameter counts once, wherever its shards lie."""
    on = run_ranks(world_size, _run, sharded, True, options)
    off = run_ranks(world_size, _run, sharded, False, {})
    for (state, norms, skipped), (expected, _, _) in zip(on, off, strict=True):
        assert skipped == 0
        assert state.keys() == expected.keys()
        for name, entries in expected.items():
            for entry, value in entries.items():
                assert_same_bits(state[name][entry], value, f"{entry} of {name}")
        assert len(norms) == (3 if options else 0)
        for reported, exact in norms:
            assert reported == pytest.approx(exact, rel=1e-6)
