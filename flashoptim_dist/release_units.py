"""What gradient release steps together, and the stream on which it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from flashoptim_dist.formats import canonical_name
from flashoptim_dist.optim.base import FlashOptimizer
from flashoptim_dist.optim.stepper import Subset
from flashoptim_dist.sharding import local_tensor

_KEPT_SUBSETS = 8
"""Sets of parameters of one unit for which plans are kept: experts without tokens make many."""


class Unit:
    """Parameters whose gradients arrive together: those of an FSDP2 unit, or of a layer.

    Args:
        name: of the module, without wrapper prefixes.
        names: name of each parameter; those that an optimizer steps, in the optimizers' order.
        optimizers: the optimizer of each.
    """

    def __init__(self, name: str, names: dict[Tensor, str], optimizers: dict[Tensor, FlashOptimizer]) -> None:
        self.name, self.names, self.optimizers = name, names, optimizers
        self.parameters = tuple(names)
        self._order = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._subsets: dict[tuple[int, ...], list[tuple[FlashOptimizer, Subset]]] = {}

    def subsets(self, collected: Iterable[Tensor]) -> list[tuple[FlashOptimizer, Subset]]:
        """Return what one launch each steps of the collected parameters: one optimizer's on one device."""
        key = tuple(sorted(self._order[parameter] for parameter in collected))
        found = self._subsets.pop(key, None)
        if found is None:
            grouped: dict[tuple[int, torch.device], list[Tensor]] = {}
            for number in key:
                parameter = self.parameters[number]
                place = (id(self.optimizers[parameter]), local_tensor(parameter).device)
                grouped.setdefault(place, []).append(parameter)
            found = [(self.optimizers[chosen[0]], Subset(chosen)) for chosen in grouped.values()]
        self._subsets[key] = found  # the newest last
        if len(self._subsets) > _KEPT_SUBSETS:
            for optimizer, subset in self._subsets.pop(next(iter(self._subsets))):
                optimizer._stepper.forget_plans_of(subset)
        return found


def find_units(parts: Sequence[nn.Module], optimizers: Sequence[FlashOptimizer]) -> list[Unit]:
    """Return the units of all model parts.

    Raises:
        ValueError: the optimizers own no parameter of the parts, or two parts share one. RuntimeError: a parameter is
            released already.
    """
    owners: dict[Tensor, tuple[int, FlashOptimizer]] = {}
    numbers = count()
    for optimizer in optimizers:
        for parameter, _, _, _ in optimizer._named():
            owners.setdefault(parameter, (next(numbers), optimizer))
    members: dict[object, list[tuple[Tensor, str]]] = {}
    unit_names: dict[object, str] = {}
    place: dict[Tensor, int] = {}
    for number, part in enumerate(parts):
        prefix = f"part{number}." if len(parts) > 1 else ""
        modules = dict(part.named_modules())
        for name, parameter in part.named_parameters():
            if parameter not in owners:
                continue
            if parameter in place:
                raise ValueError(
                    f"parameter {name!r} of model part {number} is in part {place[parameter]} too, and so would be "
                    "stepped twice: give each part once, or the module that holds both as one part"
                )
            place[parameter] = number
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                if getattr(hook, "releases_gradient", False):
                    raise RuntimeError(f"gradient release is on already for parameter {name!r}: remove() it first")
            key, unit_name = _unit_of(name, modules)
            key = (number, key)
            unit_names.setdefault(key, prefix + canonical_name(f"{unit_name}.")[:-1])
            members.setdefault(key, []).append((parameter, canonical_name(name)))
    if not members:
        raise ValueError(
            "the optimizers own none of the model's parameters: make them from this model after shard_model, and "
            "switch gradient release on outside of forward and backward, while FSDP2's parameters are sharded"
        )
    units = []
    for key, pairs in members.items():
        pairs.sort(key=lambda pair: owners[pair[0]][0])
        units.append(Unit(unit_names[key], dict(pairs), {p: owners[p][1] for p, _ in pairs}))
    return units


def _unit_of(name: str, modules: dict[str, nn.Module]) -> tuple[object, str]:
    """Return the unit of a parameter, as a key and as a name: its innermost FSDP2 unit, else its layer.

    A layer is the first numbered member of a list (``model.layers.3``), else the module that holds the parameter.
    """
    place = name.rpartition(".")[0]
    inner = place
    while True:
        module = modules[inner]
        if isinstance(module, FSDPModule):
            # Modules that were sharded together share a state, and their gradients arrive together.
            return id(module._get_fsdp_state()), inner
        if not inner:
            break
        inner = inner.rpartition(".")[0]
    steps = place.split(".") if place else []
    for depth, step in enumerate(steps):
        if step.isdecimal():
            return ".".join(steps[: depth + 1]), ".".join(steps[: depth + 1])
    return place, place


def drop_unsharded_gradients(parts: Iterable[nn.Module]) -> None:
    """Drop gradients that FSDP2 has not reduced yet: of a unit in which the backward pass raised, or kept without sync.

    The next pass would add to them: neither ``zero_grad()``, which sees shards, nor ``reset_iter_state()`` of torch
    2.13 takes them away.
    """
    for module in (module for part in parts for module in part.modules()):
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for fsdp_parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            fsdp_parameter.unsharded_accumulated_grad = None
            unsharded = getattr(fsdp_parameter, "_unsharded_param", None)  # made by the first all-gather
            if unsharded is not None:
                unsharded.grad = None


class ReleaseStream:
    """The stream of the steps, and what waits for it. Without CUDA all is in order anyway and nothing waits.

    A gradient's memory belongs to the stream on which it was made (FSDP2's reduce-scatter stream). The steps wait for
    an event there; that stream waits for the end of the step before the memory is given back to it, so that no
    gradient has to be held, or marked for a second stream, any longer.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._roots = [module for part in parts for module in _outermost_fsdp_modules(part)]
        self._parameters = [p for root in self._roots if isinstance(root, nn.Module) for p in root.parameters()]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._makers: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self._done: dict[torch.device, torch.cuda.Event] = {}
        self._versions: list[int] = []

    def gradient_is_ready(self, parameter: Tensor) -> None:
        """Note that the current stream has, up to here, made a gradient that the next steps will read."""
        if _on_cuda(parameter):
            stream = torch.cuda.current_stream()
            self._makers.setdefault(stream, torch.cuda.Event()).record(stream)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Run what is inside on the stream of the steps, between the gradients and whatever reuses their memory."""
        makers, self._makers = self._makers, {}
        if not makers:
            yield
            return
        device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        for event in makers.values():
            # Offloaded gradients are read on the host, and FSDP2 copies them there without waiting.
            event.synchronize() if self._offloaded() else stream.wait_event(event)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            # After an exception too: what was launched before it still reads gradients, and writes weights.
            done = torch.cuda.Event()
            done.record(stream)
            self._done[device] = done
            for maker in {*makers, *self._reduce_streams()}:
                maker.wait_event(done)

    def join(self) -> None:
        """Let the current stream, and FSDP2's next all-gather, wait for the steps so far; nothing else has to.

        Called again after ``optimizer.step()``, which may have stepped more on the current stream.
        """
        for device, done in self._done.items():
            torch.cuda.current_stream(device).wait_event(done)
        if self._done or self._versions:
            event = torch.cuda.current_stream().record_event()
            self._done = {}
            for root in self._roots:
                root.set_post_optim_event(event)
            self._versions = self._current_versions()

    def before_forward(self) -> None:
        """Have FSDP2's all-gather wait for all work so far if weights were written since the steps (an EMA swap)."""
        if self._versions and self._versions != self._current_versions():
            event = torch.cuda.current_stream().record_event()
            for root in self._roots:
                root.set_post_optim_event(event)
        self._versions = []

    def _current_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # which makes attributes of DTensors three times as fast
            locals_ = map(local_tensor, self._parameters)
            return [p._version + local._version for p, local in zip(self._parameters, locals_, strict=True)]

    def _offloaded(self) -> bool:
        return bool(self._parameters) and local_tensor(self._parameters[0]).device.type == "cpu"

    def _reduce_streams(self) -> set[torch.cuda.Stream]:
        """Return the streams to which FSDP2's gradient memory may go back."""
        streams = set()
        for root in self._roots:
            context = root._get_fsdp_state()._comm_ctx
            for name in ("reduce_scatter_stream", "all_reduce_stream"):
                stream = getattr(context, name, None)
                if isinstance(stream, torch.cuda.Stream):
                    streams.add(stream)
        return streams


def _on_cuda(parameter: Tensor) -> bool:
    """Return whether a parameter is trained on a CUDA device; offloaded, its shard lies in host memory."""
    kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
    return kind == "cuda"


def _outermost_fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    if isinstance(module, FSDPModule):
        return [module]
    return [found for child in module.children() for found in _outermost_fsdp_modules(child)]
