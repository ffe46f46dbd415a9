"""Running optimizers and the exact fp64 ones side by side over the families, and comparing their updates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import flashoptim_dist
from flashoptim_dist.formats import Rounding, decode_variance
from flashoptim_dist.optim.base import FlashOptimizer

from .exact import Exact, Setting
from .families import NAMES, Families

MEASURE_EVERY = 10
STOPPED_AFTER = 150
"""How many steps after their last gradient the stopped elements are looked at."""


class Subject:
    """One optimizer under test. Its fp32 weight is the setting's before every step."""

    def __init__(self, label: str, setting: Setting, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        self.label, self.setting, self.parameter, self.optimizer = label, setting, parameter, optimizer

    @torch.no_grad()
    def step(self, gradient: Tensor) -> Tensor:
        """Return the update in units of lr, fp64 on the CPU."""
        self.parameter.fill_(self.setting.weight)
        self.parameter.grad = gradient.to(self.parameter.device)
        self.optimizer.step()
        return self.setting.weight - self.parameter.detach().cpu().double()

    def root_variance(self) -> Tensor | None:
        """Return sqrt(v) as it is stored, or None where that is not known."""
        state = self.optimizer.state[self.parameter]
        codes, scales = state.get("exp_avg_sq"), state.get("exp_avg_sq_scale")
        if not isinstance(self.optimizer, FlashOptimizer) or codes is None or scales is None:
            return None
        decoded: Tensor = decode_variance(codes.cpu().reshape(-1, 32), scales.cpu().reshape(-1))
        return decoded.reshape(codes.shape).sqrt()


def ours(setting: Setting, shape: Sequence[int], rounding: Rounding, device: str, seed: int = 0) -> Subject:
    """Return our optimizer with 8-bit moments."""
    parameter = nn.Parameter(torch.zeros(*shape, device=device))
    make: Any = getattr(flashoptim_dist, setting.optimizer)
    return Subject(
        rounding, setting, parameter, make([("weight", parameter)], rounding=rounding, seed=seed, **setting.options)
    )


def official(setting: Setting, shape: Sequence[int]) -> Subject | None:
    """Return the official package's, or None where the package or a GPU is missing (it needs one)."""
    if importlib.util.find_spec("flashoptim") is None or not torch.cuda.is_available():
        return None
    parameter = nn.Parameter(torch.zeros(*shape, device="cuda"))
    make: Any = getattr(importlib.import_module("flashoptim"), setting.optimizer)
    return Subject("official", setting, parameter, make([parameter], master_weight_bits=None, **setting.options))


@dataclass
class Result:
    """How far one optimizer was from the exact one over one family.

    ``error``, ``cosine``: of the update, over the measured steps of the last tenth. ``largest``, ``exact_largest``: of
    all updates, in units of lr. ``root_ratio``: quantiles .05, .5, .95 of sqrt(v) over the exact one after the last
    step. ``stopped``: mean size of the updates of stopped elements, in units of lr, ``STOPPED_AFTER`` steps later.
    ``curve``: (step, error) of each measured step.
    """

    family: str
    beta2: float
    label: str
    optimizer: str = "FlashAdamW"
    error: float = 0.0
    cosine: float = 0.0
    largest: float = 0.0
    exact_largest: float = 0.0
    root_ratio: tuple[float, float, float] | None = None
    stopped: float | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable copy."""
        return asdict(self)


class _Sums:
    """Of one optimizer and all families: sums of squares over the last tenth, largest updates, and the curve."""

    def __init__(self) -> None:
        self.squares = torch.zeros(3, len(NAMES), dtype=torch.float64)  # difference, exact, ours
        self.product = torch.zeros(len(NAMES), dtype=torch.float64)
        self.largest = torch.zeros(2, len(NAMES), dtype=torch.float64)
        self.curve: list[tuple[int, Tensor]] = []
        self.stopped: float | None = None

    def add(self, step: int, update: Tensor, exact: Tensor, late: bool, measured: bool) -> None:
        """``update`` and ``exact`` are fp64 [families, elements]."""
        for row, value in enumerate((update, exact)):
            torch.maximum(self.largest[row], value.abs().amax(dim=1), out=self.largest[row])
        if not measured:
            return
        squares = torch.stack([(x * x).sum(dim=1) for x in (update - exact, exact, update)])
        self.curve.append((step, _ratio(squares[0], squares[1]).sqrt()))
        if late:
            self.squares += squares
            self.product += (update * exact).sum(dim=1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp(min=1e-300)


def run(
    families: Families,
    settings: Sequence[Setting],
    make: Callable[[Setting, Sequence[int]], Sequence[Subject]],
    steps: int,
    report: Callable[[int], None] = lambda step: None,
) -> list[Result]:
    """Step all optimizers over all families and compare them with the exact ones.

    Args:
        families: gradients; used up by the call.
        settings: which optimizers, each with its hyperparameters.
        make: gives the optimizers under test for a setting and a shape.
        steps: number of steps.
        report: called after every step.
    """
    exact = {setting: setting.exact(families.shape) for setting in settings}
    subjects = [subject for setting in settings for subject in make(setting, families.shape)]
    sums = [_Sums() for _ in subjects]
    for step in range(1, steps + 1):
        gradient = families.gradient(step)
        updates = {setting: one.step(gradient).view(len(NAMES), -1) for setting, one in exact.items()}
        measured = step % MEASURE_EVERY == 0 or step <= MEASURE_EVERY
        late = step > steps - max(steps // 10, MEASURE_EVERY)
        for subject, total in zip(subjects, sums, strict=True):
            update = subject.step(gradient)
            total.add(step, update.view(len(NAMES), -1), updates[subject.setting], late, measured)
            if step == families.stop_step + STOPPED_AFTER:
                total.stopped = families.part(update, "stopped")[families.stopping].abs().mean().item()
        report(step)
    return [
        result
        for subject, total in zip(subjects, sums, strict=True)
        for result in _results(families, subject, total, exact[subject.setting])
    ]


def _results(families: Families, subject: Subject, total: _Sums, reference: Exact) -> list[Result]:
    root, exact_root = subject.root_variance(), reference.root()
    results = []
    for index, name in enumerate(NAMES):
        difference, exact, own = total.squares[:, index].tolist()
        result = Result(
            family=name,
            beta2=subject.setting.beta2,
            label=subject.label,
            optimizer=subject.setting.optimizer,
            error=(difference / max(exact, 1e-300)) ** 0.5,
            cosine=total.product[index].item() / max((exact * own) ** 0.5, 1e-300),
            largest=total.largest[0, index].item(),
            exact_largest=total.largest[1, index].item(),
            stopped=total.stopped if name == "stopped" else None,
            curve=[(step, errors[index].item()) for step, errors in total.curve],
        )
        if root is not None and exact_root is not None:
            true = families.part(exact_root, name)
            ratio = (families.part(root, name).double() / true.clamp(min=1e-300))[true > 0]
            if ratio.numel():
                quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
                low, middle, high = torch.quantile(ratio, quantiles).tolist()
                result.root_ratio = (low, middle, high)
        results.append(result)
    return results
