"""Shard a model with FSDP2: which modules become units of their own, and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from flashoptim_dist.casting import is_batch_norm, modules_kept_in_fp32, set_compute_dtype
from flashoptim_dist.formats import canonical_name
from flashoptim_dist.sharding.layout import ShardingError

logger = logging.getLogger(__name__)

_WRAPPER_CHILDREN = ("_checkpoint_wrapped_module", "_orig_mod")
_SIMILAR_BLOCK = 0.25
"""A second list of modules counts as layers too (an encoder beside a decoder) if its members are this large, relative
to those of the largest list."""


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    layers: Iterable[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Apply FSDP2's ``fully_shard`` to a model in place, unit by unit, and return it. All ranks must call.

    Units of their own are the layers; the embeddings and the head, which the root unit would otherwise hold together
    at the loss; and modules kept in fp32 by ``cast_model``, since FSDP2 wants one original dtype per unit. Where
    dtypes still meet in a unit, the modules of the rarer dtype become units too. All the rest is the root unit, with
    whatever modules share: tied embeddings are there, once, gathered from the first use to the last.

    Call order: ``cast_model``, activation checkpointing, ``shard_model``, then the optimizer. Meta tensors work.
    FSDP2 averages gradients over all ranks of the mesh. Parameters are sharded outside forward and backward, also
    those of the root unit, unless ``reshard_after_forward`` is False.

    Args:
        model: the model, not sharded yet. Parameters may be DTensors of tensor parallelism on another dimension of the
            mesh that ``mesh`` is a part of.
        mesh: one dimension: parameters are cut into as many shards (FSDP). Two: shards along the second dimension,
            replicas along the first (HSDP); the dimensions have to be named.
        layers: the repeated blocks. Default: modules of the classes that Hugging Face models name in
            ``_no_split_modules``, else the members of the ModuleLists (or ModuleDicts) of the largest repeated block.
        param_dtype: dtype to compute in; None: each parameter's own. Modules kept in fp32, and BatchNorm-like layers,
            compute in fp32 all the same.
        reduce_dtype: dtype in which gradients are summed over ranks, and in which they accumulate between
            synchronizations; the gradient of a parameter then has the parameter's dtype. None: the compute dtype.
        reshard_after_forward: free the gathered weights after forward and gather them again in backward.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards in host memory.

    Raises:
        ShardingError (a ValueError): a 0-dimensional parameter, or one module that owns trainable parameters of two
            dtypes; named, with the way out. Nothing is changed then.
        ValueError: a mesh of other than one or two dimensions, a layer that is not in the model or is never called, a
            model that is sharded already.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} dimensions: FSDP needs one, HSDP two (pass a submesh, mesh['dp'])")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("the dimensions of an HSDP mesh need names: mesh_dim_names=('dp_replicate', 'dp_shard')")
    plan = plan_units(model, layers=layers, fp32_batch_norms=param_dtype is not None)

    def shard(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload_policy or OffloadPolicy(),
        )

    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    fp32_policy = policy
    if param_dtype is not None:
        fp32_policy = MixedPrecisionPolicy(torch.float32, reduce_dtype, output_dtype=param_dtype)
        set_compute_dtype(model, param_dtype)
    for unit in plan:
        shard(unit.module, fp32_policy if unit.fp32 else policy)
    shard(model, policy)
    return model


@dataclass(frozen=True)
class Unit:
    """A module that becomes an FSDP2 unit of its own."""

    name: str
    module: nn.Module
    why: str
    fp32: bool
    """Computes in fp32 whatever the compute dtype of the others."""


def plan_units(
    model: nn.Module, *, layers: Iterable[nn.Module] | None = None, fp32_batch_norms: bool = False
) -> list[Unit]:
    """Return the units that :func:`shard_model` makes, innermost first, without the root; raise what it raises."""
    tree = _Tree(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("the model is sharded by FSDP2 already: call shard_model once, on the whole model")
    tree.check_dimensions()

    chosen = _check_layers(tree, layers) if layers is not None else _find_layers(tree)
    reasons: dict[nn.Module, str] = {}
    for module in modules_kept_in_fp32(model):
        reasons.setdefault(module, "fp32")
    if fp32_batch_norms:
        for module in filter(is_batch_norm, model.modules()):
            reasons.setdefault(module, "fp32")
    fp32 = set(reasons)
    for module in chosen:
        reasons.setdefault(module, "layer")
    for module in _find_embeddings_and_head(tree, chosen):
        reasons.setdefault(module, "embedding or head")
    units = {}
    for module, why in reasons.items():
        if module is model or not tree.parameters_of(module):
            continue
        shared = tree.shared_with_outside(module)
        if shared is None:
            units[module] = why
        elif why == "layer":
            logger.warning("layer %s shares %s: both are left to the unit around them", tree.name(module), shared)
    _split_by_dtype(tree, units, fp32)
    plan = [Unit(tree.name(module), module, why, module in fp32) for module, why in units.items()]
    return sorted(plan, key=lambda unit: -tree.depth(unit.module))


# ---------------------------------------------------------------------- the module tree


class _Tree:
    """The modules and parameters of a model under all names they have, those of shared and tied ones included."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._module_names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._module_names.setdefault(module, []).append(name)
        self._by_name = {name: module for module, names in self._module_names.items() for name in names}
        self._parameter_names: dict[Tensor, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameter_names.setdefault(parameter, []).append(name)

    def name(self, module: nn.Module) -> str:
        return canonical_name(f"{self._module_names[module][0]}.")[:-1]

    def parameter_name(self, parameter: Tensor) -> str:
        return canonical_name(self._parameter_names[parameter][0])

    def depth(self, module: nn.Module) -> int:
        """Depth of the module; where it has several places, the deepest."""
        return max(name.count(".") + bool(name) for name in self._module_names[module])

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._module_names

    def parameters_of(self, module: nn.Module) -> list[Tensor]:
        return list(module.parameters())

    def outermost_wrapper(self, module: nn.Module) -> nn.Module:
        """Return the checkpointing or compile wrapper around a module: FSDP2 goes around it, so that gathering is not
        part of what is recomputed or compiled.
        """
        name = self._module_names[module][0]
        while name.rpartition(".")[2] in _WRAPPER_CHILDREN:
            name = name.rpartition(".")[0]
        return self._by_name[name]

    def owner(self, parameter: Tensor) -> nn.Module:
        """Return the module in whose forward a parameter is used: the one that holds it, or holds its ParameterList."""
        module = self._by_name[self._parameter_names[parameter][0].rpartition(".")[0]]
        return module if has_forward(module) else next(self.ancestors(module))

    def ancestors(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules with a forward around a module, from the inside out."""
        name = self._module_names[module][0]
        while name:
            name = name.rpartition(".")[0]
            if has_forward(self._by_name[name]):
                yield self._by_name[name]
        if not has_forward(self.model):
            yield self.model

    def shared_with_outside(self, module: nn.Module) -> str | None:
        """Return the name of a parameter of the module that the model also reaches by another way, or None."""
        prefixes = tuple(f"{name}." if name else "" for name in self._module_names[module])
        for parameter in module.parameters():
            for name in self._parameter_names[parameter]:
                if not name.startswith(prefixes):
                    return f"{self.parameter_name(parameter)} with {canonical_name(name)}"
        return None

    def has_several_places(self, parameter: Tensor) -> bool:
        return len(self._parameter_names[parameter]) > 1

    def check_dimensions(self) -> None:
        for parameter in self._parameter_names:
            if parameter.ndim == 0:
                raise ShardingError(
                    f"parameter {self.parameter_name(parameter)!r} has no dimensions, and FSDP2 shards dimension 0: "
                    "give it one, nn.Parameter(value.reshape(1)), or make it a buffer if it is not trained"
                )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; ModuleList, ModuleDict and ParameterList cannot."""
    return type(module).forward is not nn.Module.forward


# ---------------------------------------------------------------------- layers, embeddings, head


def _check_layers(tree: _Tree, layers: Iterable[nn.Module]) -> list[nn.Module]:
    chosen = list(layers)
    for index, layer in enumerate(chosen):
        if layer not in tree:
            raise ValueError(f"layers: number {index}, a {type(layer).__name__}, is not a module of the model")
        if not has_forward(layer):
            raise ValueError(
                f"layers: {tree.name(layer)!r} is a {type(layer).__name__}, which is never called: pass its members"
            )
    return [tree.outermost_wrapper(layer) for layer in chosen]


def _find_layers(tree: _Tree) -> list[nn.Module]:
    names: set[str] = set()
    for module in tree.model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    found = [module for module in tree.model.modules() if type(module).__name__ in names and module is not tree.model]
    if found:
        return [tree.outermost_wrapper(module) for module in found]
    blocks = [list(_members(container)) for container in _outermost_containers(tree.model)]
    sizes = [sum(_size(member) for member in block) / max(1, len(block)) for block in blocks]
    totals = [size * len(block) for size, block in zip(sizes, blocks)]
    if not any(totals):
        return []
    largest = sizes[totals.index(max(totals))]
    return [member for block, size in zip(blocks, sizes) if size >= _SIMILAR_BLOCK * largest for member in block]


def _outermost_containers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in _members(child)):
            yield child
        else:
            yield from _outermost_containers(child)


def _members(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks among a container's members: modules with parts of their own, that can be called."""
    for member in container.children():
        if has_forward(member) and any(True for _ in member.children()):
            yield member


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _find_embeddings_and_head(tree: _Tree, layers: list[nn.Module]) -> list[nn.Module]:
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in tree.model.modules() if module not in inside]
    embeddings = [module for module in outside if isinstance(module, nn.Embedding)]
    vocabularies = {module.num_embeddings for module in embeddings}
    # A subclass of Linear may exist to be used without being called (nn.MultiheadAttention's), so none is taken.
    heads: list[nn.Module]
    heads = [module for module in outside if type(module) is nn.Linear and module.out_features in vocabularies]
    for module in outside:
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        if isinstance(head, nn.Module) and head in tree and head not in inside:
            heads.append(head)
    return [tree.outermost_wrapper(module) for module in (*embeddings, *heads)]


# ---------------------------------------------------------------------- one original dtype per unit


def _split_by_dtype(tree: _Tree, units: dict[nn.Module, str], fp32: set[nn.Module]) -> None:
    """Add units until each, the root included, has trainable parameters of one dtype."""
    pending = [tree.model, *units]
    while pending:
        unit = pending.pop()
        managed = _managed(unit, units)
        if len({parameter.dtype for parameter in managed}) < 2:
            continue
        main = _main_dtype(tree, unit, managed)
        for parameter in managed:
            if parameter.dtype == main:
                continue
            module = _largest_of_one_dtype(tree, tree.owner(parameter), unit, set(managed))
            if module not in units:
                units[module] = f"{parameter.dtype} in a unit of {main}"
                pending.append(module)
                if parameter.dtype == torch.float32:
                    fp32.add(module)


def _managed(unit: nn.Module, units: dict[nn.Module, str]) -> list[Tensor]:
    """Return the trainable parameters that FSDP2 gives to a unit: all below it that no inner unit has taken."""
    parameters: dict[Tensor, None] = {}
    pending, seen = [unit], {unit}
    while pending:
        module = pending.pop()
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:  # FSDP2 lets frozen ones differ
                parameters[parameter] = None
        for child in module.children():
            if child not in seen and child not in units:
                seen.add(child)
                pending.append(child)
    return list(parameters)


def _main_dtype(tree: _Tree, unit: nn.Module, managed: list[Tensor]) -> torch.dtype:
    """Return the dtype that a mixed unit keeps: of what can't leave it, else of most of its elements."""
    fixed: dict[torch.dtype, Tensor] = {}
    for parameter in managed:
        if tree.owner(parameter) is unit or tree.has_several_places(parameter):
            fixed.setdefault(parameter.dtype, parameter)
    if len(fixed) > 1:
        (first, one), (second, other) = list(fixed.items())[:2]
        place = f"module {tree.name(unit)!r} ({type(unit).__name__})" if tree.name(unit) else type(unit).__name__
        raise ShardingError(
            f"{place} owns parameter {tree.parameter_name(one)!r} of {first}, shape {tuple(one.shape)}, and "
            f"{tree.parameter_name(other)!r} of {second}, shape {tuple(other.shape)}; FSDP2 needs one dtype per unit. "
            f"Keep the whole module in fp32, cast_model(model, keep_fp32=[{tree.name(unit)!r}]), or move one of the "
            "two into a submodule with a forward of its own"
        )
    if fixed:
        return next(iter(fixed))
    elements: Counter[torch.dtype] = Counter()
    for parameter in managed:
        elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0]


def _largest_of_one_dtype(tree: _Tree, owner: nn.Module, unit: nn.Module, managed: set[Tensor]) -> nn.Module:
    """Return the outermost module between an owner and its unit whose managed parameters have one dtype."""
    best = owner
    for module in tree.ancestors(owner):
        mine = [parameter for parameter in module.parameters() if parameter in managed]
        if module is unit or len({parameter.dtype for parameter in mine}) > 1 or tree.shared_with_outside(module):
            break
        best = module
    return best
