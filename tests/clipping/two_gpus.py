"""Norms, clipping and skipped steps over several GPUs: the numbers of the whole model, on all ranks. For torchrun.

See test_clip_grad_norm.py. With two ranks or an even number; on CPUs too, with gloo:
torchrun --nproc-per-node 2 tests/clipping/two_gpus.py
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # last: the root's kernels/ must not stand for a package of that name

import flashoptim_dist as fod  # noqa: E402
from tests.numbers import assert_same_bits  # noqa: E402

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = [(24, 64), (7, 40), (33,), (1, 64), (600, 1024)]
CLOSE = 1e-5
Layout = list[tuple[DeviceMesh | None, tuple[Any, ...]]]


def layouts(device: torch.device) -> dict[str, Layout]:
    """Where each of the five parameters lies: FSDP, HSDP, two dimensions, and several meshes with a plain tensor."""
    size = dist.get_world_size()

    def mesh(*sizes: int) -> DeviceMesh:
        return init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])

    line, replicas, grid = mesh(size), mesh(2, size // 2), mesh(size // 2, 2)
    return {
        "FSDP": [(line, (S0,))] * 5,
        "HSDP": [(replicas, (R, S0))] * 5,
        "two dimensions": [(grid, (S0, R)), (grid, (S0, R)), (grid, (R, R)), (grid, (R, S1)), (grid, (S0, S1))],
        "several meshes": [(line, (S0,)), (grid["tp"], (S0,)), (line, (R,)), (None, ()), (grid["dp"], (S0,))],
    }


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    """Whole gradients, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def place(tensors: list[Tensor], layout: Layout, device: torch.device) -> list[Tensor]:
    """The tensors as the ranks of a layout hold them."""
    return [
        tensor.to(device, copy=True)
        if mesh is None
        else distribute_tensor(tensor.to(device), mesh, where, src_data_rank=None)
        for tensor, (mesh, where) in zip(tensors, layout, strict=True)
    ]


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise an error where the host waits for the GPU inside."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(layout: Layout | None, device: torch.device) -> list[Tensor]:
    """Whole weights after four clipped steps in fp16, of which the second has an Inf on one rank and is skipped."""
    layout = [(None, ())] * 5 if layout is None else layout
    weights = [weight.half() for weight in gradients(0, 0.1)]
    parameters = [nn.Parameter(weight) for weight in place(weights, layout, device)]
    optimizer = fod.FlashAdamW(parameters, lr=1e-2)
    for step in range(1, 5):
        whole = [gradient.half() for gradient in gradients(step)]
        if step == 2:
            whole[0][-1, -1] = math.inf  # a part of one rank's shard
        expected = [
            sum(float(g.double().square().sum()) for g in whole) ** 0.5,
            max(float(g.abs().max()) for g in whole),
        ]
        for parameter, gradient in zip(parameters, place(whole, layout, device), strict=True):
            parameter.grad = gradient
        found = [fod.clip_grad_norm_(optimizer, 1.0)]
        if step != 2:  # in place; 0 times Inf would be NaN
            found.append(fod.clip_grad_norm_(parameters, 1e9, math.inf))
        for norm, number in zip(found, expected, strict=False):
            assert float(norm) == number or abs(float(norm) / number - 1) < CLOSE, (step, float(norm), number)
        if step == 4:
            with no_waiting(device):
                fod.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    assert optimizer.skipped_steps == 1, optimizer.skipped_steps
    everything = [p.detach() for p in parameters]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in everything]


def released(mesh: DeviceMesh, device: torch.device) -> None:
    """Gradient release with a running norm: the norm is the whole model's, and an Inf on one rank skips on all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(device)
    fod.shard_model(model, mesh, layers=list(model))
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-3)
    handle = fod.enable_gradient_release(model, optimizer, clip_global_norm=1.0)
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(x).square().mean()
        if step == 2:
            loss = loss * (math.inf if dist.get_rank() == 0 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert handle.gradient_norm is not None
        norms = [torch.zeros_like(handle.gradient_norm) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, handle.gradient_norm)
        assert all(torch.equal(norm, norms[0]) or bool(norm.isnan() & norms[0].isnan()) for norm in norms), norms
    assert all(p.full_tensor().isfinite().all() for p in model.parameters())  # type: ignore[attr-defined]
    assert optimizer.skipped_steps > 0


def main() -> None:
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    expected = train(None, device)
    names = layouts(device)
    for name, layout in names.items():
        for number, (weight, alone) in enumerate(zip(train(layout, device), expected, strict=True)):
            # The sums of squares are taken in another order; the coefficient may differ by an ulp of fp32, which moves
            # an element across a rounding boundary now and then.
            error = (weight.float() - alone.float()).abs().max() / alone.float().abs().max()
            assert error < 2**-10, f"parameter {number}, {name}: {float(error)}"
    for mesh in {id(layout[0][0]): layout[0][0] for layout in list(names.values())[:2]}.values():
        assert mesh is not None
        released(mesh, device)
    again = train(names["FSDP"], device)
    for number, (weight, other) in enumerate(zip(again, train(names["FSDP"], device), strict=True)):
        assert_same_bits(weight, other, f"parameter {number}, trained twice")
    print(f"rank {dist.get_rank()}: norms of {', '.join(names)} are the whole model's on {device.type}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
