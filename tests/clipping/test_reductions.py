"""How many collectives a norm takes, over which ranks, and that no mesh of a part of the ranks makes them hang."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashoptim_dist as fod
from tests import pool
from tests.pool import run_ranks

CLOSE = 1e-5
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@contextmanager
def _counted(calls: list[list[int]]) -> Iterator[None]:
    """Take down the ranks of each all-reduce of fp64 numbers inside, in order: norms, and no gradients."""
    inner = dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.dtype in (torch.float64, torch.int64):
            calls.append(dist.get_process_group_ranks(group))
        return inner(tensor, op=op, group=group, async_op=async_op)

    dist.all_reduce = counting
    try:
        yield
    finally:
        dist.all_reduce = inner


def _parameter(number: int, mesh: DeviceMesh | None, *placements: Any) -> tuple[nn.Parameter, Tensor]:
    """A parameter with a gradient, and the whole of that."""
    whole = torch.linspace(-1.0, 1.0 + number, 24 * 32).reshape(24, 32)

    def place(tensor: Tensor) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    parameter = nn.Parameter(place(torch.zeros(24, 32)))
    parameter.grad = place(whole)
    return parameter, whole


def _layout(name: str) -> list[tuple[DeviceMesh | None, tuple[Any, ...]]]:
    line, grid = pool.mesh(4), pool.mesh(2, 2, names=("dp", "tp"))
    layouts: dict[str, list[tuple[DeviceMesh | None, tuple[Any, ...]]]] = {
        "two dimensions": [(grid, (S0, S1)), (grid, (S0, R)), (grid, (R, R)), (None, ())],
        "replicas": [(grid, (R, S0)), (grid, (R, S0))],
        "meshes of equal ranks": [(line, (S0,)), (grid, (S0, S1)), (line, (R,))],
        "a part of the mesh": [(grid, (S0, S1)), (grid["dp"], (S0,))],
    }
    return layouts[name]


def _clipped(name: str) -> tuple[list[float], list[list[int]], float]:
    made = [_parameter(number, mesh, *placements) for number, (mesh, placements) in enumerate(_layout(name))]
    parameters = [parameter for parameter, _ in made]
    optimizer = fod.FlashAdamW(parameters)
    norms = [float(fod.clip_grad_norm_(optimizer, 1e9)), float(fod.clip_grad_norm_(parameters, 1e9, math.inf))]
    calls: list[list[int]] = []
    with _counted(calls):
        fod.clip_grad_norm_(optimizer, 1e9)
    expected = math.sqrt(sum(float(whole.double().square().sum()) for _, whole in made))
    return [norms[0] / expected, norms[1] / max(float(whole.abs().max()) for _, whole in made)], calls, norms[0]


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("two dimensions", [4]),
        ("replicas", [4]),
        ("meshes of equal ranks", [4]),
        ("a part of the mesh", [4, 2]),
    ],
)
def test_a_norm_takes_one_reduction_per_mesh(name: str, sizes: list[int]) -> None:
    results = run_ranks(4, _clipped, name)
    for ratios, calls, norm in results:
        assert ratios == pytest.approx([1.0, 1.0], rel=CLOSE)
        assert [len(ranks) for ranks in calls] == sizes
        assert norm == results[0][2]


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _two_stages(case: str, stage: list[list[int]]) -> tuple[float, float, list[list[int]], list[int]]:
    """Four of five ranks hold a stage over two dimensions, the fifth another by itself."""
    mesh = DeviceMesh("cpu", stage, mesh_dim_names=("dp", "tp"))
    if case == "flattened":
        mesh._flatten()
    extra = None
    if case == "other groups differ" and dist.get_rank() == stage[0][0]:
        extra = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    inside = mesh.get_coordinate() is not None
    parameter, whole = _parameter(1, mesh, S0, S1) if inside else _parameter(2, None)
    made = [_groups()]
    norm = float(fod.clip_grad_norm_([parameter], 1e9))
    made.append(_groups())
    calls: list[list[int]] = []
    with _counted(calls):
        assert float(fod.clip_grad_norm_([parameter], 1e9)) == norm
    made.append(_groups())
    if extra is not None:
        dist.destroy_process_group(extra)
    return norm, float(whole.double().norm()), calls, [made[1] - made[0], made[2] - made[1]]


@pytest.mark.parametrize(
    "case, stage, dimensions_at_once, groups",
    [
        ("made", [[0, 1], [2, 3]], True, 1),
        ("flattened", [[1, 2], [3, 4]], True, 0),
        ("other groups differ", [[0, 1], [2, 4]], False, 0),
    ],
)
def test_a_mesh_of_a_part_of_the_ranks_is_reduced_over_at_once_where_that_is_safe(
    case: str, stage: list[list[int]], dimensions_at_once: bool, groups: int
) -> None:
    """Ranks outside take no part. Where the ranks inside cannot make a group by themselves, one for each dimension."""
    inside = {rank for row in stage for rank in row}
    for rank, (norm, expected, calls, made) in enumerate(run_ranks(5, _two_stages, case, stage, timeout_s=60)):
        assert norm == pytest.approx(expected, rel=CLOSE)
        if rank not in inside:
            assert (calls, made) == ([], [0, 0])
        else:
            assert [len(ranks) for ranks in calls] == ([4] if dimensions_at_once else [2, 2])
            assert made == [groups, 0], "made at the first call and kept"


def _released(case: str) -> tuple[list[list[int]], bool, float, float]:
    """One update with gradient release: the all-reduces with the norm, whether on groups of their own, the norm."""
    if case == "all ranks":
        mesh = pool.mesh(2, 2, names=("dp_replicate", "dp_shard"))
    else:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("stage",))
    extra = None
    if case == "other groups differ" and dist.get_rank() == 0:
        extra = dist.new_group([0], use_local_synchronization=True)
    if mesh.get_coordinate() is None:
        return [], True, 0.0, 0.0
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False)
    expected = float(model.weight.detach().double().norm())
    fod.shard_model(model, mesh)
    optimizer = fod.FlashAdamW(model.named_parameters())
    groups = _groups()
    handle = fod.enable_gradient_release(model, optimizer, skip_nonfinite=True)
    own = _groups() - groups == 1
    loss = model(torch.eye(32)).square().sum() * 0.5  # whose gradient is the weight
    norms: list[list[int]] = []
    with _counted(norms):
        loss.backward()
        optimizer.step()
    assert handle.gradient_norm is not None
    if extra is not None:
        dist.destroy_process_group(extra)
    return norms, own, float(handle.gradient_norm), expected


@pytest.mark.parametrize(
    "case, ranks, own",
    [("all ranks", [0, 1, 2, 3], True), ("a part", [0, 1], True), ("other groups differ", [0, 1], False)],
)
def test_release_takes_one_reduction_per_unit_and_mesh(case: str, ranks: list[int], own: bool) -> None:
    """On a group of its own, where the ranks of the mesh can make one by themselves, else on the mesh's."""
    for rank, (norms, is_own, norm, expected) in enumerate(run_ranks(4, _released, case, timeout_s=60)):
        assert norm == pytest.approx(expected, rel=CLOSE)
        assert norms == ([ranks] if rank in ranks else [])
        assert is_own == (own or rank not in ranks)
