"""A rank of a job: trains the job's cases, one after another, by torchtitan 0.2.2's own Trainer.

    torchrun --nproc-per-node 2 recipes/benchmarks/torchtitan_support/worker.py JOB.json

The models are torchtitan's Llama 3 with the corpus of this benchmark; what a step costs and its loss come from
torchtitan's own metrics. Rank 0 writes CASE.json into the job's folder as soon as a case is finished.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[place]) for place in (1, 2)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from flashoptim_dist.torchtitan import v0_2  # noqa: E402
from torchtitan_support.cases import Case, Settings, torchtitan_arguments  # noqa: E402
from torchtitan_support.corpus import VOCABULARY, read_sequences  # noqa: E402

WARM_UP = 10
LLAMA_3_2_1B = TransformerModelArgs(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim_multiplier=1.5,
    multiple_of=1024,
    rope_theta=500000,
    vocab_size=128256,
)
"""Llama-3.2-1B's shape; torchtitan has no flavor of it, and does not tie its embedding to the output: 1.5 B in all."""


class CorpusLoader(BaseDataLoader):
    """Batches of a rank, so that all ranks' batches of a step are the same sequences on any number of ranks."""

    def __init__(self, sequences: Tensor, batch: int, rank: int, ranks: int) -> None:
        self._sequences, self._batch, self._rank, self._ranks = sequences, batch, rank, ranks
        self._position = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self._position * self._ranks + self._rank) * self._batch
            places = torch.arange(first, first + self._batch) % len(self._sequences)
            self._position += 1
            tokens = self._sequences[places]
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the corpus."""
        return {"position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self._position = int(state_dict["position"])


def build_loader(*, dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> CorpusLoader:
    """A train spec's `build_dataloader_fn`: the order of the corpus is that of the run's seed."""
    training = job_config.training
    sequences = read_sequences(Path(training.dataset_path), job_config.debug.seed, training.seq_len + 1)
    return CorpusLoader(sequences, training.local_batch_size, dp_rank, dp_world_size)


def register_models() -> None:
    """Add benchmark_adamw and benchmark_flash_adamw to torchtitan: one Llama, two ways to build optimizers."""
    for name, base in (("benchmark_adamw", "llama3"), ("benchmark_flash_adamw", v0_2.MODEL_NAME)):
        spec = get_train_spec(base)
        debug = dataclasses.replace(spec.model_args["debugmodel"], vocab_size=VOCABULARY)
        flavors = {"debug": debug, "1b": dataclasses.replace(LLAMA_3_2_1B)}
        spec = dataclasses.replace(spec, model_args=flavors, build_dataloader_fn=build_loader, build_tokenizer_fn=None)
        register_train_spec(name, spec)


class _FullyShardedDims(ParallelDims):
    """Applies FSDP at degree 1 too, which gives tensor parallelism alone its mixed precision."""

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "fsdp" or bool(super()._mesh_exist(name, degree))

    @property
    def fsdp_enabled(self) -> bool:
        return True


class BenchmarkTrainer(Trainer):
    """torchtitan's Trainer with FSDP at any degree, as torchtitan 0.3 has it.

    0.2.2 leaves FSDP out at degree 1, and with it mixed precision: AdamW would compute in fp32, at a fraction of the
    speed, and there would be nothing to compare.
    """

    def init_distributed(self) -> ParallelDims:
        """Start torch.distributed and return the parallel dimensions. All ranks must call."""
        dims = super().init_distributed()
        degrees = (field.name for field in dataclasses.fields(dims) if not field.name.startswith("_"))
        return _FullyShardedDims(**{name: getattr(dims, name) for name in degrees})


class _Recorder:
    """Takes the place of torchtitan's TensorBoard writer, and keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append({name: float(value) for name, value in metrics.items()})

    def close(self) -> None:
        pass


def build_trainer(case: Case, settings: Settings) -> BenchmarkTrainer:
    """Make a case's model, optimizer and data. All ranks must call."""
    return BenchmarkTrainer(ConfigManager().parse_args(torchtitan_arguments(case, settings)))


def train(trainer: BenchmarkTrainer) -> dict[str, Any]:
    """Train to the end and return the figures of the run, the same on all ranks, all of which must call.

    losses by step; seconds per step and tokens/s per process, medians after the first 10 steps; peak memory in GiB,
    the largest of any step and rank, and what was allocated before the model was made.
    """
    recorder = _Recorder()
    trainer.metrics_processor.logger = recorder
    trainer.train()
    timed = recorder.steps[WARM_UP:] or recorder.steps
    peaks = [max(step[f"memory/max_{kind}(GiB)"] for step in recorder.steps) for kind in ("active", "reserved")]
    largest = torch.tensor(peaks, device=trainer.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {
        "parameters": sum(parameter.numel() for part in trainer.model_parts for parameter in part.parameters()),
        "losses": [step["loss_metrics/global_avg_loss"] for step in recorder.steps],
        "gradient_norms": [step["grad_norm"] for step in recorder.steps],
        "seconds_per_step": statistics.median(step["time_metrics/end_to_end(s)"] for step in timed),
        "tokens_per_second_per_process": statistics.median(step["throughput(tps)"] for step in timed),
        "data_loading_seconds": statistics.median(step["time_metrics/data_loading(s)"] for step in timed),
        "peak_active_gib": float(largest[0]),
        "peak_reserved_gib": float(largest[1]),
        "optimizer_class": type(next(iter(trainer.optimizers))).__name__,
    }


def main() -> int:
    """Train the cases of the job file; the exit code is 0, or an exception's."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    given = job["settings"]
    settings = Settings(**{**given, **{name: Path(given[name]) for name in ("corpus", "folder")}})
    init_logger()
    register_models()
    for case in (Case(**one) for one in job["cases"]):
        held = torch.cuda.memory_allocated()
        trainer = build_trainer(case, settings)
        try:
            figures = train(trainer)
        finally:
            trainer.close()
        if dist.get_rank() == 0:
            facts = {"held_before_gib": held / 2**30, "device": torch.cuda.get_device_name()}
            unfinished = settings.folder / f"{case.name}.writing"
            unfinished.write_text(json.dumps({**dataclasses.asdict(case), **figures, **facts}), encoding="utf-8")
            os.replace(unfinished, settings.folder / f"{case.name}.json")
        del trainer, figures
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a regular exit would wait for collectives that the other ranks are in
