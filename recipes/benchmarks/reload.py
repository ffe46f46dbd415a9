"""Load a checkpoint of the recipe on this many processes: time and memory, and the logits against those of other loads.

    python recipes/benchmarks/reload.py llama3_8b RUN/checkpoints/step-00000003 --logits L.pt --export HF
    torchrun --nproc-per-node 2 recipes/benchmarks/reload.py llama3_8b RUN/checkpoints/step-00000003 --logits L.pt

The first load writes its logits, and sums of some states, to L.pt; later ones, on any number of processes, compare
theirs with them. `--export` is what `flashoptim-dist export-hf` made of the checkpoint, which transformers loads (in
one process): its logits are compared too. Ends with exit code 1 if anything differs by a bit.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llama_support.config import read_config_file
from llama_support.model import build_model, model_folder, read_llama_config
from llama_support.optimizers import build_optimizer
from llama_support.world import World, start_world

from flashoptim_dist.checkpoint import load
from flashoptim_dist.sharding import local_tensor

GIB = 2**30
STATES_OF = 16
"""Parameters whose states are summed up."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Load a checkpoint and compare."""

    config: tyro.conf.Positional[str]
    """A config of recipes/configs or a YAML file, of the run that saved."""
    checkpoint: tyro.conf.Positional[Path]
    """The checkpoint's folder."""
    logits: Path
    """What the first load writes and later ones compare with."""
    export: Path | None = None
    """A Hugging Face folder exported from the checkpoint; for one process."""
    tokens: int = 128
    """Random tokens in each of two sequences."""


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Logits of a Hugging Face Llama under torch's own attention, on the CPU: [2, tokens, vocabulary]."""
    model.eval()
    model.set_attn_implementation("sdpa")
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.cpu()


def state_sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Sums of the states of some parameters over all ranks, in fp64: exact for codes. All ranks must call."""
    found = {}
    for name, parameter in list(model.named_parameters())[-STATES_OF:]:
        for entry, value in optimizer.state[parameter].items():
            total = local_tensor(value).double().sum()
            if local_tensor(value) is not value and dist.is_initialized():
                dist.all_reduce(total)
            found[f"{name}.{entry}"] = float(total)
    return found


def held(device: torch.device) -> str:
    """Memory of this rank, held and at its peak."""
    if device.type != "cuda":
        return "memory is measured on GPUs only"
    return (
        f"held {torch.cuda.memory_allocated(device) / GIB:.2f} GiB, "
        f"peak {torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB"
    )


def main(options: Options) -> int:
    """Load, compare, and return the exit code. All ranks must call."""
    config = replace(read_config_file(options.config), optimizer="flash_adamw")
    world = start_world(config.device, replicas=config.replicate)
    folder = model_folder(config.model)
    llama_config = read_llama_config(folder, config.sequence_length)
    model = build_model(config, folder, llama_config, world)
    optimizer = build_optimizer(config, model)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    before = time.perf_counter()
    load(options.checkpoint, model, optimizer)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    print(f"rank {world.rank} of {world.size}: {time.perf_counter() - before:.1f} s, {held(world.device)}", flush=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, llama_config.vocab_size, (2, options.tokens), generator=generator).to(world.device)
    logits, sums = logits_of(model, tokens), state_sums(model, optimizer)
    same = True
    if options.logits.exists():
        first = torch.load(options.logits, weights_only=True)
        same = torch.equal(logits, first["logits"]) and sums == first["sums"]
        print(
            f"rank {world.rank}: logits and {len(sums)} sums of states {'equal' if same else 'DIFFER from'} the first"
        )
    if world.size > 1:
        dist.barrier()
    if world.is_main and not options.logits.exists():
        torch.save({"logits": logits, "sums": sums}, options.logits)
    if options.export is not None and world.size == 1:
        del model, optimizer
        gc.collect()
        same &= same_as_export(options.export, tokens, logits, world)
    if world.size > 1:
        dist.destroy_process_group()
    return 0 if same else 1


def same_as_export(folder: Path, tokens: Tensor, logits: Tensor, world: World) -> bool:
    """Whether transformers' model of an exported folder has these logits, bit for bit."""
    from transformers import AutoModelForCausalLM

    exported: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=logits.dtype, local_files_only=True)
    same = torch.equal(logits_of(exported.to(world.device), tokens), logits)
    print(f"the export's logits in transformers {'are equal' if same else 'DIFFER'}, {logits.dtype}", flush=True)
    return same


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
