"""Parameters of every kind and placement, stepped alike on any number of ranks: what the tests of optim/ share."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from flashoptim_dist.optim import FlashOptimizer
from tests import pool

LINE = ((1,), (2,), (3,), (4,))
"""Meshes of one dimension, over 1 to 4 ranks."""


@dataclass(frozen=True)
class Case:
    """One parameter and its gradients, and the meshes over which it is cut; ``placements`` None: a plain tensor."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None = (Shard(0),)
    meshes: tuple[tuple[int, ...], ...] = LINE
    dtype: torch.dtype = torch.bfloat16
    gradient_dtype: torch.dtype | None = None
    channels_last: bool = False

    def __str__(self) -> str:
        return self.name

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.name} {number}".encode()))

    def weight(self) -> Tensor:
        """The whole initial weight: also subnormals, zeros of both signs, and exact ties of bf16."""
        weight = torch.randn(self.shape, generator=self._generator(0))
        flat = weight.view(-1)
        flat[10::11] = 0.0
        flat[3::13] = -0.0
        flat[5::17] = 1e-7
        return self._strided(weight.to(self.dtype))

    def gradient(self, step: int) -> Tensor:
        """The whole gradient of a step: sizes spread over seven decades, zeros, and every third row without one."""
        generator = self._generator(step)
        gradient = torch.randn(self.shape, generator=generator)
        gradient *= torch.exp(2.0 * torch.randn(self.shape, generator=generator)) * 1e-3
        if len(self.shape) > 1:
            gradient[step % 3 :: 3] = 0.0
        gradient.view(-1)[6::7] = 0.0
        return self._strided(gradient.to(self.gradient_dtype or self.dtype))

    def _strided(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if self.channels_last else tensor

    def mesh(self, world_size: int) -> DeviceMesh | None:
        """The mesh of this world; all ranks must call."""
        sizes = next(sizes for sizes in self.meshes if torch.Size(sizes).numel() == world_size)
        return None if self.placements is None else pool.mesh(*sizes)

    def place(self, tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """This rank's part of a whole tensor that every rank has."""
        if mesh is None:
            return tensor.clone(memory_format=torch.preserve_format)
        assert self.placements is not None
        part = distribute_tensor(tensor, mesh, self.placements, src_data_rank=None)
        if not self.channels_last:
            return part
        local = part.to_local().contiguous(memory_format=torch.channels_last)
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def parameter(self, mesh: DeviceMesh | None = None) -> nn.Parameter:
        """This rank's part of the parameter (the whole of it without a mesh), in any gradient dtype."""
        parameter = nn.Parameter(self.place(self.weight(), mesh))
        parameter.grad_dtype = None
        return parameter

    def step(self, optimizer: FlashOptimizer, parameter: nn.Parameter, step: int) -> None:
        """Take a step with the gradient of that number."""
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        parameter.grad = self.place(self.gradient(step), mesh)
        optimizer.step()


KINDS_OF_PARAMETERS = (
    Case("matrix", (6, 40)),
    Case("vector", (40,)),
    Case("convolution", (5, 6, 3, 3)),
    Case("fp16", (5, 64), dtype=torch.float16),
    Case("fp32", (5, 64), dtype=torch.float32),
)
"""One of each kind, small."""


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, bit for bit; all ranks must call. (gloo gathers neither int16 nor, everywhere, bf16.)"""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    carrier = torch.float32 if tensor.is_floating_point() else torch.int32
    # A copy in any case: on one rank full_tensor() is the live tensor itself.
    return tensor.detach().to(carrier).full_tensor().to(tensor.dtype, copy=True)


def whole_state(optimizer: FlashOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The weight and every entry of its state, whole and plain; all ranks must call."""
    state = optimizer.state[parameter]
    return {"weight": whole(parameter), **{name: whole(entry) for name, entry in state.items()}}


SHARDED = [
    Case("matrix", (8, 64)),
    Case("rows not divisible by ranks", (7, 64)),
    Case("fewer rows than ranks", (3, 64)),
    Case("one row", (1, 96)),
    Case("partial groups", (7, 100)),
    Case("rows of one group and one element", (5, 33)),
    Case("short rows", (9, 24)),
    Case("vector", (130,)),
    Case("vector shorter than ranks", (3,)),
    Case("convolution", (7, 6, 3, 3)),
    Case("short convolution", (7, 3, 3, 3)),
    Case("convolution, channels last", (7, 6, 3, 3), channels_last=True),
    Case("convolution over time", (6, 12, 4)),
    Case("experts by expert", (3, 10, 64)),
    Case("experts by row", (2, 10, 40), (Shard(1),)),
    Case("columns", (6, 128), (Shard(1),), ((1,), (2,), (4,))),
    Case("columns in three", (6, 94), (Shard(1),), ((1,), (3,))),
    Case("columns, unaligned but short", (3, 9), (Shard(1),)),
    Case("expert columns", (2, 5, 64), (Shard(2),), ((1,), (2,))),
    Case("convolution by channel", (4, 32, 2, 2), (Shard(1),), ((1,), (2,), (4,))),
    Case("rows and columns", (7, 128), (Shard(0), Shard(1)), ((1, 1), (2, 2))),
    Case("hybrid", (7, 100), (Replicate(), Shard(0)), ((1, 1), (2, 1), (1, 3), (2, 2))),
    Case("replicas", (7, 100), (Replicate(),), ((1,), (2,), (4,))),
    Case("bf16 with fp32 gradient", (7, 100), gradient_dtype=torch.float32),
    Case("fp16", (7, 100), dtype=torch.float16),
    Case("fp16 with fp32 gradient", (5, 64), dtype=torch.float16, gradient_dtype=torch.float32),
    Case("fp16 with bf16 gradient", (5, 64), dtype=torch.float16, gradient_dtype=torch.bfloat16),
    Case("fp32", (7, 100), dtype=torch.float32),
    Case("fp32 with bf16 gradient", (7, 100), dtype=torch.float32, gradient_dtype=torch.bfloat16),
    Case("fp32 vector", (70,), dtype=torch.float32),
    Case("fp16 vector with fp32 gradient", (70,), dtype=torch.float16, gradient_dtype=torch.float32),
]

PLAIN = [
    Case("plain scalar", (), None),
    Case("plain fp32 scalar", (), None, dtype=torch.float32),
    Case("plain vector", (33,), None),
    Case("plain matrix", (5, 70), None),
    Case("plain empty", (0, 64), None),
]

OPTIONS: Mapping[str, dict[str, Any]] = {
    "stochastic": {},
    "nearest": {"rounding": "nearest"},
    "32-bit masters": {"master_weight_bits": 32},
    "no masters": {"master_weight_bits": None},
    "fp32 moments": {"quantize": False},
    "seeded, maximize": {"seed": 12345, "maximize": True, "weight_decay": 0.0},
}


def expected_entries(case: Case, options: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and global shape of what AdamW's state of a case holds, restated from the design's sections 3 and 4."""
    last = case.shape[-1] if case.shape else 1
    flat = len(case.shape) > 2 and last < 32
    length = torch.Size(case.shape[1:]).numel() if flat else last
    scales = (*(case.shape[:1] if flat else case.shape[:-1]), -(-length // 32))
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"step": (torch.float32, ())}
    if options.get("quantize", True) and len(case.shape) > 1 and length >= 32:
        entries |= {"exp_avg": (torch.int8, case.shape), "exp_avg_scale": (torch.bfloat16, scales)}
        entries |= {"exp_avg_sq": (torch.uint8, case.shape), "exp_avg_sq_scale": (torch.bfloat16, scales)}
    else:
        entries |= {"exp_avg": (torch.float32, case.shape), "exp_avg_sq": (torch.float32, case.shape)}
    bits = options.get("master_weight_bits", 24)
    if bits is not None and case.dtype != torch.float32:
        entries["error_bits"] = (torch.int8 if bits == 24 else torch.int16, case.shape)
    return entries
