"""FlashAdam (L2 decay) and FlashAdamW (decoupled decay): one rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from flashoptim_dist.formats import Rounding
from flashoptim_dist.optim.base import FlashOptimizer, ParamsT
from flashoptim_dist.optim.checks import check_betas, check_number, check_switch, with_positional
from flashoptim_dist.optim.rules import AdamHyperparameters
from flashoptim_dist.optim.state import MomentSpec


class _AdamFamily(FlashOptimizer):
    """What FlashAdam and FlashAdamW share."""

    moment_specs: ClassVar[tuple[MomentSpec, ...]] = (MomentSpec("exp_avg", True), MomentSpec("exp_avg_sq", False))

    def _check_group(self, group: dict[str, Any], where: str) -> None:
        check_betas(group, where)
        check_number(group, "eps", where)
        check_switch(group, "decoupled_weight_decay", where)

    def _hyperparameters(self, index: int) -> AdamHyperparameters:
        group = self.param_groups[index]
        decoupled = self._decay_is_decoupled(group)
        return AdamHyperparameters(
            lr=group["lr"],
            decay_rate=self._decay_rate(index) if decoupled else 0.0,
            l2=0.0 if decoupled else float(group["weight_decay"]),
            maximize=bool(group.get("maximize", False)),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
        )


class FlashAdamW(_AdamFamily):
    """AdamW with a 24-bit split master weight and 8-bit moments: 5.125 bytes per parameter beside the gradient.

    A drop-in for ``torch.optim.AdamW`` on plain tensors and DTensors (FSDP2, tensor and expert parallel), mixed at
    will, and for flashoptim's FlashAdamW, by position too.

    Args:
        params: parameters, (name, parameter) pairs, or groups. With names, results do not depend on the order of
            parameters and checkpoints match by name: ``FlashAdamW(model.named_parameters())``. A group may hold its
            own master_weight_bits, quantize, rounding, seed and decouple_lr beside torch's keys. They may change at any
            time: the next step goes by them, and says what it converted.
        lr: learning rate (float or 0-dim tensor).
        betas: decay rates of momentum and variance.
        eps: added to the denominator.
        weight_decay: decoupled weight decay (the weight is multiplied by 1 - lr * weight_decay).
        *after_weight_decay: by position after ``weight_decay`` come decouple_lr, quantize, compress_state_dict,
            master_weight_bits, check_numerics and fused, as in flashoptim. One alone must be False: torch has amsgrad
            there.
        amsgrad: must be False.
        decouple_lr: decay by 1 - weight_decay * lr / initial lr instead, so that ``weight_decay`` is the decay per
            step at the initial learning rate (Loshchilov and Hutter's form).
        master_weight_bits: 24 (int8 correction) or 32 (int16) for bf16 and fp16 parameters; None keeps the 16-bit
            weight alone. fp32 parameters need no correction and get none.
        quantize: False keeps moments in fp32, whatever the parameter's dtype.
        rounding: "stochastic" (unbiased; moving averages never stall) or "nearest".
        seed: of the stochastic rounding; results depend on it, never on the world size.
        compress_state_dict: False makes ``state_dict()`` give fp32 moments, which torch's optimizers load. The weights'
            corrections (``error_bits``) stay in it, and those optimizers pass over them.
        check_numerics: count the updates that are too small to change a weight, in a pure-torch step instead of the
            kernels; see ``numerics_report()``. Not with ``fused=True``.
        offload_states: keep the states of CUDA parameters in pinned host memory and stream them through the step; the
            device holds two buffers of 256 MB instead (or as large as the largest parameter's state). States that are
            read from ``optimizer.state`` directly need ``torch.cuda.synchronize()`` first. On CPU it changes nothing.
        maximize: ascend instead of descend.
        fused: None takes the Triton kernels wherever the device has them; False never; True raises where a CUDA
            parameter cannot have them. CPU parameters always take the pure-torch path.
        foreach: accepted, without effect: all tensors of a device are always stepped together.
        capturable: accepted, without effect: the kernels can always be captured in a CUDA graph.
        differentiable: must be False.

    Raises:
        ValueError: an option out of range. TypeError: a parameter of another dtype, or a sixth positional argument that
            means two things. RuntimeError: fused and foreach.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *after_weight_decay: Any,
        amsgrad: bool = False,
        decouple_lr: bool = False,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        compress_state_dict: bool = True,
        check_numerics: bool = False,
        offload_states: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        options = with_positional(
            FlashAdamW,
            after_weight_decay,
            {
                "decouple_lr": decouple_lr,
                "quantize": quantize,
                "compress_state_dict": compress_state_dict,
                "master_weight_bits": master_weight_bits,
                "check_numerics": check_numerics,
                "fused": fused,
            },
        )
        switches = {"amsgrad": amsgrad, "fused": options.pop("fused"), "foreach": foreach}
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize},
            rounding=rounding,
            seed=seed,
            offload_states=offload_states,
            torch_options={**switches, "capturable": capturable, "differentiable": differentiable},
            **options,
        )


class FlashAdam(_AdamFamily):
    """Adam with L2 weight decay (added to the gradient), compressed as :class:`FlashAdamW` is.

    A drop-in for ``torch.optim.Adam``, and for flashoptim's FlashAdam, by position too. Arguments that are not named
    here are those of :class:`FlashAdamW`.

    Args:
        weight_decay: times the weight, added to the gradient.
        *after_weight_decay: as for :class:`FlashAdamW`, without decouple_lr. One alone is refused: it is quantize for
            flashoptim and amsgrad for torch.
        decoupled_weight_decay: True makes it AdamW, as in torch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *after_weight_decay: Any,
        amsgrad: bool = False,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        rounding: Rounding = "stochastic",
        seed: int = 0,
        compress_state_dict: bool = True,
        check_numerics: bool = False,
        offload_states: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        options = with_positional(
            FlashAdam,
            after_weight_decay,
            {
                "quantize": quantize,
                "compress_state_dict": compress_state_dict,
                "master_weight_bits": master_weight_bits,
                "check_numerics": check_numerics,
                "fused": fused,
            },
        )
        switches = {"amsgrad": amsgrad, "fused": options.pop("fused"), "foreach": foreach}
        super().__init__(
            params,
            defaults,
            rounding=rounding,
            seed=seed,
            offload_states=offload_states,
            torch_options={**switches, "capturable": capturable, "differentiable": differentiable},
            **options,
        )

    def _decay_is_decoupled(self, group: Mapping[str, Any]) -> bool:
        return bool(group.get("decoupled_weight_decay", False))
