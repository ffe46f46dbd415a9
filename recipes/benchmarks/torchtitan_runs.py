"""Training by torchtitan 0.2.2 with its AdamW and with FlashAdamW: loss curves over seeds, tokens/s and peak memory.

    python recipes/benchmarks/torchtitan_runs.py --output OUT                # the debug model and 1B, FSDP and TP
    python recipes/benchmarks/torchtitan_runs.py --models debug --steps 20
    python recipes/benchmarks/torchtitan_runs.py --smoke                     # a few steps of the debug model
    python recipes/benchmarks/torchtitan_runs.py --output OUT --draw         # tables and plot of OUT's figures again

Needs GPUs: torchtitan has no CPU device. Both optimizers see the same text at one seed, in an order of that seed. AdamW
is torchtitan's default (fp32 weights, bf16 compute); FlashAdamW has bf16 weights with a correction. Tensor parallelism
runs with torchtitan's FSDP at degree 1, as torchtitan 0.3 does. Results are written after every run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_support.cases import Case, Job, Model, Parallelism, Settings, plan
from torchtitan_support.corpus import write_corpus
from torchtitan_support.report import Row, plot, tables

WORKER = Path(__file__).resolve().parent / "torchtitan_support" / "worker.py"
NAME = "torchtitan_runs"
GRACE_SECONDS = 15
"""How long after the time limit running cases may go on."""
TAIL = 60


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with torchtitan's AdamW and with FlashAdamW and compare."""

    models: tuple[Model, ...] = ("1b", "debug")
    """The debug model of torchtitan's Llama 3, and Llama-3.2-1B's shape."""
    parallelisms: tuple[Parallelism, ...] = ("fsdp", "tp")
    """Over all processes."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Initial weights and order of the text. Memory is that of the first."""
    steps: int = 100
    """Steps of a run; a fifth of them is warm-up of the learning rate."""
    processes: int = 2
    """Processes on this machine, one per GPU."""
    local_batch: int = 2
    """Sequences per GPU and step."""
    sequence_length: int = 2048
    """Tokens of a sequence."""
    checkpointing: str = "full"
    """Activation checkpointing of the large model: none, selective or full."""
    concurrent: int = 4
    """Jobs of the debug model that run at once; with 1, their tokens/s are reported too."""
    limit_seconds: float = 3600.0
    """Start nothing after this many seconds, and stop what still runs shortly after."""
    smoke: bool = False
    """Four steps of the debug model, one seed, FSDP."""
    draw: bool = False
    """Run nothing; write tables and plot of the figures that are in the output folder."""
    output: Path = Path("runs/benchmark-torchtitan")
    """Folder for torchtitan_runs.json, .md, .png and .log."""


class Results:
    """All rows so far, on disk after each."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows: list[Row] = []
        options.output.mkdir(parents=True, exist_ok=True)
        self.log = options.output / f"{NAME}.log"
        self.log.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Take a row, print it without its curves, and write all."""
        self.rows.append(row)
        short = {name: value for name, value in row.items() if not isinstance(value, list)}
        losses = row.get("losses", [])
        print(json.dumps({**short, "first_losses": losses[:2], "last_losses": losses[-2:]}), flush=True)
        document = {**facts(), "options": asdict(self.options), "results": self.rows}
        text = json.dumps(document, indent=1, default=str) + "\n"
        (self.options.output / f"{NAME}.json").write_text(text, encoding="utf-8")
        (self.options.output / f"{NAME}.md").write_text(tables(self.rows), encoding="utf-8")


def facts() -> dict[str, str]:
    """Versions."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchtitan", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def command(job_file: Path, processes: int) -> list[str]:
    """The process group of a job."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *launcher, str(WORKER), str(job_file)]


class Running:
    """A started job."""

    def __init__(self, job: Job, settings: Settings, number: int) -> None:
        self.job, self.settings = job, settings
        self.seen: set[Case] = set()
        self.stopped = ""
        self.started = time.monotonic()
        self.log = settings.folder / f"job{number}.log"
        job_file = settings.folder / f"job{number}.json"
        content = {"settings": asdict(settings), "cases": [asdict(case) for case in job.cases]}
        job_file.write_text(json.dumps(content, default=str), encoding="utf-8")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command(job_file, settings.processes), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def stop(self, reason: str) -> None:
        """End the job's processes."""
        self.stopped = reason
        # torchrun starts its ranks in sessions of their own, and ends them when it is asked to end.
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def new_rows(self) -> list[Row]:
        """The figures of cases that finished since the last call."""
        rows = []
        for case in self.job.cases:
            path = self.settings.folder / f"{case.name}.json"
            if case not in self.seen and path.exists():
                self.seen.add(case)
                rows.append({**json.loads(path.read_text(encoding="utf-8")), "alone": self.job.alone})
        return rows

    def unfinished(self) -> list[Case]:
        """The cases without figures, in their order."""
        return [case for case in self.job.cases if case not in self.seen]

    def told(self) -> list[str]:
        """The lines of the log, but for torchrun's own words on ranks that failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        ends = [
            number for number, line in enumerate(lines) if "torch/distributed/elastic/multiprocessing/api.py" in line
        ]
        return lines[: ends[0]] if ends else lines


def reason_of(running: Running) -> str:
    """What ended a job before its time, in a line: the first exception that its log names."""
    if running.stopped:
        return running.stopped
    lines = running.told()
    errors = [line for line in lines if re.match(r"(\[rank\d+\]:\s*)?[\w.]*(Error|Exception)\b", line)]
    return f"exit code {running.process.returncode}: {(errors or lines or ['no message'])[0][:300]}"


def finish(running: Running, results: Results) -> Job | None:
    """Take in what an ended job left, and return a job of the cases after the one that failed, if any are left."""
    for row in running.new_rows():
        results.add(row)
    with results.log.open("a", encoding="utf-8") as log:
        names = ", ".join(case.name for case in running.job.cases)
        log.write(f"=== {names}: {time.monotonic() - running.started:.1f} s\n" + "\n".join(running.told()) + "\n")
    left = running.unfinished()
    if not left:
        return None
    failed, *rest = left
    print(f"{failed.name} failed; the end of its log:", *running.told()[-TAIL:], sep="\n", flush=True)
    results.add({**asdict(failed), "failed": reason_of(running)})
    return Job(tuple(rest), running.job.alone) if rest else None


def run(jobs: Sequence[Job], settings: Settings, options: Options, results: Results) -> None:
    """Run the jobs in their order, some of them at once, until all are done or the time is over."""
    waiting, running = list(jobs), list[Running]()
    start, number = time.monotonic(), 0
    try:
        while waiting or running:
            elapsed = time.monotonic() - start
            while waiting and elapsed < options.limit_seconds and may_start(waiting[0], running, options.concurrent):
                running.append(Running(waiting.pop(0), settings, number := number + 1))
            if elapsed >= options.limit_seconds and not running:
                break
            if elapsed >= options.limit_seconds + GRACE_SECONDS:
                for one in running:
                    one.stop("stopped by the time limit")
            time.sleep(0.2)
            for one in list(running):
                over = one.process.poll() is not None
                if not over:
                    for row in one.new_rows():
                        results.add(row)
                    continue
                running.remove(one)
                rest = finish(one, results)
                if rest is not None:
                    waiting.insert(0, rest)
    finally:
        for one in running:
            one.stop("interrupted")
    for job in waiting:
        for case in job.cases:
            results.add({**asdict(case), "failed": "not started: the time limit"})


def may_start(job: Job, running: list[Running], concurrent: int) -> bool:
    """Whether a job may run beside those that run."""
    if not running:
        return True
    return not job.alone and len(running) < concurrent and not any(one.job.alone for one in running)


def draw(rows: list[Row], folder: Path) -> None:
    """Print and write the tables, and draw the plot, where matplotlib is installed."""
    (folder / f"{NAME}.md").write_text(tables(rows), encoding="utf-8")
    print("\n" + tables(rows), flush=True)
    try:
        plot(rows, folder / f"{NAME}.png")
    except ImportError as error:
        print(f"no plot: {error}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; the exit code is 1 if a case failed or was left out, 2 where nothing can run."""
    options = tyro.cli(Options, args=arguments)
    if options.draw:
        content = json.loads((options.output / f"{NAME}.json").read_text(encoding="utf-8"))
        draw(content["results"], options.output)
        return 0
    if torch.cuda.device_count() < options.processes:
        print(
            f"error: --processes {options.processes} needs as many GPUs, and there are {torch.cuda.device_count()};"
            " torchtitan does not train on CPUs",
            file=sys.stderr,
        )
        return 2
    results = Results(options)
    jobs = plan(options.models, options.parallelisms, options.seeds, alone=options.concurrent == 1)
    if options.smoke:
        jobs = plan(("debug",), ("fsdp",), options.seeds[:1])
    with tempfile.TemporaryDirectory(prefix="benchmark-torchtitan-") as place:
        folder = Path(place)
        settings = Settings(
            processes=options.processes,
            steps=4 if options.smoke else options.steps,
            local_batch=options.local_batch,
            sequence_length=options.sequence_length,
            checkpointing=options.checkpointing,
            corpus=folder / "corpus.pt",
            folder=folder,
        )
        print(f"{write_corpus(settings.corpus):,} tokens of text", flush=True)
        run(jobs, settings, options, results)
    draw(results.rows, options.output)
    return 1 if any("failed" in row for row in results.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
