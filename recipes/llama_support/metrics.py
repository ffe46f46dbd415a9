"""What a run tells: progress bar, run.json, metrics.jsonl, TensorBoard. On rank 0 only; silent elsewhere."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .world import World

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"

_GIB = 2**30
_LARGEST_EXPONENT = 700.0  # of e, in a float
_SECONDS_BETWEEN_LINES = 5.0


class RunLog:
    """Progress and metrics of one start of a run. Every rank may call every method; only rank 0 writes.

    A disk that cannot take the metrics does not end the run, which one rank could not do alone without a traceback: it
    is told once. Where it cannot take the next checkpoint either, all ranks end there.
    """

    def __init__(self, folder: Path, world: World, *, step: int, last_step: int) -> None:
        """Begin at `step` of `last_step`. Records of later steps, of a start that was cut off, are dropped."""
        self._is_main = world.is_main
        self._device = world.device
        self._clock = time.perf_counter()
        if not self._is_main:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        path = folder / METRICS_FILE
        _drop_records_after(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        # A bar on a terminal, lines now and then in a file.
        self._bar = tqdm(
            total=last_step, initial=step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._last_step = last_step
        self._last_line = 0.0
        self._told = False

    def run(self, facts: dict[str, Any]) -> None:
        """Write what the run is (JSON-serializable) to run.json, for the report; a run that goes on replaces it."""
        if self._is_main:
            with self._told_once():
                (self._folder / RUN_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def train(
        self, step: int, *, loss: float, lr: float, grad_norm: float, tokens: int, phases: dict[str, float]
    ) -> None:
        """Record training step number `step` (from 1).

        `tokens` counts all positions of all ranks in this step; `phases` are the seconds of its parts on this rank.
        """
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        memory = memory_gib(self._device)
        rate = tokens / seconds
        record = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_second": rate, "memory_gib": memory}
        record |= {f"seconds_{name}": length for name, length in phases.items()}
        record["seconds_rest"] = max(0.0, seconds - sum(phases.values()))
        self._write("train", step, record)
        if self._is_main:
            shown = {"loss": f"{loss:.3f}", "lr": f"{lr:.1e}", "tok/s": f"{rate:,.0f}", "GiB": f"{memory:.2f}"}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
            if self._bar.disable and (now - self._last_line > _SECONDS_BETWEEN_LINES or step == self._last_step):
                self._last_line = now
                self.say(f"step {step}/{self._last_step}: " + ", ".join(f"{k} {v}" for k, v in shown.items()))

    def validation(self, step: int, loss: float) -> None:
        """Record the validation loss after `step` steps, and its perplexity."""
        perplexity = math.exp(min(loss, _LARGEST_EXPONENT))
        self._write("validation", step, {"loss": loss, "perplexity": perplexity})
        self.say(f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:,.1f}")
        self._clock = time.perf_counter()

    def say(self, message: str) -> None:
        """Print a line above the progress bar."""
        if self._is_main:
            tqdm.write(message, file=sys.stdout)
            sys.stdout.flush()

    def checkpoint(self, step: int, folder: Path) -> None:
        """Tell of a checkpoint."""
        self.say(f"step {step}: saved {folder}")
        self._clock = time.perf_counter()  # saving is not part of the next step's tokens per second

    def close(self) -> None:
        """Finish the bar and the files."""
        if self._is_main:
            self._bar.close()
            with self._told_once():
                self._file.close()
            with self._told_once():
                self._board.close()

    def _write(self, kind: str, step: int, values: dict[str, float]) -> None:
        if not self._is_main:
            return
        record: dict[str, Any] = {"kind": kind, "step": step, **values}
        with self._told_once():
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        with self._told_once():
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    @contextmanager
    def _told_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._told:
                self.say(f"cannot write metrics in {self._folder} ({error.strerror or error}); the run goes on without")
            self._told = True


class StepClock:
    """Where a step's time goes, by the clock of this rank. A phase ends when the device has done its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a part of the step."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last call, in the order in which they began."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def memory_gib(device: torch.device) -> float:
    """Most memory this rank has held so far, in GiB: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


def _drop_records_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line cut off when the run was
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(kept), encoding="utf-8")
    os.replace(scratch, path)
