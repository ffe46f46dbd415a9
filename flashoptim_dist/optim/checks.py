"""What an optimizer refuses, by name and with the way out: options, parameters and gradients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashoptim_dist.formats import MASTER_WEIGHT_BITS, ROUNDINGS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Check the options of ours that stand in ``options``; ``where`` begins the message.

    Raises:
        ValueError: one is out of range.
    """
    bits = options.get("master_weight_bits", 24)
    if isinstance(bits, float) or bits not in MASTER_WEIGHT_BITS:
        raise ValueError(f"{where}master_weight_bits must be 24, 32 or None, got {bits!r}")
    rounding = options.get("rounding", "nearest")
    if rounding not in ROUNDINGS:
        raise ValueError(f"{where}rounding must be one of {ROUNDINGS}, got {rounding!r}")
    for name in ("quantize", "decouple_lr", "compress_state_dict", "check_numerics", "offload_states"):
        check_switch(options, name, where)
    seed = options.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"{where}seed must be an integer >= 0, got {seed!r}")


def check_switch(options: Mapping[str, Any], name: str, where: str) -> None:
    """Check an option that is on or off, where it is there.

    Raises:
        ValueError: it is something else; a word for no would count as yes.
    """
    if not isinstance(options.get(name, True), bool):
        raise ValueError(f"{where}{name} must be True or False, got {options[name]!r}")


def check_one_number(value: Any, name: str) -> None:
    """Check that a tensor holds one number; ``name`` begins the message. Does not wait for a device.

    Raises:
        ValueError: it holds none, or several.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")


def check_number(group: Mapping[str, Any], name: str, where: str) -> None:
    """Check a hyperparameter that is a finite number >= 0.

    Raises:
        TypeError: no number. ValueError: one out of range, or several.
    """
    value = group[name]
    check_one_number(value, f"{where}{name}")
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{where}{name} must be a number or a tensor, got {value!r}")
    if not 0.0 <= float(value) < math.inf:
        raise ValueError(f"{where}{name} must be a finite number >= 0, got {float(value)}")


def check_group_alone(group: Mapping[str, Any], where: str) -> None:
    """Check that a new group holds nothing that only the whole optimizer can have, and no parameter twice.

    Raises:
        ValueError: it does.
    """
    for name in ("check_numerics", "compress_state_dict", "offload_states"):
        if name in group:
            raise ValueError(f"{where}{name} holds for the whole optimizer: give it to the constructor")
    seen: dict[Tensor, int] = {}
    names = group.get("param_names")
    for index, parameter in enumerate(group["params"]):
        if parameter in seen:
            label = f"of shape {tuple(parameter.shape)}" if names is None else repr(names[seen[parameter]])
            raise ValueError(f"{where.removesuffix(': ')} holds parameter {label} twice")
        seen[parameter] = index


def check_torch_options(options: Mapping[str, Any], where: str) -> None:
    """Check torch's own switches, which say how a step runs there.

    ``fused``: None chooses by device, False never takes the Triton kernels, True demands them of CUDA parameters.
    ``foreach`` and ``capturable`` are accepted and change nothing: all tensors of a device are stepped together, and
    the kernels can always be captured.

    Raises:
        ValueError: amsgrad or differentiable, which compressed state cannot serve. RuntimeError: fused and foreach
            both True, as in torch.
    """
    for name in ("fused", "foreach", "capturable", "differentiable"):
        if options.get(name) not in (None, True, False):
            raise ValueError(f"{where}{name} must be True, False or None, got {options[name]!r}")
    if options.get("fused") and options.get("foreach"):
        raise RuntimeError(f"{where}`fused` and `foreach` cannot be `True` together")
    if options.get("amsgrad"):
        raise ValueError(
            f"{where}amsgrad=True is not supported: it keeps a third moment, which has no compressed form here. Use "
            "torch.optim's optimizer for it"
        )
    if options.get("differentiable"):
        raise ValueError(
            f"{where}differentiable=True is not supported: no gradient flows through compressed state. Use "
            "torch.optim's optimizer for it"
        )


def with_positional(optimizer: type, given: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, some of which may have come by position after weight_decay, in flashoptim's order.

    torch.optim's Adam and AdamW have one argument there, amsgrad. So one alone has two meanings, and more have one.

    Args:
        optimizer: whose constructor got them.
        given: those that came by position.
        keywords: all of them as they came by keyword, in flashoptim's order.

    Raises:
        TypeError: one alone, unless it is the default of both; too many; or one that came by keyword too.
    """
    name, names = optimizer.__name__, list(keywords)
    defaults = {option: inspect.signature(optimizer).parameters[option].default for option in names} if given else {}
    if len(given) == 1 and not (given[0] is False and defaults[names[0]] is False):
        raise TypeError(
            f"{name}: the sixth positional argument is amsgrad for torch.optim.{name.removeprefix('Flash')} and "
            f"{names[0]} for flashoptim.{name}. Pass {names[0]}={given[0]!r} by keyword if you mean that; leave "
            "amsgrad out, which is False here"
        )
    if len(given) > len(names):
        raise TypeError(f"{name} takes at most {5 + len(names)} positional arguments, got {5 + len(given)}")
    positional = dict(zip(names, given, strict=False)) if len(given) > 1 else {}
    for twice in (option for option in positional if keywords[option] is not defaults[option]):
        raise TypeError(f"{name} got {twice} by position and by keyword")
    return {**keywords, **positional}


def check_common(group: Mapping[str, Any], where: str) -> None:
    """Check the learning rate, the weight decay and the sign of a group.

    Raises:
        TypeError: no number. ValueError: one is out of range.
    """
    check_number(group, "lr", where)
    check_number(group, "weight_decay", where)
    check_switch(group, "maximize", where)


def check_decoupling(decouples: bool, decay_is_decoupled: bool, initial_lr: float, where: str) -> None:
    """Check that decay can be scaled by lr / initial lr, if it is to be.

    Raises:
        ValueError: it is L2 decay, or the initial learning rate is 0.
    """
    if decouples and not decay_is_decoupled:
        raise ValueError(f"{where}decouple_lr=True is for decoupled weight decay, and this one's is added to gradients")
    if decouples and initial_lr == 0.0:
        raise ValueError(f"{where}decouple_lr=True scales the decay by lr / initial lr, which must not be 0")


def check_betas(group: Mapping[str, Any], where: str) -> None:
    """Check the two decay rates of a group.

    Raises:
        ValueError: they are not two numbers in [0, 1).
    """
    betas = group["betas"]
    pair = hasattr(betas, "__len__") and len(betas) == 2 and not any(isinstance(beta, str) for beta in betas)
    if not pair or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ValueError(f"{where}betas must be two numbers in [0, 1), got {betas}")


def check_parameter(parameter: Tensor, name: str | None) -> None:
    """Check that a parameter can be stepped.

    Raises:
        TypeError: it has another dtype than bf16, fp16 or fp32, or is not strided.
    """
    label = f"parameter {name!r}" if name is not None else f"a parameter of shape {tuple(parameter.shape)}"
    if parameter.dtype not in _DTYPES:
        raise TypeError(
            f"{label} has dtype {parameter.dtype}; this optimizer steps bfloat16, float16 and float32 parameters"
        )
    if parameter.layout != torch.strided:
        raise TypeError(f"{label} has layout {parameter.layout}; only strided parameters can be stepped")


def check_gradient(parameter: Tensor, gradient: Tensor, name: str) -> None:
    """Check that a gradient lies as its parameter does.

    Raises:
        RuntimeError: it is sparse, of another dtype than bf16, fp16 or fp32, of another shape, or no DTensor of the
            parameter's placements where the parameter is one.
    """
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise RuntimeError(
            f"parameter {name!r} {tuple(parameter.shape)} has a sparse gradient; build its embedding with sparse=False"
        )
    if gradient.dtype not in _DTYPES:
        raise RuntimeError(
            f"parameter {name!r} {tuple(parameter.shape)} has a gradient of {gradient.dtype}; the step takes bfloat16, "
            "float16 and float32: cast it before step()"
        )
    if gradient.shape != parameter.shape:
        raise RuntimeError(
            f"parameter {name!r} {tuple(parameter.shape)} has a gradient of shape {tuple(gradient.shape)}, from before "
            "its data was replaced; drop it with zero_grad()"
        )
    if isinstance(parameter, DTensor):
        if not isinstance(gradient, DTensor):
            raise RuntimeError(
                f"parameter {name!r} is a DTensor and its gradient is not; set .grad to a DTensor of its placements"
            )
        if gradient.placements != parameter.placements:
            raise RuntimeError(
                f"parameter {name!r} {tuple(parameter.shape)} has placements {parameter.placements} and its gradient "
                f"{gradient.placements}; call grad.redistribute(placements=parameter.placements) before step()"
            )
