"""The report of a run: report.html and its plots, made from the run folder's own files."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .metrics import METRICS_FILE, RUN_FILE

SAMPLE_FILE = "sample.txt"
_GIB = 2**30
_PARTS = ("weight", "correction", "moments", "scales", "gradient", "others")
_REST = "activations and the rest"
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c9c9c")


@dataclass
class Run:
    """A run as its folder tells it.

    Attributes:
        name: what to call it.
        facts: the content of run.json.
        train: records of training steps, by step.
        validation: records of validation losses, by step.
    """

    name: str
    facts: dict[str, Any]
    train: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float:
        """Median over the training steps but the first of each start, which warms up; nan without any."""
        values = [record[key] for record in self.train[1:] or self.train if key in record]
        return statistics.median(values) if values else float("nan")

    def memory_parts(self) -> dict[str, float]:
        """GiB on the fullest rank, by part, and what the measured peak holds beyond them."""
        table = self.facts["memory"]["bytes"]
        parts = {part: max(table[part]["by_rank"]) / _GIB for part in _PARTS if table[part]["all_ranks"]}
        peak = max((record["memory_gib"] for record in self.train), default=0.0)
        parts[_REST] = max(0.0, peak - sum(parts.values()))
        return parts

    def phases(self) -> dict[str, float]:
        """Median seconds of each part of a step."""
        names = [key for key in (self.train[-1] if self.train else {}) if key.startswith("seconds_")]
        return {name.removeprefix("seconds_").replace("_", " "): self.median(name) for name in names}


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read a run folder. Raises OSError or ValueError where it is not one."""
    run = Run(name or folder.name, json.loads((folder / RUN_FILE).read_text(encoding="utf-8")))
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        (run.train if record["kind"] == "train" else run.validation).append(record)
    return run


def write_report(folder: Path, runs: Sequence[Run], *, title: str) -> Path:
    """Write report.html and three PNGs into `folder`; returns the page. Any number of runs are laid over each other."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    plots = [
        ("Loss", "loss.png", _plot_loss(runs)),
        ("Memory of the fullest rank", "memory.png", _plot_bars([run.memory_parts() for run in runs], runs, "GiB")),
        ("A step's time, median", "step_time.png", _plot_bars([run.phases() for run in runs], runs, "seconds")),
    ]
    for _, file, figure in plots:
        figure.savefig(folder / file, dpi=120)
        matplotlib.pyplot.close(figure)
    pictures = "\n".join(f'<h2>{heading}</h2>\n<img src="{file}" alt="{heading}">' for heading, file, _ in plots)
    page = folder / "report.html"
    page.write_text(_PAGE.format(
        title=html.escape(title), table=_table(runs), pictures=pictures, details=_details(folder, runs),
    ), encoding="utf-8")  # fmt: skip
    return page


def summary(run: Run) -> dict[str, str]:
    """The figures of a run in a line each."""
    last = run.train[-1] if run.train else {}
    validation = run.validation[-1] if run.validation else {}
    memory = run.facts["memory"]
    return {
        "optimizer": memory["optimizer"],
        "parameters": f"{memory['parameters']:,}",
        "ranks": f"{memory['world_size']} x {run.facts['device']}",
        "steps": f"{last.get('step', 0)}",
        "training loss, last step": f"{last.get('loss', float('nan')):.4f}",
        "validation loss": f"{validation.get('loss', float('nan')):.4f}",
        "perplexity": f"{validation.get('perplexity', float('nan')):,.2f}",
        "tokens per second, median": f"{run.median('tokens_per_second'):,.0f}",
        "optimizer step, median": f"{1e3 * run.median('seconds_optimizer'):.1f} ms",
        "bytes per parameter, weights and states": f"{_held_per_parameter(memory):.3f}",
        "peak memory of a rank": f"{sum(run.memory_parts().values()):.2f} GiB",
    }


def _held_per_parameter(memory: dict[str, Any]) -> float:
    return sum(memory["bytes"][part]["bytes_per_parameter"] for part in ("weight", "correction", "moments", "scales"))


def _table(runs: Sequence[Run]) -> str:
    columns = [summary(run) for run in runs]
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = "\n".join(
        f"<tr><td>{name}</td>" + "".join(f"<td>{html.escape(column[name])}</td>" for column in columns) + "</tr>"
        for name in columns[0]
    )
    return f"<table>\n<tr><th></th>{head}</tr>\n{rows}\n</table>"


def _details(folder: Path, runs: Sequence[Run]) -> str:
    sample = folder / SAMPLE_FILE
    parts = []
    if sample.is_file():
        text = html.escape(sample.read_text(encoding="utf-8"))
        parts.append(f"<h2>A sample of what the model writes</h2>\n<pre>{text}</pre>")
    for run in runs:
        options = html.escape(json.dumps({k: v for k, v in run.facts.items() if k != "memory"}, indent=2))
        parts.append(f"<h2>Options of {html.escape(run.name)}</h2>\n<pre>{options}</pre>")
    return "\n".join(parts)


def _plot_loss(runs: Sequence[Run]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, color in zip(runs, _COLORS):
        axes.plot(*_points(run.train), color=color, alpha=0.6, linewidth=1, label=f"{run.name}, training")
        axes.plot(*_points(run.validation), color=color, marker="o", label=f"{run.name}, validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def _points(records: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record["loss"] for record in records]


def _plot_bars(tables: Sequence[dict[str, float]], runs: Sequence[Run], unit: str) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.6 + 0.7 * len(runs)), layout="constrained")
    names = list(dict.fromkeys(name for table in tables for name in table))
    ends = [0.0] * len(runs)
    for name, color in zip(names, _COLORS * 2):
        lengths = [table.get(name, 0.0) for table in tables]
        axes.barh([run.name for run in runs], lengths, left=ends, label=name, color=color)
        ends = [end + length for end, length in zip(ends, lengths)]
    axes.set(xlabel=unit)
    figure.legend(*axes.get_legend_handles_labels(), ncols=4, fontsize="small", loc="outside lower center")
    return figure


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ border-bottom: 1px solid #ddd; padding: .2rem .8rem .2rem 0; text-align: left; }}
img {{ max-width: 100%; }}
pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto; white-space: pre-wrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
{table}
{pictures}
{details}
</body>
</html>
"""
