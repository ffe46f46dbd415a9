"""Small models and runs that the checkpoint tests save and load, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flashoptim_dist as fod
from tests.pool import mesh

WIDTH = 48


class Net(nn.Module):
    """Uneven rows, fewer rows than ranks, a bias, a norm, a frozen and an unused layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.up = nn.Linear(WIDTH, 70)
        self.norm = nn.LayerNorm(70)
        self.down = nn.Linear(70, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.tiny = nn.Linear(WIDTH, 1)
        self.frozen = nn.Linear(5, 40)
        self.unused = nn.Linear(40, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.norm(self.up(hidden))))
        return self.head(hidden) + self.tiny(hidden)


def build(placement: str = "fsdp", *, tied: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(tied).to(dtype)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if placement == "single":
        return net
    grid = {"fsdp": (world_size,), "hsdp": (2, world_size // 2)}[placement]
    net = fully_shard(net.requires_grad_(), mesh=mesh(*grid))
    net.frozen.requires_grad_(False)
    return net


def adamw(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, **options)


def flash(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    return fod.FlashAdamW(named, lr=1e-2, **options)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> float:
    """The same batch on all ranks, so that the result does not depend on their number."""
    loss = torch.zeros(())
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(0, 13, (4, 6), generator=generator)
        loss = torch.nn.functional.cross_entropy(net(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.seen += 1
    return loss.item()


def gathered(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All weights, buffers and optimizer states, whole, by name (all ranks must call)."""
    result = {f"model.{name}": full(value) for name, value in net.state_dict().items()}
    names = {parameter: name for name, parameter in net.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                result[f"optimizer.{names[parameter]}.{name}"] = full(value)
    return result


def full(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names of entries that are not bit-equal, or only on one side."""
    names = sorted(left.keys() | right.keys())
    return [name for name in names if name not in left or name not in right or not _same(left[name], right[name])]


def _same(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return (
        torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
        if left.ndim
        else bool(left == right)
    )
