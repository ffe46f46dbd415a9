"""States in host memory: `offload_states=True`, and parameters, gradients and states under CPUOffloadPolicy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard

import flashoptim_dist as fod
from flashoptim_dist.checkpoint import load, save
from flashoptim_dist.sharding import like_parameter
from tests.fake_world import fake_rank
from tests.numbers import assert_same_bits
from tests.pool import run_ranks
from tests.release.models import build, everything, train

SHAPES = [(24, 64), (7, 40), (33,), (40, 32), (0, 32), (5, 64)]


def _parameters(device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter((torch.randn(shape) * 0.1).bfloat16().to(device)) for shape in SHAPES]


def _steps(offload: bool, device: str, steps: int = 3, **options: Any) -> tuple[list[Tensor], fod.FlashAdamW]:
    parameters = _parameters(device)
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    optimizer = fod.FlashAdamW(named, lr=1e-2, offload_states=offload, **options)
    for step in range(steps):
        torch.manual_seed(step)
        for number, parameter in enumerate(parameters):
            parameter.grad = None if step == 1 and number == 1 else torch.randn_like(parameter)
        fod.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


def _assert_alike(ours: tuple[list[Tensor], fod.FlashAdamW], expected: tuple[list[Tensor], fod.FlashAdamW]) -> None:
    for weight, other in zip(ours[0], expected[0], strict=True):
        assert_same_bits(weight, other, "weight")
    states, others = ours[1].state_dict()["state"], expected[1].state_dict()["state"]
    for number, entries in others.items():
        for name, value in entries.items():
            assert_same_bits(states[number][name].cpu(), value.cpu(), f"{name} of p{number}")


def test_it_changes_nothing_on_the_cpu() -> None:
    _assert_alike(_steps(True, "cpu"), _steps(False, "cpu"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_streamed_states_give_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of one to two parameters; also where a parameter has no gradient, and after a load."""
    offload = pytest.importorskip("flashoptim_dist.optim.offload")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here")
    monkeypatch.setattr(offload, "CHUNK_BYTES", 1 << 12)
    ours, expected = _steps(True, device, fused=True), _steps(False, device, fused=True)
    assert len(ours[1]._stepper.plans) > 2
    assert all(isinstance(plan, offload.StagedPlan) for plan in ours[1]._stepper.plans)
    _assert_alike(ours, expected)
    for _, optimizer in (ours, expected):
        fresh = fod.FlashAdamW(optimizer.param_groups, offload_states=optimizer is ours[1], fused=True)
        fresh.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            fresh.step()
    _assert_alike(ours, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_states_lie_in_pinned_memory_and_two_buffers_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashoptim_dist.optim import offload

    monkeypatch.setattr(offload, "CHUNK_BYTES", 1 << 20)
    parameters = [nn.Parameter(torch.zeros(256, 1024, dtype=torch.bfloat16, device="cuda")) for _ in range(32)]
    optimizer = fod.FlashAdamW(parameters, offload_states=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        optimizer.step()
    optimizer.state_dict()
    held = torch.cuda.memory_allocated() - before
    states = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if v.ndim)
    assert all(v.is_pinned() for s in optimizer.state.values() for v in s.values() if v.ndim)
    assert held <= 2 * (1 << 20) + (1 << 20), "two buffers, tables and step counters"
    assert states > 24 * (1 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_options_that_cannot_be_streamed_are_refused_on_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="offload_states=True streams states through the Triton kernels"):
        _steps(True, "cuda", fused=False)


def test_d43_a_state_stays_where_the_offloaded_shard_is() -> None:
    """pytorch#148532: the shard is on the CPU, the mesh says cuda, and from_local moves states there."""
    with fake_rank(0, 2):
        mesh = DeviceMesh("cuda", [0, 1])
        form = DTensor.from_local(torch.zeros(2, 32, device="meta"), mesh, [Shard(0)], run_check=False)
        parameter = DTensor(torch.zeros(2, 32), form._spec, requires_grad=False)
        state = like_parameter(torch.zeros(2, 1, dtype=torch.bfloat16), parameter, (4, 1))
        assert isinstance(state, DTensor)
        assert (state.shape, state._local_tensor.device.type, state.dtype) == ((4, 1), "cpu", torch.bfloat16)
        assert (state.device_mesh, state.placements) == (mesh, (Shard(0),))


def _offloaded(policy: bool, release: bool) -> tuple[dict[str, dict[str, Tensor]], float]:
    offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if policy else None
    model = build(dist.get_world_size(), layers=2, offload_policy=offload_policy)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    norm = torch.zeros(())
    if release:
        fod.enable_gradient_release(model, optimizer)

    def clip() -> None:
        nonlocal norm
        norm = fod.clip_grad_norm_(optimizer, 0.1)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    train(model, optimizer, range(2), scheduler=scheduler, before_step=None if release else clip)
    return everything(model, optimizer), float(norm)


@pytest.mark.parametrize("release", [False, True])
def test_b18_d43_cpu_offload_policy(release: bool) -> None:
    """Parameters, gradients and states on the CPU: steps, clipping and release as without; ao#959, ao PR 1649: with a
    frozen parameter and a scheduler.
    """
    on, off = (run_ranks(2, _offloaded, policy, release) for policy in (True, False))
    for (state, norm), (expected, expected_norm) in zip(on, off, strict=True):
        assert norm == expected_norm
        for name, entries in expected.items():
            for entry, value in entries.items():
                assert_same_bits(state[name][entry], value, f"{entry} of {name}")


def _resumed_under_offload(folder: str, release: bool) -> tuple[list[float], list[float]]:
    """Losses of two steps after a save, and of the same two after a load into fresh objects."""

    def fresh() -> tuple[Any, fod.FlashAdamW]:
        model = build(dist.get_world_size(), layers=1, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
        if release:
            fod.enable_gradient_release(model, optimizer)
        return model, optimizer

    model, optimizer = fresh()
    train(model, optimizer, range(4))
    save(folder, model, optimizer)
    expected, weights = train(model, optimizer, range(4, 6)), everything(model, optimizer)
    model, optimizer = fresh()
    load(folder, model, optimizer)
    losses = train(model, optimizer, range(4, 6))
    for name, entries in everything(model, optimizer).items():
        for entry, value in entries.items():
            assert_same_bits(value, weights[name][entry], f"{entry} of {name}")
    return losses, expected


@pytest.mark.parametrize("release", [False, pytest.param(True, marks=pytest.mark.full)])
def test_b23_resume_under_cpu_offload(tmp_path: Path, release: bool) -> None:
    """Megatron-LM#1842, #1820: with states in host memory the loss went from 0.31 to 10 on resuming."""
    for losses, expected in run_ranks(2, _resumed_under_offload, str(tmp_path), release):
        assert losses == expected


def test_b18_streamed_states_are_those_of_an_optimizer() -> None:
    """ao#959, ao#1209: a scheduler takes offload_states=True for an optimizer, and a frozen parameter stays."""
    results = []
    for offload in (True, False):
        parameters = _parameters("cpu")
        parameters[1].requires_grad_(False)
        frozen = parameters[1].detach().clone()
        optimizer = fod.FlashAdamW(parameters, lr=1e-2, offload_states=offload)
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        for step in range(3):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)
        assert torch.equal(parameters[1], frozen)
        assert parameters[1] not in optimizer.state
        results.append([parameter.detach() for parameter in parameters])
    for ours, expected in zip(*results, strict=True):
        assert_same_bits(ours, expected, "weight")
