"""The runs' figures as tables and as a plot of the loss curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from torchtitan_support.cases import NAMES, OPTIMIZERS

LAST = 10
"""The final loss of a run is the mean of this many last steps."""
COLORS = {"adamw": "tab:blue", "flash_adamw": "tab:orange"}

Row = dict[str, Any]
"""A finished run's figures (worker.train), or a case with what stopped it under "failed"."""


def final_loss(row: Row) -> float:
    """Mean loss of the last steps."""
    return statistics.mean(row["losses"][-LAST:])


def settings_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """The pairs of model and parallelism that there are, the large model first."""
    found = {(row["model"], row["parallelism"]) for row in rows}
    return [pair for pair in product(("1b", "debug"), ("fsdp", "tp")) if pair in found]


def finished(rows: Iterable[Row], model: str, parallelism: str, optimizer: str) -> list[Row]:
    """The finished runs of an optimizer, by seed."""
    wanted = (model, parallelism, optimizer)
    chosen = [row for row in rows if "failed" not in row]
    chosen = [row for row in chosen if (row["model"], row["parallelism"], row["optimizer"]) == wanted]
    return sorted(chosen, key=lambda row: int(row["seed"]))


def compare(rows: list[Row], model: str, parallelism: str) -> dict[str, float] | None:
    """The noise and the difference, or None where the optimizers have no seed in common.

    Noise: largest minus smallest final loss of all of AdamW's seeds. Difference: over the seeds of both, mean final
    loss of FlashAdamW's runs minus AdamW's. At one seed both see the same text, so the largest difference of such a
    pair is there too. Of the curves: the mean over the steps of the difference of the means (absolute), and of AdamW's
    largest minus smallest loss.
    """
    adamw, flash = (
        {int(row["seed"]): row for row in finished(rows, model, parallelism, optimizer)} for optimizer in OPTIMIZERS
    )
    seeds = sorted(set(adamw) & set(flash))
    if not seeds:
        return None
    theirs, ours = ({seed: final_loss(row) for seed, row in runs.items()} for runs in (adamw, flash))
    means = [statistics.mean(final[seed] for seed in seeds) for final in (theirs, ours)]
    curves = [
        [statistics.mean(step) for step in zip(*(runs[seed]["losses"] for seed in seeds))] for runs in (adamw, flash)
    ]
    spreads = [max(step) - min(step) for step in zip(*(row["losses"] for row in adamw.values()))]
    return {
        "seeds": len(seeds),
        "adamw": means[0],
        "flash_adamw": means[1],
        "noise": max(theirs.values()) - min(theirs.values()),
        "difference": means[1] - means[0],
        "largest_pair": max(abs(ours[seed] - theirs[seed]) for seed in seeds),
        "curve_noise": statistics.mean(spreads),
        "curve_difference": statistics.mean(abs(b - a) for a, b in zip(*curves)),
    }


def tables(rows: list[Row]) -> str:
    """Two tables, of what a step costs and of the losses, and the list of what failed; Markdown."""
    lines = [
        "| model | parallelism | optimizer | runs | final loss by seed | tokens/s per GPU | step ms | peak GiB, active "
        "| peak GiB, reserved |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, parallelism), optimizer in product(settings_of(rows), OPTIMIZERS):
        runs = finished(rows, model, parallelism, optimizer)
        if not runs:
            continue
        losses = ", ".join(f"{final_loss(row):.4f}" for row in runs)
        timed = [row for row in runs if row["alone"]]
        speed, step = "", ""
        if timed:
            speed = f"{statistics.median(row['tokens_per_second_per_process'] for row in timed):,.0f}"
            step = f"{1e3 * statistics.median(row['seconds_per_step'] for row in timed):.1f}"
        peaks = " | ".join(f"{runs[0][f'peak_{kind}_gib']:.2f}" for kind in ("active", "reserved"))
        cells = [model, parallelism, NAMES[optimizer], str(len(runs)), losses, speed, step, peaks]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Final loss: mean of the last {LAST} steps. Noise: largest minus smallest over AdamW's seeds.",
        "",
        "| model | parallelism | seeds | AdamW | FlashAdamW | difference of the means | noise | largest difference at "
        "one seed | curves: difference | curves: noise |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, parallelism in settings_of(rows):
        found = compare(rows, model, parallelism)
        if found:
            names = ("largest_pair", "curve_difference", "curve_noise")
            lines.append(
                f"| {model} | {parallelism} | {found['seeds']} | {found['adamw']:.4f} | {found['flash_adamw']:.4f} | "
                f"{found['difference']:+.4f} | {found['noise']:.4f} | "
                f"{' | '.join(f'{found[name]:.4f}' for name in names)} |"
            )
    failed = [row for row in rows if "failed" in row]
    if failed:
        lines += [
            "",
            *(
                f"- {row['model']} {row['parallelism']} {row['optimizer']} seed {row['seed']}: {row['failed']}"
                for row in failed
            ),
        ]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Draw a panel for each model and parallelism: mean loss and band over the seeds, of both optimizers.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = settings_of(row for row in rows if "failed" not in row)
    if not pairs:
        return
    figure, axes = pyplot.subplots(1, len(pairs), figsize=(4.2 * len(pairs), 3.6), squeeze=False)
    for axis, (model, parallelism) in zip(axes[0], pairs):
        for optimizer in OPTIMIZERS:
            runs = finished(rows, model, parallelism, optimizer)
            if not runs:
                continue
            losses = list(zip(*(row["losses"] for row in runs)))
            steps = range(1, len(losses) + 1)
            label = f"{NAMES[optimizer]} ({len(runs)})"
            axis.plot(steps, [statistics.mean(step) for step in losses], color=COLORS[optimizer], label=label, lw=1)
            low, high = [min(step) for step in losses], [max(step) for step in losses]
            axis.fill_between(steps, low, high, color=COLORS[optimizer], alpha=0.25, lw=0)
        axis.set(title=f"{model}, {parallelism}", xlabel="step", ylabel="loss")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
