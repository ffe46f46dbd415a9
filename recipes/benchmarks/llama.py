"""Peak memory and tokens/s of whole training steps at size: FlashAdamW with and without release, AdamW, flashoptim.

    python recipes/benchmarks/llama.py --processes 2 --output OUT                      # Llama-3.1-8B, 2 x 4096 per GPU
    python recipes/benchmarks/llama.py --recipe llama3_8b_single_gpu --cases release --output OUT
    python recipes/benchmarks/llama.py --smoke                                         # small, on a CPU too
    python recipes/benchmarks/llama.py -- --sequence-length 16384 --micro-batch 1      # options of llama_finetune.py

Model, loss, attention and activation checkpointing are the recipe's, the same for every case; weights and tokens are
random. Each case is a process group of its own, so that none sees another's memory; the rounds take the cases in turn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from llama_support.config import Config as RecipeConfig  # noqa: E402
from llama_support.config import read_command_line  # noqa: E402
from llama_support.data import StepBatches  # noqa: E402
from llama_support.model import build_model, model_folder, read_llama_config  # noqa: E402
from llama_support.optimizers import build_optimizer, release_gradients  # noqa: E402
from llama_support.training import accumulate_gradient, clip_gradients, take_step  # noqa: E402
from llama_support.world import World, start_world  # noqa: E402

Case = Literal["adamw", "flash_adamw", "release", "flashoptim", "flashoptim release"]
CASES: tuple[Case, ...] = ("adamw", "flash_adamw", "release", "flashoptim", "flashoptim release")
NAMES = {
    "adamw": "torch AdamW, fp32",
    "flash_adamw": "FlashAdamW",
    "release": "FlashAdamW, gradient release, clipping",
    "flashoptim": "flashoptim FlashAdamW",
    "flashoptim release": "flashoptim FlashAdamW, gradient release, no clipping",
}
WARM_UP = 2
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure whole training steps. Options after -- go to the recipe's config."""

    recipe: str = "llama3_8b"
    """A config of recipes/configs."""
    processes: int = 1
    """Processes on this machine, one per GPU."""
    cases: tuple[Case, ...] = CASES
    """What to measure; flashoptim is left out where it is not installed."""
    steps: int = 8
    """Timed steps of a case in a round, after 2 to warm up."""
    rounds: int = 1
    """How often all cases are run; the median of a case's rounds is reported."""
    smoke: bool = False
    """The recipe's debug model and a few short steps."""
    output: Path = Path("runs/benchmark-llama")
    """Folder for llama.json and llama.md."""
    worker: Case | None = None
    """Measure this one case in this process group (the benchmark starts itself so)."""


def random_step(config: RecipeConfig, vocabulary: int, world: World, generator: torch.Generator) -> StepBatches:
    """One optimizer step's batches of this rank: whole sequences of one document each, random tokens."""
    micro_batches = max(1, config.global_batch // (world.size * config.micro_batch))
    shape = (config.micro_batch, config.sequence_length)
    batches = []
    for _ in range(micro_batches):
        tokens = torch.randint(0, vocabulary, (shape[0], shape[1] + 1), generator=generator)
        batches.append(
            {
                "input_ids": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
                "document_ids": torch.zeros(shape, dtype=torch.int64),
            }
        )
    return StepBatches(batches, trained_tokens=world.size * micro_batches * shape[0] * shape[1])


def case_config(config: RecipeConfig, case: Case) -> RecipeConfig:
    """The recipe's config for a case."""
    return replace(
        config,
        optimizer="adamw" if case == "adamw" else "flash_adamw",
        gradient_release=case == "release",
    )


def peer_optimizer(config: RecipeConfig, model: nn.Module, release: bool) -> torch.optim.Optimizer:
    """The official package's FlashAdamW with the recipe's options."""
    from flashoptim import FlashAdamW, enable_gradient_release

    optimizer: torch.optim.Optimizer = FlashAdamW(
        model.parameters(), lr=config.peak_lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    if release:
        enable_gradient_release(model, optimizer)
    return optimizer


def measure(case: Case, config: RecipeConfig, steps: int) -> dict[str, Any]:
    """Train a few steps of a case and return its figures. All ranks must call; each gets the same."""
    peer = case.startswith("flashoptim")
    # One GPU alone needs no process group, except where FSDP2 has to cast fp32 weights for the matrix products.
    world = start_world(config.device, needs_mesh=case == "adamw")
    cuda = world.device.type == "cuda"
    folder = model_folder(config.model)
    llama = read_llama_config(folder, config.sequence_length)
    model = build_model(config, folder, llama, world)
    optimizer = peer_optimizer(config, model, "release" in case) if peer else build_optimizer(config, model)
    release = None if peer else release_gradients(config, model, optimizer)
    generator = torch.Generator().manual_seed(world.rank)
    seconds, optimizer_seconds, losses = [], [], []

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for number in range(WARM_UP + steps):
        batches = random_step(config, llama.vocab_size, world, generator)
        if number == WARM_UP and cuda:
            torch.cuda.reset_peak_memory_stats()
        start = now()
        losses.append(accumulate_gradient(model, batches, world, None, release))
        middle = now()
        if case == "release":
            take_step(optimizer, None, release)
        elif case != "flashoptim release":  # whose backward pass has stepped; it cannot clip
            take_step(optimizer, clip_gradients(model, optimizer, config.clip_norm))
        optimizer.zero_grad()
        end = now()
        seconds.append(end - start)
        optimizer_seconds.append(end - middle)
    tokens = config.sequence_length * config.micro_batch * len(batches.micro_batches)
    step = statistics.median(seconds[WARM_UP:])
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    held = torch.cuda.memory_allocated() / GIB if cuda else 0.0
    return {
        "case": case,
        "ranks": world.size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step_and_rank": tokens,
        "seconds_per_step": step,
        "tokens_per_second_per_rank": tokens / step,
        "clip_and_step_milliseconds": 1e3 * statistics.median(optimizer_seconds[WARM_UP:]),
        "peak_gib_over_ranks": world.sum(peak)[0],
        "held_gib_over_ranks": world.sum(held)[0],
        "loss": losses[-1],
    }


def work(options: Options, arguments: list[str]) -> None:
    """What each rank of a case runs; rank 0 writes the figures as JSON to standard output's last line."""
    assert options.worker is not None
    config = case_config(read_command_line(arguments), options.worker)
    figures = measure(options.worker, config, options.steps)
    if not dist.is_initialized() or dist.get_rank() == 0:
        device = torch.cuda.get_device_name() if config.device != "cpu" and torch.cuda.is_available() else "CPU"
        print(json.dumps({**figures, "device": device}), flush=True)
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # figures are out; a peer's leftover hook is no reason to fail
            dist.destroy_process_group()


def run_case(options: Options, case: Case, arguments: list[str]) -> dict[str, Any]:
    """Start a case's process group and return its figures, or what stopped it."""
    command = [sys.executable]
    if options.processes > 1:
        command += [str(ROOT / "launch" / "ranks.py"), "--standalone", f"--nproc-per-node={options.processes}"]
    command += [__file__, "--worker", case, "--steps", str(options.steps), "--", *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        errors.seek(0)
        told = errors.read()
    if result.returncode != 0:
        sys.stderr.write(told)
        lines = [line for line in told.splitlines() if "Error" in line] or told.splitlines() or ["no message"]
        return {"case": case, "failed": lines[-1][:300]}
    figures: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return figures


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a case, each the median over its rounds (numbers only; the rest is the first round's).

    A case that failed in one round has failed.
    """
    failed = [found for found in rounds if "failed" in found]
    if failed:
        return failed[0]
    merged = dict(rounds[0])
    for name, value in rounds[0].items():
        if isinstance(value, float):
            merged[name] = statistics.median(found[name] for found in rounds)
    return merged


def write_results(options: Options, results: list[dict[str, Any]], arguments: list[str]) -> str:
    """Write llama.json and llama.md into the output folder and return the table."""
    lines = [
        "| optimizer | peak GiB, all ranks | held GiB | tokens/s per rank | step s | clip and step ms | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results:
        name = NAMES[row["case"]]
        if "failed" in row:
            lines.append(f"| {name} | {row['failed']} | | | | | |")
            continue
        lines.append(
            f"| {name} | {row['peak_gib_over_ranks']:.1f} | {row['held_gib_over_ranks']:.1f}"
            f" | {row['tokens_per_second_per_rank']:,.0f} | {row['seconds_per_step']:.3f}"
            f" | {row['clip_and_step_milliseconds']:.2f} | {row['loss']:.4f} |"
        )
    table = "\n".join(lines) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    facts = {"torch": torch.__version__, "python": platform.python_version(), "recipe": arguments}
    document = {**facts, "options": asdict(options), "results": results}
    (options.output / "llama.json").write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
    (options.output / "llama.md").write_text(table, encoding="utf-8")
    return table


def main() -> int:
    """Measure all cases; the exit code is 1 if one of them failed."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = tyro.cli(Options, args=arguments[:split])
    given = arguments[split + 1 :]
    if options.worker is not None:
        work(options, given)
        return 0
    recipe = ["--config", options.recipe]
    if options.smoke:
        recipe = ["--model", "debug", "--sequence-length", "64", "--micro-batch", "1", "--global-batch", "4"]
    else:
        # One micro-batch a step: what is measured is a step, not accumulation.
        recipe += ["--global-batch", "1"]
    recipe += given
    cases = [case for case in options.cases if not case.startswith("flashoptim") or _installed("flashoptim")]
    rounds: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            figures = run_case(options, case, recipe)
            rounds[case].append(figures)
            print(json.dumps(figures), flush=True)
    results = [median_of(rounds[case]) for case in cases]
    print(write_results(options, results, recipe))
    return 1 if any("failed" in row for row in results) else 0


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    sys.exit(main())
