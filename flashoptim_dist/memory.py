"""What a model and its optimizer hold in memory, per parameter, per rank and in all; also before any of it exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flashoptim_dist.optim import FlashOptimizer
from flashoptim_dist.optim.state import ERROR_BITS, SCALE_SUFFIX, STEP, bytes_per_entry
from flashoptim_dist.sharding import local_tensor

CATEGORIES = ("weight", "correction", "moments", "scales", "gradient", "others")
"""``others``: step counters, state entries of other optimizers under other names, and the model's buffers."""

_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta", "grad_avg"}
)
_STEP_BYTES = 4
_RANKS_SHOWN = 8


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryReport:
    """Count the bytes of weights, optimizer state and gradients. All ranks must call, between steps.

    Every rank counts its own shards; where torch.distributed is initialized with more than one rank, one all-reduce of
    a small integer tensor (on the GPU with NCCL) brings the counts together, and every rank returns the same figures.

    What does not exist yet is predicted, and said to be: state as the optimizer will make it (FlashOptimizer and its
    subclasses by their own rules; Adam, AdamW and SGD of torch), a gradient in its parameter's dtype, and all that is
    on the meta device. So the report is right before the first step, and for a model that was never given memory. Of
    other optimizers only what exists is counted.

    Bytes are elements held times bytes per element: without FSDP2's padding of uneven shards, gathered weights,
    activations and the allocator's rounding. A tied parameter counts once, a frozen one has weight alone.

    Args:
        model: the model; FSDP2 units that are still gathered (after an evaluation) are resharded.
        optimizer: its optimizer. Parameters of one that the other lacks are counted too.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else the gathered weights would stand here for the shards
    held = dict.fromkeys(CATEGORIES, 0)
    predicted = dict.fromkeys(CATEGORIES, 0)

    def count(category: str, tensor: Tensor) -> None:
        counts = predicted if local_tensor(tensor).is_meta else held
        counts[category] += _bytes(tensor)

    parameters = elements = 0
    in_optimizer = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter in dict.fromkeys([*in_optimizer, *model.parameters()]):
        parameters += parameter.numel()
        elements += local_tensor(parameter).numel()
        count("weight", parameter)
        if parameter.grad is not None:
            count("gradient", parameter.grad)
        elif parameter.requires_grad:
            predicted["gradient"] += _bytes(parameter)
        state = optimizer.state.get(parameter)
        if state:
            for name, value in state.items():
                if isinstance(value, Tensor):
                    count(_category(name), value)
        elif parameter in in_optimizer and parameter.requires_grad:
            for name, size in _predict_state(optimizer, in_optimizer[parameter], parameter):
                predicted[_category(name)] += size
    for buffer in model.buffers():
        count("others", buffer)

    own = [elements, *held.values(), *predicted.values()]
    by_rank = _gather(own)
    middle = 1 + len(CATEGORIES)
    rows = tuple(
        MemoryRow(name, tuple(r[1 + i] + r[middle + i] for r in by_rank), tuple(r[middle + i] for r in by_rank))
        for i, name in enumerate(CATEGORIES)
    )
    rank = dist.get_rank() if len(by_rank) > 1 else 0
    return MemoryReport(type(optimizer).__name__, parameters, rank, tuple(r[0] for r in by_rank), rows)


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one category. ``predicted_by_rank`` is the part of ``bytes_by_rank`` that does not exist yet."""

    category: str
    bytes_by_rank: tuple[int, ...]
    predicted_by_rank: tuple[int, ...]

    @property
    def all_ranks(self) -> int:
        """Bytes of all ranks together."""
        return sum(self.bytes_by_rank)

    @property
    def predicted(self) -> int:
        """Bytes of all ranks together that do not exist yet."""
        return sum(self.predicted_by_rank)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by category and rank; ``str()`` is a table.

    Attributes:
        optimizer: class of the optimizer.
        parameters: elements of all parameters of the whole model, whatever the number of ranks.
        rank: the rank that holds this report.
        elements_by_rank: parameter elements that each rank holds; with replicas their sum is more than ``parameters``.
        rows: one for each of ``CATEGORIES``, in their order.
    """

    optimizer: str
    parameters: int
    rank: int
    elements_by_rank: tuple[int, ...]
    rows: tuple[MemoryRow, ...]

    def row(self, category: str) -> MemoryRow:
        """Return the row of one of ``CATEGORIES``."""
        return self.rows[CATEGORIES.index(category)]

    @property
    def total(self) -> MemoryRow:
        """The sum over categories."""
        ranks = range(len(self.elements_by_rank))
        held = tuple(sum(row.bytes_by_rank[rank] for row in self.rows) for rank in ranks)
        return MemoryRow("total", held, tuple(sum(row.predicted_by_rank[rank] for row in self.rows) for rank in ranks))

    def per_parameter(self, category: str) -> float:
        """Return bytes per parameter of a category or of the ``"total"``: of a shard, so that replicas don't count."""
        row = self.total if category == "total" else self.row(category)
        return row.all_ranks / max(1, sum(self.elements_by_rank))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data (JSON-serializable)."""
        table = {
            row.category: {
                "bytes_per_parameter": self.per_parameter(row.category),
                "this_rank": row.bytes_by_rank[self.rank],
                "all_ranks": row.all_ranks,
                "by_rank": list(row.bytes_by_rank),
                "predicted": row.predicted,
            }
            for row in (*self.rows, self.total)
        }
        return {
            "optimizer": self.optimizer,
            "parameters": self.parameters,
            "rank": self.rank,
            "world_size": len(self.elements_by_rank),
            "elements_by_rank": list(self.elements_by_rank),
            "bytes": table,
        }

    def __str__(self) -> str:
        world_size = len(self.elements_by_rank)
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        lines = [
            f"Memory of {self.parameters:,} parameters with {self.optimizer}, {ranks}",
            f"{'':<12}{'bytes/param':>12}{f'rank {self.rank}':>14}{'all ranks':>14}",
        ]
        for row in (*self.rows, self.total):
            own, everywhere = _readable(row.bytes_by_rank[self.rank]), _readable(row.all_ranks)
            lines.append(f"{row.category:<12}{self.per_parameter(row.category):>12.4f}{own:>14}{everywhere:>14}")
        totals = self.total.bytes_by_rank
        if 1 < world_size <= _RANKS_SHOWN:
            lines.append("total by rank: " + ", ".join(_readable(size) for size in totals))
        elif world_size > 1:
            lines.append(f"total by rank: {_readable(min(totals))} to {_readable(max(totals))}")
        missing = [row.category for row in self.rows if row.predicted]
        if missing:
            size = _readable(self.total.predicted)
            lines.append(f"not allocated yet, and predicted: {size} of {', '.join(missing)}")
        return "\n".join(lines)


def _bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def _category(name: str) -> str:
    if name == ERROR_BITS:
        return "correction"
    if name.endswith(SCALE_SUFFIX):
        return "scales"
    return "moments" if name in _MOMENTS else "others"


def _predict_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> Iterator[tuple[str, int]]:
    """Yield name and local bytes of the entries that the optimizer will make for a parameter."""
    if isinstance(optimizer, FlashOptimizer):
        yield STEP, _STEP_BYTES
        yield from bytes_per_entry(optimizer._record(parameter).entries).items()
    elif isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        yield STEP, _STEP_BYTES
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        yield from ((name, _bytes(parameter)) for name in names)
    elif isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        yield "momentum_buffer", _bytes(parameter)


def _gather(own: Iterable[int]) -> list[list[int]]:
    """Return every rank's row of integers, by rank."""
    row = torch.tensor(list(own), dtype=torch.int64)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [row.tolist()]
    backend = dist.get_backend()
    on_gpu = "nccl" in backend and "cpu:" not in backend
    rows = torch.zeros(dist.get_world_size(), len(row), dtype=torch.int64)
    rows[dist.get_rank()] = row
    rows = rows.to(torch.device("cuda", torch.cuda.current_device())) if on_gpu else rows
    dist.all_reduce(rows)  # zero in all rows but one per rank: the sum is the collection
    return rows.tolist()


def _readable(size: int) -> str:
    if size < 1024:
        return f"{size} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min((size.bit_length() - 1) // 10, len(units))
    return f"{size / 1024**power:.2f} {units[power - 1]}"
