"""Reported failures of other optimizers that concern the step on shards: B17, B22, B23, C40, D45, D48.

D48 is in test_layouts.py and, at its full size, in test_gpu.py; B23's load peak is in test_gpu.py.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flashoptim_dist import FlashAdamW
from tests.kernels.conftest import INTERPRETED
from tests.kernels.pairs import bf16, decoded, fp32, named, random_gradient, random_weights, set_gradient
from tests.numbers import assert_same_bits
from tests.optim.cases import whole, whole_state
from tests.pool import mesh, run_ranks

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton's interpreter or a GPU"
)
on_ranks = pytest.mark.skipif(not INTERPRETED, reason="the ranks of the pool are on the CPU: needs TRITON_INTERPRET=1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 40, bias=False, dtype=bf16)
        self.down = nn.Linear(40, 9, dtype=bf16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def trained(compiled: bool, steps: int = 2) -> dict[str, Tensor]:
    """Train a sharded model, its gradients from torch.compile or not; the gathered weights and states."""
    torch.manual_seed(0)
    model = Block()
    fully_shard(model, mesh=mesh(dist.get_world_size()))
    run = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2, fused=True)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        run(torch.randn(4, 32, dtype=bf16)).float().square().sum().backward()
        optimizer.step()
    found = {}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{entry}": value for entry, value in whole_state(optimizer, parameter).items()}
    return found


@on_ranks
@pytest.mark.full
def test_b17_gradients_of_a_compiled_sharded_model() -> None:
    """torchao#652: the step takes the local tensors of DTensors, whoever made their gradients."""
    eager, compiled = run_ranks(2, trained, False)[0], run_ranks(2, trained, True)[0]
    for name, value in eager.items():
        assert_same_bits(compiled[name], value, name)


def save_or_resume(directory: str, resume: bool) -> dict[str, Tensor]:
    """Two steps and a save, or a load; one more step follows either."""
    torch.manual_seed(0)
    model = Block()
    fully_shard(model, mesh=mesh(dist.get_world_size()))
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2, fused=True)
    parameters = dict(model.named_parameters())

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters.values():
            full = torch.randn(parameter.shape, generator=generator).to(bf16)
            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        optimizer.step()

    if not resume:
        step(1)
        step(2)
        for name, parameter in parameters.items():
            for entry, value in optimizer.state[parameter].items():
                assert isinstance(value, DTensor) or entry == "step", f"{entry} of {name} is a plain tensor"
                if isinstance(value, DTensor) and not entry.endswith("_scale"):
                    assert value.shape == parameter.shape
        dcp.save(
            {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=directory
        )
    else:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=directory)
        set_optimizer_state_dict(model, optimizer, state["optim"])
    step(3)
    found = {}
    for name, parameter in parameters.items():
        found |= {f"{name}.{entry}": value for entry, value in whole_state(optimizer, parameter).items()}
    return found


@on_ranks
@pytest.mark.full
def test_b22_save_and_resume_on_half_the_ranks(tmp_path: Path) -> None:
    """TransformerEngine#2424: states are DTensors of the parameter's shape; half the ranks go on with the same bits."""
    expected = run_ranks(2, save_or_resume, str(tmp_path / "saved"), False)[0]
    resumed = run_ranks(1, save_or_resume, str(tmp_path / "saved"), True)[0]
    for name, value in expected.items():
        assert_same_bits(resumed[name], value, name)


@pytest.mark.full
def test_b23_1025_tensors_in_one_group(device: torch.device) -> None:
    """Megatron-LM#7288: more tensors than one launch of others describes; every one is stepped, once."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.full((2,), float(n), device=device)) for n in range(1, 1026)]
    optimizer = FlashAdamW(parameters, lr=1.0, weight_decay=0.0, eps=0.0, fused=True)
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    assert len({int(optimizer.state[p]["step"]) for p in parameters}) == 1
    # The first update of Adam is lr in size, whatever the gradient.
    for number, parameter in enumerate(parameters, start=1):
        assert torch.allclose(parameter.detach().cpu(), torch.full((2,), number - 1.0), atol=1e-3), number


def test_b23_tables_of_1025_tensors(device: torch.device) -> None:
    """The same without the steps: a row of every table for each tensor, and each element in one task."""
    from flashoptim_dist.optim.fused import Plan

    parameters = [nn.Parameter(torch.zeros(n % 40 + 1, device=device)) for n in range(1025)]
    optimizer = FlashAdamW(parameters, fused=True)
    optimizer.init_state()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    tasks = next(iter(optimizer._tasks().values()))
    plan = Plan(tasks, torch.zeros((), dtype=torch.int32, device=device), True)
    assert plan.scalars.shape[0] == plan.steps.host.shape[0] == 1025
    assert plan.steps.device[:, 0].tolist() == [optimizer.state[p]["step"].data_ptr() for p in parameters]
    tables = torch.cat([launch._arguments[2] for launch in plan.launches]).cpu()
    assert sorted(tables[:, 0].tolist()) == list(range(1025))
    assert tables[:, 2].eq(1).all()


def test_b23_resume_with_fp32_moments_gives_the_same_bits(device: torch.device) -> None:
    """Megatron-LM#1842: a saved and loaded optimizer goes on as the other does."""
    torch.manual_seed(0)
    weights = [nn.Parameter(w.detach().to(device)) for w in random_weights([(2, 32), (3,)], bf16)]
    optimizer = FlashAdamW(named(weights), fused=True)
    gradients = [[random_gradient(w.shape, bf16).to(device) for w in weights] for _ in range(2)]

    def step(of: FlashAdamW, parameters: list[nn.Parameter], number: int) -> None:
        for parameter, gradient in zip(parameters, gradients[number], strict=True):
            parameter.grad = gradient
        of.step()

    step(optimizer, weights, 0)
    copies = [nn.Parameter(w.detach().clone()) for w in weights]
    resumed = FlashAdamW(named(copies), fused=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer, weights, 1)
    step(resumed, copies, 1)
    for a, b in zip(weights, copies, strict=True):
        assert_same_bits(b.detach(), a.detach())
        for name, value in optimizer.state[a].items():
            assert_same_bits(resumed.state[b][name], value, name)


def step_strided(rows_strided: bool) -> dict[str, Tensor]:
    """A step of a column-sharded matrix whose local tensor is a view of the whole one: rows further apart than long."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    weight, gradient = torch.randn(3, 128).to(bf16), torch.randn(3, 128).to(bf16)
    line = mesh(dist.get_world_size())
    width = 128 // dist.get_world_size()

    def part(tensor: Tensor) -> DTensor:
        local = tensor[:, rank * width : (rank + 1) * width]
        local = local if rows_strided else local.contiguous()
        assert local.is_contiguous() is not rows_strided
        return DTensor.from_local(local, line, [Shard(1)], run_check=False, shape=tensor.shape, stride=(128, 1))

    parameter = nn.Parameter(part(weight))
    optimizer = FlashAdamW([("weight", parameter)], lr=1e-2, fused=True)
    parameter.grad = part(gradient)
    optimizer.step()
    return whole_state(optimizer, parameter)


@on_ranks
def test_c40_local_tensors_with_row_strides() -> None:
    """pytorch#118836: a local shard need not be contiguous, and nothing may take it for it."""
    strided, packed = run_ranks(2, step_strided, True), run_ranks(2, step_strided, False)
    for name, value in packed[0].items():
        assert_same_bits(strided[0][name], value, name)
        assert_same_bits(strided[1][name], value, name)


def step_small_matrix() -> list[dict[str, Tensor]]:
    """(1, 17) over a mesh of 2 x 2: empty shards, and rows that no group may be cut from."""
    line = mesh(2, 2)
    torch.manual_seed(0)
    weight, gradient = torch.randn(1, 17).to(bf16), torch.randn(1, 17).to(bf16)
    found = []
    for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(0))):
        parameter = nn.Parameter(distribute_tensor(weight, line, placements, src_data_rank=None))
        optimizer = FlashAdamW([("weight", parameter)], lr=1e-2, fused=True)
        parameter.grad = distribute_tensor(gradient, line, placements, src_data_rank=None)
        optimizer.step()
        found.append({"weight": whole(parameter), "exp_avg": whole(optimizer.state[parameter]["exp_avg"])})
    return found


@on_ranks
@pytest.mark.full
def test_c40_a_matrix_smaller_than_its_mesh() -> None:
    """pytorch#136228: (1, 17) over data and tensor parallel ranks."""
    torch.manual_seed(0)
    parameter, gradient = nn.Parameter(torch.randn(1, 17).to(bf16)), torch.randn(1, 17).to(bf16)
    optimizer = FlashAdamW([("weight", parameter)], lr=1e-2, fused=True)
    parameter.grad = gradient
    optimizer.step()
    for results in run_ranks(4, step_small_matrix):
        for result in results:
            assert_same_bits(result["weight"], parameter.detach(), "weight")
            assert_same_bits(result["exp_avg"], optimizer.state[parameter]["exp_avg"], "exp_avg")


def test_d45_gradients_accumulated_in_fp32(device: torch.device) -> None:
    """transformers#34645: a gradient of another dtype than its parameter, in one step and not in the next."""
    torch.manual_seed(0)
    (weight,) = random_weights([(3, 40)], bf16)
    gradients = [random_gradient(weight.shape, dtype) for dtype in (fp32, bf16, fp32)]
    tested = nn.Parameter(weight.detach().to(device, copy=True))
    optimizer = FlashAdamW(named([tested]), rounding="nearest", fused=True)
    reference = FlashAdamW(named([weight]), rounding="nearest", fused=False)
    for gradient in gradients:
        set_gradient(tested, gradient.to(device))
        set_gradient(weight, gradient)
        optimizer.step()
        reference.step()
    difference = decoded(optimizer, tested)["weight"] - decoded(reference, weight)["weight"]
    assert difference.abs().max() <= 3 * 2**-16 * 0.1
    assert torch.equal(optimizer.state[tested]["step"].cpu(), reference.state[weight]["step"])


def accumulate() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Block()
    policy = MixedPrecisionPolicy(reduce_dtype=fp32)
    fully_shard(model, mesh=mesh(dist.get_world_size()), mp_policy=policy)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2, fused=True)
    for part in range(4):
        model.set_requires_gradient_sync(part == 3)
        torch.manual_seed(part)
        model(torch.randn(4, 32, dtype=bf16)).float().square().sum().backward()
    optimizer.step()
    moved = {name: whole(parameter) for name, parameter in model.named_parameters()}
    assert all(optimizer.state[p]["step"].item() == 1 for p in model.parameters())
    return moved


@on_ranks
@pytest.mark.full
def test_d45_accumulation_without_synchronization() -> None:
    """Three backwards without a reduction, a fourth with one in fp32, and a step."""
    first, second = run_ranks(2, accumulate)
    torch.manual_seed(0)
    for name, parameter in Block().named_parameters():
        assert_same_bits(first[name], second[name], name)
        assert not torch.equal(first[name], parameter.detach())
