"""Gradient release on against off over several GPUs, bit for bit: FSDP, HSDP, offload to the CPU. For torchrun.

See test_gpu.py. On CPUs too, with gloo: torchrun --nproc-per-node 2 tests/release/two_gpus.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # last: the root's kernels/ must not stand for a package of that name

import flashoptim_dist as fod  # noqa: E402
from tests.numbers import assert_same_bits  # noqa: E402

WIDTH, LAYERS, STEPS = 256, 6, 5


class Block(nn.Module):
    """Two matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def train(mesh: DeviceMesh, device: torch.device, *, release: bool, offload: bool, clip: float | None) -> list[Tensor]:
    """Weights, and all states in their order, after some steps of two micro-batches each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(torch.bfloat16)
    if not offload:
        model.to(device)
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else None
    fod.shard_model(model, mesh, layers=list(model), offload_policy=policy)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-3)
    if release:
        fod.enable_gradient_release(model, optimizer, accumulation_steps=2)
    for step in range(STEPS):
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            x = torch.randn(16, WIDTH, generator=generator).to(device, torch.bfloat16)
            model(x).float().square().mean().backward()
        if clip is not None:
            norm = fod.clip_grad_norm_(optimizer, clip)
            squares = sum(whole(parameter.grad).double().square().sum() for parameter in model.parameters())
            assert abs(float(norm) / float(squares) ** 0.5 - 1) < 1e-5, (float(norm), float(squares) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    entries = [whole(p.detach()) for p in model.parameters()]
    return entries + [whole(value) for p in model.parameters() for value in optimizer.state[p].values()]


def whole(tensor: Tensor | None) -> Tensor:
    """A whole tensor on the CPU; gathered over the GPUs, where the process group is, if it lies on the CPU."""
    assert tensor is not None
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        local = tensor.to_local().to(mesh.device_type)
        tensor = DTensor.from_local(
            local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        ).full_tensor()
    return tensor.cpu()


def main() -> None:
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    size = dist.get_world_size()
    meshes = {
        "FSDP": init_device_mesh(device.type, (size,), mesh_dim_names=("dp_shard",)),
        "HSDP": init_device_mesh(device.type, (size, 1), mesh_dim_names=("dp_replicate", "dp_shard")),
    }
    if size % 2 == 0 and size > 2:
        meshes["HSDP of several shards"] = init_device_mesh(
            device.type, (2, size // 2), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    for name, mesh in meshes.items():
        for offload in (False, True):
            ours, expected = (
                train(mesh, device, release=release, offload=offload, clip=None) for release in (True, False)
            )
            for number, (value, other) in enumerate(zip(ours, expected, strict=True)):
                assert_same_bits(value, other, f"entry {number}, {name}, offload {offload}")
            train(mesh, device, release=False, offload=offload, clip=0.5)
    where = f"{size} ranks on {device.type}: {', '.join(meshes)}, with offload too"
    print(f"rank {dist.get_rank()}: release on is off over {where}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
