"""Cast a model to a 16-bit dtype, and keep what must stay in fp32 working in its midst."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from flashoptim_dist.formats import canonical_name

logger = logging.getLogger(__name__)

CAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Floating dtypes that stand for themselves. fp8 and the like stand for a value only with a scale kept elsewhere."""


def cast_model(model: nn.Module, dtype: torch.dtype = torch.bfloat16, keep_fp32: Sequence[str] = ()) -> nn.Module:
    """Cast parameters and floating buffers to ``dtype`` in place, except what has to stay in fp32; return the model.

    Kept in (or brought to) fp32 are

    - modules that a pattern names, with everything below them;
    - BatchNorm-like layers (all BatchNorm and InstanceNorm classes of torch, and any module with buffers
      ``running_mean`` and ``running_var``);
    - modules that own a parameter tied to one of those: a tied parameter stays one tensor, of one dtype.

    In forward a module kept in fp32 gets its 16-bit floating inputs as fp32, positional and keyword ones, and gives
    its fp32 outputs back as ``dtype``, so that the modules around it see what a cast module would give them.

    Rotary frequencies (any buffer or parameter whose name ends in ``inv_freq``), integers, booleans, complex and fp8
    tensors stay as they are. Parameters remain the same objects, tied ones tied; an existing gradient is cast along.
    Meta tensors work. A second call with the same arguments changes nothing.

    Call it before ``shard_model`` and on every rank alike; it does not communicate.

    Args:
        model: the model. Parameters may be DTensors of tensor parallelism.
        dtype: ``torch.bfloat16``, ``torch.float16``, or ``torch.float32`` (then nothing is special).
        keep_fp32: fnmatch patterns on names of modules as ``named_modules`` gives them, without the prefixes that
            wrappers put in. ``*`` matches dots too: ``"*norm"`` is every module whose name ends in ``norm``.

    Raises:
        ValueError: another dtype; a pattern that matches no module; a parameter that is not materialized yet; a model
            that FSDP2 has sharded already and that this would change.
    """
    if dtype not in CAST_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(str(d) for d in CAST_DTYPES)}, got {dtype}")
    patterns = (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"keep_fp32 takes patterns on the names of modules, not a {type(pattern).__name__}")
    named = _select(model, patterns)
    batch_norms = {module for module in model.modules() if is_batch_norm(module)}
    kept = _close_over_ties(model, named | batch_norms) if dtype != torch.float32 else set()
    targets = _target_dtypes(model, dtype, kept)
    _check_can_change(model, targets)

    for parameter, target in targets.items():
        _cast_parameter(parameter, target)
    _cast_buffers(model, dtype, kept)
    roots = set(_outermost_with_forward(model, kept))
    for module in model.modules():
        _hook(module, dtype if module in roots else None)
    _log(model, dtype)
    return model


def modules_kept_in_fp32(model: nn.Module) -> list[nn.Module]:
    """Return the modules that :func:`cast_model` kept in fp32, the outermost ones, in the order of the model."""
    return [module for module in model.modules() if _hooks_of(module)]


def set_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Make modules kept in fp32 give their outputs as ``dtype``: for a mixed-precision policy that computes in another
    dtype than the parameters have.
    """
    for module in model.modules():
        for hook in _hooks_of(module):
            if isinstance(hook, _OutputsToDtype):
                hook.compute_dtype = dtype


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm or InstanceNorm of torch, or keeps the same running statistics."""
    return isinstance(module, _NormBase) or {"running_mean", "running_var"} <= module._buffers.keys()


# ---------------------------------------------------------------------- which


def _select(model: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    # The dot: a wrapper's prefix ends in one, and the wrapped module's own name is nothing but that prefix.
    names = [(canonical_name(f"{name}.")[:-1], module) for name, module in model.named_modules(remove_duplicate=False)]
    selected: set[nn.Module] = set()
    for pattern in patterns:
        matches = {module for name, module in names if fnmatchcase(name, pattern)}
        if not matches:
            raise ValueError(f"keep_fp32: pattern {pattern!r} matches no module of {_hint(model, pattern, names)}")
        selected |= matches
    return selected


def _hint(model: nn.Module, pattern: str, names: Iterable[tuple[str, nn.Module]]) -> str:
    hint = type(model).__name__
    for name, _ in model.named_parameters(remove_duplicate=False):
        if fnmatchcase(canonical_name(name), pattern):
            owner = canonical_name(name).rpartition(".")[0]
            return f"{hint}; it matches the parameter {canonical_name(name)!r}: name its module, {owner!r}"
    close = difflib.get_close_matches(pattern, sorted({name for name, _ in names}), n=3, cutoff=0.5)
    if close:
        hint += f"; close names: {', '.join(repr(name) for name in close)}"
    return hint + " (patterns are matched against whole names, as in model.named_modules(): '*.norm', not 'norm')"


def _close_over_ties(model: nn.Module, kept: set[nn.Module]) -> set[nn.Module]:
    """Add the submodules of kept modules, and the owners of parameters that kept modules own as well."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for _, parameter in _castable(module._parameters):
            owners.setdefault(parameter, []).append(module)
    closed: set[nn.Module] = set()
    pending = list(kept)
    while pending:
        module = pending.pop()
        if module in closed:
            continue
        closed.add(module)
        pending.extend(module.children())
        for _, parameter in _castable(module._parameters):
            pending.extend(owners[parameter])
    return closed


def _outermost_with_forward(model: nn.Module, kept: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules whose calls have to be wrapped. A ModuleList is never called: its members are."""
    pending, seen = [model], set()
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        if module in kept and type(module).forward is not nn.Module.forward:
            yield module
        else:
            pending.extend(module.children())


# ---------------------------------------------------------------------- casting


def _castable(entries: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in entries.items():
        if tensor is not None and tensor.dtype in _CASTABLE and not name.endswith("inv_freq"):
            yield name, tensor


def _target_dtypes(model: nn.Module, dtype: torch.dtype, kept: set[nn.Module]) -> dict[Tensor, torch.dtype]:
    """Return the dtype that every parameter to cast shall have."""
    targets: dict[Tensor, torch.dtype] = {}
    for module in model.modules():
        for name, parameter in _castable(module._parameters):
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter {name!r} of {type(module).__name__} has no shape yet: run one batch through the model "
                    "before cast_model"
                )
            targets[parameter] = torch.float32 if module in kept else dtype
    return targets


def _check_can_change(model: nn.Module, targets: dict[Tensor, torch.dtype]) -> None:
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for name, parameter in model.named_parameters():
        if targets.get(parameter, parameter.dtype) != parameter.dtype:
            raise ValueError(
                f"parameter {canonical_name(name)!r} is sharded by FSDP2 as {parameter.dtype} and would become "
                f"{targets[parameter]}: call cast_model before shard_model"
            )


@torch.no_grad()
def _cast_parameter(parameter: Tensor, dtype: torch.dtype) -> None:
    """Cast in place, so that every module and optimizer that holds the parameter sees it."""
    if parameter.dtype == dtype:
        return
    gradient, parameter.grad = parameter.grad, None
    if type(parameter) is nn.Parameter:
        parameter.data = parameter.data.to(dtype)
    else:  # DTensors and other subclasses have no data of their own to exchange
        cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, cast)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


@torch.no_grad()
def _cast_buffers(model: nn.Module, dtype: torch.dtype, kept: set[nn.Module]) -> None:
    """Cast buffers. One that several modules share stays shared among those of one dtype."""
    done: dict[tuple[Tensor, torch.dtype], Tensor] = {}
    for module in model.modules():
        target = torch.float32 if module in kept else dtype
        for name, buffer in list(_castable(module._buffers)):
            if buffer.dtype != target:
                if (buffer, target) not in done:
                    done[buffer, target] = buffer.to(target)
                module._buffers[name] = done[buffer, target]


def _log(model: nn.Module, dtype: torch.dtype) -> None:
    counts: dict[torch.dtype, int] = {}
    for name, parameter in model.named_parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
        if parameter.dtype != dtype:
            logger.debug("kept %s in %s", canonical_name(name), parameter.dtype)
    summary = ", ".join(f"{count:,} in {kind}" for kind, count in counts.items())
    logger.info("cast to %s: parameters now %s", dtype, summary)


# ---------------------------------------------------------------------- forward


class _InputsToFloat32:
    """Forward pre-hook: 16-bit floating tensors among the arguments become fp32. A class, so that models pickle."""

    handle: RemovableHandle

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tree_map(self._cast, args), tree_map(self._cast, kwargs)

    @staticmethod
    def _cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            return value.to(torch.float32)
        return value


class _OutputsToDtype:
    """Forward hook: fp32 tensors among the outputs become the dtype that the model around the module computes in."""

    handle: RemovableHandle

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.compute_dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(self._cast, output)

    def _cast(self, value: Any) -> Any:
        return value.to(self.compute_dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _hooks_of(module: nn.Module) -> list[_InputsToFloat32 | _OutputsToDtype]:
    # Looked up where torch keeps them, and nowhere else: copies of a model carry copies of its hooks.
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, _InputsToFloat32 | _OutputsToDtype)]


def _hook(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Leave the module with the hooks for this dtype, once, or with none."""
    existing = _hooks_of(module)
    if dtype is not None and any(isinstance(hook, _OutputsToDtype) and hook.dtype == dtype for hook in existing):
        return
    for hook in existing:
        hook.handle.remove()
    if dtype is not None:
        before, after = _InputsToFloat32(), _OutputsToDtype(dtype)
        before.handle = module.register_forward_pre_hook(before, with_kwargs=True)
        after.handle = module.register_forward_hook(after)
