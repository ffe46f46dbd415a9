"""Names of parameters as a checkpoint spells them: the same as torch's ``get_model_state_dict`` gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from flashoptim_dist.checkpoint.errors import CheckpointError

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

ModelParts = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def as_parts(model: ModelParts) -> list[nn.Module]:
    """Return the model as a list of parts (pipeline stages hold several)."""
    return [model] if isinstance(model, nn.Module) else list(model)


def as_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list."""
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def parameter_names(parts: Iterable[nn.Module]) -> dict[torch.Tensor, list[str]]:
    """Return every parameter with its names; a tied parameter has several, the first as ``named_parameters`` has it.

    Raises:
        CheckpointError: two parts of the model give different parameters one name.
    """
    names: dict[torch.Tensor, list[str]] = {}
    owner: dict[str, torch.Tensor] = {}
    for part in parts:
        for raw, parameter in part.named_parameters(remove_duplicate=False):
            name = canonical_name(part, raw)
            if owner.setdefault(name, parameter) is not parameter:
                raise CheckpointError(
                    f"two parts of the model have a parameter {name!r}: give each the names it has in the whole model"
                )
            if name not in names.setdefault(parameter, []):
                names[parameter].append(name)
    return names


def canonical_name(module: nn.Module, name: str) -> str:
    """Return a name without what torch.compile, activation checkpointing, FSDP1 and DDP put into it."""
    kept: list[str] = []
    current: object = module
    for piece in name.split("."):
        in_ddp = isinstance(current, nn.parallel.DistributedDataParallel) and piece == "module"
        if piece not in _WRAPPERS and not in_ddp:
            kept.append(piece)
        current = getattr(current, piece, None)
    return ".".join(kept)
