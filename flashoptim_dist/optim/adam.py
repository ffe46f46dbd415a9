"""FlashAdamW (decoupled weight decay) and, on the same rule, Adam's other forms."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flashoptim_dist.formats import Rounding
from flashoptim_dist.optim.base import FlashOptimizer, ParamsT
from flashoptim_dist.optim.reference import Rule
from flashoptim_dist.optim.rules import adam_scalars, adam_update
from flashoptim_dist.optim.state import MomentSpec


class FlashAdamW(FlashOptimizer):
    """AdamW with a 24-bit split master weight and 8-bit moments: 5.125 bytes per parameter beside the gradient.

    A drop-in for ``torch.optim.AdamW`` on plain tensors and DTensors (FSDP2, tensor and expert parallel), mixed at
    will.

    Args:
        params: parameters, (name, parameter) pairs, or groups. With names, results do not depend on the order of
            parameters and checkpoints match by name: ``FlashAdamW(model.named_parameters())``.
        lr: learning rate (float or 0-dim tensor).
        betas: decay rates of momentum and variance.
        eps: added to the denominator.
        weight_decay: decoupled weight decay (the weight is multiplied by 1 - lr * weight_decay).
        master_weight_bits: 24 (int8 correction) or 32 (int16) for bf16 and fp16 parameters; None keeps the 16-bit
            weight alone. fp32 parameters need no correction and get none.
        quantize: False keeps moments in fp32, whatever the parameter's dtype.
        rounding: "stochastic" (unbiased; moving averages never stall) or "nearest".
        seed: of the stochastic rounding; results depend on it, never on the world size.
        maximize: ascend instead of descend.

    Raises:
        ValueError: an option out of range. TypeError: a parameter of another dtype.
    """

    moment_specs: ClassVar[tuple[MomentSpec, ...]] = (MomentSpec("exp_avg", True), MomentSpec("exp_avg_sq", False))
    decoupled_decay: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            master_weight_bits=master_weight_bits,
            quantize=quantize,
            rounding=rounding,
            seed=seed,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        betas = group["betas"]
        if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        if not float(group["eps"]) >= 0.0:
            raise ValueError(f"eps must be >= 0, got {group['eps']}")

    def _rule(self, group: dict[str, Any], step: int) -> tuple[Any, Rule]:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        scalars = adam_scalars(
            lr=lr,
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=float(group["eps"]),
            decay=1.0 - lr * weight_decay if self.decoupled_decay else 1.0,
            l2=0.0 if self.decoupled_decay else weight_decay,
            step=step,
        )
        return scalars, adam_update
