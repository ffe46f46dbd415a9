"""Time of an optimizer step: ours and its peers, in one run on one device.

    python recipes/benchmarks/step.py                      # GPU, the models of the README's table
    python recipes/benchmarks/step.py --smoke              # small sizes, on a GPU or a CPU

A step is timed from an idle device, with its host work: a CUDA event before, `step()`, one after, and a wait; the
median of 20 after 5 to warm up. Each model gets fresh bf16 or fp32 parameters and gradients. Correctness comes first:
steps of ours are compared with the pure-torch definition before anything is timed.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from checks import run_checks
from rich.console import Console
from rich.table import Table
from shapes import MODELS, SMOKE_MODELS, Shape
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist.optim import cpu_backend

BYTES_PER_ELEMENT = 12.25
"""What the compressed step must move: 7.125 read, 5.125 written (bf16 weight and gradient, 24-bit master)."""

WARM_UP_SECONDS = 0.2

_LONGEST_BAR = 8
"""In the chart, in times of our bar."""

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass
class Config:
    """Options of the benchmark."""

    smoke: bool = False
    """Small models and few repetitions."""
    models: tuple[str, ...] = ()
    """Only models whose name contains one of these."""
    peers: tuple[str, ...] = ()
    """Only optimizers whose name contains one of these; all by default."""
    checks: bool = False
    """Also measure host time on DTensors and memory beside the states, and compare captured steps with eager ones."""
    prototype: Path | None = None
    """Folder with proto4.py, an earlier prototype of the kernel, to time as well."""
    output: Path | None = None
    """Folder for step.json and step.png."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    repetitions: int = 20
    """Timed steps."""


@dataclass
class Result:
    """Medians of one optimizer on one model; times in milliseconds."""

    model: str
    optimizer: str
    elements: int
    tensors: int
    floor_ms: float
    step_ms: float
    host_ms: float
    device_ms: float | None
    bytes_per_parameter: float
    error: str = ""


Maker = Callable[[list[nn.Parameter]], Any]


@dataclass
class Optimizer:
    """An optimizer to time: how to make it, and the dtype of its parameters and gradients.

    ``cpu_backend``: how ours steps CPU tensors.
    """

    name: str
    dtype: torch.dtype
    make: Maker
    cpu_backend: Literal["auto", "eager"] = "auto"


def optimizers(config: Config, device: torch.device) -> list[Optimizer]:
    """Return the optimizers that are installed here, ours first; say which are not."""
    bf16, fp32 = torch.bfloat16, torch.float32
    on_gpu = device.type == "cuda"

    def ours(rounding: Any) -> Maker:
        return lambda parameters: fod.FlashAdamW(parameters, rounding=rounding, **HYPERPARAMETERS)

    def torch_adamw(**options: Any) -> Maker:
        return lambda parameters: torch.optim.AdamW(parameters, **HYPERPARAMETERS, **options)

    found = [
        Optimizer("flashoptim_dist nearest", bf16, ours("nearest")),
        Optimizer("flashoptim_dist stochastic", bf16, ours("stochastic")),
        Optimizer("torch AdamW fused fp32", fp32, torch_adamw(fused=True)),
        Optimizer("torch AdamW foreach fp32", fp32, torch_adamw(foreach=True)),
        Optimizer("torch AdamW fused bf16", bf16, torch_adamw(fused=True)),
        Optimizer("torch AdamW foreach bf16", bf16, torch_adamw(foreach=True)),
    ]
    if not on_gpu:
        found += [
            Optimizer("torch AdamW default fp32", fp32, torch_adamw()),
            Optimizer("flashoptim_dist eager nearest", bf16, ours("nearest"), "eager"),
            Optimizer("flashoptim_dist eager stochastic", bf16, ours("stochastic"), "eager"),
        ]
    if config.prototype is not None and on_gpu:
        sys.path.insert(0, str(config.prototype))
        found += [
            Optimizer(f"prototype {name}", bf16, _prototype(name == "stochastic")) for name in ("nearest", "stochastic")
        ]
    for package, optimizer in (
        ("flashoptim", Optimizer("flashoptim FlashAdamW", bf16, _flashoptim)),
        ("torchao", Optimizer("torchao AdamW8bit (no master)", bf16, _torchao)),
        ("bitsandbytes", Optimizer("bitsandbytes AdamW8bit (no master)", bf16, _bitsandbytes)),
    ):
        if importlib.util.find_spec(package) is None:
            print(f"not installed, skipped: {package}")
        elif not on_gpu:
            print(f"needs a GPU, skipped: {package}")
        else:
            found.append(optimizer)
    return [o for o in found if not config.peers or any(peer in o.name for peer in config.peers)]


def _flashoptim(parameters: list[nn.Parameter]) -> Any:
    from flashoptim import FlashAdamW

    return FlashAdamW(parameters, **HYPERPARAMETERS)


def _torchao(parameters: list[nn.Parameter]) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, **HYPERPARAMETERS)


def _bitsandbytes(parameters: list[nn.Parameter]) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **HYPERPARAMETERS)


def _prototype(stochastic: bool) -> Maker:
    def make(parameters: list[nn.Parameter]) -> Any:
        from proto4 import MultiAdamW4

        return MultiAdamW4(parameters, BLOCK=256, ITERS=8, num_warps=1, SR=stochastic)

    return make


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def step_times(step: Callable[[], Any], device: torch.device, repetitions: int) -> tuple[float, float]:
    """Return (median step, median host time of step()) in ms."""
    begin = time.perf_counter()
    for number in itertools.count(1):
        step()
        synchronize(device)
        # A few quick steps leave the clocks, and the caches that a compilation has emptied, as they were.
        if number >= min(5, repetitions) and (device.type != "cuda" or time.perf_counter() - begin > WARM_UP_SECONDS):
            break
    steps, hosts = [], []
    for _ in range(repetitions):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            before = time.perf_counter()
            step()
            hosts.append((time.perf_counter() - before) * 1e3)
            end.record()
            synchronize(device)
            steps.append(start.elapsed_time(end))
        else:
            before = time.perf_counter()
            step()
            steps.append((time.perf_counter() - before) * 1e3)
            hosts.append(steps[-1])
    return statistics.median(steps), statistics.median(hosts)


def graph_time(step: Callable[[], Any], device: torch.device, repetitions: int) -> float | None:
    """Return the device time of a step in ms, from replays of a CUDA graph; None where it cannot be captured."""
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        return None
    return step_times(graph.replay, device, repetitions)[0]


def copy_bandwidth(device: torch.device, smoke: bool) -> float:
    """Return the bytes per second, read plus written, of a large copy on the device."""
    size = 1 << (24 if smoke or device.type == "cpu" else 31)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds, _ = step_times(lambda: target.copy_(source), device, 20)
    return 2 * size / milliseconds * 1e3


def make_parameters(shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Return parameters of Llama-like sizes with gradients, the same for the same shapes."""
    torch.manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter((torch.randn(shape, device=device) * 0.02).to(dtype))
        parameter.grad = (torch.randn(shape, device=device) * 1e-3).to(dtype)
        parameters.append(parameter)
    return parameters


def measure(optimizer: Optimizer, name: str, shapes: list[Shape], bandwidth: float, config: Config) -> Result:
    """Time one optimizer on one model."""
    device = pick_device(config)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    floor = BYTES_PER_ELEMENT * elements / bandwidth * 1e3
    result = Result(name, optimizer.name, elements, len(shapes), floor, 0.0, 0.0, None, 0.0)
    allocated = torch.cuda.memory_allocated if device.type == "cuda" else lambda: 0
    gc.collect()  # what the last run left would be counted as freed by this one
    start = allocated()
    backend = cpu_backend()
    cpu_backend(optimizer.cpu_backend)
    try:
        parameters = make_parameters(shapes, optimizer.dtype, device)
        made = optimizer.make(parameters)
        made.step()
        synchronize(device)
        gc.collect()
        result.bytes_per_parameter = (allocated() - start) / elements
        result.step_ms, result.host_ms = step_times(made.step, device, config.repetitions)
        if isinstance(made, fod.FlashAdamW):
            result.device_ms = graph_time(made.step, device, config.repetitions)
    except Exception as error:  # a peer that fails is a row of the table, not the end of the run
        result.error = f"{type(error).__name__}: {str(error)[:120]}"
    finally:
        cpu_backend(backend)
    return result


def check_correct(device: torch.device) -> None:
    """Compare one step of ours with the pure-torch definition; raises AssertionError where they differ."""
    shapes: list[Shape] = [(256, 512), (70, 100), (77,)]
    for rounding in ("nearest", "stochastic"):
        weights: list[list[Tensor]] = []
        for fused in (None, False):
            parameters = make_parameters(shapes, torch.bfloat16, device)
            optimizer = fod.FlashAdamW(parameters, rounding=rounding, fused=fused, **HYPERPARAMETERS)
            for _ in range(3):
                optimizer.step()
            weights.append([optimizer.master_weight(parameter) for parameter in parameters])
        for ours, definition in zip(*weights, strict=True):
            # A code that rounds the other way changes the update by less than a tenth of lr.
            assert (ours - definition).abs().max() < 0.1 * HYPERPARAMETERS["lr"], "the step differs from its definition"


def clocks_under_load(device: torch.device, shapes: list[Shape]) -> str:
    """Return this GPU's clocks and power, asked for while steps of ours keep it busy until the answer is there."""
    optimizer = fod.FlashAdamW(make_parameters(shapes, torch.bfloat16, device), **HYPERPARAMETERS)
    for _ in range(300):
        optimizer.step()
    identity = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"  # nvidia-smi's numbers can be others
    query = ["nvidia-smi", identity, "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    try:
        with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asked:
            while asked.poll() is None:
                for _ in range(20):
                    optimizer.step()
                synchronize(device)
            answer, _ = asked.communicate()
    except OSError:
        return "unknown"
    return answer.strip() if asked.returncode == 0 else "unknown"


def pick_device(config: Config) -> torch.device:
    """Return the device that the options ask for."""
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def version(package: str) -> str:
    """Return the version of an installed package, or a dash."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def show(results: list[Result], title: str) -> None:
    """Print the table, each model's times beside their ratio to ours with stochastic rounding."""
    table = Table(title=title)
    for column in ("model", "optimizer", "step ms", "host ms", "device ms", "floor ms", "bytes/param", "x ours"):
        table.add_column(column, justify="left" if column in ("model", "optimizer") else "right")
    for result in results:
        if result.error:
            table.add_row(result.model, result.optimizer, result.error)
            continue
        ours = [r.step_ms for r in results if r.model == result.model and r.optimizer.endswith("dist stochastic")]
        table.add_row(
            result.model,
            result.optimizer,
            f"{result.step_ms:.3f}",
            f"{result.host_ms:.3f}",
            "" if result.device_ms is None else f"{result.device_ms:.3f}",
            f"{result.floor_ms:.3f}",
            f"{result.bytes_per_parameter:.3f}",
            f"{result.step_ms / ours[0]:.2f}" if ours and ours[0] else "",
        )
    Console(width=150).print(table)


def draw(results: list[Result], path: Path, title: str) -> None:
    """Draw a bar chart per model; the dashed line is the time of a copy of the same bytes.

    Bars that are much longer than ours are cut off, so that the others can be told apart.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(result.model for result in results))
    figure, axes = pyplot.subplots(1, len(models), figsize=(3.6 * len(models), 3.8), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        rows = [result for result in results if result.model == model and not result.error]
        colours = ["#0072B2" if "flashoptim_dist" in row.optimizer else "#BBBBBB" for row in rows]
        most = min(max(row.step_ms for row in rows), _LONGEST_BAR * rows[0].step_ms)
        bars = axis.barh([row.optimizer for row in rows], [min(row.step_ms, most) for row in rows], color=colours)
        axis.bar_label(bars, [f"{row.step_ms:.3g}{' →' * (row.step_ms > most)}" for row in rows], padding=2, fontsize=6)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.2 * most)
        axis.axvline(rows[0].floor_ms, color="#D55E00", linestyle="--", linewidth=1)
        axis.set_title(f"{model}\n{rows[0].elements / 1e6:,.0f} M in {rows[0].tensors} tensors", fontsize=9)
        axis.set_xlabel("ms per step", fontsize=8)
        axis.tick_params(labelsize=7)
        if axis is not axes[0][0]:
            axis.set_yticklabels([])
    figure.suptitle(f"{title}; dashed: copying as many bytes", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(config: Config) -> list[Result]:
    """Run the benchmark and return its rows."""
    device = pick_device(config)
    if config.smoke:
        config.repetitions = min(config.repetitions, 3)
    check_correct(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "triton", "flashoptim", "torchao"))
    title = f"AdamW step on one {name}, {versions}, {datetime.date.today()}"
    bandwidth = copy_bandwidth(device, config.smoke)
    print(f"{title}\ncopy {bandwidth / 1e9:,.0f} GB/s, {config.repetitions} repetitions")
    models = SMOKE_MODELS if config.smoke else MODELS
    chosen = {n: s for n, s in models.items() if not config.models or any(model in n for model in config.models)}
    if device.type == "cuda":
        print(f"clocks under load: {clocks_under_load(device, next(iter(chosen.values())))}")
    if config.checks:
        for line in run_checks(next(iter(chosen.values())), device, config.repetitions):
            print(line, flush=True)
    results = []
    candidates = optimizers(config, device)
    for model, shapes in chosen.items():
        for optimizer in candidates:
            results.append(measure(optimizer, model, shapes, bandwidth, config))
            print(f"{model:18s} {optimizer.name:34s} {results[-1].step_ms:9.3f} ms {results[-1].error}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    show(results, title)
    if config.output is not None:
        config.output.mkdir(parents=True, exist_ok=True)
        rows = [asdict(result) for result in results]
        (config.output / "step.json").write_text(
            json.dumps({"title": title, "copy_bytes_per_s": bandwidth, "rows": rows}, indent=1)
        )
        draw(results, config.output / "step.png", title)
        print(f"written: {config.output / 'step.json'}, {config.output / 'step.png'}")
    return results


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
