"""Invariant 1: states and weights gathered from 1, 2, 3 and 4 ranks are bit-equal, for every placement and option.

The reference is the same parameter as one plain tensor in this process, so the number of ranks, the placement and
being a DTensor at all must leave no trace.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from flashoptim_dist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from tests.numbers import assert_same_bits
from tests.optim.cases import OPTIONS, PLAIN, SHARDED, Case, expected_entries, whole, whole_state
from tests.pool import mesh, run_ranks

STEPS = 3
State = dict[str, Tensor]

OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "Adam": (FlashAdam, {"weight_decay": 0.1}),
    "Lion": (FlashLion, {"weight_decay": 0.1}),
    "SGD with momentum": (FlashSGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGDW, Nesterov": (FlashSGDW, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def train(case: Case, kinds: dict[str, tuple[type, dict[str, Any]]], world_size: int | None) -> dict[str, State] | None:
    """Step one parameter under each optimizer; on ranks, of `world_size`, the gathered result is rank 0's alone."""
    results = {}
    for kind, (optimizer_type, options) in kinds.items():
        parameter = case.parameter(None if world_size is None else case.mesh(world_size))
        optimizer = optimizer_type([(case.name, parameter)], lr=1e-2, **options)
        for step in range(1, STEPS + 1):
            case.step(optimizer, parameter, step)
        for name, entry in optimizer.state[parameter].items():
            if name != "step" and isinstance(parameter, DTensor):
                assert isinstance(entry, DTensor), f"{name} is a plain tensor"
                assert entry.placements == parameter.placements
                assert entry.device_mesh == parameter.device_mesh
        results[kind] = whole_state(optimizer, parameter)
    return results if world_size is None or dist.get_rank() == 0 else None


ADAMW = {name: (FlashAdamW, {"weight_decay": 0.1, **options}) for name, options in OPTIONS.items()}


@cache
def alone(case: Case) -> dict[str, State]:
    result = train(case, ADAMW, None)
    assert result is not None
    return result


def assert_same_states(actual: dict[str, State] | None, expected: dict[str, State]) -> None:
    assert actual is not None
    assert actual.keys() == expected.keys()
    for kind, entries in expected.items():
        assert actual[kind].keys() == entries.keys()
        for name, entry in entries.items():
            assert_same_bits(actual[kind][name], entry, f"{name} ({kind})")


WORLDS = [
    pytest.param(case, torch.Size(sizes).numel(), id=f"{case.name}-{'x'.join(map(str, sizes))}")
    for case in SHARDED
    for sizes in case.meshes
]
EVERY_WORLD = ("fewer rows than ranks", "partial groups", "vector shorter than ranks", "convolution", "hybrid")
"""Cases that meet each of their meshes in the fast tier. The others meet only their largest there."""


def _held_back(mark: pytest.MarkDecorator) -> list[Any]:
    """All of WORLDS, those that the fast tier leaves out with this mark."""
    meetings = [(case, sizes) for case in SHARDED for sizes in case.meshes]
    return [
        world
        if case.name in EVERY_WORLD or sizes == case.meshes[-1]
        else pytest.param(*world.values, id=world.id, marks=mark)
        for world, (case, sizes) in zip(WORLDS, meetings, strict=True)
    ]


IN_TIERS, OTHERS_IN_TIERS = _held_back(pytest.mark.full), _held_back(pytest.mark.long)


@pytest.mark.parametrize("case, world_size", IN_TIERS)
def test_states_do_not_depend_on_the_world_size(case: Case, world_size: int) -> None:
    results = run_ranks(world_size, train, case, ADAMW, world_size)
    assert_same_states(results[0], alone(case))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_tensors_are_stepped_alike_on_every_rank(case: Case) -> None:
    results = run_ranks(2, train_everywhere, case)
    for result in results:
        assert_same_states(result, alone(case))


def train_everywhere(case: Case) -> dict[str, State] | None:
    return train(case, ADAMW, None)


@cache
def others_alone(case: Case) -> dict[str, State]:
    result = train(case, OTHERS, None)
    assert result is not None
    return result


@pytest.mark.full
@pytest.mark.parametrize("case, world_size", OTHERS_IN_TIERS)
def test_states_of_other_optimizers_do_not_depend_on_the_world_size(case: Case, world_size: int) -> None:
    results = run_ranks(world_size, train, case, OTHERS, world_size)
    assert_same_states(results[0], others_alone(case))


@pytest.mark.parametrize("case", [*SHARDED, *PLAIN], ids=str)
@pytest.mark.parametrize("kind", OPTIONS)
def test_state_holds_what_the_format_says(case: Case, kind: str) -> None:
    """Names, dtypes and shapes, and that the test above compares numbers that moved at all."""
    result = alone(case)[kind]
    entries = {name: (entry.dtype, tuple(entry.shape)) for name, entry in result.items() if name != "weight"}
    assert entries == expected_entries(case, OPTIONS[kind])
    assert result["step"].item() == STEPS
    if result["weight"].numel() == 0:
        return
    assert bool((result["weight"] != case.weight()).any()) or case.shape == ()  # one bf16 number may stay
    for name in ("exp_avg", "exp_avg_sq"):
        assert bool((result[name] != 0).any())


def test_options_and_names_change_the_bits() -> None:
    """Else equality would prove little: rounding, seed and name all enter the noise."""
    case = SHARDED[0]
    states = alone(case)
    codes = {name: states[name]["exp_avg"].to(torch.int32) for name in ("stochastic", "nearest", "seeded, maximize")}
    assert not torch.equal(codes["stochastic"], codes["nearest"])
    assert not torch.equal(codes["stochastic"], -codes["seeded, maximize"])
    other = nn.Parameter(case.weight())
    optimizer = FlashAdamW([("another", other)], lr=1e-2, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        case.step(optimizer, other, step)
    assert not torch.equal(optimizer.state[other]["exp_avg"], states["stochastic"]["exp_avg"])


# ---------------------------------------------------------------------------------------------- real FSDP2 and TP


class Block(nn.Module):
    """Tensor parallel by columns and rows, a norm that is replicated over tensor ranks, and uneven sizes everywhere."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=True)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def numbered(model: nn.Module) -> nn.Module:
    """Give every element its index in its own whole tensor as value, so that a shard tells which elements it holds."""
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
    return model


def shard_block(model: nn.Module, dp: int, tp: int, replicas: int) -> nn.Module:
    sizes, names = ((replicas,), ("dp_replicate",)) if replicas > 1 else ((), ())
    device_mesh = mesh(*sizes, dp, tp, names=(*names, "dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, device_mesh["tp"], plan)
    return fully_shard(model, mesh=device_mesh["dp_replicate", "dp"] if replicas > 1 else device_mesh["dp"])


def train_block(width: int, hidden: int, dp: int, tp: int, replicas: int, quantize: bool) -> dict[str, State] | None:
    """Where each rank's elements lie is read off a copy whose values are indices; no placement is asked."""
    model = shard_block(initial_block(width, hidden), dp, tp, replicas)
    places = {
        name: parameter.to_local().to(torch.int64)
        for name, parameter in shard_block(numbered(Block(width, hidden)), dp, tp, replicas).named_parameters()
    }
    strided = [p for p in model.parameters() if any(isinstance(placement, _StridedShard) for placement in p.placements)]
    assert bool(strided) == (tp > 1)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2, quantize=quantize)
    for step in range(1, STEPS + 1):
        for name, parameter in model.named_parameters():
            local = block_gradient(name, tuple(parameter.shape), step).reshape(-1)[places[name]]
            parameter.grad = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        optimizer.step()
    results = {}
    for name, parameter in model.named_parameters():
        results[name] = whole_state(optimizer, parameter)
        # What torch gathers must be what the indices say.
        held = whole(parameter).reshape(-1)[places[name].reshape(-1)]
        assert_same_bits(parameter.to_local().reshape(-1), held, name)
    return results if dist.get_rank() == 0 else None


def initial_block(width: int, hidden: int) -> nn.Module:
    torch.manual_seed(3)
    return Block(width, hidden).to(torch.bfloat16)


def block_gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return Case(f"block {name}", shape).gradient(step)


@cache
def block_alone(width: int, hidden: int, quantize: bool) -> dict[str, State]:
    model = initial_block(width, hidden)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2, quantize=quantize)
    for step in range(1, STEPS + 1):
        for name, parameter in model.named_parameters():
            parameter.grad = block_gradient(name, tuple(parameter.shape), step)
        optimizer.step()
    return {name: whole_state(optimizer, parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "width, hidden, dp, tp, replicas, quantize",
    [
        (64, 128, 2, 1, 1, True),
        (64, 128, 1, 2, 1, True),
        (64, 128, 2, 2, 1, True),
        (64, 132, 2, 1, 1, True),
        (96, 128, 2, 2, 1, True),
        # Strided shards that are uneven, and some that are empty; rows are cut inside groups.
        (64, 133, 2, 2, 1, False),
        (64, 3, 2, 2, 1, False),
        pytest.param(64, 128, 4, 2, 1, True, marks=pytest.mark.full),
        pytest.param(64, 128, 2, 4, 1, True, marks=pytest.mark.full),
        pytest.param(64, 128, 2, 2, 2, True, marks=pytest.mark.full),
        pytest.param(96, 192, 3, 2, 1, True, marks=pytest.mark.full),
        pytest.param(66, 134, 4, 2, 1, False, marks=pytest.mark.full),
    ],
)
def test_fsdp_and_tensor_parallel(width: int, hidden: int, dp: int, tp: int, replicas: int, quantize: bool) -> None:
    """FSDP2 over tensor parallelism: strided shards of dimension 0, both dimensions cut at once, replicated norms."""
    results = run_ranks(dp * tp * replicas, train_block, width, hidden, dp, tp, replicas, quantize)
    assert_same_states(results[0], block_alone(width, hidden, quantize))


def refused_on(columns: int) -> str:
    model = shard_block(initial_block(64, columns), 1, 2, 1)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2)
    try:
        optimizer.init_state()
    except ValueError as error:
        return str(error)
    return ""


def test_column_cuts_through_groups_are_refused_when_the_state_is_made() -> None:
    """A row-parallel weight of 72 columns over 2 ranks: 36 each. Every rank says so, and none hangs."""
    for message in run_ranks(2, refused_on, 72):
        assert "'down.weight' (64, 72)" in message
        assert "columns 0 to 36 of rows of 72, which cuts a group of 32" in message
        assert "quantize=False" in message


def unquantized_columns(world_size: int | None) -> dict[str, State] | None:
    case = Case("unaligned", (6, 72), (Shard(1),))
    return train(case, {"fp32 moments": (FlashAdamW, {"quantize": False})}, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_unaligned_columns_can_be_stepped_without_quantization(world_size: int) -> None:
    """The way out that the refusal names."""
    expected = unquantized_columns(None)
    assert expected is not None
    assert_same_states(run_ranks(world_size, unquantized_columns, world_size)[0], expected)
