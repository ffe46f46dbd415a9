"""torchtitan 0.2.2 on the CPU, part two: training runs of a small debug model by torchtitan's own Trainer.

gloo has no PREMUL_SUM reduction, and its barrier() wants no device ids. The data are made up, since the package brings
neither data nor a tokenizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flashoptim_dist.formats import canonical_name
from flashoptim_dist.optim import FlashOptimizer
from tests.torchtitan_v0_2.device import BaseDataLoader, ConfigManager, Trainer, train_spec, v0_2

FLAVOR = "small"
FLASH = ("--model.name", "llama3_flash", "--experimental.custom_import", v0_2.__name__, "--training.dtype", "bfloat16")
"""What the issue asks a user to give, and bf16 weights."""
ADAMW = ("--model.name", "llama3", "--optimizer.implementation", "for-loop")


class TokenLoader(BaseDataLoader):
    """Random tokens by rank and position; its state is the position."""

    def __init__(self, rank: int, shape: tuple[int, int]) -> None:
        self._rank, self._shape, self._position = rank, shape, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self._rank + self._position)
            self._position += 1
            tokens = torch.randint(64, self._shape, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = int(state_dict["position"])


def _load_tokens(*, dp_rank: int, job_config: Any, **_: Any) -> TokenLoader:
    return TokenLoader(dp_rank, (job_config.training.local_batch_size, job_config.training.seq_len + 1))


def _small(name: str) -> Any:
    """Return a train spec with a smaller debug model and made up data."""
    spec = train_spec.get_train_spec(name)
    args = dataclasses.replace(
        spec.model_args["debugmodel"], dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256
    )
    return dataclasses.replace(
        spec, model_args={FLAVOR: args}, build_dataloader_fn=_load_tokens, build_tokenizer_fn=None
    )


@contextlib.contextmanager
def cpu_shims() -> Iterator[None]:
    """Supply what training needs, for a while; torchtitan switches Python's garbage collection off, too."""
    barrier = dist.barrier

    def plain_barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)

    specs = {name: _small(name) for name in ("llama3", v0_2.MODEL_NAME)}
    with (
        mock.patch.object(dist, "barrier", plain_barrier),
        mock.patch.dict(train_spec._extra_train_specs, specs),
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank())}),
        mock.patch("time.sleep"),  # two seconds at the end of each training
    ):
        try:
            yield
        finally:
            gc.enable()


@dataclass
class Run:
    """What a run left: losses by step, its step, all weights and states whole, fp32 masters, kinds of optimizers."""

    losses: dict[int, float]
    step: int
    state: dict[str, Tensor]
    masters: dict[str, Tensor]
    optimizers: list[str]


def run(folder: str, *arguments: str, train: bool = True) -> Run:
    """Train as torchtitan's command line does, or only load the newest checkpoint (all ranks must call)."""
    common = (
        f"--model.flavor {FLAVOR} --training.seq_len 16 --training.local_batch_size 2 --metrics.log_freq 1 "
        f"--job.dump_folder {folder} --lr_scheduler.warmup_steps 2 --lr_scheduler.total_steps 20 --debug.seed 1 "
        "--checkpoint.enable --checkpoint.no-last-save-model-only --activation_checkpoint.mode none"
    ).split()
    with cpu_shims():
        trainer = Trainer(ConfigManager().parse_args([*common, *arguments]))
        try:
            for part in trainer.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.set_force_sum_reduction_for_comms(True)
            losses = _record_losses(trainer)
            if train:
                trainer.train()
            else:
                assert trainer.checkpointer.load()
            return Run(losses, trainer.step, *_contents(trainer), [type(one).__name__ for one in trainer.optimizers])
        finally:
            trainer.close()


def _record_losses(trainer: Any) -> dict[int, float]:
    seen: dict[int, float] = {}
    log = trainer.metrics_processor.log

    def recording(step: int, loss: float, *rest: Any, **kwargs: Any) -> None:
        seen[step] = float(loss)
        log(step, loss, *rest, **kwargs)

    trainer.metrics_processor.log = recording
    return seen


def _contents(trainer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    state: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    for model, optimizer in zip(trainer.model_parts, trainer.optimizers, strict=True):
        for raw, parameter in model.named_parameters():
            name = canonical_name(raw)
            state[name] = _whole(parameter)
            for key, value in optimizer.state[parameter].items():
                state[f"{name}.{key}"] = _whole(value)
            if isinstance(optimizer, FlashOptimizer):
                masters[name] = _whole(optimizer.master_weight(parameter))
    return state, masters


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names of entries that are not bit-equal, or only on one side."""
    return [
        name
        for name in sorted({*left, *right})
        if name not in left
        or name not in right
        or left[name].dtype != right[name].dtype
        or not torch.equal(left[name], right[name])
    ]
