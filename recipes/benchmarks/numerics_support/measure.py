"""Running optimizers and exact fp64 Adam side by side over the families, and comparing their updates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashoptim_dist import FlashAdamW
from flashoptim_dist.formats import Rounding, decode_variance

from .families import NAMES, Families

BETA1 = 0.9
EPS = 1e-15
"""So small that gradients of 1e-9 are not hidden by it."""

MEASURE_EVERY = 10
STOPPED_AFTER = 150
"""How many steps after their last gradient the stopped elements are looked at."""


class ExactAdam:
    """Adam (Kingma and Ba, arXiv 1412.6980, Algorithm 1) in fp64."""

    def __init__(self, shape: Sequence[int], beta2: float) -> None:
        self.beta2, self.step_count = beta2, 0
        self.momentum = torch.zeros(*shape, dtype=torch.float64)
        self.variance = torch.zeros_like(self.momentum)

    def step(self, gradient: Tensor) -> Tensor:
        """Return the update in units of lr."""
        self.step_count += 1
        g = gradient.double()
        self.momentum.mul_(BETA1).add_(g, alpha=1 - BETA1)
        self.variance.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        root = (self.variance / (1 - self.beta2**self.step_count)).sqrt_().add_(EPS)
        return self.momentum / (1 - BETA1**self.step_count) / root


class Subject:
    """One optimizer under test. Its fp32 weight is zero before every step, and so minus the update after it."""

    def __init__(self, label: str, beta2: float, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        self.label, self.beta2, self.parameter, self.optimizer = label, beta2, parameter, optimizer

    @torch.no_grad()
    def step(self, gradient: Tensor) -> Tensor:
        """Return the update in units of lr, fp32 on the CPU."""
        self.parameter.zero_()
        self.parameter.grad = gradient.to(self.parameter.device)
        self.optimizer.step()
        return -self.parameter.detach().cpu()

    def root_variance(self) -> Tensor | None:
        """Return sqrt(v) as it is stored, or None where that is not known."""
        state = self.optimizer.state[self.parameter]
        codes, scales = state.get("exp_avg_sq"), state.get("exp_avg_sq_scale")
        if not isinstance(self.optimizer, FlashAdamW) or codes is None or scales is None:
            return None
        decoded: Tensor = decode_variance(codes.cpu().reshape(-1, 32), scales.cpu().reshape(-1))
        return decoded.reshape(codes.shape).sqrt()


def ours(shape: Sequence[int], beta2: float, rounding: Rounding, device: str, seed: int = 0) -> Subject:
    """Return our AdamW with 8-bit moments; weight decay off, lr 1."""
    parameter = nn.Parameter(torch.zeros(*shape, device=device))
    optimizer = FlashAdamW(
        [("weight", parameter)],
        lr=1.0,
        betas=(BETA1, beta2),
        eps=EPS,
        weight_decay=0.0,
        rounding=rounding,
        seed=seed,
    )
    return Subject(rounding, beta2, parameter, optimizer)


def official(shape: Sequence[int], beta2: float) -> Subject | None:
    """Return the official package's AdamW, or None where the package or a GPU is missing (it needs one)."""
    if importlib.util.find_spec("flashoptim") is None or not torch.cuda.is_available():
        return None
    flashoptim: Any = importlib.import_module("flashoptim")
    parameter = nn.Parameter(torch.zeros(*shape, device="cuda"))
    optimizer = flashoptim.FlashAdamW(
        [parameter], lr=1.0, betas=(BETA1, beta2), eps=EPS, weight_decay=0.0, master_weight_bits=None
    )
    return Subject("official", beta2, parameter, optimizer)


@dataclass
class Result:
    """How far one optimizer was from exact Adam over one family.

    ``error``, ``cosine``: of the update, over the measured steps of the last tenth. ``largest``, ``exact_largest``: of
    all updates, in units of lr. ``root_ratio``: quantiles .05, .5, .95 of sqrt(v) over the exact one after the last
    step. ``stopped``: mean size of the updates of stopped elements, in units of lr, ``STOPPED_AFTER`` steps later.
    ``curve``: (step, error) of each measured step.
    """

    family: str
    beta2: float
    label: str
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
    betas2: Sequence[float],
    make: Callable[[Sequence[int], float], Sequence[Subject]],
    steps: int,
    report: Callable[[int], None] = lambda step: None,
) -> list[Result]:
    """Step all optimizers over all families and compare them with exact Adam.

    Args:
        families: gradients; used up by the call.
        betas2: decay rates of the variance.
        make: gives the optimizers for a shape and a beta2.
        steps: number of steps.
        report: called after every step.
    """
    exact = {beta2: ExactAdam(families.shape, beta2) for beta2 in betas2}
    subjects = [subject for beta2 in betas2 for subject in make(families.shape, beta2)]
    sums = [_Sums() for _ in subjects]
    for step in range(1, steps + 1):
        gradient = families.gradient(step)
        updates = {beta2: adam.step(gradient).view(len(NAMES), -1) for beta2, adam in exact.items()}
        measured = step % MEASURE_EVERY == 0 or step <= MEASURE_EVERY
        late = step > steps - max(steps // 10, MEASURE_EVERY)
        for subject, total in zip(subjects, sums, strict=True):
            update = subject.step(gradient).double()
            total.add(step, update.view(len(NAMES), -1), updates[subject.beta2], late, measured)
            if step == families.stop_step + STOPPED_AFTER:
                total.stopped = families.part(update, "stopped")[families.stopping].abs().mean().item()
        report(step)
    return [
        result
        for subject, total in zip(subjects, sums, strict=True)
        for result in _results(families, subject, total, exact[subject.beta2].variance.sqrt())
    ]


def _results(families: Families, subject: Subject, total: _Sums, exact_root: Tensor) -> list[Result]:
    root = subject.root_variance()
    results = []
    for index, name in enumerate(NAMES):
        difference, exact, own = total.squares[:, index].tolist()
        result = Result(
            family=name,
            beta2=subject.beta2,
            label=subject.label,
            error=(difference / max(exact, 1e-300)) ** 0.5,
            cosine=total.product[index].item() / max((exact * own) ** 0.5, 1e-300),
            largest=total.largest[0, index].item(),
            exact_largest=total.largest[1, index].item(),
            stopped=total.stopped if name == "stopped" else None,
            curve=[(step, errors[index].item()) for step, errors in total.curve],
        )
        if root is not None:
            true = families.part(exact_root, name)
            ratio = (families.part(root, name).double() / true.clamp(min=1e-300))[true > 0]
            if ratio.numel():
                quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
                low, middle, high = torch.quantile(ratio, quantiles).tolist()
                result.root_ratio = (low, middle, high)
        results.append(result)
    return results
