"""What a run tells: progress bar, metrics.jsonl, TensorBoard. On rank 0 only; silent elsewhere."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .world import World

_GIB = 2**30
_SECONDS_BETWEEN_LINES = 5.0


class RunLog:
    """Progress and metrics of one start of a run. Every rank may call every method; only rank 0 writes."""

    def __init__(self, folder: Path, world: World, *, step: int, last_step: int) -> None:
        """Begin at `step` of `last_step`. Records of later steps, of a start that was cut off, are dropped."""
        self._is_main = world.is_main
        self._device = world.device
        self._clock = time.perf_counter()
        if not self._is_main:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        _drop_records_after(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        # A bar on a terminal, lines now and then in a file.
        self._bar = tqdm(
            total=last_step, initial=step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._last_step = last_step
        self._last_line = 0.0

    def train(self, step: int, *, loss: float, lr: float, grad_norm: float, tokens: int) -> None:
        """Record training step number `step` (from 1); `tokens` counts all positions of all ranks in this step."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        memory = memory_gib(self._device)
        rate = tokens / seconds
        record = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens_per_second": rate, "memory_gib": memory}
        self._write("train", step, record)
        if self._is_main:
            shown = {"loss": f"{loss:.3f}", "lr": f"{lr:.1e}", "tok/s": f"{rate:,.0f}", "GiB": f"{memory:.2f}"}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
            if self._bar.disable and (now - self._last_line > _SECONDS_BETWEEN_LINES or step == self._last_step):
                self._last_line = now
                self.say(f"step {step}/{self._last_step}: " + ", ".join(f"{k} {v}" for k, v in shown.items()))

    def validation(self, step: int, loss: float) -> None:
        """Record the validation loss after `step` steps."""
        self._write("validation", step, {"loss": loss})
        self.say(f"step {step}: validation loss {loss:.4f}")
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
            self._file.close()
            self._board.close()

    def _write(self, kind: str, step: int, values: dict[str, float]) -> None:
        if not self._is_main:
            return
        record: dict[str, Any] = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)


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
