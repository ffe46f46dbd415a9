"""What a step refuses by name or follows, where a kernel would read the wrong memory; the torch step does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flashoptim_dist as fod
from flashoptim_dist.optim.base import FlashOptimizer
from tests.kernels.pairs import bf16, named, random_gradient, random_weights, set_gradient
from tests.numbers import assert_same_bits

SHAPES = [(2, 32), (4, 32)]
both_backends = pytest.mark.parametrize("fused", [True, False])


def stepped(
    device: torch.device, kind: type[FlashOptimizer] = fod.FlashAdamW, fused: bool = True
) -> tuple[list[nn.Parameter], FlashOptimizer]:
    """Parameters and their optimizer after a step."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(p.detach().to(device)) for p in random_weights(SHAPES, bf16)]
    optimizer = kind(named(parameters), lr=0.1, fused=fused)
    new_gradients(parameters)
    optimizer.step()
    return parameters, optimizer


def new_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        set_gradient(parameter, random_gradient(parameter.shape, bf16).to(parameter.device))


def refuse(parameters: list[nn.Parameter], optimizer: FlashOptimizer, message: str) -> None:
    """Assert that a step raises, and leaves all as it was."""
    before = [parameter.detach().clone() for parameter in parameters]
    counts = [float(optimizer.state[parameter]["step"]) for parameter in parameters[:1]]
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter.detach(), weight)
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters[:1]] == counts


@both_backends
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.float8_e4m3fn])
def test_a_gradient_of_another_dtype_is_refused_by_name(dtype: torch.dtype, fused: bool, device: torch.device) -> None:
    parameters, optimizer = stepped(device, fused=fused)
    set_gradient(parameters[1], torch.ones(SHAPES[1], device=device).to(dtype))
    refuse(parameters, optimizer, rf"layers\.1\.weight' \(4, 32\) has a gradient of {dtype}")


@both_backends
def test_a_sparse_gradient_is_refused_by_name_after_a_dense_one(fused: bool, device: torch.device) -> None:
    parameters, optimizer = stepped(device, fused=fused)
    set_gradient(parameters[1], torch.ones(SHAPES[1], dtype=bf16, device=device).to_sparse())
    refuse(parameters, optimizer, r"layers\.1\.weight' \(4, 32\) has a sparse gradient")


def test_a_gradient_that_is_a_negative_view_is_refused_by_name(device: torch.device) -> None:
    parameters, optimizer = stepped(device)
    optimizer._stepper.forget()
    set_gradient(parameters[1], torch.ones(SHAPES[1], dtype=torch.complex64, device=device).conj().imag)
    refuse(parameters, optimizer, r"layers\.1\.weight' \(4, 32\).*resolve_neg")


@both_backends
@pytest.mark.parametrize("kind", [fod.FlashAdamW, fod.FlashLion, fod.FlashSGD])
@pytest.mark.parametrize("rows", [2, 64])
def test_the_state_of_a_resized_parameter_is_refused_by_name(
    rows: int, kind: type[FlashOptimizer], fused: bool, device: torch.device
) -> None:
    parameters, optimizer = stepped(device, kind, fused)
    parameters[1].grad = None
    parameters[1].data = torch.ones(rows, 32, dtype=bf16, device=device)
    new_gradients(parameters)
    refuse(parameters, optimizer, rf"layers\.1\.weight' of local shape \({rows}, 32\).*del optimizer\.state")
    del optimizer.state[parameters[1]]
    optimizer.step()
    assert optimizer.state[parameters[1]]["step"].item() == 1.0


@both_backends
def test_a_gradient_from_before_a_parameter_was_resized_is_refused(fused: bool, device: torch.device) -> None:
    parameters, optimizer = stepped(device, fused=fused)
    parameters[1].data = torch.ones(64, 32, dtype=bf16, device=device)
    refuse(parameters, optimizer, r"layers\.1\.weight' \(64, 32\) has a gradient of shape \(4, 32\)")


@both_backends
@pytest.mark.parametrize(
    "name, value, message",
    [
        ("step", torch.tensor(3), "int64"),
        ("step", 3.0, "a float, no tensor"),
        ("exp_avg", torch.zeros(4, 32), "float32"),
        ("exp_avg", None, "missing"),
    ],
)
def test_state_that_the_user_replaced_by_another_kind_is_refused(
    name: str, value: Any, message: str, fused: bool, device: torch.device
) -> None:
    parameters, optimizer = stepped(device, fused=fused)
    new = value.to(device) if isinstance(value, torch.Tensor) else value
    optimizer.state[parameters[1]][name] = new
    refuse(parameters, optimizer, rf"state '{name}' of parameter 'layers\.1\.weight'.*{message}")


@both_backends
def test_what_else_the_user_keeps_in_a_state_is_left_alone(fused: bool, device: torch.device) -> None:
    parameters, optimizer = stepped(device, fused=fused)
    optimizer.state[parameters[0]]["average"] = torch.zeros(3, 4).t()
    optimizer.state[parameters[0]]["note"] = "mine"
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"].item() == 2.0


@both_backends
def test_parameters_put_into_a_group_or_taken_out_of_it_by_hand_are_followed(fused: bool, device: torch.device) -> None:
    parameters, optimizer = stepped(device, fused=fused)
    added = nn.Parameter(torch.ones(2, 32, dtype=bf16, device=device))
    new_gradients([*parameters, added])
    group, taken_out = optimizer.param_groups[0], parameters[0].detach().clone()
    group["params"][0], group["param_names"][0] = added, "added"
    optimizer.step()
    assert_same_bits(parameters[0].detach(), taken_out)
    assert optimizer.state[added]["step"].item() == 1.0
    assert optimizer.state[parameters[1]]["step"].item() == 2.0
    optimizer.add_param_group({"params": [("again", parameters[0])]})
    optimizer.step()
    assert not torch.equal(parameters[0], taken_out)
    again = parameters[0].detach().clone()
    optimizer.param_groups.pop()
    optimizer.step()
    assert_same_bits(parameters[0].detach(), again)
    assert optimizer.state[added]["step"].item() == 3.0


@both_backends
def test_one_clip_coefficient_of_one_dimension_holds_for_all(fused: bool, device: torch.device) -> None:
    sides = [stepped(device, fused=fused) for _ in range(2)]
    for number, (parameters, optimizer) in enumerate(sides):
        torch.manual_seed(1)
        new_gradients(parameters)
        optimizer.clip_coefficient = torch.tensor([0.5] if number else 0.5, device=device)
        optimizer.step()
    for parameter, other in zip(sides[0][0], sides[1][0], strict=True):
        assert_same_bits(parameter.detach(), other.detach())
