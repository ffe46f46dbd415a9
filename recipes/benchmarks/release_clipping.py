"""What clipping by gradient release's estimate of the global norm does to a loss curve, beside the norm itself.

    python recipes/benchmarks/release_clipping.py              # 200 steps, two seeds: ten minutes on one core
    python recipes/benchmarks/release_clipping.py --smoke      # a few steps, which prove nothing

Trains the recipe's debug model with the recipe itself: clipped by the exact norm, by the estimate under gradient
release, and not at all; the three of a seed from the same weights over the same data in the same order. Writes
release_clipping.json, .md and .png into the output folder and prints the table. Started again it goes on.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro
from llama_finetune import train
from llama_support.config import Config
from llama_support.report import Run, read_run

MODES = {"exact norm": "#4269d0", "estimate, release": "#ff725c", "no clipping": "#9c9c9c"}
"""Ways to clip, and the color of each. The first is what the others are compared with."""
EXACT, ESTIMATE, NONE = MODES


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Compare loss curves under exact clipping, under gradient release's estimate, and without clipping."""

    model: str = "debug"
    """As llama_finetune.py takes it; another one needs another lr and clip_norm."""
    data: str = "stdlib"
    """As llama_finetune.py takes it."""
    steps: int = 200
    """Steps of each run."""
    seeds: tuple[int, ...] = (0, 1)
    """Each gives other initial weights and another order of the data."""
    clip_norm: float = 0.5
    """Largest global norm; the debug model's gradients mostly have 1 to 2."""
    lr: float = 6e-3
    """Peak learning rate; twice the recipe's, so that large steps would show."""
    sequence_length: int = 128
    """Tokens per sequence."""
    global_batch: int = 4
    """Sequences per step."""
    output: Path = Path("runs/release_clipping")
    """Folder for the runs and the results."""
    smoke: bool = False
    """Few steps, to see that everything runs."""


def main(benchmark: Benchmark) -> dict[str, object]:
    """Train everything, print and write the results; return what release_clipping.json holds."""
    started = time.monotonic()
    runs = {mode: [_run(benchmark, mode, seed) for seed in benchmark.seeds] for mode in MODES}
    window = max(1, len(runs[EXACT][0].train) // 8)
    rows = [
        _row(runs, mode, number, benchmark.clip_norm, window)
        for number in range(len(benchmark.seeds))
        for mode in MODES
    ]
    document: dict[str, object] = {
        "options": {**asdict(benchmark), "output": str(benchmark.output)},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.monotonic() - started, 1),
        "window": window,
        "rows": rows,
    }
    table = _table(rows)
    (benchmark.output / "release_clipping.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (benchmark.output / "release_clipping.md").write_text(table + "\n", encoding="utf-8")
    _plot(runs, benchmark, window)
    print(table)
    print(f"losses are means of the last {window} steps; results in {benchmark.output}, {document['seconds']} s")
    return document


def _run(benchmark: Benchmark, mode: str, seed: int) -> Run:
    folder = benchmark.output / f"{mode.replace(', ', '-').replace(' ', '-')}-{seed}"
    steps = 4 if benchmark.smoke else benchmark.steps
    train(
        Config(
            model=benchmark.model,
            data=benchmark.data,
            output=str(folder),
            steps=steps,
            warmup_steps=steps // 10,
            lr=benchmark.lr,
            clip_norm=0.0 if mode == NONE else benchmark.clip_norm,
            gradient_release=mode == ESTIMATE,
            sequence_length=benchmark.sequence_length,
            global_batch=benchmark.global_batch,
            micro_batch=benchmark.global_batch,
            activation_checkpointing="none",
            validation_sequences=32,
            evaluate_every=0,
            save_every=0,
            sample_tokens=0,
            when_finished="stop",
            seed=seed,
            device="cpu",
        )
    )
    return read_run(folder, mode)


def _losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.train]


def _row(runs: dict[str, list[Run]], mode: str, number: int, clip_norm: float, window: int) -> dict[str, object]:
    """Figures of one run, and how far its losses are from those of exact clipping with the same seed."""
    run, exact = runs[mode][number], runs[EXACT][number]
    norms = [record["grad_norm"] for record in run.train]
    apart = [abs(one - other) for one, other in zip(_losses(run), _losses(exact), strict=True)]
    return {
        "seed": run.facts["options"]["seed"],
        "mode": mode,
        "training_loss": statistics.fmean(_losses(run)[-window:]),
        "validation_loss": run.validation[-1]["loss"],
        "loss_apart": statistics.fmean(apart),
        "loss_apart_largest": max(apart),
        "norm_median": statistics.median(norms),
        "norm_largest": max(norms),
        "steps_above_bound": sum(norm > clip_norm for norm in norms) / len(norms),
    }


def _table(rows: Sequence[dict[str, object]]) -> str:
    head = ["seed", "clipped by", "training loss", "validation loss", "apart from exact: mean", "largest"]
    head += ["gradient norm: median", "largest", "steps above the bound"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        values = [str(row["seed"]), str(row["mode"])]
        for name in ("training_loss", "validation_loss", "loss_apart", "loss_apart_largest"):
            values.append(f"{row[name]:.4f}")
        values += [f"{row['norm_median']:.2f}", f"{row['norm_largest']:.2f}", f"{row['steps_above_bound']:.0%}"]
        lines.append(values)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Means over the last `window` values, fewer at the beginning."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _plot(runs: dict[str, list[Run]], benchmark: Benchmark, window: int) -> None:
    """Losses above, gradient norms before clipping below; a column for each seed."""
    count = len(benchmark.seeds)
    figure, grid = plt.subplots(
        2, count, figsize=(4.5 * count, 5), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, seed in enumerate(benchmark.seeds):
        losses, norms = grid[0][column], grid[1][column]
        for mode, color in MODES.items():
            run = runs[mode][column]
            steps = [record["step"] for record in run.train]
            losses.plot(steps, _smooth(_losses(run), window // 2 or 1), color=color, linewidth=1, label=mode)
            norms.plot(steps, [record["grad_norm"] for record in run.train], color=color, linewidth=0.7)
        norms.axhline(benchmark.clip_norm, color="black", linewidth=0.7, linestyle="--")
        norms.set(yscale="log", xlabel="step")
        losses.set(title=f"seed {seed}")
        for axes in (losses, norms):
            axes.grid(alpha=0.3)
    grid[0][0].set(ylabel=f"loss, mean of {window // 2 or 1} steps")
    grid[1][0].set(ylabel="gradient norm before clipping")
    grid[0][0].legend(fontsize="small")
    figure.savefig(benchmark.output / "release_clipping.png", dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Benchmark))
