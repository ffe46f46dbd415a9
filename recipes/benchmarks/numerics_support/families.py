"""Synthetic gradients, all families of a step as rows of one matrix, so that one optimizer steps them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RARE_PERIOD = 50
"""A rare row gets a gradient once in so many steps."""

OUTLIER = 1e4
"""How many times its group mates' gradients an outlier's are; there is one per group of 32."""

GAUSSIAN_SCALES = (1e-2, 1e-5, 1e-7, 1e-9)
NAMES = (
    *(f"Gaussian {scale:g}" for scale in GAUSSIAN_SCALES),
    "lognormal 1",
    "lognormal 2",
    "rare rows",
    "stopped",
    "outlier",
    "constant, equal in a group",
    "constant, own",
)


@dataclass(frozen=True)
class Families:
    """All families: ``rows`` of ``columns`` (a multiple of 32) each, one under the other in the order of ``NAMES``.

    ``factors`` [rows of all, columns] scales Gaussian numbers; ``constants`` are gradients that never change (zero in
    the other families); ``phases`` [rows] say in which step of a period a rare row has its gradient; ``stopping`` marks
    the elements of the stopped family whose gradient is zero after ``stop_step``.
    """

    rows: int
    columns: int
    factors: Tensor
    constants: Tensor
    phases: Tensor
    stopping: Tensor
    stop_step: int
    generator: torch.Generator

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix of all families."""
        return (self.rows * len(NAMES), self.columns)

    def part(self, matrix: Tensor, name: str) -> Tensor:
        """Return the rows of a family: [rows, ...] of [rows of all, ...]."""
        start = NAMES.index(name) * self.rows
        return matrix[start : start + self.rows]

    def gradient(self, step: int) -> Tensor:
        """Return the gradients of a step, fp32. To be called once per step, in order."""
        gradient = torch.randn(self.shape, generator=self.generator) * self.factors + self.constants
        self.part(gradient, "rare rows").mul_(((step + self.phases) % RARE_PERIOD == 0).unsqueeze(1))
        if step > self.stop_step:
            self.part(gradient, "stopped").masked_fill_(self.stopping, 0.0)
        return gradient


def make_families(rows: int, columns: int, stop_step: int, seed: int) -> Families:
    """Return the families.

    Args:
        rows: per family.
        columns: per row, a multiple of 32.
        stop_step: last step with a gradient for every element of the stopped family.
        seed: of all random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator)

    groups = columns // 32
    outlier = torch.full(shape, 1e-2)
    outlier.view(rows, groups, 32)[:, :, 5] *= OUTLIER
    zero, plain = torch.zeros(shape), torch.full(shape, 1e-2)
    equal = torch.randn(rows, groups, generator=generator).repeat_interleave(32, dim=1) * 1e-2
    own = normal() * 1e-2
    factors = [torch.full(shape, scale) for scale in GAUSSIAN_SCALES]
    factors += [torch.exp(normal() * spread) * 1e-2 for spread in (1.0, 2.0)]
    factors += [plain, plain, outlier, zero, zero]
    return Families(
        rows=rows,
        columns=columns,
        factors=torch.cat(factors),
        constants=torch.cat([zero] * (len(NAMES) - 2) + [equal, own]),
        phases=torch.arange(rows) * 3 % RARE_PERIOD,
        stopping=torch.rand(shape, generator=generator) < 0.25,
        stop_step=stop_step,
        generator=generator,
    )
