"""The bounds that the format is held to, and which of them hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .families import NAMES
from .measure import Result

GAUSSIAN_ERROR = {("nearest", 0.95): 0.02, ("nearest", 0.999): 0.035, ("stochastic", 0.95): 0.02}
GAUSSIAN_ERROR[("stochastic", 0.999)] = 0.026
LOGNORMAL_ERROR = {("lognormal 1", 0.95): 0.055, ("lognormal 1", 0.999): 0.10}
LOGNORMAL_ERROR |= {("lognormal 2", 0.95): 0.30, ("lognormal 2", 0.999): 0.33}
LARGEST = {"lognormal 1": 2.0, "lognormal 2": 4.0}
"""Largest update in units of lr."""

CONSTANT_ERROR = {0.95: 0.06, 0.999: 0.17}
"""Of constants of each element's own; stochastic rounding."""

OVER_EXACT = 2.5
"""Largest update over the exact largest one, in every family but lognormal 2."""

STOPPED = 0.002
"""Mean update of stopped elements in units of lr; stochastic rounding."""

# A momentum code y = 127 sqrt(|m| / s) is off by 1/sqrt(12) in the root mean square, rounded to nearest, and by
# 1/sqrt(6) with noise; the number by 2 sqrt(s |m|) times that over 127. In a Gaussian group of 32 s is about 2.1 and
# the mean of |m| is 0.8 standard deviations, which makes 0.006 and 0.008 of the momentum per step; decayed by beta
# and added up over the steps, beta / sqrt(1 - beta**2) = 2.1 times that for SGD with 0.9: 0.013 and 0.018. With
# Nesterov's gradient beside it less. For Lion (beta2 0.99) 0.044 and 0.062 of a stored momentum whose standard
# deviation is 0.07 of a gradient's, 0.0028 and 0.0039 beside an interpolated one of 0.118: an error e turns the sign
# where the number is smaller, in atan(e) / pi of all cases, and every turned sign is an error of 2.
MOMENTUM_ERROR = {
    ("FlashSGD", "nearest"): 0.013 * 1.5,
    ("FlashSGD", "stochastic"): 0.018 * 1.5,
    ("FlashSGDW", "nearest"): 0.013 * 1.5,
    ("FlashSGDW", "stochastic"): 0.018 * 1.5,
    ("FlashLion", "nearest"): 2.0 * (math.atan(0.0028 / 0.118) / math.pi) ** 0.5 * 1.5,
    ("FlashLion", "stochastic"): 2.0 * (math.atan(0.0039 / 0.118) / math.pi) ** 0.5 * 1.5,
}
"""Error of the update under Gaussian gradients, for optimizers of one momentum: as derived, and half of it more."""

RARE_RATIO = (0.97, 1.03)
"""Median of sqrt(v) over exact in rare rows at beta2 .999 after 2,000 steps; stochastic rounding."""


@dataclass(frozen=True)
class Check:
    """One bound on one result."""

    optimizer: str
    family: str
    beta2: float
    label: str
    what: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the value lies within; NaN does not."""
        return self.low <= self.value <= self.high


def checks(results: Iterable[Result]) -> list[Check]:
    """Return every bound that applies to our results; other packages' results are bound by nothing."""
    found: list[Check] = []
    for result in results:
        if result.label not in ("nearest", "stochastic"):
            continue
        stochastic = result.label == "stochastic"
        family, beta2 = result.family, result.beta2
        assert family in NAMES

        def add(what: str, value: float, high: float, low: float = 0.0, of: Result = result) -> None:
            found.append(Check(of.optimizer, of.family, of.beta2, of.label, what, value, low, high))

        if family.startswith("Gaussian") and (result.label, beta2) in GAUSSIAN_ERROR:
            add("error", result.error, GAUSSIAN_ERROR[(result.label, beta2)])
        if family.startswith("Gaussian") and (result.optimizer, result.label) in MOMENTUM_ERROR:
            add("error", result.error, MOMENTUM_ERROR[(result.optimizer, result.label)])
        if (family, beta2) in LOGNORMAL_ERROR:
            add("error", result.error, LOGNORMAL_ERROR[(family, beta2)])
        if family in LARGEST and beta2 in (0.95, 0.999):
            add("largest update", result.largest, LARGEST[family])
        if family == "constant, own" and stochastic and beta2 in CONSTANT_ERROR:
            add("error", result.error, CONSTANT_ERROR[beta2])
        if family != "lognormal 2":
            add("largest / exact largest", result.largest / max(result.exact_largest, 1e-300), OVER_EXACT)
        # Exact Lion never rests: the sign of a momentum that shrinks stays.
        if result.stopped is not None and stochastic and result.optimizer != "FlashLion":
            add("mean update of stopped", result.stopped, STOPPED)
        if family == "rare rows" and stochastic and beta2 == 0.999 and result.root_ratio:
            add("median sqrt(v) / exact", result.root_ratio[1], RARE_RATIO[1], RARE_RATIO[0])
    return found
