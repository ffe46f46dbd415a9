"""Checkpoints: bytes, time and memory, ours and torch AdamW's through torch.distributed.checkpoint, in one run.

    python recipes/benchmarks/checkpoint.py                                   # one process
    torchrun --nproc-per-node 2 recipes/benchmarks/checkpoint.py              # FSDP2, on GPUs or CPUs
    python recipes/benchmarks/checkpoint.py --smoke                           # seconds

A save ends when everything is on disk (fsync); before a load the system is asked to drop the files from its cache. The
stall is the time until a background save lets the training loop go on (on a GPU: until the copies are done), in percent
of a synchronous save; beside it, how much slower optimizer steps are while the save is written. Memory is the peak
during the call beyond what the model, its optimizer and its gradients hold, on the rank that needs most.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from checkpoint_support.measure import Result, copy_speed, disk_speed, measure
from checkpoint_support.subjects import subjects
from rich.console import Console
from rich.table import Table
from shapes import SMOKE_MODELS, Shape, gpt2, llama
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MODELS: dict[str, list[Shape]] = {
    "Llama-3.2-1B": llama(2048, 8192, 16, 512, 128256, tied=True),
    "GPT-2 124M": gpt2(),
    "tiny Llama": SMOKE_MODELS["tiny Llama"],
}
HEAD = (
    "bytes/param",
    "save s",
    "save GB/s",
    "load s",
    "load GB/s",
    "stall ms",
    "stall %",
    "step slower by",
    "save MB",
    "async MB",
    "load MB",
)


@dataclass
class Config:
    """Options of the benchmark."""

    smoke: bool = False
    """A small model and few repetitions."""
    model: str | None = None
    """One of the model names; by default Llama-3.2-1B on GPUs and GPT-2 124M on CPUs."""
    repetitions: int = 5
    """Timed saves, loads and background saves of each subject."""
    only: tuple[str, ...] = ()
    """Only subjects whose name contains one of these."""
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
    results: list[Result] = []
    try:
        size = 5 * sum(torch.Size(shape).numel() for shape in shapes)
        plain = disk_speed(base, size) if first else 0.0
        copying = copy_speed(min(size, 1 << 29)) if first else 0.0
        for subject in subjects(shapes, device, mesh):
            if config.only and not any(part in subject.name for part in config.only):
                continue
            if first:
                print(f"measuring {subject.name}", flush=True)
            results.append(measure(subject, base, repetitions, device))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        if first and temporary:
            shutil.rmtree(base, ignore_errors=True)
    document = {
        "command": _command(world_size),
        "date": str(datetime.date.today()),
        "machine": _machine(device, world_size),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in ("torch", "flashoptim")}},
        "model": model,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes),
        "ranks": world_size,
        "disk_bytes_per_s": plain,
        "copy_bytes_per_s": copying,
        "results": [
            {**asdict(result), "bytes_per_parameter": result.bytes_per_parameter, "stall": result.stall}
            for result in results
        ],
    }
    if first:
        _show(document, results, config.output)
    if dist.is_initialized():
        dist.barrier()
    return document


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


def _cells(result: Result) -> list[str]:
    def number(value: float | None, text: str) -> str:
        return "" if value is None else text.format(value)

    def megabytes(value: int | None) -> str:
        return number(None if value is None else value / 1e6, "{:.0f}")

    slower = result.step_while_saving_s / result.step_s - 1 if result.step_while_saving_s and result.step_s else None
    return [
        f"{result.bytes_per_parameter:.3f}",
        f"{result.save_s:.3f}",
        f"{result.bytes_on_disk / result.save_s / 1e9:.2f}",
        f"{result.load_s:.3f}",
        f"{result.bytes_on_disk / result.load_s / 1e9:.2f}",
        number(None if result.stall_s is None else result.stall_s * 1e3, "{:.1f}"),
        number(None if result.stall is None else result.stall * 100, "{:.1f}"),
        number(None if slower is None else slower * 100, "{:.0f} %"),
        megabytes(result.save_memory),
        megabytes(result.async_memory),
        megabytes(result.load_memory),
    ]


def _rows(results: Sequence[Result]) -> list[list[str]]:
    return [[r.name, *([r.error] + [""] * (len(HEAD) - 1) if r.error else _cells(r))] for r in results]


def _show(document: dict[str, Any], results: Sequence[Result], output: Path | None) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    title = (
        f"{document['model']}, {document['parameters'] / 1e6:,.1f} M parameters; {document['machine']}; {versions}; "
        f"{document['date']}"
    )
    speeds = (
        f"A plain sequential write with fsync: {document['disk_bytes_per_s'] / 1e9:.2f} GB/s; a copy in host memory by "
        f"one thread: {document['copy_bytes_per_s'] / 1e9:.2f} GB/s"
    )
    table = Table(title=title)
    table.add_column("")
    for name in HEAD:
        table.add_column(name, justify="right")
    for row in _rows(results):
        table.add_row(*row)
    Console(width=170).print(table)
    print(speeds)
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    (output / "checkpoint.json").write_text(json.dumps(document, indent=1))
    lines = [["", *HEAD], ["---"] * (len(HEAD) + 1), *_rows(results)]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text = f"{title}. {speeds}:\n\n    {document['command']}\n\n{body}\n"
    (output / "checkpoint.md").write_text(text)
    print(f"written: {output / 'checkpoint.json'}, {output / 'checkpoint.md'}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
    if dist.is_initialized():
        dist.destroy_process_group()
