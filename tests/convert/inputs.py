"""Checkpoints to convert, and what they should become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from tests.checkpoint.models import Net, adamw, build, flash, steps

LAYOUTS = ("nested", "flattened", "torchtitan")


def trained(kind: str = "flash", *, tied: bool = False, seed: int = 0, **options: Any) -> tuple[Net, Any]:
    """A model after five steps: bf16 with FlashAdamW, or fp32 with torch's AdamW."""
    net = build("single", tied=tied, seed=seed, dtype=torch.bfloat16 if kind == "flash" else torch.float32)
    optimizer = flash(net, **options) if kind == "flash" else adamw(net, **options)
    steps(net, optimizer, range(5))
    return net, optimizer


def save_plain(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, layout: str) -> Path:
    """Save with torch's own functions, in one of the layouts that they (and torchtitan) write."""
    options = StateDictOptions(flatten_optimizer_state_dict=layout != "nested")
    model, state = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer, options=options)
    if layout == "torchtitan":  # the model's entries stand at the top there
        whole: dict[str, Any] = {**model, "optimizer": state, "train_state": {"step": torch.tensor(5)}}
    else:
        whole = {"model": model, "optimizer": state}
    dcp.save(whole, checkpoint_id=path, no_dist=True)
    return path


def load_plain(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, layout: str) -> None:
    """Load with torch's own functions."""
    options = StateDictOptions(flatten_optimizer_state_dict=layout != "nested")
    model, state = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer, options=options)
    whole: dict[str, Any] = {**model, "optimizer": state} if layout == "torchtitan" else {"model": model}
    whole["optimizer"] = state
    dcp.load(whole, checkpoint_id=path, no_dist=True)
    loaded = {name: whole[name] for name in model} if layout == "torchtitan" else whole["model"]
    net.load_state_dict(loaded)
    set_optimizer_state_dict(net, optimizer, whole["optimizer"], options=options)


def save_ours(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    return checkpoint.save(path, net, optimizer)


def expected_plain(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """fp32 master weights and decoded moments, by name."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    result = {}
    decoded = _decoded(optimizer)
    for number, (parameter, _, _, _) in enumerate(optimizer._named()):
        result[f"{names[parameter]}.weight"] = optimizer.master_weight(parameter)
        result |= {f"{names[parameter]}.{key}": value for key, value in decoded[number].items() if key != "error_bits"}
    return result


def _decoded(optimizer: Any) -> dict[int, dict[str, Tensor]]:
    before, optimizer.compress_state_dict = optimizer.compress_state_dict, False
    try:
        return {number: dict(state) for number, state in optimizer.state_dict()["state"].items()}
    finally:
        optimizer.compress_state_dict = before


def plain_values(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The same of a plain optimizer."""
    result = {}
    for name, parameter in net.named_parameters():
        if parameter in optimizer.state:
            result[f"{name}.weight"] = parameter.detach()
            result |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return result


def half_code_bounds(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """For every decoded moment the distance to the farther neighbour among its code's values, halved.

    Found by decoding codes one up and one down, of one moment at a time (a momentum is relative to its variance), so
    that nothing of the format is repeated here but this: what is too small for a variance's codes has code 1, and the
    largest code, 255, may be a power of two, above which neighbours are twice as far apart as below.
    """
    here, bounds = expected_plain(net, optimizer), {}
    trained = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    for moment, low, high in (("exp_avg", -127, 127), ("exp_avg_sq", 1, 255)):
        smallest, largest = {}, {}
        for shift in (-1, 1):
            moved = fod.FlashAdamW(trained)
            state = optimizer.state_dict()
            for number, entries in state["state"].items():
                if f"{moment}_scale" in entries:
                    code = entries[moment].to(torch.int16)
                    smallest[trained[number][0]] = code <= 1
                    largest[trained[number][0]] = code == 255
                    kept = code if moment == "exp_avg" else code.clamp(min=1)
                    entries[moment] = (kept + shift).clamp(low, high).to(entries[moment].dtype)
            moved.load_state_dict(state)
            for key, value in expected_plain(net, moved).items():
                name, _, kind = key.rpartition(".")
                if kind != moment:
                    continue
                gap = (value - here[key]).abs() / 2
                if moment == "exp_avg_sq" and name in smallest:
                    gap = torch.where(smallest[name], here[key], torch.where(largest[name], 2 * gap, gap))
                bounds[key] = torch.maximum(gap, bounds[key]) if key in bounds else gap
    return bounds
