"""Train with two optimizers on the same data in the same order, and lay the runs over each other.

    python recipes/compare.py --processes 2 --output runs/compare                 # FlashAdamW and torch's AdamW
    python recipes/compare.py --processes 8 -- --config llama3_8b --steps 100     # options of llama_finetune.py

Writes report.html with its plots, and comparison.json, into the output folder. Started again it goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from llama_support.errors import BadInput
from llama_support.report import Run, read_run, summary, write_report
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Train with several optimizers on the same data in the same order. Options after -- go to llama_finetune.py."""

    optimizers: tuple[str, ...] = ("flash_adamw", "adamw")
    """What llama_finetune.py's --optimizer takes."""
    processes: int = 1
    """Processes on this machine, one per GPU."""
    output: Path = Path("runs/compare")
    """Where the runs, a folder per optimizer, and the report go."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise BadInput(f"--processes {self.processes}: give at least 1")


def train(comparison: Comparison, optimizer: str, options: list[str]) -> Run:
    """Run llama_finetune.py to its end and read what it left."""
    folder = comparison.output / optimizer
    script = str(ROOT / "recipes" / "llama_finetune.py")
    command = [sys.executable, script]
    if comparison.processes > 1:
        ranks = [str(ROOT / "launch" / "ranks.py"), "--standalone", f"--nproc-per-node={comparison.processes}"]
        command = [sys.executable, *ranks, script]
    command += [*options, "--optimizer", optimizer, "--output", str(folder), "--when-finished", "stop"]
    if optimizer != "flash_adamw":
        command.append("--no-gradient-release")  # which it cannot; a config or option asks for the other's
    code = subprocess.run(command).returncode
    if code != 0:
        raise BadInput(f"the run with {optimizer} ended with exit code {code}; {' '.join(command)}")
    return read_run(folder, optimizer)


def main() -> int:
    """Train, compare, print; the exit code is 0, or 2 where a run failed."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        comparison = tyro.cli(Comparison, args=arguments[:split])
        runs = [train(comparison, optimizer, arguments[split + 1 :]) for optimizer in comparison.optimizers]
        page = write_report(comparison.output, runs, title=" and ".join(comparison.optimizers))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    columns = {run.name: summary(run) for run in runs}
    table = Table("", *columns)
    for name in columns[runs[0].name]:
        table.add_row(name, *(column[name] for column in columns.values()))
    Console().print(table)
    (comparison.output / "comparison.json").write_text(json.dumps(columns, indent=2) + "\n", encoding="utf-8")
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
