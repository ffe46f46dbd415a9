"""The ways to save and load a training run that are compared: ours, torch's AdamW through DCP, the official package."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flashoptim_dist as fod
from flashoptim_dist import checkpoint

Key = Literal["ours", "torch-dcp", "torch-ours", "official"]
KEYS: tuple[Key, ...] = get_args(Key)

Wait = Callable[[], object]
Done = Callable[[], bool]


@dataclass
class Run:
    """A model with its optimizer, and how it is saved and loaded. All but the step communicate."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    save: Callable[[Path], object]
    load: Callable[[Path], object]
    start_save: Callable[[Path], tuple[Done, Wait]] | None
    """Starts a save in the background; tells whether it is done, and waits for it."""


@dataclass
class Subject:
    """One row of the table."""

    key: Key
    """What the command line calls it."""
    name: str
    make: Callable[[], Run]
    missing: str = ""
    """Why it can't be measured here; empty where it can."""


class Weights(nn.Module):
    """Parameters of the given shapes, without a forward."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        values = [(torch.randn(shape, device=device) * 0.02).to(dtype) for shape in shapes]
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)


def make_model(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
) -> nn.Module:
    """Return the model, sharded over the mesh, with gradients."""
    model = Weights(shapes, dtype, device)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).normal_(0.0, 1e-3)
    return model


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def subjects(shapes: Sequence[tuple[int, ...]], device: torch.device, mesh: DeviceMesh | None) -> list[Subject]:
    """Return what is compared, ours first."""

    def ours() -> Run:
        model = make_model(shapes, torch.bfloat16, device, mesh)
        return _our_run(model, fod.FlashAdamW(model.named_parameters(), lr=1e-4))

    def torchs(by_us: bool) -> Callable[[], Run]:
        def make() -> Run:
            model = make_model(shapes, torch.float32, device, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
            return _our_run(model, optimizer) if by_us else _dcp_run(model, optimizer)

        return make

    missing = ""
    if importlib.util.find_spec("flashoptim") is None:
        missing = "the package flashoptim is not installed"
    elif device.type != "cuda":
        missing = "its step needs a GPU"
    return [
        Subject("ours", "flashoptim_dist", ours),
        Subject("torch-dcp", "torch AdamW fp32, torch DCP", torchs(by_us=False)),
        Subject("torch-ours", "torch AdamW fp32, flashoptim_dist.checkpoint", torchs(by_us=True)),
        Subject("official", "flashoptim FlashAdamW, torch DCP", lambda: _official_run(shapes, device, mesh), missing),
    ]


def _our_run(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    def start(path: Path) -> tuple[Done, Wait]:
        handle = checkpoint.async_save(path, model, optimizer)
        return handle.done, handle.result

    return Run(
        model,
        optimizer,
        save=lambda path: checkpoint.save(path, model, optimizer),
        load=lambda path: checkpoint.load(path, model, optimizer),
        start_save=start,
    )


def _dcp_run(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """torch's own functions; states are named by the model's parameters."""
    alone = not dist.is_initialized()

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    def save(path: Path) -> None:
        dcp.save(state(), checkpoint_id=path, no_dist=alone)

    def load(path: Path) -> None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=path, no_dist=alone)
        set_model_state_dict(model, loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])

    def start(path: Path) -> tuple[Done, Wait]:
        future: Any = dcp.async_save(state(), checkpoint_id=path, no_dist=alone)
        return future.done, future.result

    return Run(model, optimizer, save, load, start)


def _official_run(shapes: Sequence[tuple[int, ...]], device: torch.device, mesh: DeviceMesh | None) -> Run:
    from flashoptim import FlashAdamW

    model = make_model(shapes, torch.bfloat16, device, mesh)
    return _dcp_run(model, FlashAdamW(model.parameters(), lr=1e-4))


def drop_from_page_cache(folder: Path) -> None:
    """Ask the system to forget the files, so that they are read from the disk; it need not obey."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
