"""The step as a training loop sees it: torch's own protocols, what is refused, and what must leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashoptim_dist import FlashAdamW
from flashoptim_dist.formats import merge, noise_key, parameter_id, split
from flashoptim_dist.optim import reference
from flashoptim_dist.optim.rules import adam_scalars, adam_update
from flashoptim_dist.sharding import shard_layout
from tests import pool
from tests.numbers import assert_same_bits
from tests.optim.cases import PLAIN, SHARDED, Case, whole_state
from tests.pool import run_ranks

MATRIX, VECTOR = Case("matrix", (9, 70)), Case("vector", (33,), dtype=torch.float32)


def pair(**options: Any) -> tuple[list[nn.Parameter], FlashAdamW]:
    parameters = [MATRIX.parameter(), VECTOR.parameter()]
    named = [(MATRIX.name, parameters[0]), (VECTOR.name, parameters[1])]
    return parameters, FlashAdamW(named, **{"lr": 2.0**-7, **options})


def set_gradients(parameters: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    for case, parameter in zip((MATRIX, VECTOR), parameters):
        parameter.grad = case.gradient(step) * factor


def states(parameters: list[nn.Parameter], optimizer: FlashAdamW) -> list[dict[str, Tensor]]:
    return [whole_state(optimizer, parameter) for parameter in parameters]


def assert_same_states(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            assert_same_bits(one[name], other[name], name)


def straight(steps: int = 3, **options: Any) -> list[dict[str, Tensor]]:
    parameters, optimizer = pair(**options)
    for step in range(1, steps + 1):
        set_gradients(parameters, step)
        optimizer.step()
    return states(parameters, optimizer)


# ---------------------------------------------------------------------------------------------- torch's protocols


def test_closure_is_called_once_with_gradients_on_and_its_loss_returned() -> None:
    parameters, optimizer = pair()
    calls = []
    for step in range(1, 4):

        def closure(step: int = step) -> Tensor:
            calls.append(torch.is_grad_enabled())
            set_gradients(parameters, step)
            return torch.tensor(float(step))

        with torch.no_grad():
            assert optimizer.step(closure).item() == step
    assert calls == [True] * 3
    assert optimizer.step() is None
    parameters, optimizer = pair()
    for step in range(1, 4):
        optimizer.step(lambda step=step: set_gradients(parameters, step))
    assert_same_states(states(parameters, optimizer), straight())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_as_learning_rate(shape: tuple[int, ...]) -> None:
    """Gives the float's bits where fp32 holds it, and may be changed in place."""
    lr = torch.full(shape, 2.0**-7)
    parameters, optimizer = pair(lr=lr)
    for step in range(1, 4):
        set_gradients(parameters, step)
        optimizer.step()
    assert_same_states(states(parameters, optimizer), straight())
    optimizer.param_groups[0]["lr"].fill_(0.0)
    before = states(parameters, optimizer)
    set_gradients(parameters, 4)
    optimizer.step()
    for one, other in zip(states(parameters, optimizer), before):
        assert_same_bits(one["weight"], other["weight"])
        assert one["step"].item() == 4.0


def test_a_template_of_an_optimizer_with_a_tensor_as_learning_rate() -> None:
    parameters, optimizer = pair(lr=torch.tensor(2.0**-7))
    model = nn.ParameterDict({MATRIX.name: parameters[0], VECTOR.name: parameters[1]})
    get_optimizer_state_dict(model, optimizer)
    assert all(state["step"].item() == 0.0 for state in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"].item() == 2.0**-7
    for step in range(1, 4):
        set_gradients(parameters, step)
        optimizer.step()
    assert_same_states(states(parameters, optimizer), straight())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: n / 3, lambda n: 1 / (n + 1)]),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
    "OneCycleLR, which turns betas too": lambda o: lr_scheduler.OneCycleLR(o, [1e-2, 1e-3], total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_turn_the_groups_as_they_turn_adamws(name: str) -> None:
    """Two groups with learning rates of their own; the weights follow torch's to one step's quantization."""
    runs = []
    for optimizer_type in (FlashAdamW, torch.optim.AdamW):
        parameters = [nn.Parameter(VECTOR.weight()), nn.Parameter(VECTOR.weight().flip(0))]
        optimizer = optimizer_type(
            [{"params": parameters[:1], "lr": 1e-2}, {"params": parameters[1:], "lr": 1e-3}], lr=1.0
        )
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for step in range(1, 7):
            for parameter in parameters:
                parameter.grad = VECTOR.gradient(step)
            optimizer.step()
            if name == "ReduceLROnPlateau":
                scheduler.step(1.0)
            else:
                scheduler.step()
            rates.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        runs.append((rates, [parameter.detach() for parameter in parameters]))
    (rates, weights), (their_rates, their_weights) = runs
    assert rates == their_rates
    for weight, theirs in zip(weights, their_weights):
        # fp32 moments: only the order of fp32 operations differs, a few units of 2^-24 in each of 6 steps.
        assert torch.allclose(weight, theirs, rtol=6 * 2.0**-22, atol=6 * 1e-2 * 2.0**-20)


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled gradients", "unscaled before the step"])
def test_grad_scaler(unscale: bool) -> None:
    """Scales that are powers of two leave no trace; steps with an Inf are skipped, counted, and do not advance."""
    parameters, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    for step in (1, 2):
        set_gradients(parameters, step, 2.0**8)
        scaler.scale(torch.zeros(()))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    before = states(parameters, optimizer)
    set_gradients(parameters, 3, 2.0**8)
    assert parameters[0].grad is not None
    parameters[0].grad[0, 0] = float("inf")
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    assert optimizer.skipped_steps == 1
    assert_same_states(states(parameters, optimizer), before)
    set_gradients(parameters, 3, 2.0**7)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert_same_states(states(parameters, optimizer), straight())
    # The scaler leaves nothing behind that would scale a step without it.
    set_gradients(parameters, 4)
    optimizer.step()
    assert_same_states(states(parameters, optimizer), straight(4))


def test_step_hooks_run() -> None:
    parameters, optimizer = pair()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    set_gradients(parameters, 1)
    optimizer.step()
    assert seen == ["pre", "post"]


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    """As in torch: no state, no decay, and its step count does not advance when it comes and goes."""
    parameters, optimizer = pair(weight_decay=0.5)
    parameters[0].grad = MATRIX.gradient(1)
    optimizer.step()
    assert parameters[1] not in optimizer.state
    assert_same_bits(parameters[1].detach(), VECTOR.weight())
    set_gradients(parameters, 2)
    optimizer.step()
    parameters[0].grad = None
    before = whole_state(optimizer, parameters[0])
    parameters[1].grad = VECTOR.gradient(3)
    optimizer.step()
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [2.0, 2.0]
    for name, value in whole_state(optimizer, parameters[0]).items():
        assert_same_bits(value, before[name], name)


def test_init_state_makes_all_of_it_and_takes_no_step() -> None:
    parameters, optimizer = pair()
    parameters[1].requires_grad_(False)
    optimizer.init_state()
    assert list(optimizer.state) == parameters[:1]
    assert all(not entry.any() for entry in optimizer.state[parameters[0]].values())
    parameters[1].requires_grad_(True)
    for step in range(1, 4):
        set_gradients(parameters, step)
        optimizer.step()
    assert_same_states(states(parameters, optimizer), straight())


def test_a_group_can_be_added_in_mid_run() -> None:
    parameters = [MATRIX.parameter(), VECTOR.parameter()]
    optimizer = FlashAdamW([(MATRIX.name, parameters[0])], lr=2.0**-7)
    parameters[0].grad = MATRIX.gradient(1)
    optimizer.step()
    optimizer.add_param_group({"params": [(VECTOR.name, parameters[1])], "lr": 1e-3})
    set_gradients(parameters, 2)
    optimizer.step()
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [2.0, 1.0]
    assert_same_bits(parameters[0].detach(), straight(2)[0]["weight"])


def test_the_order_of_named_parameters_leaves_no_trace() -> None:
    parameters = [MATRIX.parameter(), VECTOR.parameter()]
    optimizer = FlashAdamW([(VECTOR.name, parameters[1]), (MATRIX.name, parameters[0])], lr=2.0**-7)
    for step in range(1, 4):
        set_gradients(parameters, step)
        optimizer.step()
    assert_same_states(states(parameters, optimizer), straight())


# ---------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(
    "bits, rounding",
    [
        (8, "stochastic"),
        (16, "nearest"),
        pytest.param(8, "nearest", marks=pytest.mark.full),
        pytest.param(16, "stochastic", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("case", [case for case in (*SHARDED, *PLAIN) if 0 not in case.shape], ids=str)
def test_the_size_of_blocks_leaves_no_trace(case: Case, bits: int, rounding: str) -> None:
    """A parameter stepped in blocks of 32 elements up to all at once: the same bits."""
    results = []
    for chunk in (32, 64, 100, 288, 1 << 18):
        weight = case.weight()
        layout = shard_layout(weight, case.name)
        shape, scales = layout.local_shape, layout.scale_local_shape
        compressed = layout.quantized
        corrected = weight.dtype != torch.float32
        correction = torch.zeros(shape, dtype=torch.int8 if bits == 8 else torch.int16) if corrected else None
        moments = tuple(
            reference.MomentTensors(
                signed,
                torch.zeros(shape, dtype=(torch.int8 if signed else torch.uint8) if compressed else torch.float32),
                torch.zeros(scales, dtype=torch.bfloat16) if compressed else None,
            )
            for signed in (True, False)
        )
        key = noise_key(3, parameter_id(case.name, 0)) if rounding == "stochastic" else None
        for step in range(1, 4):
            scalars = adam_scalars(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, decay=0.999, l2=0.0, step=step)
            task = reference.ParameterStep(
                layout, weight, case.gradient(step), correction, moments, scalars, 1.0, key, step
            )
            reference.step_parameter(task, adam_update, chunk)
        tensors = [weight, *([] if correction is None else [correction])]
        for moment in moments:
            tensors += [moment.values, *([] if moment.scale is None else [moment.scale])]
        results.append(tensors)
    for chunked in results[:-1]:
        for actual, expected in zip(chunked, results[-1], strict=True):
            assert_same_bits(actual, expected)


class LargestStorage(TorchDispatchMode):
    """Records the largest memory that any operation made."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self._known:
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_temporary_memory_does_not_grow_with_the_parameter(strided: bool, rounding: Any) -> None:
    """Invariant 4: 2^22 elements, 16 MiB in fp32; no temporary is larger than 4 bytes for each element of a block."""
    weight = torch.randn(1 << 11, 1 << 11).to(torch.bfloat16)
    parameter = nn.Parameter(weight.t() if strided else weight)
    parameter.grad = torch.randn(1 << 11, 1 << 11).to(torch.bfloat16)
    optimizer = FlashAdamW([("w", parameter)], rounding=rounding)
    optimizer.init_state()
    known = [parameter.data, parameter.grad, *optimizer.state[parameter].values()]
    with LargestStorage(known) as largest:
        optimizer.step()
    assert 0 < largest.nbytes <= 4 * reference.CHUNK_ELEMENTS * 4


def collectives_of_a_step() -> list[int]:
    """Of the first step, which makes the state, of a later one, and of one that asks for a template."""
    counts = []
    parameter = MATRIX.parameter(pool.mesh(2))
    optimizer = FlashAdamW([(MATRIX.name, parameter)], lr=1e-2)
    for step in (1, 2):
        parameter.grad = MATRIX.place(MATRIX.gradient(step), pool.mesh(2))
        with CommDebugMode() as communication:
            optimizer.step()
        counts.append(communication.get_total_counts())
    fresh = MATRIX.parameter(pool.mesh(2))
    asked = FlashAdamW([(MATRIX.name, fresh)], lr=0.0)
    fresh.grad = torch.zeros_like(fresh)
    with CommDebugMode() as communication:
        asked.step()
        asked.init_state()
        asked.state_dict()
    counts.append(communication.get_total_counts())
    return counts


def test_a_step_communicates_nothing() -> None:
    """Invariant 4, in its collectives."""
    assert run_ranks(2, collectives_of_a_step) == [[0, 0, 0]] * 2


# ---------------------------------------------------------------------------------------------- refusals


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(10, 32, sparse=True)
    optimizer = FlashAdamW(embedding.named_parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"'weight' \(10, 32\) has a sparse gradient; build its embedding with sparse=False"
    ):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.complex128])
def test_parameters_of_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    good, bad = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, dtype=dtype))
    with pytest.raises(TypeError, match=rf"parameter 'bad' has dtype {dtype}"):
        FlashAdamW([("good", good), ("bad", bad)])
    with pytest.raises(TypeError, match=rf"a parameter of shape \(3,\) has dtype {dtype}"):
        FlashAdamW([bad])
    # A refused group leaves the optimizer as it was.
    optimizer = FlashAdamW([("good", good)])
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [("bad", bad)]})
    assert len(optimizer.param_groups) == 1


BAD_OPTIONS = [
    ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
    ({"lr": float("nan")}, "lr must be"),
    ({"lr": float("inf")}, "lr must be"),
    ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
    ({"betas": (-0.1, 0.9)}, "betas"),
    ({"eps": -1e-8}, "eps must be a finite number >= 0"),
    ({"weight_decay": -0.1}, "weight_decay must be a finite number >= 0"),
    ({"master_weight_bits": 16}, "master_weight_bits must be 24, 32 or None, got 16"),
    ({"rounding": "up"}, "rounding must be one of"),
    ({"quantize": 8}, "quantize must be True or False, got 8"),
    ({"seed": -1}, "seed must be an integer >= 0, got -1"),
    ({"seed": 1.5}, "seed must be an integer"),
]


@pytest.mark.parametrize("options, message", BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS])
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=message):
        FlashAdamW([parameter], **options)
    with pytest.raises(ValueError, match=message):
        FlashAdamW([{"params": [parameter], **options}])


def gradient_elsewhere(kind: str) -> tuple[str, bool]:
    """A gradient that does not lie as its parameter does; returns the message, and whether all weights stayed."""
    device_mesh = pool.mesh(2)
    good = nn.Parameter(distribute_tensor(torch.ones(4, 64), device_mesh, [Shard(0)], src_data_rank=None))
    bad = nn.Parameter(distribute_tensor(torch.ones(4, 64), device_mesh, [Shard(0)], src_data_rank=None))
    optimizer = FlashAdamW([("good", good), ("layer.bad", bad)], lr=0.5)
    good.grad = torch.ones_like(good)
    if kind == "replicated":
        bad.grad = distribute_tensor(torch.ones(4, 64), device_mesh, [Replicate()], src_data_rank=None)
    elif kind == "cut otherwise":
        bad.grad = distribute_tensor(torch.ones(4, 64), device_mesh, [Shard(1)], src_data_rank=None)
    else:
        bad.grad = torch.ones(4, 64)
    try:
        optimizer.step()
        message = ""
    except RuntimeError as error:
        message = str(error)
    return message, all(bool((parameter.to_local() == 1).all()) for parameter in (good, bad))


@pytest.mark.parametrize(
    "kind, words",
    [
        ("replicated", "'layer.bad' (4, 64) has placements (Shard(dim=0),) and its gradient (Replicate(),)"),
        ("cut otherwise", "'layer.bad' (4, 64) has placements (Shard(dim=0),) and its gradient (Shard(dim=1),)"),
        ("plain", "'layer.bad' is a DTensor and its gradient is not"),
    ],
)
def test_a_gradient_that_lies_elsewhere_is_refused_before_anything_is_stepped(kind: str, words: str) -> None:
    for message, untouched in run_ranks(2, gradient_elsewhere, kind):
        assert words in message
        assert untouched


def on_another_mesh() -> tuple[torch.Size, bool]:
    """Parameters on meshes of their own, beside plain ones, in one optimizer."""
    rows = Case("rows", (5, 64)).parameter(pool.mesh(4))
    grid_case = Case("grid", (6, 128), (Shard(0), Shard(1)), ((2, 2),))
    grid = grid_case.parameter(pool.mesh(2, 2))
    plain = VECTOR.parameter()
    optimizer = FlashAdamW([("rows", rows), ("grid", grid), ("vector", plain)], lr=1e-2)
    rows.grad = Case("rows", (5, 64)).place(Case("rows", (5, 64)).gradient(1), pool.mesh(4))
    grid.grad = grid_case.place(grid_case.gradient(1), pool.mesh(2, 2))
    plain.grad = VECTOR.gradient(1)
    optimizer.step()
    kinds = [isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in (rows, grid, plain)]
    return optimizer.state[grid]["exp_avg_scale"].shape, kinds == [True, True, False]


def test_meshes_and_plain_tensors_mix() -> None:
    assert run_ranks(4, on_another_mesh) == [((6, 4), True)] * 4


# ---------------------------------------------------------------------------------------------- specials


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_an_element_that_is_not_finite_hurts_itself_alone(special: float) -> None:
    """All other elements have the bits they would have with a zero gradient there."""
    results = []
    for value in (special, 0.0):
        parameter = nn.Parameter(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
        optimizer = FlashAdamW([("w", parameter)], lr=1e-2, rounding="nearest")
        for step in (1, 2, 3):
            gradient = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)) * 1e-2
            gradient[2, 5] = value if step == 2 else 0.0
            parameter.grad = gradient
            optimizer.step()
        results.append(whole_state(optimizer, parameter))
    hurt, clean = results
    others = torch.ones(4, 64, dtype=torch.bool)
    others[2, 5] = False
    if special == 1e30:
        others[2, :32] = False  # finite, so it counts for its group's scale
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert_same_bits(hurt[name][others], clean[name][others], name)


def test_a_master_that_moves_below_the_resolution_of_bf16_is_not_lost() -> None:
    """1000 constant steps of 1e-6 of the weight: bf16 alone would stand still, the 24-bit master goes the way."""
    parameter = nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
    optimizer = FlashAdamW([("w", parameter)], lr=1e-6, weight_decay=0.0)
    for _ in range(1000):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = 1.0 - merge(parameter.detach(), optimizer.state[parameter]["error_bits"]).to(torch.float64).mean().item()
    # fp32's own unit at 1 is 6e-8, 6 % of a step, half of it below 1: what is lost is the add's own rounding.
    assert moved == pytest.approx(1e-3, rel=0.07)
    assert torch.equal(split(torch.full((1,), 1.0 - 1e-3), torch.bfloat16, 8)[0], parameter.detach()[0, :1])
