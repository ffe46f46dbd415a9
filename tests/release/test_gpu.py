"""Gradient release and clipping on a GPU: streams, memory, and no waiting."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flashoptim_dist as fod
from tests.numbers import assert_same_bits
from tests.several_gpus import run_on_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a CUDA device"
    ),
]

WIDTH, LAYERS = 2048, 24
UNIT_BYTES = 2 * (WIDTH * WIDTH * 2)
"""Two bf16 matrices."""


class Block(nn.Module):
    """Two large matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@pytest.fixture
def world() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _build(sharded: bool) -> tuple[nn.Sequential, fod.FlashAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    if sharded:
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp_shard",))
        fod.shard_model(model, mesh, layers=list(model), reduce_dtype=None)
    return model, fod.FlashAdamW(model.named_parameters(), lr=1e-3)


def _train(sharded: bool, release: bool, steps: int = 4, **options: Any) -> tuple[list[Tensor], int]:
    """Weights after some steps, and the bytes that the last backward pass added at its peak."""
    gc.collect()  # a model of before, in cycles, would be freed while this one is measured
    model, optimizer = _build(sharded)
    if release:
        fod.enable_gradient_release(model, optimizer, **options)
    added = 0
    for step in range(steps):
        x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16, generator=_generator(step))
        loss = model(x).float().square().mean()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
        added = torch.cuda.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]
    return weights, added


def _generator(step: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(step)


@pytest.mark.parametrize("sharded", [False, True])
def test_on_is_off(sharded: bool, world: None) -> None:
    (ours, _), (expected, _) = _train(sharded, True), _train(sharded, False)
    for weight, other in zip(ours, expected, strict=True):
        assert_same_bits(weight, other, "weight")


@pytest.mark.parametrize("sharded", [False, True])
def test_two_units_gradients_at_most(sharded: bool, world: None) -> None:
    """Without release all gradients are alive at the end of the backward; with it two units', and working memory."""
    (_, with_release), (_, without) = _train(sharded, True), _train(sharded, False)
    # While gradients come, the layers' activations go: well under one unit's gradients in all.
    assert without >= (LAYERS - 1) * UNIT_BYTES
    # FSDP2 holds the unsharded weights of two units and the reduction's input of up to two beside the gradients.
    working = 6 * UNIT_BYTES if sharded else UNIT_BYTES
    assert with_release <= 2 * UNIT_BYTES + working
    assert with_release < without


@pytest.mark.parametrize("option", [{}, {"clip_global_norm": 1.0}, {"clip_parameter_norm": 1.0}])
def test_the_host_never_waits(option: dict[str, float]) -> None:
    model, optimizer = _build(False)
    fod.enable_gradient_release(model, optimizer, **option)  # type: ignore[arg-type]
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    for step in range(6):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            if step == 5:
                torch.cuda.set_sync_debug_mode("default")


def test_clipping_waits_for_nothing_and_needs_no_memory() -> None:
    model, optimizer = _build(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in range(4):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.cuda.set_sync_debug_mode("error")
        try:
            fod.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < UNIT_BYTES // 8


def test_on_is_off_over_several_gpus() -> None:
    """FSDP, HSDP and offload to the CPU over NCCL, by torchrun."""
    printed = run_on_gpus(Path(__file__).with_name("two_gpus.py"))
    assert "release on is off" in printed
