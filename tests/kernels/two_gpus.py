"""Steps sharded over two GPUs against the same steps on one, bit for bit. For torchrun; see test_shards.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # last: the root's kernels/ must not stand for a package of that name

from flashoptim_dist import FlashAdamW, FlashLion  # noqa: E402
from tests.numbers import assert_same_bits  # noqa: E402
from tests.optim.cases import SHARDED, Case, whole_state  # noqa: E402

STEPS = 5


def train(kind: type, cases: list[Case], meshes: dict[str, DeviceMesh | None], device: torch.device) -> dict:
    parameters = {}
    for case in cases:
        parameters[case.name] = nn.Parameter(case.place(case.weight().to(device), meshes[case.name]))
        parameters[case.name].grad_dtype = None
    optimizer = kind(list(parameters.items()), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(1, STEPS + 1):
        for case in cases:
            parameters[case.name].grad = case.place(case.gradient(step).to(device), meshes[case.name])
        optimizer.step()
    return {name: whole_state(optimizer, parameter) for name, parameter in parameters.items()}


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    made: dict[tuple[int, ...], DeviceMesh] = {}
    meshes: dict[str, DeviceMesh | None] = {}
    cases = []
    for case in SHARDED:
        sizes = next((sizes for sizes in case.meshes if torch.Size(sizes).numel() == dist.get_world_size()), None)
        if sizes is None or case.placements is None:
            continue
        if sizes not in made:
            made[sizes] = init_device_mesh("cuda", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
        meshes[case.name] = made[sizes]
        cases.append(case)
    for kind in (FlashAdamW, FlashLion):
        sharded = train(kind, cases, meshes, device)
        alone: dict[str, dict[str, Tensor]] = train(kind, cases, dict.fromkeys(meshes), device)
        for name, entries in alone.items():
            for entry, value in entries.items():
                assert_same_bits(sharded[name][entry].cpu(), value.cpu(), f"{entry} of {name!r}, {kind.__name__}")
    print(f"rank {dist.get_rank()}: {len(cases)} placements bit-equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
