"""FlashLion: Lion with decoupled decay."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flashoptim_dist.formats import Rounding
from flashoptim_dist.optim.base import FlashOptimizer, ParamsT
from flashoptim_dist.optim.checks import check_betas
from flashoptim_dist.optim.rules import LionHyperparameters
from flashoptim_dist.optim.state import MomentSpec


class FlashLion(FlashOptimizer):
    """Lion (arXiv 2302.06675) with a 24-bit split master weight and an 8-bit momentum: 4.06 bytes per parameter.

    Its update is the sign of an interpolated momentum, times lr. A drop-in for flashoptim's FlashLion, by position
    too. Arguments that are not named here are those of :class:`FlashAdamW`.

    Args:
        lr: learning rate; 3 to 10 times smaller than AdamW's.
        betas: weights of the momentum in the update, and in its own moving average.
        weight_decay: decoupled (the weight is multiplied by 1 - lr * weight_decay).
    """

    moment_specs: ClassVar[tuple[MomentSpec, ...]] = (MomentSpec("exp_avg", True),)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
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
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
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

    def _check_group(self, group: dict[str, Any], where: str) -> None:
        check_betas(group, where)

    def _hyperparameters(self, index: int) -> LionHyperparameters:
        group = self.param_groups[index]
        return LionHyperparameters(
            lr=group["lr"],
            decay_rate=self._decay_rate(index),
            l2=0.0,
            maximize=bool(group.get("maximize", False)),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
        )
