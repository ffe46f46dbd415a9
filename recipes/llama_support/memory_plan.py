"""What a run will hold on each GPU, found before there is one: the model lives on the meta device, the ranks are fake.

States and gradients are exact (`memory_report` on the sharded model). What comes and goes within a step is an
estimate: a layer's and the loss's tensors are counted by torch's memory tracker while they run without memory, and
FSDP2's buffers follow from the sizes of its units. The allocator's rounding, NCCL, CUDA's context and the data are not
in it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from flashoptim_dist import cast_model, memory_report, shard_model
from flashoptim_dist.memory import CATEGORIES
from flashoptim_dist.sharding.fsdp import plan_units

from .config import Config
from .errors import BadInput
from .layers import recompute_activations
from .loss import LlamaWithLoss, LossHead
from .model import gradient_sum_dtype, weight_dtype, wrap_layers
from .optimizers import build_optimizer

_COMPUTE = torch.bfloat16
PARTS = ("states", "gradient", "in flight", "activations", "loss")
"""states: all that stays between steps. gradient: this rank's shards. in flight: whole units' gathered weights, their
gradients and the buffers they travel in. activations: what the layers keep, and the one being recomputed. loss: a chunk
of logits and what comes of it."""


@dataclass(frozen=True)
class Moment:
    """Bytes by part at one point of a step; `parts` has a value for each of PARTS."""

    name: str
    parts: tuple[int, ...]

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self.parts)


@dataclass(frozen=True)
class Workspace:
    """Bytes of activations, for one micro-batch on one rank.

    Attributes:
        kept: what a layer keeps from forward to backward: for full recomputation its output, the next layer's input.
        layer: what its backward holds more at its peak, the gradients of its own weights included.
        loss: what the final norm, the head and the loss hold at their peak, the head's gradient not included.
        hidden: a gradient of a layer's input or output.
    """

    kept: int
    layer: int
    loss: int
    hidden: int


@dataclass(frozen=True)
class Units:
    """Elements of FSDP2's units, gathered and padded to whole shards. `embedding` and `head` are 0 within the root."""

    layer: int
    layers: int
    head: int
    embedding: int
    root: int

    @property
    def total(self) -> int:
        """Elements of the whole model."""
        return self.layer * self.layers + self.head + self.embedding + self.root


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank holds.

    Attributes:
        world_size: ranks.
        shards: parts that each parameter is cut into; 0 without FSDP2.
        parameters: of the whole model.
        states: bytes by category of `memory_report`; `gradient` is that without gradient release.
        units: of FSDP2, or as they would be.
        work: activations.
        micro_batches: per rank and step.
        vocabulary: bytes of a gradient of the head, or of the embeddings, as the backward pass makes it.
        sum_bytes: bytes per element of a gradient while it is summed over ranks.
        casts_sums: the sums are cast to another dtype, that of the weights.
    """

    world_size: int
    shards: int
    parameters: int
    states: dict[str, int]
    units: Units
    work: Workspace
    micro_batches: int
    vocabulary: int
    sum_bytes: int
    casts_sums: bool

    def peak(self, *, release: bool) -> Moment:
        """The moment at which the most is held, with or without gradient release."""
        return max(self.moments(release=release), key=lambda moment: moment.total)

    def moments(self, *, release: bool) -> Iterator[Moment]:
        """The points of a step that can be the highest, by how FSDP2 (torch 2.11 to 2.13) gathers, reduces and frees.

        A unit's weights are gathered into one buffer and copied out of it; the next unit's buffer is filled meanwhile.
        Its gradient is copied, in the dtype of the sum over ranks, into a buffer that lives until the next unit's is
        made. The root unit is gathered from the first to the last. Without FSDP2 each gradient is made in its place.
        """
        units, work, sharded = self.units, self.work, self.shards > 0
        compute, buffer = _COMPUTE.itemsize * sharded, _COMPUTE.itemsize * (self.shards > 1)
        held = sum(self.states.values()) - self.states["gradient"]

        def gradient(done: int, newest: int) -> int:
            """Shards: `done` elements have theirs in this backward pass; release keeps the newest of them.

            All have one where earlier micro-batches left it, release or not, until this pass has come by.
            """
            left = (newest if release else done) + (units.total - done if self.micro_batches > 1 else 0)
            return round(self.states["gradient"] * left / units.total)

        def out(unit: int) -> int:
            """A unit's gradient on its way to the shards: the buffer, and this rank's sum where it is cast after."""
            return round(self.sum_bytes * unit * (1 + self.casts_sums / self.shards)) if sharded else 0

        root = compute * units.root
        # With embeddings and head in the root unit, the head's gradient waits from the loss to the end.
        waiting = 0 if units.head else self.vocabulary
        kept = work.kept * units.layers
        flying = root + (compute + buffer) * units.head + self.vocabulary
        yield Moment("loss", (held, gradient(0, 0), flying, kept, work.loss))
        if units.head and sharded:
            flying = root + self.vocabulary + out(units.head) + buffer * units.layer
            yield Moment("backward of the head", (held, gradient(units.head, units.head), flying, kept, work.hidden))
        for index in range(units.layers - 1, -1, -1):
            before = units.head if index == units.layers - 1 else units.layer
            done = units.head + units.layer * (units.layers - 1 - index)
            following = units.layer if index else units.embedding
            flying = root + waiting + compute * units.layer + buffer * following + out(before)
            activations = work.kept * (index + 1) + work.layer
            yield Moment(f"backward of layer {index}", (held, gradient(done, before), flying, activations, 0))
        done = units.head + units.layer * units.layers
        if units.embedding and sharded:
            gathered = compute * units.embedding + out(units.layer)
            flying = root + waiting + self.vocabulary + max(gathered, out(units.embedding))
            yield Moment("backward of the embeddings", (held, gradient(done, units.layer), flying, work.hidden, 0))
        done += units.embedding
        newest = units.embedding or units.layer
        flying = root + waiting + max((0 if units.embedding else self.vocabulary) + out(units.layer), out(units.root))
        yield Moment("end of the backward pass", (held, gradient(done, newest), flying, 0, 0))
        yield Moment("optimizer step", (held, gradient(units.total, units.root), 0, 0, 0))


def plan_memory(
    config: Config, llama_config: LlamaConfig, world_size: int, *, rank: int = 0, root_holds_embeddings: bool = False
) -> MemoryPlan:
    """Predict what a rank of a run on `world_size` GPUs holds. No process group may exist; nothing communicates.

    Args:
        config: options of the run.
        llama_config: the model.
        world_size: number of ranks. One rank with flash_adamw has neither mesh nor gathered weights.
        rank: whose bytes; rank 0 holds the most wherever rows do not divide.
        root_holds_embeddings: units as plain FSDP2 recipes make them, with embeddings and head in the root unit, and
            FSDP2 on one rank too. For comparisons with such.

    Raises:
        BadInput: `--replicate` does not divide the number of ranks.
    """
    if world_size % config.replicate:
        raise BadInput(f"--replicate {config.replicate} does not divide {world_size} ranks; give a divisor")
    share = -(-config.global_batch // world_size)
    micro_batch = min(config.micro_batch, share)
    needs_mesh = world_size > 1 or config.optimizer != "flash_adamw" or root_holds_embeddings
    shards = world_size // config.replicate if needs_mesh else 0
    sums = gradient_sum_dtype(config, world_size, _COMPUTE)
    with fake_rank(rank, world_size):
        with torch.device("meta"):
            model = LlamaWithLoss(llama_config)
        cast_model(model, weight_dtype(config))
        wrap_layers(model, config)
        units = _units(model, max(1, shards), root_holds_embeddings)
        if needs_mesh:
            mesh = _mesh(rank, world_size, config.replicate)
            shard_model(model, mesh, param_dtype=_COMPUTE, reduce_dtype=sums)
        report = memory_report(model, build_optimizer(config, model))
    return MemoryPlan(
        world_size,
        shards,
        report.parameters,
        {name: report.row(name).bytes_by_rank[rank] for name in CATEGORIES},
        units,
        measure_workspace(config, llama_config, micro_batch),
        -(-share // micro_batch),
        llama_config.vocab_size * llama_config.hidden_size * _COMPUTE.itemsize,
        sums.itemsize,
        sums != weight_dtype(config),
    )


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a world whose other ranks do not exist and which sends nothing: torch's fake process group."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mesh(rank: int, world_size: int, replicas: int) -> DeviceMesh:
    # DTensor's caches know meshes by their sizes and names, and would give a later rank of this process the coordinate
    # of an earlier one.
    names = ("dp_replicate", f"dp_shard_of_rank_{rank}")
    if replicas == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=names[1:])
    return init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=names)


def _units(model: LlamaWithLoss, shards: int, root_holds_embeddings: bool) -> Units:
    def padded(module: nn.Module) -> int:
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        return sum(-(-shape[0] // shards) * shards * math.prod(shape[1:]) for shape in shapes)

    sizes = {unit.name: padded(unit.module) for unit in plan_units(model)}
    layers = [size for name, size in sizes.items() if name.startswith("model.layers.")]
    head, embedding = (sizes.get(name, 0) for name in ("lm_head", "model.embed_tokens"))  # tied: in the root unit
    if root_holds_embeddings:
        head = embedding = 0
    return Units(max(layers), len(layers), head, embedding, padded(model) - sum(layers) - head - embedding)


def measure_workspace(config: Config, llama_config: LlamaConfig, sequences: int) -> Workspace:
    """Count what a layer and the loss hold for a micro-batch, by running them without memory under torch's tracker."""
    width, length = llama_config.hidden_size, config.sequence_length
    llama_config._attn_implementation = "sdpa"
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(_COMPUTE)
    try:
        with FakeTensorMode():
            hidden = torch.zeros(sequences, length, width, requires_grad=True)
            assert llama_config.head_dim is not None
            angles = torch.zeros(sequences, length, llama_config.head_dim)
            layer = recompute_activations(LlamaDecoderLayer(llama_config, 0), config.activation_checkpointing)
            kept, peak = _track(layer, (hidden, angles), lambda: layer(hidden, position_embeddings=(angles, angles)))
            head = nn.ModuleList(
                [LlamaRMSNorm(width), LossHead(width, llama_config.vocab_size, bias=False, dtype=_COMPUTE)]
            )
            labels = torch.zeros(sequences, length, dtype=torch.int64)
            _, loss = _track(head, (hidden, labels), lambda: head[1](head[0](hidden), labels))
    finally:
        torch.set_default_dtype(dtype)
    size = sequences * length * width * _COMPUTE.itemsize
    return Workspace(kept, peak - kept, loss - llama_config.vocab_size * width * _COMPUTE.itemsize, size)


def _track(module: nn.Module, given: tuple[Tensor, ...], forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes beside the weights and what is given after a forward pass, and at the peak of forward and backward."""
    tracker = MemTracker()
    tracker.track_external(module, *given)
    with tracker:
        result = forward()
        kept = tracker.get_tracker_snapshot("current")
        result.backward(torch.empty_like(result))
    there = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *module.parameters()))
    device = torch.device("cpu")
    after, most = (snapshot[device]["Total"] - there for snapshot in (kept, tracker.get_tracker_snapshot("peak")))
    return after, most
