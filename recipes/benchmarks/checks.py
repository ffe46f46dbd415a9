"""What the table of ``step.py`` does not show: host time on DTensors, memory beside the states, captured graphs.

python recipes/benchmarks/step.py --checks
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from shapes import Shape
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import flashoptim_dist as fod


def run_checks(shapes: list[Shape], device: torch.device, repetitions: int) -> list[str]:
    """Return one line per check.

    Args:
        shapes: of this rank's parameters.
        device: where they are.
        repetitions: timed steps.

    Raises:
        AssertionError: a replayed graph gives other bits than eager steps.
    """
    lines = [host_time(shapes, device, repetitions)]
    if device.type == "cuda":
        lines += [extra_memory(shapes, device), captured_steps(device)]
    return lines


def host_time(shapes: list[Shape], device: torch.device, repetitions: int) -> str:
    """Time step() on the host, on DTensors as FSDP2 makes them, over a mesh of one rank."""
    if not dist.is_available():
        return "host time on DTensors: skipped, torch.distributed is not available"
    if dist.is_initialized():
        return "host time on DTensors: skipped, a process group exists already"
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
    except (RuntimeError, ValueError) as error:
        return f"host time on DTensors: skipped, no process group: {str(error)[:100]}"
    try:
        parameters = []
        for shape in shapes:
            weight, gradient = (torch.randn(shape, device=device).to(torch.bfloat16) * s for s in (0.02, 1e-3))
            parameters.append(nn.Parameter(DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)))
            parameters[-1].grad = DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False)
        optimizer = fod.FlashAdamW(parameters, lr=1e-4)
        times = []
        for number in range(5 + repetitions):
            _synchronize(device)
            before = time.perf_counter()
            optimizer.step()
            if number >= 5:
                times.append((time.perf_counter() - before) * 1e3)
        _synchronize(device)
        return f"host time of step() on {len(shapes)} DTensors: {statistics.median(times):.3f} ms"
    finally:
        dist.destroy_process_group()


def extra_memory(shapes: list[Shape], device: torch.device) -> str:
    """Peak device memory of planning and stepping beside weights, gradients and states."""
    parameters, optimizer = _optimizer(shapes, device)
    optimizer.init_state()
    _synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        optimizer.step()
    _synchronize(device)
    extra = torch.cuda.max_memory_allocated(device) - before
    return f"device memory beside the states of {len(parameters)} tensors: {extra / 2**20:.2f} MiB"


def captured_steps(device: torch.device) -> str:
    """Compare ten replays of a captured step with ten eager ones, bit for bit."""
    shapes: list[Shape] = [(256, 512), (70, 100), (77,), (8, 16, 3, 3)]
    results: list[list[Tensor]] = []
    for captured in (False, True):
        parameters, optimizer = _optimizer(shapes, device)
        optimizer.step()
        optimizer.step()
        _synchronize(device)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for _ in range(10):
            if captured:
                graph.replay()
            else:
                optimizer.step()
        _synchronize(device)
        states: list[dict[str, Any]] = [optimizer.state[parameter] for parameter in parameters]
        results.append([*(p.detach() for p in parameters), *(value for state in states for value in state.values())])
    for eager, replayed in zip(*results, strict=True):
        assert torch.equal(eager, replayed), "a replayed step gives other bits than an eager one"
    return f"captured step: {len(results[0])} tensors bit-equal to eager steps after 10 replays"


def _optimizer(shapes: list[Shape], device: torch.device) -> tuple[list[nn.Parameter], fod.FlashAdamW]:
    torch.manual_seed(0)
    parameters = []
    for shape in shapes:
        parameters.append(nn.Parameter(torch.randn(shape, device=device).to(torch.bfloat16) * 0.02))
        parameters[-1].grad = torch.randn(shape, device=device).to(torch.bfloat16) * 1e-3
    return parameters, fod.FlashAdamW(parameters, lr=1e-4, weight_decay=0.1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
