"""Small models on any placement, stepped with given gradients, so that all placements must come to the same bits."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashoptim_dist as fod
from flashoptim_dist.sharding import local_tensor
from tests.pool import mesh

WIDTH = 128


class Net(nn.Module):
    """Uneven and short rows, fewer rows than ranks, stacked experts, a frozen and an unused layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.ragged = nn.Linear(37, 6)
        self.wide = nn.Linear(192, 6)
        self.tiny = nn.Linear(WIDTH, 1)
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(4, 8, 64))])
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.frozen = nn.Linear(40, 5)
        self.unused = nn.Linear(40, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.norm(self.up(hidden))))
        return self.head(hidden) + self.tiny(hidden)


PLACEMENTS = ("single", "fsdp", "hsdp", "fsdp_tp", "shard1", "experts")


def possible(placement: str, world_size: int) -> bool:
    """Whether the model can be placed so on that many ranks."""
    even = world_size % 2 == 0
    return {
        "single": world_size == 1,
        "fsdp": True,
        "hsdp": even,
        "fsdp_tp": even,
        "shard1": world_size > 1,
        "experts": even,
    }[placement]


def build(placement: str = "fsdp", *, tied: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Net:
    """Make the model, the same on all ranks, and place it (all ranks must call)."""
    torch.manual_seed(seed)
    net = Net(tied).to(dtype)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if placement == "single":
        return net
    flat = mesh(world_size)
    if placement == "hsdp":
        fully_shard(net, mesh=mesh(2, world_size // 2))
    elif placement == "fsdp_tp":
        grid = mesh(world_size // 2, 2, names=("dp", "tp"))
        parallelize_module(net, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=grid["dp"])
    elif placement == "shard1":
        fully_shard(net, mesh=flat, shard_placement_fn=lambda p: _second_dimension(p, world_size))
    elif placement == "experts":
        grid = mesh(2, world_size // 2, names=("ep", "ep_shard"))
        whole = net.experts[0].detach()
        net.experts[0] = nn.Parameter(distribute_tensor(whole, grid, [Shard(0), Shard(1)]))
        fully_shard(net, mesh=flat, ignored_params={net.experts[0]})
    else:
        fully_shard(net, mesh=flat)
    return net


def _second_dimension(parameter: nn.Parameter, world_size: int) -> Shard:
    fits = parameter.ndim == 2 and parameter.shape[1] % (32 * world_size) == 0
    return Shard(1) if fits else Shard(0)


def trainable(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]


def adamw(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in trainable(net)], lr=1e-2, foreach=False, **options)


def flash(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return fod.FlashAdamW(trainable(net), lr=1e-2, **options)


OPTIMIZERS = {"adamw": adamw, "flash": flash}


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, which: Iterable[int]) -> None:
    """Step with gradients that depend on the name of the parameter and the number of the step alone."""
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for step in which:
        for name, parameter in net.named_parameters():
            if parameter in updated and parameter.requires_grad and not name.startswith("unused"):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
                whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = like(whole, parameter)
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(net, "seen"):
            net.seen += 1


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, as a DTensor like the parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    placed = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(whole.shape, *placed)
    part = whole
    if all(shape):
        for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
            part = part.narrow(dim, start, length)
    else:
        part = whole.new_empty(shape)
    local = torch.empty(shape, dtype=whole.dtype, device=parameter.device).copy_(part)
    return DTensor.from_local(local, *placed, run_check=False, shape=whole.shape, stride=whole.stride())


def states(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All weights, buffers and optimizer states as they are, by name."""
    optimizer.state_dict()  # as a save does: gives parameters that never had a gradient their zero state
    result = {f"model.{name}": value.detach() for name, value in net.state_dict().items()}
    names = {parameter: name for name, parameter in net.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                result[f"optimizer.{names[parameter]}.{name}"] = value.detach()
    return result


def gathered(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All weights, buffers and optimizer states, whole, by name (all ranks must call)."""
    return {name: full(value) for name, value in states(net, optimizer).items()}


def full(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.clone()
    if value.dtype == torch.int16:  # neither gloo nor NCCL can send these
        return value.to(torch.int32).full_tensor().to(torch.int16)
    return value.full_tensor().clone()


def same(whole: Tensor | None, value: Tensor) -> bool:
    """Whether this rank's part of a state has the bits and the dtype of its part of a whole tensor."""
    if whole is None or whole.shape != value.shape:
        return False
    return _same(local_tensor(like(whole, value)), local_tensor(value))


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names of entries that are not bit-equal, or only on one side."""
    names = sorted(left.keys() | right.keys())
    return [name for name in names if name not in left or name not in right or not _same(left[name], right[name])]


def _same(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
