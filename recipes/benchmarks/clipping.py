"""Time of clipping by the global norm and stepping: ours, and torch's clip_grad_norm_ before its fused AdamW.

    python recipes/benchmarks/clipping.py                  # GPU: the shard of Llama-3.1-8B on one of 8 ranks
    python recipes/benchmarks/clipping.py --smoke          # small, on a GPU or a CPU

Ours is compared with its step alone plus one read of the gradients, which is what it has to cost at least. Each time
is from an idle device, host work included; the median of the repetitions.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from shapes import MODELS, SMOKE_MODELS, Shape
from torch import nn

import flashoptim_dist as fod


@dataclass
class Config:
    """Options of the benchmark."""

    smoke: bool = False
    """A small model and few repetitions."""
    model: str = "Llama-3.1-8B / 8"
    """A name of shapes.py."""
    output: Path | None = None
    """Folder for clipping.json."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    repetitions: int = 20
    """Timed repetitions, after 5 to warm up."""


def make_parameters(shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Parameters with gradients of their dtype, whose global norm is well above 1."""
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02))
        parameter.grad = torch.empty_like(parameter).normal_()
        parameters.append(parameter)
    return parameters


def median_ms(work: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median time of a call from an idle device to its end there, in milliseconds."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for number in range(repetitions + 5):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if number >= 5:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def read_ms(parameters: list[nn.Parameter], device: torch.device, repetitions: int) -> float:
    """Time to read all gradients once, at the bandwidth of a large copy (which reads and writes), in milliseconds."""
    size = sum(p.numel() * p.element_size() for p in parameters)
    source = torch.empty(min(size, 1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = median_ms(lambda: target.copy_(source), device, repetitions)
    return copied / 2 * size / source.numel()


def measure_ours(shapes: list[Shape], device: torch.device, repetitions: int) -> dict[str, float]:
    """Times of FlashAdamW in milliseconds, and of one read of its gradients."""
    parameters = make_parameters(shapes, torch.bfloat16, device)
    optimizer = fod.FlashAdamW(parameters, lr=1e-4)

    def clip() -> None:
        fod.clip_grad_norm_(optimizer, 1.0)

    def clip_and_step() -> None:
        clip()
        optimizer.step()

    times = {"ours: step": median_ms(optimizer.step, device, repetitions)}
    times["ours: clip"] = median_ms(clip, device, repetitions)
    optimizer.clip_coefficient = None
    times["ours: clip and step"] = median_ms(clip_and_step, device, repetitions)
    times["one read of the gradients"] = read_ms(parameters, device, repetitions)
    return times


def measure_torch(shapes: list[Shape], dtype: torch.dtype, device: torch.device, repetitions: int) -> dict[str, float]:
    """Times of torch's fused AdamW in milliseconds."""
    parameters = make_parameters(shapes, dtype, device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    name = str(dtype).removeprefix("torch.")
    return {
        f"torch, {name}: step": median_ms(optimizer.step, device, repetitions),
        f"torch, {name}: clip and step": median_ms(clip_and_step, device, repetitions),
    }


def main(config: Config) -> None:
    """Measure, print, and write clipping.json if a folder is given."""
    kind = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
    device = torch.device("cpu" if kind == "auto" else kind)
    shapes = next(iter(SMOKE_MODELS.values())) if config.smoke else MODELS[config.model]
    repetitions = 3 if config.smoke else config.repetitions
    times = measure_ours(shapes, device, repetitions)
    for dtype in (torch.bfloat16, torch.float32):
        times |= measure_torch(shapes, dtype, device, repetitions)
    for name, value in times.items():
        print(f"{name:44} {value:9.3f} ms")
    least = times["ours: step"] + times["one read of the gradients"]
    ratio = times["ours: clip and step"] / least
    print(f"clip and step over (step + one read): {ratio:.3f}")
    if config.output is not None:
        config.output.mkdir(parents=True, exist_ok=True)
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        record = {"card": card, "torch": torch.__version__, "milliseconds": times, "ratio": ratio}
        (config.output / "clipping.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
