"""What states in host memory cost: the step with and without `offload_states=True`, and the device memory it frees.

    python recipes/benchmarks/offload.py                   # GPU: Llama-3.2-1B
    python recipes/benchmarks/offload.py --smoke           # small

Needs a GPU and the Triton kernels. Times are medians from an idle device to the end of the copies back, host work
included. The floor is the time of the larger of the two directions at the measured rate of a pinned copy.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from clipping import make_parameters, median_ms
from shapes import MODELS, SMOKE_MODELS, Shape

import flashoptim_dist as fod

MIB = 2**20


@dataclass
class Config:
    """Options of the benchmark."""

    smoke: bool = False
    """A small model and few repetitions."""
    model: str = "Llama-3.2-1B"
    """A name of shapes.py."""
    output: Path | None = None
    """Folder for offload.json."""
    repetitions: int = 20
    """Timed repetitions, after 5 to warm up."""


def pinned_copy_gb_per_s(device: torch.device) -> float:
    """Rate of a copy of 1 GiB from pinned host memory to the device, in GB/s (1e9)."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    return host.numel() / median_ms(lambda: target.copy_(host, non_blocking=True), device, 5) / 1e6


def measure(shapes: list[Shape], offload: bool, device: torch.device, repetitions: int) -> dict[str, Any]:
    """Step time in milliseconds, and bytes per parameter that weights, gradients and states hold on the device."""
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    parameters = make_parameters(shapes, torch.bfloat16, device)
    optimizer = fod.FlashAdamW(parameters, lr=1e-4, offload_states=offload)
    milliseconds = median_ms(optimizer.step, device, repetitions)
    held = torch.cuda.memory_allocated(device) - before
    count = sum(parameter.numel() for parameter in parameters)
    return {"milliseconds": milliseconds, "held_mib": held / MIB, "parameters": count}


def main(config: Config) -> None:
    """Measure, print, and write offload.json if a folder is given."""
    if not torch.cuda.is_available():
        raise SystemExit("offload.py: no GPU was found; states are offloaded from one")
    device = torch.device("cuda")
    shapes = next(iter(SMOKE_MODELS.values())) if config.smoke else MODELS[config.model]
    repetitions = 3 if config.smoke else config.repetitions
    kept = measure(shapes, False, device, repetitions)
    offloaded = measure(shapes, True, device, repetitions)
    rate = pinned_copy_gb_per_s(device)
    billions = kept["parameters"] / 1e9
    # 3.125 bytes of states per parameter travel each way: correction, two moments, and their scales.
    floor = 3.125 * billions / rate * 1e3
    record = {
        "card": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "kept": kept,
        "offloaded": offloaded,
        "pinned_copy_gb_per_s": rate,
        "milliseconds_per_billion": (offloaded["milliseconds"] - kept["milliseconds"]) / billions,
        "floor_milliseconds": floor,
        "saved_mib": kept["held_mib"] - offloaded["held_mib"],
    }
    print(f"{'states on the device':28} {kept['milliseconds']:9.2f} ms, {kept['held_mib']:9.0f} MiB held")
    print(f"{'states in host memory':28} {offloaded['milliseconds']:9.2f} ms, {offloaded['held_mib']:9.0f} MiB held")
    print(f"pinned copy {rate:.1f} GB/s, floor {floor:.2f} ms")
    print(
        f"cost {record['milliseconds_per_billion']:.1f} ms per billion parameters, {record['saved_mib']:.0f} MiB saved"
    )
    if config.output is not None:
        config.output.mkdir(parents=True, exist_ok=True)
        (config.output / "offload.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Config))
