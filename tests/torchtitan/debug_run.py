"""torchtitan 0.3.0 on the CPU, part two: what training lacks there, and debug models that a CPU trains in seconds.

With torch 2.13, gloo has no PREMUL_SUM reduction, its barrier() wants no device ids, and torch.distributed.set_timeout
does not exist yet. Importing this file takes seconds: only the slow tier does.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from flashoptim_dist.optim.base import FlashOptimizer
from tests.torchtitan import device
from tests.torchtitan.models import full, snapshot

with device.as_device():
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from flashoptim_dist.torchtitan import recipes


@contextlib.contextmanager
def cpu_shims() -> Iterator[None]:
    """Supply what training needs, for a while; torchtitan switches Python's garbage collection off, too."""
    barrier = dist.barrier

    def plain_barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)

    with (
        mock.patch.object(dist, "barrier", plain_barrier),
        mock.patch.object(dist, "set_timeout", create=True),
        mock.patch("time.sleep"),  # two seconds at the end of each training
    ):
        try:
            yield
        finally:
            gc.enable()


class TokenLoader(BaseDataLoader):
    """Random tokens by rank and position; its state is the position."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 64

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._rank, self._position = dp_rank, 0
        self._shape, self._vocabulary = (local_batch_size, seq_len + 1), config.vocabulary

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self._rank + self._position)
            self._position += 1
            tokens = torch.randint(self._vocabulary, self._shape, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = int(state_dict["position"])


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan wants a tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def shrink(config: Any, folder: str, *, steps: int, layers: int = 1, **parallelism: Any) -> Any:
    """Return a debug config cut down to what a CPU trains in seconds, changed in place."""
    model = config.model_spec.model
    del model.layers[layers:]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.dump_folder = folder
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = TokenLoader.Config()
    config.metrics = MetricsProcessor.Config(log_freq=1)
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 16, 2
    config.training.disable_cuda_graphs = True
    config.lr_scheduler.total_steps = 20  # the same schedule, however many of its steps are run
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    if torch.__version__ < (2, 12):
        # The loss in chunks runs lm_head after the norm of the same FSDP unit and frees both, which older torch's
        # backward does not gather again.
        config.loss = config.loss.loss_fn
    config.debug.seed = 1
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def build(config: Any) -> Any:
    """Build a trainer for gloo, or for a GPU; call within :func:`cpu_shims`. All ranks must call."""
    trainer = config.build()
    if device.ON_GPU:
        return trainer
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer


@contextlib.contextmanager
def recorded_metrics() -> Iterator[list[tuple[int, float, float]]]:
    """Yield a list that gains (step, loss, gradient norm) for every step that is logged meanwhile."""
    seen: list[tuple[int, float, float]] = []
    log = MetricsProcessor.log

    def recording(self: Any, step: int, loss: float, largest: float, norm: float, **kwargs: Any) -> None:
        seen.append((step, loss, norm))
        log(self, step, loss, largest, norm, **kwargs)

    with mock.patch.object(MetricsProcessor, "log", recording):
        yield seen


@dataclass
class Trained:
    """What a run left: (step, loss, norm) by step, all weights and flat states as they were loaded and at the end,
    fp32 masters, kinds of optimizers."""

    metrics: list[tuple[int, float, float]]
    loaded: dict[str, Any]
    state: dict[str, Any]
    masters: dict[str, torch.Tensor]
    optimizers: list[str]


def run(make: Callable[..., Any], folder: str, **options: Any) -> Trained:
    """Build, load what there is, train to the end, and save as the config says. All ranks must call."""
    with cpu_shims(), recorded_metrics() as metrics:
        trainer = build(make(folder, **options))
        [model] = trainer.model_parts
        loaded: dict[str, Any] = {}
        load = trainer.checkpointer.load

        def recording(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            if found:  # asked for the state of a fresh AdamW, torch makes a step
                loaded.update(snapshot(model, trainer.optimizers))
            return found

        try:
            with mock.patch.object(trainer.checkpointer, "load", recording):
                trainer.train()
            trainer.checkpointer.maybe_wait_for_saving()
            kinds = [type(optimizer).__name__ for optimizer in trainer.optimizers]
            masters = {
                name: full(value)
                for optimizer in trainer.optimizers
                if isinstance(optimizer, FlashOptimizer)
                for name, value in optimizer.get_master_weights(model).items()
            }
            return Trained(metrics, loaded, snapshot(model, trainer.optimizers), masters, kinds)
        finally:
            trainer.close()


def llama(folder: str, *, steps: int, change: dict[str, Any] | None = None, **parallelism: Any) -> Any:
    """The Llama debug recipe, shrunk. ``change``: values by dotted names, set in the config."""
    config = shrink(recipes.llama3_debug_flash(), folder, steps=steps, **parallelism)
    config.optimizer.lr = 4e-3
    return changed(config, change)


def stock_llama(folder: str, *, steps: int, change: dict[str, Any] | None = None) -> Any:
    """torchtitan's own debug config: AdamW, fp32 weights."""
    return changed(shrink(llama3_debugmodel(), folder, steps=steps), change)


def moe(folder: str, *, steps: int, change: dict[str, Any] | None = None, **parallelism: Any) -> Any:
    """The recipe of experts, shrunk to a dense layer and one of experts."""
    config = shrink(recipes.moe_debug_flash(), folder, steps=steps, layers=2, **parallelism)
    config.optimizer.lr = 4e-3
    return changed(config, change)


def changed(config: Any, change: dict[str, Any] | None) -> Any:
    """Set values by dotted names; checkpoints that are switched on keep everything."""
    config.checkpoint.keep_latest_k = 0
    for name, value in (change or {}).items():
        *path, last = name.split(".")
        owner = config
        for piece in path:
            owner = getattr(owner, piece)
        setattr(owner, last, value)
    return config
