"""A small model with everything that gradient release has to get right, and a loop that trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import flashoptim_dist as fod
from tests import pool
from tests.optim.cases import whole_state

VOCABULARY, WIDTH, LENGTH = 50, 64, 6


class Block(nn.Module):
    """A block with a norm, one Linear that is called twice, and a parameter that is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.sometimes = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.uses_it = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(self.norm(x)))
        hidden = self.down(self.down(hidden))
        if self.uses_it:
            hidden = hidden * (1.0 + self.sometimes)
        return x + hidden


class Model(nn.Module):
    """Embedding, blocks, head; the head may be tied to the embedding. One frozen and one unused parameter."""

    def __init__(self, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Parameter(torch.randn(7, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.frozen
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(
    world_size: int,
    *,
    tied: bool = False,
    hybrid: bool = False,
    checkpointing: bool = False,
    compiled: bool = False,
    offload_policy: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 3,
) -> Model:
    """The model, the same on any number of ranks, sharded unless there is no process group (``world_size`` 0)."""
    torch.manual_seed(0)
    model = Model(layers, tied)
    fod.cast_model(model, dtype)
    for number, layer in enumerate(model.layers):
        if checkpointing:
            model.layers[number] = checkpoint_wrapper(layer)
        if compiled:
            layer.compile(backend="aot_eager")
    if world_size:
        mesh = pool.mesh(2, world_size // 2) if hybrid else pool.mesh(world_size)
        # All ranks see the same batch, and fp32 sums of equal numbers are exact for 1, 2 and 4 ranks: the gradients are
        # those of one rank, bit for bit.
        fod.shard_model(model, mesh, layers=list(model.layers), offload_policy=offload_policy)
    return model


def batch(step: int, micro: int = 0) -> Tensor:
    """Tokens of a micro-batch, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy."""
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    micro_batches: int = 1,
    scheduler: Any = None,
    around: Callable[[int], Any] | None = None,
    before_step: Callable[[], Any] | None = None,
) -> list[float]:
    """An ordinary loop; returns the losses. ``around`` gives a context for each micro-batch's backward."""
    losses = []
    for step in steps:
        for block in model.modules():
            if isinstance(block, Block):
                block.uses_it = step % 2 == 0
        for micro in range(micro_batches):
            loss = loss_of(model, batch(step, micro))
            if around is None:
                loss.backward()
            else:
                with around(micro):
                    loss.backward()
            losses.append(float(loss))
        if before_step is not None:
            before_step()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def everything(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """All weights and states, whole, by name; all ranks must call."""
    return {
        name: whole_state(optimizer, parameter)
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
