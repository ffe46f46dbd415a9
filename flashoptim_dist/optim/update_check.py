"""check_numerics: counting the updates that are too small to change a weight.

Counts stay on the device, on each rank's own shard; nothing is gathered. The step is the pure-torch one, without
kernels, for looking at a run: it waits for a GPU once, to read the step counts of all parameters and what is known of
their gradients. An update counts where the element has one (a momentum, or without momentum a gradient, that is not
zero, and lr > 0), and counts as too small where it is lost for good: with rounding to nearest, where the stored weight
(16 bits, or 16 with their correction) stays as it was; with stochastic rounding, which moves a weight by the right
amount in the mean however small the update, only where the fp32 sum itself does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashoptim_dist.formats import merge, split
from flashoptim_dist.formats.weights import SPLIT_DTYPES
from flashoptim_dist.optim.rules import Rule

WARN_ABOVE = 0.1
"""Fraction of a parameter's updates that may be too small before a warning: elements whose gradient vanishes have tiny
updates in every healthy run."""


@dataclass(frozen=True)
class UpdateCounts:
    """How many updates a parameter's elements had on this rank since the optimizer was made, and how many were lost."""

    updates: int
    too_small: int

    @property
    def fraction(self) -> float:
        """Return the fraction that was too small; 0 where there was no update."""
        return self.too_small / self.updates if self.updates else 0.0


@dataclass(frozen=True)
class NumericsReport:
    """Counts by parameter name, of this rank's shard. ``str()`` is a table, worst first."""

    parameters: Mapping[str, UpdateCounts]

    @property
    def total(self) -> UpdateCounts:
        """Return the counts over all parameters."""
        counts = self.parameters.values()
        return UpdateCounts(sum(c.updates for c in counts), sum(c.too_small for c in counts))

    def __str__(self) -> str:
        rows = sorted(self.parameters.items(), key=lambda item: -item[1].fraction)
        rows.append(("all", self.total))
        width = max(len(name) for name, _ in rows)
        lines = [f"{'parameter':{max(width, 9)}} {'updates':>16} {'too small':>16} {'fraction':>9}"]
        lines += [f"{name:{max(width, 9)}} {c.updates:16,} {c.too_small:16,} {c.fraction:9.2%}" for name, c in rows]
        return "\n".join(lines)


class UpdateCheck:
    """The counters of one optimizer, and the one warning it gives."""

    def __init__(self) -> None:
        self._counters: dict[str, Tensor] = {}
        self._polls = 0
        self._copies: list[tuple[list[str], Tensor, torch.cuda.Event | None]] = []
        self._warned = False

    def counter(self, name: str, device: torch.device) -> Tensor:
        """Return a parameter's counter: int64 [2] on its device, (updates, too small)."""
        counter = self._counters.get(name)
        if counter is None or counter.device != device:
            counter = self._counters[name] = torch.zeros(2, dtype=torch.int64, device=device)
        return counter

    def report(self) -> NumericsReport:
        """Read all counters: one transfer per device, which waits for it."""
        counts: dict[str, UpdateCounts] = {}
        for names, stacked in self._stacked():
            counts.update(_named_counts(names, stacked))
        report = NumericsReport({name: counts[name] for name in self._counters})
        self._warn(report.parameters)
        return report

    def poll(self) -> None:
        """Warn, once, if a parameter's updates are lost. Called after every step; never waits.

        After steps 1, 2, 4, 8, ... the counters are copied to the host asynchronously, and looked at in a later step,
        once the copy is there.
        """
        if self._warned:
            return
        waiting: list[tuple[list[str], Tensor, torch.cuda.Event | None]] = []
        for names, stacked, event in self._copies:
            if event is None or event.query():
                self._warn(_named_counts(names, stacked))
            else:
                waiting.append((names, stacked, event))
        self._copies = waiting
        self._polls += 1
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._polls & (self._polls - 1) or capturing:
            return
        for names, stacked in self._stacked():
            if stacked.device.type == "cpu":
                self._warn(_named_counts(names, stacked))
                continue
            with torch.cuda.device(stacked.device):
                copy = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
                copy.copy_(stacked, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._copies.append((names, copy, event))

    def _stacked(self) -> list[tuple[list[str], Tensor]]:
        """Return (names, counters [N, 2]) of each device."""
        by_device: dict[torch.device, list[str]] = {}
        for name, counter in self._counters.items():
            by_device.setdefault(counter.device, []).append(name)
        return [(names, torch.stack([self._counters[name] for name in names])) for names in by_device.values()]

    def _warn(self, counts: Mapping[str, UpdateCounts]) -> None:
        if self._warned or not counts:
            return
        name, worst = max(counts.items(), key=lambda item: item[1].fraction)
        if worst.fraction <= WARN_ABOVE:
            return
        self._warned = True
        warnings.warn(
            f"check_numerics: {worst.too_small:,} of the {worst.updates:,} updates of parameter {name!r} on this rank "
            f"were too small to change its weights ({worst.fraction:.0%}). Raise the learning rate, keep more bits "
            "(master_weight_bits=24 or 32) or use rounding='stochastic'; numerics_report() has all parameters",
            stacklevel=4,
        )


def _named_counts(names: list[str], stacked: Tensor) -> dict[str, UpdateCounts]:
    return {name: UpdateCounts(*row) for name, row in zip(names, stacked.tolist(), strict=True)}


def counting(rule: Rule, counter: Tensor, dtype: torch.dtype, correction_bits: int, stochastic: bool) -> Rule:
    """Return the rule, made to add to ``counter``.

    Args:
        rule: see ``optim.rules``.
        counter: int64 [2].
        dtype: of the stored weight.
        correction_bits: 8, 16 or 0.
        stochastic: whether the weight, or its correction, is rounded stochastically.
    """

    def counted(
        weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: object
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        old = weight.clone()
        new, after = rule(weight, gradient, moments, scalars)
        updated = (after[0] if after else gradient) != 0
        stored = new if stochastic and dtype in SPLIT_DTYPES else _stored(new, dtype, correction_bits)
        counter[0] += updated.sum()
        counter[1] += (updated & (stored == old)).sum()
        return new, after

    return counted


def _stored(master: Tensor, dtype: torch.dtype, correction_bits: int) -> Tensor:
    """Return fp32 weights as storage holds them, rounded to nearest."""
    if dtype not in SPLIT_DTYPES:
        return master
    if not correction_bits:
        return master.to(dtype).to(torch.float32)
    return merge(*split(master, dtype, correction_bits))
