"""`clip_grad_norm_` again and again: what it keeps between two calls, what makes it look anew, and what it lets go."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import flashoptim_dist as fod
from flashoptim_dist import clipping
from tests import pool
from tests.optim.cases import whole
from tests.pool import run_ranks

bf16, fp32 = torch.bfloat16, torch.float32
CLOSE = 1e-5
BACKENDS = [pytest.param(None, id="torch"), pytest.param(True, id="kernels")]


def _parameter(rows: int, *, sharded: bool, grad: bool = True) -> nn.Parameter:
    weight = torch.linspace(-1.0, 2.0, rows * 32).reshape(rows, 32)
    placed = distribute_tensor(weight, pool.mesh(_world()), [Shard(0)], src_data_rank=None) if sharded else weight
    parameter = nn.Parameter(placed)
    parameter.grad_dtype = None
    if grad:
        parameter.grad = _like(parameter, float(rows))
    return parameter


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _like(parameter: Tensor, scale: float) -> Tensor:
    """A new gradient."""
    return (parameter.detach() * scale).clone()


def _parameters() -> list[nn.Parameter]:
    """Sharded and plain ones, one frozen, one without a gradient."""
    parameters = [_parameter(rows, sharded=sharded) for rows, sharded in ((4, True), (6, False), (8, True), (3, False))]
    parameters += [_parameter(5, sharded=True, grad=False), _parameter(7, sharded=False, grad=False)]
    parameters[5].requires_grad_(False)
    return parameters


def _expected(parameters: list[nn.Parameter], norm_type: float) -> float:
    gradients = [whole(p.grad).double() for p in parameters if p.grad is not None]
    if math.isinf(norm_type):
        return max((float(gradient.abs().max()) for gradient in gradients), default=0.0)
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


Change = Callable[[fod.FlashAdamW, list[nn.Parameter]], None]


def _new_gradients(_: fod.FlashAdamW, parameters: list[nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters[:4]):
        parameter.grad = _like(parameter, 2.0 + number)


def _add_group(optimizer: fod.FlashAdamW, parameters: list[nn.Parameter]) -> None:
    parameters.append(_parameter(9, sharded=True))
    optimizer.add_param_group({"params": [parameters[-1]]})


def _swap(optimizer: fod.FlashAdamW, parameters: list[nn.Parameter]) -> None:
    """Another parameter of the same size at the place of one."""
    parameters[1] = _parameter(6, sharded=False)
    parameters[1].grad = _like(parameters[1], 20.0)
    optimizer.param_groups[0]["params"][1] = parameters[1]


def _drop(row: int) -> Change:
    def change(_: fod.FlashAdamW, parameters: list[nn.Parameter]) -> None:
        parameters[row].grad = None

    return change


def _give(row: int, make: Callable[[nn.Parameter], Tensor]) -> Change:
    def change(_: fod.FlashAdamW, parameters: list[nn.Parameter]) -> None:
        parameters[row].grad = make(parameters[row])

    return change


def _toggle(row: int, grad: bool) -> Change:
    def change(_: fod.FlashAdamW, parameters: list[nn.Parameter]) -> None:
        parameters[row].requires_grad_(grad)

    return change


def _grow(_: fod.FlashAdamW, parameters: list[nn.Parameter]) -> None:
    """The same objects, with more elements."""
    weight = torch.linspace(1.0, 3.0, 12 * 32).reshape(12, 32)
    parameters[1].grad = None
    parameters[1].data = weight
    parameters[1].grad = weight * 3.0


def _local(parameter: Tensor) -> Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _misaligned(parameter: Tensor) -> Tensor:
    memory = torch.empty(parameter.numel() + 1)
    return memory[1:].view(parameter.shape).copy_(parameter.detach() * 50.0)


def _strided(parameter: Tensor) -> Tensor:
    rows, columns = parameter.shape
    return torch.empty(rows, columns * 2)[:, ::2].copy_(parameter.detach() * 60.0)


def _replicated(parameter: Tensor) -> Tensor:
    return distribute_tensor(torch.full(parameter.shape, 70.0), pool.mesh(_world()), [Replicate()], src_data_rank=None)


CHANGES: dict[str, tuple[Change, bool]] = {
    # name: (change, whether it has to look at everything again)
    "nothing": (lambda *_: None, False),
    "new gradients": (_new_gradients, False),
    "another parameter that looks the same": (_swap, False),
    "a frozen parameter that has a gradient": (_toggle(0, False), False),
    "a group more": (_add_group, True),
    "no gradient of a DTensor": (_drop(0), True),
    "no gradient of a plain tensor": (_drop(3), True),
    "a gradient where there was none": (_give(4, lambda p: _like(p, 30.0)), True),
    "a gradient of a frozen parameter": (_give(5, lambda p: _like(p, 30.0)), True),
    "a parameter without gradient is frozen": (_toggle(4, False), True),
    "a frozen parameter is trained": (_toggle(5, True), True),
    "more elements": (_grow, True),
    "another dtype": (_give(1, lambda p: _like(p, 40.0).to(bf16)), True),
    "another dtype in a DTensor": (_give(2, lambda p: _like(p, 40.0).to(bf16)), True),
    "misaligned memory": (_give(1, _misaligned), True),
    "other strides": (_give(1, _strided), True),
    "a plain gradient of a DTensor": (_give(0, lambda p: _local(p).detach().clone() * 45.0), True),
    "a DTensor as gradient of a plain tensor": (_give(1, _replicated), True),
    "other placements": (_give(0, _replicated), True),
}


def _looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with one number for each call that looked at every parameter."""
    looks: list[int] = []
    original = clipping._sums_and_plans

    def counted(*arguments: object) -> object:
        looks.append(len(looks))
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(clipping, "_sums_and_plans", counted)
    return looks


def _norm_after(name: str, fused: bool | None, norm_type: float) -> tuple[list[float], list[float], int]:
    """Norms before a change, after it, and of new gradients after that; what they should be; looks for the change."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        looks = _looks(monkeypatch)
        parameters = _parameters()
        optimizer = fod.FlashAdamW(parameters, fused=fused)
        found, expected = [], []
        for _ in range(2):
            optimizer.clip_coefficient = None
            found.append(float(fod.clip_grad_norm_(optimizer, 1.0, norm_type)))
            expected.append(_expected(parameters, norm_type))
        assert len(looks) == 1, "the second call looks at nothing anew"
        CHANGES[name][0](optimizer, parameters)
        for repeated in range(3):
            if repeated == 1:
                changed = len(looks) - 1
            if repeated == 2:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.clone() * 2.0
            optimizer.clip_coefficient = None
            found.append(float(fod.clip_grad_norm_(optimizer, 1.0, norm_type)))
            expected.append(_expected(parameters, norm_type))
    return found, expected, changed


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name: str, fused: bool | None) -> None:
    for norm_type in (2.0, math.inf):
        [(found, expected, changed)] = run_ranks(1, _norm_after, name, fused, norm_type)
        assert found == pytest.approx(expected, rel=CLOSE)
        assert changed == CHANGES[name][1]


def _norms_on_ranks() -> tuple[list[float], list[float]]:
    """A gradient that is None on rank 1 alone, then there again; placements that differ from call to call."""
    parameter, other = _parameter(1, sharded=True), _parameter(4, sharded=True)
    optimizer = fod.FlashAdamW([parameter, other])
    mesh = pool.mesh(_world())
    found, expected = [], []

    def take(gradient_norms: list[float]) -> None:
        optimizer.clip_coefficient = None
        found.append(float(fod.clip_grad_norm_(optimizer, 1.0)))
        expected.append(math.hypot(*gradient_norms))

    def norm(tensor: Tensor) -> float:
        return float(whole(tensor).double().norm())

    given = parameter.grad
    assert given is not None
    assert other.grad is not None
    for hold in (True, True, False, False, True):
        parameter.grad = given if hold or dist.get_rank() == 0 else None  # rank 1 holds no row of it
        take([norm(given), norm(other.grad)])
    placements: list[list[Placement]] = [[Partial()], [Partial()], [Shard(0)], [Replicate()], [Shard(0)]]
    with_sum = nn.Parameter(distribute_tensor(torch.zeros(4, 32), mesh, [Replicate()], src_data_rank=None))
    optimizer.add_param_group({"params": [with_sum]})
    for placement in placements:
        rows = torch.full((4, 32), 5.0)
        if isinstance(placement[0], Partial):
            with_sum.grad = DTensor.from_local(rows * (dist.get_rank() + 1), mesh, placement)
            size = 5.0 * sum(range(1, _world() + 1)) * math.sqrt(128)
        else:
            with_sum.grad = distribute_tensor(rows, mesh, [Replicate()], src_data_rank=None)
            size = 5.0 * math.sqrt(128)
        take([norm(given), norm(other.grad), size])
    return found, expected


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_changes_on_some_ranks_alone(world_size: int) -> None:
    for found, expected in run_ranks(world_size, _norms_on_ranks):
        assert found == pytest.approx(expected, rel=CLOSE)


def _sparse(parameter: Tensor) -> Tensor:
    return parameter.detach().to_sparse()


@pytest.mark.parametrize("fused", BACKENDS)
@pytest.mark.parametrize(
    "make, message",
    [
        (_sparse, "has a sparse gradient"),
        (lambda parameter: parameter.detach() * 1j, "has a complex gradient"),
    ],
)
def test_a_gradient_that_is_refused_is_refused_later_too(
    make: Callable[[Tensor], Tensor], message: str, fused: bool | None
) -> None:
    parameters = [_parameter(4, sharded=False), _parameter(6, sharded=False)]
    optimizer = fod.FlashAdamW(parameters, fused=fused)
    for _ in range(2):
        fod.clip_grad_norm_(optimizer, 1.0)
    kept, parameters[1].grad = parameters[1].grad, None
    parameters[1].grad = make(parameters[1])
    with pytest.raises(RuntimeError, match=message):
        fod.clip_grad_norm_(optimizer, 1.0)
    parameters[1].grad = kept
    optimizer.clip_coefficient = None
    assert float(fod.clip_grad_norm_(optimizer, 1.0)) == pytest.approx(_expected(parameters, 2.0), rel=CLOSE)


def test_gradients_released_since_the_last_call_are_refused() -> None:
    """No gradient before, and none after they were stepped in the backward pass: the same to look at."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = fod.FlashAdamW(model.named_parameters())
    handle = fod.enable_gradient_release(model, optimizer)
    for _ in range(2):
        assert float(fod.clip_grad_norm_(optimizer, 1.0)) == 0.0
    optimizer.zero_grad()
    model(torch.ones(2, 32)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="stepped during the backward pass"):
        fod.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    handle.remove()


def test_each_choice_of_optimizers_has_its_own_norm() -> None:
    first, second = ([_parameter(4, sharded=False)], [_parameter(6, sharded=False), _parameter(2, sharded=False)])
    one, two = fod.FlashAdamW(first), fod.FlashLion(second)
    sharing = fod.FlashAdamW(first)
    cases = [(one, first), ([one, two], first + second), ([two, one], first + second), ([one, sharing], first)]
    for _ in range(3):
        for given, parameters in cases:
            for norm_type in (2.0, math.inf):
                for optimizer in (one, two, sharing):
                    optimizer.clip_coefficient = None
                norm = fod.clip_grad_norm_(given, 1.0, norm_type)  # type: ignore[arg-type]
                assert float(norm) == pytest.approx(_expected(parameters, norm_type), rel=CLOSE)


def test_a_copy_of_the_optimizer_takes_the_norm_of_its_own_parameters() -> None:
    parameters = [_parameter(4, sharded=False)]
    optimizer = fod.FlashAdamW(parameters)
    fod.clip_grad_norm_(optimizer, 1.0)
    other = copy.deepcopy(optimizer)
    [copied] = other.param_groups[0]["params"]
    other.clip_coefficient = None
    copied.grad = _like(copied, 90.0)
    assert float(fod.clip_grad_norm_(other, 1.0)) == pytest.approx(_expected([copied], 2.0), rel=CLOSE)


def _what_is_freed(fused: bool | None) -> list[bool]:
    parameters = _parameters()
    parameters[1].grad = _strided(parameters[1])
    optimizer = fod.FlashAdamW(parameters, fused=fused)
    for _ in range(2):
        fod.clip_grad_norm_(optimizer, 1.0)
    locals_ = [weakref.ref(_local(p.grad).untyped_storage()) for p in parameters if p.grad is not None]
    tensors = [weakref.ref(_local(p.grad)) for p in parameters if p.grad is not None]
    gc.disable()
    try:
        optimizer.zero_grad(set_to_none=True)
        freed = [reference() is None for reference in tensors + locals_]
    finally:
        gc.enable()
    of_optimizer, of_parameter = weakref.ref(optimizer), weakref.ref(parameters[0])
    del optimizer, parameters
    gc.collect()
    return [*freed, of_optimizer() is None, of_parameter() is None]


@pytest.mark.parametrize("fused", BACKENDS)
def test_nothing_is_kept_alive(fused: bool | None) -> None:
    """Gradients are freed by zero_grad(), without a garbage collection; the optimizer and its parameters by theirs."""
    [freed] = run_ranks(1, _what_is_freed, fused)
    assert freed == [True] * 10


@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_the_coefficient_has_the_bits_of_the_plain_formula(bad: float) -> None:
    parameters = [_parameter(4, sharded=False), _parameter(6, sharded=False)]
    assert parameters[0].grad is not None
    parameters[0].grad[0, 0] = bad
    optimizer = fod.FlashAdamW(parameters)
    squares = torch.stack([p.grad.double().reshape(-1).dot(p.grad.double().reshape(-1)) for p in parameters])  # type: ignore[union-attr]
    for max_norm in (0.0, 0.3, 1e9, math.inf):
        optimizer.clip_coefficient = None
        norm = fod.clip_grad_norm_(optimizer, max_norm)
        wide = (squares[0] + squares[1]).sqrt()
        expected = (max_norm / (wide + 1e-6)).clamp(max=1.0)
        expected = torch.where(torch.isfinite(wide), expected, math.nan).float()
        assert optimizer.clip_coefficient is not None
        assert torch.equal(optimizer.clip_coefficient.view(torch.int32), expected.view(torch.int32))
        assert norm.dtype == fp32
        torch.testing.assert_close(norm, wide.float(), rtol=0.0, atol=0.0, equal_nan=True)
