"""Training runs that change something between save and load: groups, ties, frozen parameters, pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from tests.checkpoint.models import build, flash, gathered, steps, trainable

CASES = {
    "tied": "tied weights",
    "frozen": "trained, then frozen before the save, unfrozen after the load",
    "frozen at load": "trained before the save, frozen from the load on",
    "late": "no gradient before the save, one after the load",
    "fresh": "no step before the save",
    "reordered": "parameter groups and parameters in another order",
    "regrouped": "parameter groups split and merged",
    "parts": "pipeline stages: layers spread otherwise over ranks and model parts",
    "lion": "FlashLion",
    "sgd": "FlashSGD with momentum",
    "lossless": "32-bit masters",
    "adamw": "torch's AdamW",
}
"""Key and what the page calls it."""

LAYERS = 8


def save_case(path: str, case: str) -> dict[str, Tensor]:
    """Train, save, train on; everything at the save and after (all ranks must call)."""
    run = _Run(case, load=False)
    run.before_save()
    checkpoint.save(path, run.parts, run.optimizers)
    return run.then()


def load_case(path: str, case: str) -> dict[str, Tensor] | str:
    """Load into a run that starts otherwise, train on; everything after the load, or the error."""
    run = _Run(case, load=True)
    try:
        checkpoint.load(path, run.parts, run.optimizers)
    except checkpoint.CheckpointError as error:
        return str(error)
    return run.then()


class _Run:
    def __init__(self, case: str, load: bool) -> None:
        self.case = case
        if case == "parts":
            self.parts = _stages(load)
            self.optimizers = [fod.FlashAdamW(part.named_parameters(), lr=1e-2) for part in self.parts]
            return
        net = build("fsdp", tied=case == "tied", seed=5 if load else 0)
        self.parts = [net]
        self.optimizers = [_optimizer(case, net, load)]
        if load and case in ("frozen", "frozen at load"):
            _freeze(net, True)

    def before_save(self) -> None:
        if self.case == "fresh":
            return
        self._step(range(2))
        if self.case == "frozen":
            _freeze(self.parts[0], True)
            self._step([2])

    def then(self) -> dict[str, Tensor]:
        """Everything now, and after two more steps."""
        if self.case == "frozen":
            _freeze(self.parts[0], False)
        elif self.case == "frozen at load":
            _freeze(self.parts[0], True)
        now = self._gathered()
        if self.case == "late":  # these have no gradient in `steps`
            for parameter in self.parts[0].unused.parameters():  # type: ignore[union-attr]
                parameter.grad = torch.ones_like(parameter)
        self._step(range(3, 5))
        return now | {f"later.{name}": value for name, value in self._gathered().items()}

    def _step(self, which: Any) -> None:
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            steps(part, optimizer, which)

    def _gathered(self) -> dict[str, Tensor]:
        entries: dict[str, Tensor] = {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            entries |= gathered(part, optimizer)
        return entries


def _freeze(net: nn.Module, frozen: bool) -> None:
    for parameter in (*net.up.parameters(), *net.norm.parameters()):  # type: ignore[union-attr]
        parameter.requires_grad_(not frozen)


def _optimizer(case: str, net: nn.Module, load: bool) -> torch.optim.Optimizer:
    named = trainable(net)
    if case == "lion":
        return fod.FlashLion(named, lr=1e-3, weight_decay=0.1)
    if case == "sgd":
        return fod.FlashSGD(named, lr=1e-2, momentum=0.9)
    if case == "lossless":
        return flash(net, master_weight_bits=32)
    if case == "adamw":
        return torch.optim.AdamW([p for _, p in named], lr=1e-2, foreach=False)
    if case not in ("reordered", "regrouped"):
        return flash(net)
    matrices = [(name, p) for name, p in named if p.ndim > 1]
    others = [(name, p) for name, p in named if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "lr": 1e-2},
        {"params": others[:3], "weight_decay": 0.0, "lr": 2e-2},
        {"params": others[3:], "weight_decay": 0.0, "lr": 2e-2},
    ]
    if load and case == "reordered":
        groups = [{"params": group["params"][::-1], "lr": 0.5} for group in groups[::-1]]
    elif load:
        groups = [
            {"params": matrices[4:], "lr": 0.5},
            {"params": others, "lr": 0.5},  # two groups of equal options become one
            {"params": matrices[:4], "lr": 0.5},
        ]
    return fod.FlashAdamW(groups)


class Stage(nn.Module):
    """One pipeline stage, with the names that its layers have in the whole model."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): _layer(index) for index in layers})


def _layer(index: int) -> nn.Linear:
    torch.manual_seed(index)
    return nn.Linear(64, 40, dtype=torch.bfloat16)


def _stages(load: bool) -> list[nn.Module]:
    """This rank's parts: before, its share of the layers in two; after, the mirrored layers, each a part of its own."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = list(range(LAYERS))[rank::world_size]
    if load:
        parts = [[LAYERS - 1 - index] for index in mine]
    else:
        parts = [mine[::2], mine[1::2]] if len(mine) > 1 else [mine]
    stages: list[nn.Module] = [Stage(layers) for layers in parts]
    if load:
        with torch.no_grad():
            for parameter in [p for stage in stages for p in stage.parameters()]:
                parameter.zero_()
    return stages
