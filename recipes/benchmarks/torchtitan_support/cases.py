"""What runs: a case is one training run, and a job the cases that one process group runs one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

Model = Literal["debug", "1b"]
Parallelism = Literal["fsdp", "tp"]
Optimizer = Literal["adamw", "flash_adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "flash_adamw")
NAMES = {"adamw": "torchtitan AdamW, fp32 weights", "flash_adamw": "FlashAdamW, bf16 weights"}
LEARNING_RATES: dict[Model, str] = {"debug": "8e-4", "1b": "3e-4"}
"""Those of torchtitan's own configs of the debug model and of 8B."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    model: Model
    parallelism: Parallelism
    optimizer: Optimizer
    seed: int

    @property
    def name(self) -> str:
        """A name for files and messages."""
        return f"{self.model}-{self.parallelism}-{self.optimizer}-seed{self.seed}"


@dataclass(frozen=True)
class Job:
    """Cases that one process group runs in turn, and whether other jobs may run beside it."""

    cases: tuple[Case, ...]
    alone: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all cases have in common."""

    processes: int
    steps: int
    local_batch: int
    """Sequences per process and step under FSDP; tensor parallelism gives all of a step's to each process."""
    sequence_length: int
    checkpointing: str
    """Of activations, of the large model."""
    corpus: Path
    """What corpus.write_corpus has written."""
    folder: Path
    """Of this benchmark's run; a case's results and torchtitan's own files go there."""


def plan(
    models: Sequence[Model], parallelisms: Sequence[Parallelism], seeds: Sequence[int], alone: bool = False
) -> list[Job]:
    """The jobs in their order: what every later figure is measured by first, so that a time limit cuts the rest.

    The first seed of the large model has a process group for each case, for a memory that no other case has touched;
    its other seeds share one. Nothing runs beside the large model; of the debug model several jobs may, unless `alone`.
    """
    rest: list[Job] = []
    if "1b" in models:
        first, *others = seeds
        for parallelism in parallelisms:
            rest += [Job((Case("1b", parallelism, optimizer, first),), alone=True) for optimizer in OPTIMIZERS]
    if "debug" in models:
        for parallelism, optimizer in product(parallelisms, OPTIMIZERS):
            rest.append(Job(tuple(Case("debug", parallelism, optimizer, seed) for seed in seeds), alone=alone))
    if "1b" in models and others:
        for parallelism in parallelisms:
            cases = [Case("1b", parallelism, optimizer, seed) for seed in others for optimizer in OPTIMIZERS]
            rest.append(Job(tuple(cases), alone=True))
    return rest


def torchtitan_arguments(case: Case, settings: Settings) -> list[str]:
    """torchtitan's command line for a case: its defaults but for what is named here.

    AdamW so has fp32 weights, computed with in bf16, and the fused implementation.
    """
    tensor_parallel = case.parallelism == "tp"
    options = {
        "model.name": f"benchmark_{case.optimizer}",
        "model.flavor": case.model,
        "optimizer.lr": LEARNING_RATES[case.model],
        "lr_scheduler.warmup_steps": settings.steps // 5,
        "training.steps": settings.steps,
        "training.seq_len": settings.sequence_length,
        "training.local_batch_size": settings.local_batch * (settings.processes if tensor_parallel else 1),
        "training.dataset_path": settings.corpus,
        "training.dtype": "bfloat16" if case.optimizer == "flash_adamw" else "float32",
        "parallelism.tensor_parallel_degree": settings.processes if tensor_parallel else 1,
        "activation_checkpoint.mode": settings.checkpointing if case.model == "1b" else "none",
        "debug.seed": case.seed,
        "metrics.log_freq": 1,
        "comm.init_timeout_seconds": 120,
        "comm.train_timeout_seconds": 60,
        "job.dump_folder": settings.folder / case.name,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*given, "--metrics.disable_color_printing"]
