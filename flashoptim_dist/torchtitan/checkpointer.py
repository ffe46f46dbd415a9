"""torchtitan's CheckpointManager, whose last save exports the master weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER, ModelWrapper

from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.state import ERROR_BITS


class FlashCheckpointManager(CheckpointManager):
    """``CheckpointManager`` whose last, model-only save holds the fp32 master weights, in ``export_dtype``.

    torchtitan's own saves the 16-bit weights there, cast, without their corrections. Other saves are the same.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and whether to export."""

        export_master_weights: bool = True
        """Apply the corrections in the last, model-only save (all of export_dtype's bits count then)."""

    def __init__(self, config: Config, **runtime: Any) -> None:
        super().__init__(config, **runtime)
        self._model_parts: list[nn.Module] = list(runtime["model_parts"])
        self._export = config.export_master_weights

    def _save_last_step(self, curr_step: int) -> None:
        if not self._export or not self.last_save_model_only:
            super()._save_last_step(curr_step)
            return
        wrapper = self.states[MODEL]
        try:
            with master_weights_in_model(self._model_parts, self.states[OPTIMIZER]):
                # Another wrapper: torchtitan's own keeps what it hands out.
                self.states[MODEL] = ModelWrapper(self._model_parts)
                super()._save_last_step(curr_step)
        finally:
            self.states[MODEL] = wrapper


@contextlib.contextmanager
def master_weights_in_model(
    model_parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[None]:
    """Put fp32 master weights in the place of the parameters that have a correction, for ``state_dict()``.

    So the model's own hooks see them (a fused projection is saved as its parts). The model can't be run meanwhile. It
    takes 4 bytes per element of this rank's shards. No communication.

    Args:
        model_parts: the model, or the parts of a pipeline.
        optimizers: those that step its parameters, as a container of torchtitan's lists them; others than this
            library's are passed over.
    """
    parts = list(model_parts)
    modules = list(dict.fromkeys(module for part in parts for module in part.modules()))
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()  # else the module holds the gathered weights, which no optimizer knows
    masters: dict[torch.Tensor, nn.Parameter] = {}
    for optimizer in optimizers:
        if isinstance(optimizer, FlashOptimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if ERROR_BITS in optimizer.state.get(parameter, {}):
                        masters[parameter] = nn.Parameter(optimizer.master_weight(parameter), requires_grad=False)
    taken: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in masters:
                    taken.append((module, name, parameter))
        for module, name, parameter in taken:
            module._parameters[name] = masters[parameter]
        yield
    finally:
        for module, name, parameter in taken:
            module._parameters[name] = parameter
