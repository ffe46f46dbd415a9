"""FlashSGD (L2 decay) and FlashSGDW (decoupled decay): one rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from flashoptim_dist.formats import Rounding
from flashoptim_dist.optim.base import FlashOptimizer, ParamsT
from flashoptim_dist.optim.checks import check_number, check_switch
from flashoptim_dist.optim.rules import SgdHyperparameters
from flashoptim_dist.optim.state import MomentSpec


class _SgdFamily(FlashOptimizer):
    """What FlashSGD and FlashSGDW share. A group without momentum keeps no moments."""

    moment_specs: ClassVar[tuple[MomentSpec, ...]] = (MomentSpec("momentum_buffer", True),)
    moments_are_optional: ClassVar[bool] = True

    def _check_group(self, group: dict[str, Any], where: str) -> None:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        check_number(group, "momentum", where)
        check_switch(group, "nesterov", where)
        if not math.isfinite(dampening):
            raise ValueError(f"{where}dampening must be a finite number, got {dampening}")
        if group["nesterov"] and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"{where}nesterov=True needs a momentum above 0 and no dampening, got momentum {momentum} and "
                f"dampening {dampening}"
            )

    def _moments_of(self, group: Mapping[str, Any]) -> tuple[MomentSpec, ...]:
        return self.moment_specs if group["momentum"] else ()

    def _hyperparameters(self, index: int) -> SgdHyperparameters:
        group = self.param_groups[index]
        decoupled = self._decay_is_decoupled(group)
        return SgdHyperparameters(
            lr=group["lr"],
            decay_rate=self._decay_rate(index) if decoupled else 0.0,
            l2=0.0 if decoupled else float(group["weight_decay"]),
            maximize=bool(group.get("maximize", False)),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
        )


class FlashSGD(_SgdFamily):
    """SGD as ``torch.optim.SGD`` defines it, with a 24-bit split master weight and an 8-bit momentum.

    4.06 bytes per parameter, 3 without momentum. A drop-in for ``torch.optim.SGD`` and for flashoptim's FlashSGD, by
    position too. Arguments that are not named here are those of :class:`FlashAdamW`.

    Args:
        lr: learning rate.
        momentum: 0 keeps no moments.
        dampening: the gradient enters the momentum times 1 - dampening, from the second step on (as in torch;
            flashoptim dampens the first one too).
        weight_decay: L2: times the weight, added to the gradient.
        nesterov: Nesterov momentum.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = 24,
        check_numerics: bool = False,
        fused: bool | None = None,
        *,
        offload_states: bool = False,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weight_bits=master_weight_bits,
            quantize=quantize,
            rounding=rounding,
            seed=seed,
            compress_state_dict=compress_state_dict,
            check_numerics=check_numerics,
            offload_states=offload_states,
            torch_options={
                "fused": fused,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
            },
        )

    def _decay_is_decoupled(self, group: Mapping[str, Any]) -> bool:
        return False


class FlashSGDW(_SgdFamily):
    """SGD with decoupled weight decay (arXiv 1711.05101), compressed as :class:`FlashSGD` is.

    A drop-in for flashoptim's FlashSGDW, by position too. Arguments that are not named here are those of
    :class:`FlashSGD` and :class:`FlashAdamW`.

    Args:
        weight_decay: decoupled (the weight is multiplied by 1 - lr * weight_decay).
        decouple_lr: decay by 1 - weight_decay * lr / initial lr instead.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        decouple_lr: bool = False,
        quantize: bool = True,
        compress_state_dict: bool = True,
        master_weight_bits: int | None = 24,
        check_numerics: bool = False,
        fused: bool | None = None,
        *,
        offload_states: bool = False,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            master_weight_bits=master_weight_bits,
            quantize=quantize,
            rounding=rounding,
            seed=seed,
            decouple_lr=decouple_lr,
            compress_state_dict=compress_state_dict,
            check_numerics=check_numerics,
            offload_states=offload_states,
            torch_options={
                "fused": fused,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
            },
        )
