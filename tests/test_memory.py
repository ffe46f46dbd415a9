"""memory_report: the count of what is there, and the prediction of what will be."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist.casting import cast_model
from flashoptim_dist.memory import CATEGORIES, MemoryReport, MemoryRow, memory_report
from flashoptim_dist.sharding.fsdp import shard_model
from tests.pool import mesh, run_ranks


class Shapes(nn.Module):
    """Shapes that are quantized and ones that are not, whole groups and broken ones, a tied and a frozen parameter."""

    def __init__(self, *, scalar: bool = True) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(10, 64))
        self.broken = nn.Parameter(torch.zeros(5, 70))
        self.short_rows = nn.Parameter(torch.zeros(7, 20))
        self.conv = nn.Parameter(torch.zeros(6, 5, 3, 3))  # rows of 45
        self.small_conv = nn.Parameter(torch.zeros(6, 2, 3, 3))  # rows of 18
        self.experts = nn.Parameter(torch.zeros(2, 3, 32))
        self.vector = nn.Parameter(torch.zeros(100))
        self.frozen = nn.Parameter(torch.zeros(4, 64), requires_grad=False)
        self.tied = self.matrix
        self.fp32 = nn.Linear(64, 2)
        self.register_buffer("table", torch.zeros(9))
        if scalar:
            self.scalar = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        own = [p.float().sum() for p in self.parameters(recurse=False) if p.requires_grad]
        return torch.stack(own).sum() + self.fp32(torch.ones(1, 64).bfloat16()).float().sum()


QUANTIZED = {(10, 64): 10 * 2, (5, 70): 5 * 3, (6, 5, 3, 3): 6 * 2, (2, 3, 32): 6, (2, 64): 2 * 2}
"""Number of scales per moment, by shape, from the format's definition."""


def _shapes(*, scalar: bool = True) -> Shapes:
    return cast_model(Shapes(scalar=scalar), keep_fp32=["fp32"])  # type: ignore[return-value]


def _expected(model: nn.Module, correction: int = 1) -> dict[str, int]:
    """Bytes in all by category, by the rules of the format, written down once more."""
    total = dict.fromkeys(CATEGORIES, 0)
    for parameter in model.parameters():
        count, itemsize, shape = parameter.numel(), parameter.dtype.itemsize, tuple(parameter.shape)
        total["weight"] += count * itemsize
        if not parameter.requires_grad:
            continue
        total["gradient"] += count * itemsize
        total["others"] += 4
        total["correction"] += correction * count if itemsize == 2 else 0
        total["moments"] += count * 2 if shape in QUANTIZED else count * 8
        total["scales"] += 2 * 2 * QUANTIZED.get(shape, 0)
    total["others"] += sum(buffer.numel() * buffer.dtype.itemsize for buffer in model.buffers())
    return total


def _counts(report: MemoryReport) -> dict[str, int]:
    return {row.category: row.all_ranks for row in report.rows}


@pytest.mark.parametrize("bits, correction", [(24, 1), (32, 2), (None, 0)])
def test_flash_adamw_before_and_after_the_first_step(bits: int | None, correction: int) -> None:
    model = _shapes()
    optimizer = fod.FlashAdamW(model.parameters(), master_weight_bits=bits)
    before = memory_report(model, optimizer)
    assert not optimizer.state  # a report makes none
    assert _counts(before) == _expected(model, correction)
    assert before.parameters == sum(p.numel() for p in model.parameters())
    assert before.elements_by_rank == (before.parameters,)
    predicted = {row.category for row in before.rows if row.predicted}
    assert predicted == set(CATEGORIES) - {"weight"} - (set() if correction else {"correction"})
    model().backward()
    optimizer.step()
    after = memory_report(model, optimizer)
    assert _counts(after) == _counts(before)
    assert after.total.predicted == 0
    assert before.total.predicted == sum(
        row.all_ranks for row in after.rows if row.category not in ("weight", "others")
    ) + 4 * sum(p.requires_grad for p in model.parameters())
    optimizer.zero_grad()
    assert {row.category for row in memory_report(model, optimizer).rows if row.predicted} == {"gradient"}


def test_options_of_the_optimizer_and_its_groups_count() -> None:
    model = nn.Linear(64, 8, bias=False).bfloat16()
    other = nn.Linear(64, 8, bias=False).bfloat16()
    both = nn.ModuleList([model, other])
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters()), "quantize": False},
        {"params": list(other.parameters()), "master_weight_bits": 32},
    ]
    report = memory_report(both, fod.FlashAdamW(groups))
    assert report.row("moments").all_ranks == 512 * 8 + 512 * 2
    assert report.row("correction").all_ranks == 512 * 1 + 512 * 2


def test_the_headline_figure() -> None:
    model = nn.Linear(4096, 1024, bias=False).bfloat16()
    report = memory_report(model, fod.FlashAdamW(model.parameters()))
    per = {name: report.per_parameter(name) for name in CATEGORIES}
    assert per["weight"] + per["correction"] + per["moments"] + per["scales"] == 5.125
    assert per["gradient"] == 2.0
    assert report.per_parameter("total") == pytest.approx(7.125, abs=1e-5)


@pytest.mark.parametrize(
    "make, factor",
    [
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.AdamW(p, foreach=False), 2),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 1),
        (lambda p: torch.optim.SGD(p), 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_optimizers_can_be_compared(make: Any, factor: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30)).to(dtype)
    optimizer = make(model.parameters())
    before = memory_report(model, optimizer)
    model(torch.ones(2, 40, dtype=dtype)).sum().backward()
    optimizer.step()
    after = memory_report(model, optimizer)
    assert _counts(before) == _counts(after)
    assert after.total.predicted == 0
    size = dtype.itemsize * sum(p.numel() for p in model.parameters())
    assert after.row("moments").all_ranks == factor * size
    assert after.row("weight").all_ranks == after.row("gradient").all_ranks == size
    assert after.row("scales").all_ranks == after.row("correction").all_ranks == 0


def test_other_optimizers_are_counted_as_far_as_they_exist() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adadelta(model.parameters())
    assert memory_report(model, optimizer).row("moments").all_ranks == 0
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    report = memory_report(model, optimizer)
    assert report.row("moments").all_ranks == 2 * 4 * 72
    assert report.row("others").all_ranks == 2 * 4


def test_parameters_of_either_side_count_once() -> None:
    model = _shapes()
    assert memory_report(model, fod.FlashAdamW([model.matrix])).row("correction").all_ranks == 640
    extra = nn.Parameter(torch.zeros(2, 32))
    report = memory_report(model, torch.optim.AdamW([*model.parameters(), extra]))
    assert report.parameters == sum(p.numel() for p in model.parameters()) + 64


def test_meta_tensors_are_all_prediction() -> None:
    with torch.device("meta"):
        model = _shapes()
    report = memory_report(model, fod.FlashAdamW(model.named_parameters()))
    assert _counts(report) == _expected(_shapes())
    assert report.total.predicted == report.total.all_ranks


def _shard_and_report(sizes: tuple[int, ...]) -> tuple[MemoryReport, MemoryReport, MemoryReport, dict[str, int]]:
    model = _shapes(scalar=False)
    shard_model(model, mesh(*sizes), reshard_after_forward=False)
    optimizer = fod.FlashAdamW(model.named_parameters())
    before = memory_report(model, optimizer)
    with torch.no_grad():
        model()  # leaves gathered weights behind
    gathered = memory_report(model, optimizer)
    model().backward()
    optimizer.step()
    after = memory_report(model, optimizer)
    own = dict.fromkeys(("weight", "state"), 0)
    for parameter in model.parameters():
        own["weight"] += parameter.to_local().nbytes  # type: ignore[attr-defined]
        for name, value in optimizer.state[parameter].items() if parameter.requires_grad else ():
            own["state"] += value.nbytes if name == "step" else value.to_local().nbytes
    return before, gathered, after, own


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_shards_are_counted_by_rank_and_in_all(sizes: tuple[int, ...]) -> None:
    world_size, replicas = math.prod(sizes), sizes[0] if len(sizes) == 2 else 1
    whole = _shapes(scalar=False)
    expected = _expected(whole)
    results = run_ranks(world_size, _shard_and_report, sizes)
    parameters = sum(p.numel() for p in whole.parameters())
    for rank, (before, gathered, after, own) in enumerate(results):
        assert before.rank == after.rank == rank
        assert _counts(before) == _counts(gathered) == _counts(after)
        assert after.rows == results[0][2].rows  # every rank knows all
        for row in after.rows:
            assert len(row.bytes_by_rank) == world_size
            if row.category != "others":
                assert row.all_ranks == replicas * expected[row.category]
        trained = sum(p.requires_grad for p in whole.parameters())
        assert after.row("others").all_ranks == world_size * (4 * trained + 9 * 2)
        assert after.row("weight").bytes_by_rank[rank] == own["weight"]
        state = ("correction", "moments", "scales")
        assert sum(after.row(name).bytes_by_rank[rank] for name in state) + 4 * trained == own["state"]
        assert after.parameters == parameters
        assert sum(after.elements_by_rank) == replicas * parameters
        assert after.per_parameter("weight") == pytest.approx(expected["weight"] / parameters)
        assert after.total.predicted == 0
        assert before.total.predicted > 0


def _meta_and_uneven() -> tuple[dict[str, int], dict[str, int]]:
    with torch.device("meta"):
        model = _shapes(scalar=False)
    shard_model(model, mesh(dist.get_world_size()))
    meta = memory_report(model, fod.FlashAdamW(model.named_parameters()))
    real_model = _shapes(scalar=False)
    shard_model(real_model, mesh(dist.get_world_size()))
    real = memory_report(real_model, fod.FlashAdamW(real_model.named_parameters()))
    return _counts(meta), _counts(real)


def test_sharded_meta_tensors() -> None:
    for meta, real in run_ranks(3, _meta_and_uneven):
        assert meta == real


def test_the_table_and_the_dictionary() -> None:
    rows = [MemoryRow(name, (0, 0), (0, 0)) for name in CATEGORIES]
    rows[0] = MemoryRow("weight", (3000, 2000), (0, 0))
    rows[2] = MemoryRow("moments", (3 * 2**20, 2**20), (2**20, 0))
    report = MemoryReport("FlashAdamW", 2500, 1, (1500, 1000), tuple(rows))
    text = str(report)
    assert text.splitlines() == [
        "Memory of 2,500 parameters with FlashAdamW, 2 ranks",
        "             bytes/param        rank 1     all ranks",
        "weight            2.0000      1.95 KiB      4.88 KiB",
        "correction        0.0000           0 B           0 B",
        "moments        1677.7216      1.00 MiB      4.00 MiB",
        "scales            0.0000           0 B           0 B",
        "gradient          0.0000           0 B           0 B",
        "others            0.0000           0 B           0 B",
        "total          1679.7216      1.00 MiB      4.00 MiB",
        "total by rank: 3.00 MiB, 1.00 MiB",
        "not allocated yet, and predicted: 1.00 MiB of moments",
    ]
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["bytes"]["moments"] == {
        "bytes_per_parameter": 4 * 2**20 / 2500,
        "this_rank": 2**20,
        "all_ranks": 4 * 2**20,
        "by_rank": [3 * 2**20, 2**20],
        "predicted": 2**20,
    }
    assert data["bytes"]["total"]["all_ranks"] == 4 * 2**20 + 5000
    assert data["world_size"] == 2
    with pytest.raises(FrozenInstanceError):
        report.rank = 0  # type: ignore[misc]


def test_many_ranks_and_sizes_stay_readable() -> None:
    rows = tuple(MemoryRow(name, tuple(1023 * 4**r for r in range(16)), (0,) * 16) for name in CATEGORIES)
    text = str(MemoryReport("AdamW", 7, 0, (7,) + (0,) * 15, rows))
    assert "total by rank: 5.99 KiB to 5.99 TiB" in text
    assert "1023 B" in text
    assert "1 rank\n" in str(MemoryReport("AdamW", 0, 0, (0,), tuple(MemoryRow(n, (0,), (0,)) for n in CATEGORIES)))
