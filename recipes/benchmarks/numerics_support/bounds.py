"""The bounds that the format is held to, and which of them hold."""

from __future__ import annotations

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

RARE_RATIO = (0.97, 1.03)
"""Median of sqrt(v) over exact in rare rows at beta2 .999 after 2,000 steps; stochastic rounding."""


@dataclass(frozen=True)
class Check:
    """One bound on one result."""

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
            found.append(Check(of.family, of.beta2, of.label, what, value, low, high))

        if family.startswith("Gaussian") and (result.label, beta2) in GAUSSIAN_ERROR:
            add("error", result.error, GAUSSIAN_ERROR[(result.label, beta2)])
        if (family, beta2) in LOGNORMAL_ERROR:
            add("error", result.error, LOGNORMAL_ERROR[(family, beta2)])
        if family in LARGEST and beta2 in (0.95, 0.999):
            add("largest update", result.largest, LARGEST[family])
        if family == "constant, own" and stochastic and beta2 in CONSTANT_ERROR:
            add("error", result.error, CONSTANT_ERROR[beta2])
        if family != "lognormal 2":
            add("largest / exact largest", result.largest / max(result.exact_largest, 1e-300), OVER_EXACT)
        if result.stopped is not None and stochastic:
            add("mean update of stopped", result.stopped, STOPPED)
        if family == "rare rows" and stochastic and beta2 == 0.999 and result.root_ratio:
            add("median sqrt(v) / exact", result.root_ratio[1], RARE_RATIO[1], RARE_RATIO[0])
    return found
