"""Plans are kept while they hold: whatever happens between two steps, a kept plan gives the bits of a new one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist.optim import stepper
from flashoptim_dist.optim.base import FlashOptimizer
from tests.kernels.pairs import bf16, copy_of, fp32, named, random_gradient, random_weights, set_gradient
from tests.numbers import assert_same_bits

SHAPES = [(2, 32), (3,)]
Event = Callable[[FlashOptimizer, list[nn.Parameter]], None]
HELD: list[Any] = []
"""What somebody still refers to."""


def nothing(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    pass


def move_gradients(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()


def misalign_gradients(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        buffer = torch.zeros(gradient.numel() + 1, dtype=gradient.dtype, device=gradient.device)
        buffer[1:] = gradient.reshape(-1)
        parameter.grad = buffer[1:].view(gradient.shape)


def drop_a_gradient(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    parameters[0].grad = None


def drop_all_gradients(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def change_gradient_dtype(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        set_gradient(parameter, parameter.grad.float())


def change_gradient_strides(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    assert parameters[0].grad is not None
    parameters[0].grad = parameters[0].grad.t().contiguous().t()


def reload_state(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    state = optimizer.state_dict()
    state["state"] = {
        number: {name: value.clone() for name, value in entry.items()} for number, entry in state["state"].items()
    }
    optimizer.load_state_dict(state)


def replace_state_tensors(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    """As those do who move the state to the CPU between steps and back."""
    for entry in optimizer.state.values():
        for name in entry:
            entry[name] = entry[name].clone()
    spoil_freed_memory(optimizer)


def replace_states(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    """The dicts themselves, while the old ones are still held by somebody."""
    HELD.append(dict(optimizer.state))
    for parameter in parameters:
        if parameter in optimizer.state:
            optimizer.state[parameter] = {name: value.clone() for name, value in optimizer.state[parameter].items()}


def replace_the_state(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    """By a plain mapping, as torch's Optimizer keeps it."""
    HELD.append(optimizer.state)
    optimizer.state = defaultdict(dict, {p: {n: v.clone() for n, v in s.items()} for p, s in optimizer.state.items()})


def update_held_states(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    """One entry of each, by dict.update, while the old tensors live on."""
    for state in optimizer.state.values():
        HELD.append(dict(state))
        state.update(exp_avg=state["exp_avg"].clone())


def replace_state_data(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    """The older idiom for the same."""
    for entry in optimizer.state.values():
        for value in entry.values():
            value.data = value.data.clone()


def spoil_freed_memory(optimizer: FlashOptimizer) -> None:
    for entry in optimizer.state.values():
        for value in entry.values():
            torch.full_like(value, 3)


def overwrite_weights(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))


def replace_weight_data(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.clone() * 0.5


def change_learning_rate(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def learning_rate_tensor(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25, device=parameters[0].device)


def fill_learning_rate_tensor(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    lr = optimizer.param_groups[0]["lr"]
    if isinstance(lr, Tensor):
        lr.fill_(0.125)


def change_decay(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


def change_betas(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)


def switch_momentum_on(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


def switch_nesterov_on(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["nesterov"] = True


def add_a_group(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    if len(optimizer.param_groups) == 1:
        added = nn.Parameter(torch.full((2, 32), 0.5, dtype=bf16, device=parameters[0].device))
        optimizer.add_param_group({"params": [("added", added)], "lr": 0.1})
        parameters.append(added)


def unfreeze(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    parameters[-1].requires_grad_(True)


EVENTS: list[tuple[type[FlashOptimizer], dict[str, Any], Event]] = [
    *(
        (fod.FlashAdamW, {}, event)
        for event in (
            nothing, move_gradients, misalign_gradients, drop_a_gradient, drop_all_gradients, change_gradient_dtype,
            change_gradient_strides, reload_state, replace_state_tensors, replace_states, replace_the_state,
            update_held_states, replace_state_data, overwrite_weights, replace_weight_data, change_learning_rate,
            learning_rate_tensor, change_betas, add_a_group, unfreeze,
        )
    ),
    (fod.FlashAdam, {"weight_decay": 0.0}, change_decay),
    (fod.FlashAdamW, {"lr": torch.tensor(0.5)}, fill_learning_rate_tensor),
    (fod.FlashSGD, {"momentum": 0.0, "lr": 0.1}, switch_momentum_on),
    (fod.FlashSGD, {"momentum": 0.9, "lr": 0.1}, switch_nesterov_on),
]  # fmt: skip


FAST = (
    nothing, move_gradients, misalign_gradients, drop_a_gradient, reload_state, replace_state_tensors, replace_states,
    replace_the_state, update_held_states, overwrite_weights, change_learning_rate, add_a_group, unfreeze,
    switch_momentum_on,
)  # fmt: skip


def new_gradients(parameters: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for parameter in parameters:
        parameter.grad_dtype = None
        gradient = random_gradient(parameter.shape, bf16).to(parameter.device)
        if not parameter.requires_grad:
            continue
        if parameter.grad is None or parameter.grad.dtype != bf16:
            set_gradient(parameter, gradient)
        else:
            parameter.grad.copy_(gradient)


@pytest.mark.parametrize(
    "kind, options, event",
    [pytest.param(*case, id=case[2].__name__, marks=() if case[2] in FAST else pytest.mark.full) for case in EVENTS],
)
def test_a_kept_plan_gives_the_bits_of_a_new_one(
    kind: type[FlashOptimizer], options: dict[str, Any], event: Event, device: torch.device
) -> None:
    torch.manual_seed(0)
    weights = random_weights(SHAPES, bf16)
    if event is unfreeze:
        weights[-1].requires_grad_(False)
    options = {"lr": 0.01, **options}
    if isinstance(options["lr"], Tensor):
        options["lr"] = options["lr"].to(device)
    sides = []
    for keeps in (True, False):
        parameters = [nn.Parameter(w.detach().to(device, copy=True), w.requires_grad) for w in weights]
        own = {**options, "lr": options["lr"].clone() if isinstance(options["lr"], Tensor) else options["lr"]}
        optimizer = kind(named(parameters), **own, fused=True)
        plans = []
        for step in range(3):
            new_gradients(parameters, step)
            if step == 1:
                event(optimizer, parameters)
            if not keeps:
                optimizer._stepper.forget()
            optimizer.step()
            plans.append(list(optimizer._stepper.plans))
        if keeps and event in (nothing, move_gradients, change_learning_rate, fill_learning_rate_tensor, change_betas):
            assert plans[0] == plans[2], "the plan should have been kept"
        sides.append((optimizer, parameters))
    (kept, kept_parameters), (planned, planned_parameters) = sides
    for number, (a, b) in enumerate(zip(kept_parameters, planned_parameters, strict=True)):
        assert_same_bits(a.detach(), b.detach(), f"weight {number}")
        assert kept.state[a].keys() == planned.state[b].keys()
        for name, value in planned.state[b].items():
            assert_same_bits(kept.state[a][name], value, f"{name} of tensor {number}")


def take_out_of_the_group(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    for key in ("params", "param_names"):
        optimizer.param_groups[0][key].pop(0)


def put_behind_the_others(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    for key in ("params", "param_names"):
        members = optimizer.param_groups[0][key]
        members.append(members.pop(0))


def change_dtype_and_skip(optimizer: FlashOptimizer, parameters: list[nn.Parameter]) -> None:
    """A step that is skipped, and for which one parameter has to be planned anew."""
    gradient = parameters[0].grad
    assert gradient is not None
    set_gradient(parameters[0], gradient.float())
    optimizer.found_inf = torch.ones((), device=gradient.device)


TWO_PLANS = [
    nothing,
    drop_a_gradient,
    move_gradients,
    take_out_of_the_group,
    put_behind_the_others,
    change_dtype_and_skip,
]


@pytest.mark.parametrize("event", TWO_PLANS, ids=lambda event: event.__name__)
@pytest.mark.parametrize(
    "row",
    [pytest.param(0, id="in the first plan"), pytest.param(-1, id="in the second plan", marks=pytest.mark.full)],
)
def test_two_plans_give_the_bits_of_one(
    event: Event, row: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two has to be planned anew, each parameter is stepped once."""
    torch.manual_seed(0)
    weights = random_weights([(4, 32), (2, 32), (3,), (1, 32)][:: 1 if row == 0 else -1], bf16)
    sides = []
    for plans in (2, 1):
        monkeypatch.setattr(stepper, "_FEW_TASKS", 2 if plans == 2 else 32)
        for name in ("_LOOK_MICROSECONDS", "_LAUNCH_MICROSECONDS"):
            monkeypatch.setattr(stepper, name, 0.0)
        parameters = [nn.Parameter(w.detach().to(device, copy=True)) for w in weights]
        optimizer = fod.FlashAdamW(named(parameters), lr=0.01, fused=True)
        for step in range(3):
            new_gradients(parameters, step)
            if step == 1:
                event(optimizer, parameters)
            optimizer.step()
            if step == 1:
                optimizer.found_inf = None
            if step == 0:
                assert len(optimizer._stepper.plans) == plans
        assert optimizer.skipped_steps == (event is change_dtype_and_skip)
        sides.append((optimizer, parameters))
    (two, two_parameters), (one, one_parameters) = sides
    for a, b in zip(two_parameters, one_parameters, strict=True):
        assert_same_bits(a.detach(), b.detach(), "weight")
        for name, value in one.state[b].items():
            assert_same_bits(two.state[a][name], value, name)


def test_the_first_plan_keeps_a_device_busy_while_the_host_looks_at_the_rest() -> None:
    """Large models: a few tensors. Small ones: most of the elements. Tiny ones, done before the host is: all."""

    def first_and_total(sizes: list[int]) -> tuple[int, int, int]:
        tasks: list[Any] = [SimpleNamespace(record=SimpleNamespace(layout=SimpleNamespace(numel=n))) for n in sizes]
        waves = stepper._waves(tasks)
        assert sorted(map(id, tasks)) == sorted(id(task) for wave in waves for task in wave)
        return len(waves), len(waves[0]), sum(task.record.layout.numel for task in waves[0])

    assert first_and_total([10_000_000] * 300) == (2, 20, 200_000_000)
    plans, tensors, elements = first_and_total([1_000_000] * 50 + [1_000] * 100)
    assert plans == 2
    assert 25 < tensors < 50
    assert elements == tensors * 1_000_000
    assert first_and_total([1_000] * 100) == (1, 100, 100_000)
    assert first_and_total([10_000_000] * 31) == (1, 31, 310_000_000)


def test_steps_are_counted_per_parameter(device: torch.device) -> None:
    """A parameter without a gradient is left alone and its step does not advance."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(w.detach().to(device)) for w in random_weights([(2, 32), (1, 32)], bf16)]
    optimizer = fod.FlashAdamW(named(parameters), fused=True)
    for step in range(3):
        new_gradients(parameters, step)
        if step == 1:
            parameters[1].grad, before = None, parameters[1].detach().clone()
        optimizer.step()
        if step == 1:
            assert_same_bits(parameters[1].detach(), before, "weight without a gradient")
    assert [optimizer.state[p]["step"].item() for p in parameters] == [3, 2]


@pytest.mark.parametrize("kind", [fod.FlashAdamW, fod.FlashLion])
def test_found_inf_skips_everything(kind: type[FlashOptimizer], device: torch.device) -> None:
    """No bit changes, no step advances, and the skip is counted; the next step is a usual one."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(w.detach().to(device)) for w in random_weights(SHAPES, bf16)]
    optimizer = kind(named(parameters), fused=True)
    found_inf = torch.zeros((), device=device)
    optimizer.found_inf = found_inf
    new_gradients(parameters, 0)
    optimizer.step()
    before = [(p.detach().clone(), {n: v.clone() for n, v in optimizer.state[p].items()}) for p in parameters]
    found_inf.fill_(1.0)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    for parameter, (weight, state) in zip(parameters, before, strict=True):
        assert_same_bits(parameter.detach(), weight, "weight")
        for name, value in state.items():
            assert_same_bits(optimizer.state[parameter][name], value, name)
    found_inf.zero_()
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in parameters] == [2, 2]
    assert optimizer.skipped_steps == 1


def test_loss_scale_and_clip_coefficient_are_read_from_the_device(device: torch.device) -> None:
    """Powers of two change no bit: the step equals one with gradients scaled beforehand."""
    torch.manual_seed(0)
    weights = random_weights(SHAPES, bf16)
    results = []
    for scale in (1.0, 1024.0):
        parameters = [nn.Parameter(w.detach().to(device, copy=True)) for w in weights]
        optimizer = fod.FlashAdamW(named(parameters), fused=True)
        for step in range(2):
            if scale != 1.0:
                optimizer.grad_scale = torch.tensor(scale * 4, device=device)
                optimizer.clip_coefficient = torch.tensor(4.0, device=device)
            new_gradients(parameters, step)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
            optimizer.step()
        results.append([p.detach() for p in parameters])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b, "weight")


def test_grad_scaler(device: torch.device) -> None:
    """C50: with an Inf in one gradient nobody steps; the scaler halves its scale and the next step is taken."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(w.detach().float().to(device)) for w in random_weights(SHAPES, bf16)]
    optimizer = fod.FlashAdamW(named(parameters), fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        loss = parameters[0].sum() * factor + parameters[1].sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert optimizer.skipped_steps == 1
    assert [optimizer.state[p]["step"].item() for p in parameters] == [2, 2]


def test_corrections_of_replaced_weights_are_dropped(device: torch.device) -> None:
    """D47: after `copy_` into the weights a step with lr = 0 leaves them as they were set."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(w.detach().to(device)) for w in random_weights(SHAPES, bf16)]
    optimizer = fod.FlashAdamW(named(parameters), weight_decay=0.0, fused=True)
    for step in range(2):
        new_gradients(parameters, step)
        optimizer.step()
    overwrite_weights(optimizer, parameters)
    expected = [p.detach().clone() for p in parameters]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    for parameter, weight in zip(parameters, expected, strict=True):
        assert_same_bits(parameter.detach(), weight, "weight")
        assert not optimizer.state[parameter]["error_bits"].any()


def test_zero_gradient_and_learning_rate_change_no_weight(device: torch.device) -> None:
    """Invariant 3, on weights of every exponent and their corrections."""
    torch.manual_seed(0)
    patterns = torch.randint(0, 0x7F80, (8, 64), dtype=torch.int32) | (torch.randint(0, 2, (8, 64)) << 15).int()
    weight = nn.Parameter(patterns.to(torch.int16).view(bf16))
    optimizer = fod.FlashAdamW(named([weight]), fused=False)
    optimizer.init_state()
    state = optimizer.state[weight]
    state["error_bits"].copy_(torch.randint(-128, 128, (8, 64)))
    state["error_bits"][(patterns & 0x7FFF) == 0] = 0
    state["exp_avg"].copy_(torch.randint(-127, 128, (8, 64)))
    state["exp_avg_sq"].copy_(torch.randint(3, 256, (8, 64)))
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        state[name].fill_(0.01)
    weight.grad = torch.zeros_like(weight)
    (copy,), other = copy_of(optimizer, [weight], device, lr=0.0)
    other.step()
    # A negative correction under the smallest weight, or below zero, is the one thing that decodes to another number.
    assert_same_bits(copy.detach().cpu(), weight.detach(), "weight")
    assert_same_bits(other.state[copy]["error_bits"].cpu(), state["error_bits"], "correction")


def test_an_unusual_gradient_leaves_all_parameters_unchanged(device: torch.device) -> None:
    """A sparse gradient is refused before anything is written."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(w.detach().to(device)) for w in random_weights([(2, 32), (4, 32)], fp32)]
    optimizer = fod.FlashAdamW(named(parameters), fused=True)
    new = [torch.ones_like(parameters[0]), torch.ones_like(parameters[1]).to_sparse()]
    for parameter, gradient in zip(parameters, new, strict=True):
        parameter.grad = gradient
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight"):
        optimizer.step()
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter.detach(), weight, "weight")
