"""How exact the compressed moments and master weights are: our optimizers against fp64 on synthetic gradients.

    python recipes/benchmarks/numerics.py              # 2,000 steps: three minutes on two cores
    python recipes/benchmarks/numerics.py --smoke      # seconds; figures of so few steps prove nothing

Writes numerics.json, numerics.md and numerics.png into the output folder and prints the tables. The official
flashoptim package is measured beside ours where it is installed and there is a GPU. The exit status says only whether
the benchmark ran: bounds that do not hold are marked in the table.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import tyro
from numerics_support.bounds import GAUSSIAN_ERROR, Check, checks
from numerics_support.exact import OTHERS, Setting
from numerics_support.families import NAMES, make_families
from numerics_support.measure import STOPPED_AFTER, Result, Subject, official, ours, run
from numerics_support.special import Special, drift, odd_gradient, zero_gradients

ADAMW = "FlashAdamW"
ROUNDINGS: tuple[Literal["nearest", "stochastic"], ...] = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Measure the numerics of the optimizers."""

    steps: int = 2000
    """Steps over the gradient families."""
    drift_steps: int = 3000
    """Steps under a constant gradient for the drift of master weights."""
    betas2: tuple[float, ...] = (0.95, 0.99, 0.999)
    """Decay rates of AdamW's variance."""
    others: bool = True
    """Measure FlashAdam, FlashLion, FlashSGD and FlashSGDW too."""
    rows: int = 8
    """Rows of each family."""
    columns: int = 512
    """Columns of each family, a multiple of 32."""
    seed: int = 0
    """Of the gradients."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where our optimizer runs; its pure-torch step on cpu, its kernels on cuda."""
    output: Path = Path("runs/numerics")
    """Folder for the results."""
    smoke: bool = False
    """Small sizes, to see that everything runs."""


def main(config: Config) -> dict[str, object]:
    """Run everything, print and write it; return what numerics.json holds."""
    if config.columns % 32 or min(config.rows, config.columns, config.steps, config.drift_steps) < 1:
        raise SystemExit("numerics: columns must be a multiple of 32, and rows, steps and drift-steps at least 1")
    rows, columns, steps, drift_steps = config.rows, config.columns, config.steps, config.drift_steps
    if config.smoke:
        rows, columns, steps, drift_steps = 2, 64, 200, 20
    started = time.monotonic()
    # Stopped elements are looked at STOPPED_AFTER steps later, so their gradients end in time for that.
    families = make_families(rows, columns, max(1, min(steps // 2, steps - STOPPED_AFTER)), config.seed)

    settings = [Setting(beta2=beta2) for beta2 in config.betas2] + list(OTHERS if config.others else ())

    def subjects(setting: Setting, shape: Sequence[int]) -> list[Subject]:
        theirs = official(setting, shape)
        return [ours(setting, shape, rounding, config.device) for rounding in ROUNDINGS] + ([theirs] if theirs else [])

    def report(step: int) -> None:
        if step % max(steps // 10, 1) == 0:
            print(f"step {step} of {steps}, {time.monotonic() - started:.0f} s", flush=True)

    results = run(families, settings, subjects, steps, report)
    specials: list[Special] = []
    odd_steps = 40 if config.smoke else min(steps, 400)
    for beta2 in sorted({config.betas2[0], config.betas2[-1]}):
        specials += drift(drift_steps, beta2, config.device)
        for rounding in ROUNDINGS:
            specials += zero_gradients(odd_steps, rounding, beta2, config.device)
            error = GAUSSIAN_ERROR.get((rounding, beta2), 0.035)
            for value in (float("inf"), float("nan"), 1e6):
                specials += odd_gradient(value, odd_steps, rounding, beta2, error, config.device)
    bounds = checks(results)

    document = {
        "command": {name: str(value) for name, value in asdict(config).items() if name != "output"},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.monotonic() - started, 1),
        "results": [result.to_dict() for result in results],
        "checks": [{**asdict(check), "holds": check.holds} for check in bounds],
        "specials": [special.to_dict() for special in specials],
    }
    text = "\n\n".join([results_table(results), checks_table(bounds), specials_table(specials)])
    config.output.mkdir(parents=True, exist_ok=True)
    (config.output / "numerics.json").write_text(json.dumps(document, indent=1))
    (config.output / "numerics.md").write_text(text + "\n")
    plot(results, config.output / "numerics.png")
    print(text)
    held = [check.holds for check in bounds] + [special.holds for special in specials]
    print(f"\n{sum(held)} of {len(held)} bounds hold; results in {config.output}, {document['seconds']} s")
    return document


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def results_table(results: Sequence[Result]) -> str:
    """Return every result as a Markdown table."""
    rows = []
    for r in sorted(
        results, key=lambda r: (r.optimizer != ADAMW, r.optimizer, NAMES.index(r.family), r.beta2, r.label)
    ):
        ratio = "" if r.root_ratio is None else "{1:.3f} ({0:.3f} to {2:.3f})".format(*r.root_ratio)
        stopped = "" if r.stopped is None else f"{r.stopped:.1e}"
        largest = f"{r.largest:.3g} ({r.exact_largest:.3g})"
        figures = [f"{r.error:.4f}", f"{r.cosine:.5f}", largest, ratio, stopped]
        rows.append([r.optimizer, r.family, f"{r.beta2:g}", r.label, *figures])
    head = [
        "optimizer",
        "gradients",
        "beta2",
        "rounding",
        "error",
        "cosine",
        "largest (exact)",
        "sqrt(v) / exact",
        "stopped",
    ]
    return _table(head, rows)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**fails**"


def checks_table(bounds: Sequence[Check]) -> str:
    """Return the bounds on the families as a Markdown table."""
    rows = []
    for c in bounds:
        bound = f"{c.low:g} to {c.high:g}" if c.low else f"<= {c.high:g}"
        rows.append(
            [c.optimizer, c.family, f"{c.beta2:g}", c.label, c.what, f"{c.value:.4g}", bound, _verdict(c.holds)]
        )
    return _table(["optimizer", "gradients", "beta2", "rounding", "what", "measured", "bound", ""], rows)


def specials_table(specials: Sequence[Special]) -> str:
    """Return the single experiments as a Markdown table."""
    rows = [
        [s.what, f"{s.beta2:g}", s.label, f"{s.value:.3g}", f"<= {s.bound:.3g}", _verdict(s.holds)] for s in specials
    ]
    return _table(["what", "beta2", "rounding", "measured", "bound", ""], rows)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw the error of the update over the steps, one panel per family: AdamW's decay rates, or the others."""
    cases = sorted({(r.optimizer, r.beta2) for r in results}, key=lambda case: (case[0] != ADAMW, *case))
    rows_of_panels = [[case for case in cases if (case[0] == ADAMW) == adamw] for adamw in (True, False)]
    blocks = [block for block in rows_of_panels if block]
    columns = 4
    height = -(-len(NAMES) // columns)
    figure = plt.figure(figsize=(14, 8 * len(blocks)), layout="constrained")
    styles = {"nearest": "--", "stochastic": "-", "official": ":"}
    for block, part in zip(blocks, figure.subfigures(len(blocks), 1, squeeze=False).flat, strict=True):
        axes = part.subplots(height, columns, sharex=True, squeeze=False)
        for axis, name in zip(axes.flat, NAMES, strict=False):
            for r in (r for r in results if r.family == name and (r.optimizer, r.beta2) in block):
                steps, errors = zip(*r.curve, strict=True)
                # Errors of families that are exact for a while are zero, which a logarithm cannot show.
                shown = [max(error, 1e-4) for error in errors]
                case = f"{r.beta2:g}" if r.optimizer == ADAMW else r.optimizer
                color = f"C{block.index((r.optimizer, r.beta2))}"
                axis.plot(steps, shown, styles[r.label], color=color, linewidth=0.9, label=f"{case} {r.label}")
            axis.set_yscale("log")
            axis.set_title(name, fontsize=9)
            axis.grid(alpha=0.3)
        for axis in list(axes.flat)[len(NAMES) :]:
            axis.set_axis_off()
        handles, labels = axes.flat[0].get_legend_handles_labels()
        title = "AdamW: beta2, rounding" if block[0][0] == ADAMW else "optimizer, rounding"
        part.legend(handles, labels, loc="lower right", fontsize=8, title=title)
        part.supxlabel("step")
        part.supylabel("relative error of the update")
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
