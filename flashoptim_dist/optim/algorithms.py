"""Telling from a saved parameter group whether another algorithm than the optimizer's has saved it.

The names of a state's entries tell most, but not all: torch's RAdam keeps entries of Adam's names, Muon
of SGD's, and an optimizer that has not stepped, or SGD without momentum, keeps none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashoptim_dist.optim.base import FlashOptimizer

_OF_SOME_ALGORITHM = {
    *("betas", "eps", "amsgrad", "momentum_decay"),  # Adam, Lion, RAdam, NAdam, Adamax
    *("momentum", "dampening", "nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"),  # SGD, Muon
    *("alpha", "centered", "rho", "lr_decay", "initial_accumulator_value"),  # RMSprop, Adadelta, Adagrad
    *("lambd", "t0", "etas", "step_sizes", "beta2_decay", "history_size"),  # ASGD, Rprop, Adafactor, LBFGS
}
"""Hyperparameters by which an algorithm is known. Other keys are the user's own, and mean nothing."""

_SWITCHES = {"foreach", "capturable", "differentiable"}
"""Of all of torch's optimizers of Adam's kind."""


def check_algorithm(optimizer: FlashOptimizer, index: int, saved: Mapping[str, Any]) -> None:
    """Refuse a saved parameter group of another algorithm. One without any learning rate says nothing.

    Raises:
        ValueError: what it holds that this algorithm does not know, or lacks.
    """
    own = optimizer.defaults.keys() & (_OF_SOME_ALGORITHM | {"lr", "weight_decay"})
    known = own | ({"amsgrad"} if {"betas", "eps"} <= own else set())
    foreign = (_OF_SOME_ALGORITHM & saved.keys()) - known - optimizer.param_groups[index].keys()
    missing = own - saved.keys() if "lr" in saved else set()
    if "amsgrad" in known and saved.keys() >= _SWITCHES:
        missing |= {"amsgrad"} - saved.keys()  # torch's RAdam and Adamax have all of Adam's but this
    if foreign or missing:
        found = [f"holds {sorted(foreign)}"] if foreign else []
        found += [f"lacks {sorted(missing)}"] if missing else []
        raise ValueError(
            f"parameter group {index} of the state {' and '.join(found)}: it was saved by another algorithm than "
            f"{type(optimizer).__name__}'s, whose moments mean something else. Begin with a fresh optimizer instead"
        )
    if saved.get("amsgrad"):
        raise ValueError(
            f"parameter group {index} of the state: amsgrad=True is not supported by {type(optimizer).__name__}. To go "
            "on without it, set amsgrad to False there and delete max_exp_avg_sq from the state of each parameter"
        )
