"""Time and memory of saves and loads. All ranks call everything here together; the slowest rank's figure counts."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from .subjects import Run, Subject, drop_from_page_cache


@dataclass
class Result:
    """One row: times in seconds (medians), memory in bytes beyond what model, optimizer and gradients hold."""

    name: str
    parameters: int = 0
    bytes_on_disk: int = 0
    save_s: float = 0.0
    load_s: float = 0.0
    first_stall_s: float | None = None
    """Time until the first background save returned; buffers are made in it."""
    stall_s: float | None = None
    """The same of the later ones."""
    background_s: float | None = None
    """From the call to the end of a background save."""
    step_s: float | None = None
    """An optimizer step while nothing is saved."""
    step_while_saving_s: float | None = None
    save_memory: int | None = None
    async_memory: int | None = None
    load_memory: int | None = None
    save_gpu_memory: int | None = None
    async_gpu_memory: int | None = None
    """Until the call returned; afterwards the steps need some too."""
    load_gpu_memory: int | None = None
    all_save_s: list[float] = field(default_factory=list)
    all_load_s: list[float] = field(default_factory=list)
    all_stall_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes on disk per parameter of the model, everything included."""
        return self.bytes_on_disk / max(self.parameters, 1)

    @property
    def stall(self) -> float | None:
        """Stall of the training loop as a fraction of a synchronous save's time."""
        return None if self.stall_s is None or not self.save_s else self.stall_s / self.save_s


def measure(subject: Subject, folder: Path, repetitions: int, device: torch.device) -> Result:
    """Measure one subject in ``folder``, which is emptied before and after each save."""
    result = Result(subject.name)
    run = subject.make()
    result.parameters = sum(parameter.numel() for parameter in run.model.parameters())
    for _ in range(2):
        run.optimizer.step()
    path = folder / "checkpoint"

    def fresh() -> None:
        _synchronize(device)  # another rank may still look at what is removed
        _on_first(lambda: shutil.rmtree(path, ignore_errors=True))

    fresh()
    run.save(path)  # makes process groups, imports modules
    result.bytes_on_disk = sum(file.stat().st_size for file in path.iterdir())
    if run.start_save is not None:
        fresh()
        first = _background(run, path, device)
        result.first_stall_s, result.async_memory, result.async_gpu_memory = first.stall, first.memory, first.gpu_memory
    result.step_s = statistics.median(_step(run, device) for _ in range(7))
    all_background: list[float] = []
    while_saving: list[float] = []
    for number in range(repetitions):  # by turns, so that all see the same machine
        fresh()
        seconds, memory, gpu = _timed(lambda: run.save(path), device)
        result.all_save_s.append(seconds)
        _on_first(lambda: drop_from_page_cache(path))
        load_seconds, load_memory, load_gpu = _timed(lambda: run.load(path), device)
        result.all_load_s.append(load_seconds)
        if number == 0:
            result.save_memory, result.save_gpu_memory = memory, gpu
            result.load_memory, result.load_gpu_memory = load_memory, load_gpu
        if run.start_save is not None:
            fresh()
            background = _background(run, path, device)
            result.all_stall_s.append(background.stall)
            all_background.append(background.whole)
            while_saving += background.steps
    fresh()
    result.save_s = statistics.median(result.all_save_s)
    result.load_s = statistics.median(result.all_load_s)
    if run.start_save is not None:
        result.stall_s = statistics.median(result.all_stall_s)
        result.background_s = statistics.median(all_background)
        result.step_while_saving_s = _slowest(statistics.median(while_saving) if while_saving else 0.0) or None
    return result


@dataclass
class _Background:
    """One save in the background: times in seconds, memory in bytes beyond what was held."""

    stall: float
    """Until the call returned."""
    whole: float
    """Until everything was on disk."""
    steps: list[float]
    """Each step meanwhile, on this rank."""
    memory: int | None
    gpu_memory: int | None


def _background(run: Run, path: Path, device: torch.device) -> _Background:
    """Save in the background while steps go on."""
    assert run.start_save is not None
    _synchronize(device)
    peak, gpu_peak = _peak_memory(), _peak_gpu_memory(device)
    begin = time.perf_counter()
    done, wait = run.start_save(path)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the next step would wait for the copies that are enqueued
    stall = time.perf_counter() - begin
    gpu = gpu_peak()
    steps = []
    while not done():
        steps.append(_step(run, device))
    wait()
    whole = time.perf_counter() - begin
    # The last step may have run on after the end.
    return _Background(_slowest(stall), _slowest(whole), steps[:-1], _most(peak()), _most(gpu))


def _step(run: Run, device: torch.device) -> float:
    begin = time.perf_counter()
    run.optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _timed(work: Callable[[], object], device: torch.device) -> tuple[float, int | None, int | None]:
    """Return seconds, peak of host memory and of GPU memory beyond what is held."""
    _synchronize(device)
    peak, gpu_peak = _peak_memory(), _peak_gpu_memory(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    memory, gpu = peak(), gpu_peak()
    return _slowest(seconds), _most(memory), _most(gpu)


def _peak_gpu_memory(device: torch.device) -> Callable[[], int | None]:
    """Start to watch the peak of what tensors take on the GPU; returns how to read what was added."""
    if device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    return lambda: torch.cuda.max_memory_allocated(device) - held


def _peak_memory() -> Callable[[], int | None]:
    """Start to watch the peak of this process's host memory; returns how to read what was added."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed
        return lambda: None
    before = _status("VmRSS")
    return lambda: _status("VmHWM") - before


def _status(field_name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field_name)) * 1024


def disk_speed(folder: Path, size: int) -> float:
    """Return the bytes per second of a plain sequential write of this size, fsync included, by one rank."""
    block = os.urandom(1 << 22)
    file = folder / "plain"
    begin = time.perf_counter()
    with open(file, "wb", buffering=0) as stream:
        for _ in range(max(1, size // len(block))):
            stream.write(block)
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - begin
    file.unlink()
    return max(1, size // len(block)) * len(block) / seconds


def copy_speed(size: int) -> float:
    """Return the bytes per second of a copy in host memory by one thread, in pieces of a parameter's size."""
    pieces = [torch.ones(1 << 24, dtype=torch.uint8) for _ in range(max(1, size >> 24))]
    targets = [piece.clone() for piece in pieces]
    begin = time.perf_counter()
    for target, piece in zip(targets, pieces, strict=True):
        target.copy_(piece)
    return (len(pieces) << 24) / (time.perf_counter() - begin)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def _on_first(work: Callable[[], object]) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        work()
    if dist.is_initialized():
        dist.barrier()


def _slowest(value: float) -> float:
    return max(_gathered(value))


def _most(value: int | None) -> int | None:
    values = _gathered(value)
    return None if any(one is None for one in values) else max(values)


def _gathered(value: object) -> list:
    if not dist.is_initialized():
        return [value]
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
