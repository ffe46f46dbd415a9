"""Print what a run would hold on each GPU, before there is a GPU: states, gradients, buffers, activations.

    python recipes/memory.py --configs llama3_70b
    python recipes/memory.py --configs llama3_8b --world-sizes 2 8 -- --sequence-length 16384 --micro-batch 1
    python recipes/memory.py --configs llama3_8b --world-sizes 2 --moments          # the course of a step

Any number of GPUs is planned in one process on a CPU; nothing is allocated. Options after -- are llama_finetune.py's.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
from dataclasses import dataclass, replace

import tyro
from llama_support.config import Config, read_command_line
from llama_support.errors import BadInput
from llama_support.memory_plan import PARTS, MemoryPlan, plan_memory
from llama_support.model import model_folder, read_llama_config
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict the GiB per GPU of runs of llama_finetune.py. Options after -- go to each of them."""

    configs: tuple[str, ...] = ("llama3_70b", "llama3_8b", "llama3_1b")
    """What llama_finetune.py's --config takes."""
    world_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    """Numbers of GPUs."""
    moments: bool = False
    """Print the moments of a step, with and without gradient release, instead of one line per number of GPUs."""


def largest(plan: MemoryPlan, part: str) -> int:
    """The most bytes that one of PARTS reaches in a step without gradient release."""
    return max(moment.parts[PARTS.index(part)] for moment in plan.moments(release=False))


def overview(config: Config, llama_config: LlamaConfig, world_sizes: tuple[int, ...]) -> Table:
    """A line per number of GPUs, torch's AdamW last."""
    names = ("weights", "correction", "moments", "scales", "gradient", *PARTS[2:], "peak", "peak, release", "AdamW")
    table = Table("GPUs", "batch", *names, box=box.MARKDOWN)
    for world_size in world_sizes:
        plan = plan_memory(replace(config, optimizer="flash_adamw"), llama_config, world_size)
        adamw = plan_memory(replace(config, optimizer="adamw", gradient_release=False), llama_config, world_size)
        states = [plan.states[name] for name in ("weight", "correction", "moments", "scales", "gradient")]
        peaks = [plan.peak(release=False), plan.peak(release=True), adamw.peak(release=False)]
        sizes = [*states, *(largest(plan, part) for part in PARTS[2:]), *(peak.total for peak in peaks)]
        share = -(-config.global_batch // world_size)
        batch = f"{min(config.micro_batch, share)} x {plan.micro_batches}"
        table.add_row(str(world_size), batch, *(f"{size / _GIB:.2f}" for size in sizes))
    return table


def course(plan: MemoryPlan, *, release: bool) -> Table:
    """A line per moment; of the layers the first, the last and the highest."""
    table = Table("moment", *PARTS, "total", box=box.MARKDOWN)
    moments = list(plan.moments(release=release))
    layers = [moment for moment in moments if moment.name.startswith("backward of layer")]
    shown = {layers[0], layers[-1], max(layers, key=lambda moment: moment.total)}
    for moment in moments:
        if moment not in layers or moment in shown:
            table.add_row(moment.name, *(f"{size / _GIB:.2f}" for size in (*moment.parts, moment.total)))
    return table


def main() -> int:
    """Print the tables; the exit code is 0, or 2 for options no run can have."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = tyro.cli(Options, args=arguments[:split])
    console = Console(width=200 if not sys.stdout.isatty() else None)
    try:
        for name in options.configs:
            config = read_command_line(["--config", name, *arguments[split + 1 :]])
            llama_config = read_llama_config(model_folder(config.model), config.sequence_length)
            title = f"{name}: {config.sequence_length} tokens per sequence, {config.global_batch} sequences per step,"
            console.print(f"{title} activation checkpointing {config.activation_checkpointing}; GiB per GPU")
            if not options.moments:
                console.print(overview(config, llama_config, options.world_sizes))
                continue
            for world_size in options.world_sizes:
                plan = plan_memory(config, llama_config, world_size)
                for release in (False, True) if config.optimizer == "flash_adamw" else (False,):
                    console.print(f"{world_size} GPUs, {'with' if release else 'without'} gradient release")
                    console.print(course(plan, release=release))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
