"""Runs of the recipe on the ranks of a pool, to their end or to a step in which they die."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import llama_finetune
import torch
from llama_support.config import Config
from llama_support.errors import BadInput


class CutOffError(Exception):
    """Stands for whatever ends a process in the middle of a step."""


def _no_report(folder: Path, *arguments: Any, **options: Any) -> Path:
    return folder


@contextmanager
def without_report() -> Iterator[None]:
    """Runs inside end without the pictures of their report, which take as long as the steps of a small run."""
    write_report = llama_finetune.write_report
    llama_finetune.write_report = _no_report
    try:
        yield
    finally:
        llama_finetune.write_report = write_report


def train(values: dict[str, Any], cut_at: int | None = None, report: bool = False) -> str | None:
    """Train on this rank; the text of the BadInput that stopped it, if one did. `cut_at` dies in that step.

    Without the report, unless it is asked for.
    """
    set_learning_rate = llama_finetune.set_learning_rate

    def set_or_die(optimizer: torch.optim.Optimizer, config: Config, step: int) -> float:
        if step == cut_at:
            raise CutOffError
        return set_learning_rate(optimizer, config, step)

    llama_finetune.set_learning_rate = set_or_die
    try:
        with nullcontext() if report else without_report():
            llama_finetune.train(Config(**values))
    except BadInput as error:
        return str(error)
    except CutOffError:
        return "cut off"
    finally:
        llama_finetune.set_learning_rate = set_learning_rate
    return None
