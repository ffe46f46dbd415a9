"""Checkpoints: bytes, time and memory, ours and torch AdamW's through torch.distributed.checkpoint, in one run.

    python recipes/benchmarks/checkpoint.py                                   # one process
    torchrun --nproc-per-node 2 recipes/benchmarks/checkpoint.py              # FSDP2, on GPUs or CPUs
    python recipes/benchmarks/checkpoint.py --smoke                           # seconds

A save ends when everything is on disk (fsync); before a load the system is asked to drop the files from its cache. The
stall is the time until a background save lets the training loop go on (on a GPU: until the copies are done), in percent
of a synchronous save; beside it, how much slower optimizer steps are while the save is written. Memory is the peak
during the call beyond what the model, its optimizer and its gradients hold, on the rank that needs most. The results
are written after each subject. The official package's step needs a GPU; without one, or without the package, it is left
out.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from checkpoint_support.measure import Result, copy_speed, disk_speed, measure
from checkpoint_support.report import as_document, show, write
from checkpoint_support.subjects import KEYS, Key, Subject, subjects
from shapes import SMOKE_MODELS, Shape, gpt2, llama
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MODELS: dict[str, list[Shape]] = {
    "Llama-3.2-1B": llama(2048, 8192, 16, 512, 128256, tied=True),
    "GPT-2 124M": gpt2(),
    "tiny Llama": SMOKE_MODELS["tiny Llama"],
}


@dataclass
class Config:
    """Options of the benchmark."""

    smoke: bool = False
    """A small model and few repetitions."""
    model: str | None = None
    """One of the model names; by default Llama-3.2-1B on GPUs and GPT-2 124M on CPUs."""
    repetitions: int = 5
    """Timed saves, loads and background saves of each subject."""
    subjects: tuple[Key, ...] = KEYS
    """What is measured: this library; torch's AdamW saved by torch and by this library; the official package."""
    directory: Path | None = None
    """A folder on the disk to measure, seen by all ranks; a temporary one by default."""
    output: Path | None = None
    """Folder for checkpoint.json and checkpoint.md."""
    device: Literal["auto", "cuda", "cpu"] = "auto"


def main(config: Config) -> dict[str, Any]:
    """Run the benchmark (all ranks), print and write it; return what checkpoint.json holds."""
    device, mesh = _start(config.device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if config.repetitions < 1:
        raise SystemExit("checkpoint: --repetitions must be at least 1")
    repetitions = min(config.repetitions, 2) if config.smoke else config.repetitions
    default = "Llama-3.2-1B" if device.type == "cuda" else "GPT-2 124M"
    model = config.model or ("tiny Llama" if config.smoke else default)
    if model not in MODELS:
        raise SystemExit(f"checkpoint: there is no model {model!r}; there are {', '.join(MODELS)}")
    shapes = MODELS[model]
    base, temporary = _folder(config)
    document: dict[str, Any] = {
        "command": _command(world_size),
        "date": str(datetime.date.today()),
        "machine": _machine(device, world_size),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "flashoptim")}},
        "model": model,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes),
        "ranks": world_size,
        "results": [],
    }
    results: list[Result] = []
    try:
        size = 5 * document["parameters"]
        document["disk_bytes_per_s"] = disk_speed(base, size) if first else 0.0
        document["copy_bytes_per_s"] = copy_speed(min(size, 1 << 29)) if first else 0.0
        for subject in subjects(shapes, device, mesh):
            if subject.key not in config.subjects:
                continue
            results.append(_measure(subject, base, repetitions, device, first))
            document["results"] = [as_document(result) for result in results]
            if first and config.output is not None:  # after each: a run that is cut short leaves what it measured
                write(document, results, config.output)
    finally:
        if first and temporary:
            shutil.rmtree(base, ignore_errors=True)
    if first:
        show(document, results)
        if config.output is not None:
            print(f"written: {config.output / 'checkpoint.json'}, {config.output / 'checkpoint.md'}")
    if dist.is_initialized():
        dist.barrier()
    return document


def _measure(subject: Subject, base: Path, repetitions: int, device: torch.device, first: bool) -> Result:
    """Measure one subject, or say in a line why not."""
    if subject.missing:
        if first:
            print(f"skipped {subject.name}: {subject.missing}", flush=True)
        return Result(subject.name, error=subject.missing)
    if first:
        print(f"measuring {subject.name}", flush=True)
    result = measure(subject, base, repetitions, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _start(wanted: str) -> tuple[torch.device, DeviceMesh | None]:
    """Return this rank's device, and the mesh under torchrun."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        return device, None
    if not dist.is_initialized():
        # gloo beside NCCL: torch's own background save communicates on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return device, init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))


def _folder(config: Config) -> tuple[Path, bool]:
    """Return the folder to save to, the same on all ranks, and whether it is to be deleted."""
    if config.directory is not None:
        config.directory.mkdir(parents=True, exist_ok=True)
        return config.directory, False
    made = [tempfile.mkdtemp(prefix="checkpoint-benchmark-")] if not _is_later_rank() else [""]
    if dist.is_initialized():
        dist.broadcast_object_list(made)
    return Path(made[0]), True


def _is_later_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() != 0


def _command(world_size: int) -> str:
    launcher = "python" if "WORLD_SIZE" not in os.environ else f"torchrun --nproc-per-node {world_size}"
    return f"{launcher} recipes/benchmarks/checkpoint.py {shlex.join(sys.argv[1:])}".strip()


def _machine(device: torch.device, world_size: int) -> str:
    if device.type == "cuda":
        return f"{world_size} x {torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), {world_size} ranks of {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
    if dist.is_initialized():
        dist.destroy_process_group()
