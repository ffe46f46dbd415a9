"""What the options of the optimizers mean, and what is refused: schedulers, decoupled decay, master weights, checks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashoptim_dist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashoptim_dist.optim import FlashOptimizer, compiled, definition, eager
from tests.optim.cases import SHARDED, Case, whole
from tests.pool import mesh, run_ranks

ALL = [FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW]
CASE = Case("options", (6, 70), None)


def pair(optimizer_type: type[FlashOptimizer], **options: Any) -> tuple[FlashOptimizer, list[nn.Parameter]]:
    """An optimizer of two groups, of lr 1e-4 and 1e-2."""
    parameters = [CASE.parameter(), CASE.parameter()]
    groups = [{"params": [parameters[0]], "lr": 1e-4}, {"params": [parameters[1]], "lr": 1e-2}]
    return optimizer_type(groups, lr=1e-3, **options), parameters


@pytest.mark.parametrize("optimizer_type", ALL)
def test_schedulers_see_the_lr_of_each_group(optimizer_type: type[FlashOptimizer]) -> None:
    optimizer, parameters = pair(optimizer_type)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 1e-2]
    for parameter in parameters:
        parameter.grad = CASE.gradient(1)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-5, 5e-3]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-4, 1e-2]


@pytest.mark.parametrize("optimizer_type", [FlashAdamW, FlashLion, FlashSGDW])
@pytest.mark.parametrize("scheduled", [False, True], ids=["lr set", "scheduler"])
def test_decouple_lr_decays_by_lr_over_each_groups_first(optimizer_type: type[FlashOptimizer], scheduled: bool) -> None:
    """Weights without a gradient shrink by weight_decay * lr / initial lr, whatever the group's lr: half of it here."""
    optimizer, parameters = pair(optimizer_type, weight_decay=1e-2, decouple_lr=True, master_weight_bits=32)
    if scheduled:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    else:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    before = [optimizer.master_weight(parameter).double() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, weight in zip(parameters, before, strict=True):
        # Two roundings to fp32 (the factor, the product).
        torch.testing.assert_close(optimizer.master_weight(parameter).double(), weight * 0.995, rtol=2.0**-22, atol=0.0)


# ---------------------------------------------------------------------------------------------- master weights


@pytest.mark.parametrize("bits", [24, 32, None])
@pytest.mark.parametrize("optimizer_type", ALL)
def test_master_weights_are_set_and_read_before_the_first_step(
    optimizer_type: type[FlashOptimizer], bits: int | None
) -> None:
    parameter = CASE.parameter()
    optimizer = optimizer_type([("block.weight", parameter)], lr=1e-3, master_weight_bits=bits)
    value = torch.randn(CASE.shape, generator=torch.Generator().manual_seed(1))
    optimizer.set_master_weights({"block.weight": value})
    found = optimizer.get_master_weights()["block.weight"]
    # Half an ulp of a mantissa of 7 bits (bf16) and the correction's 8; 16 more hold all of fp32.
    bound = {24: 2.0**-16, 32: 0.0, None: 2.0**-8}[bits] * value.abs()
    assert found.dtype == torch.float32
    assert bool(((found - value).abs() <= bound).all())
    # The 16-bit weight is the nearest one; a tie of the master may lie on either side.
    assert bool(((parameter.float() - found).abs() <= 2.0**-8 * found.abs()).all())
    optimizer.set_master_weights({"block.weight": found})
    assert torch.equal(optimizer.master_weight(parameter), found)


def masters_of_shards(case: Case, world_size: int) -> tuple[Tensor, bool]:
    parameter = case.parameter(case.mesh(world_size))
    optimizer = FlashAdamW([(case.name, parameter)], lr=1e-2)
    value = torch.randn(case.shape, generator=torch.Generator().manual_seed(1))
    optimizer.set_master_weights({case.name: value})
    case.step(optimizer, parameter, 1)
    found = optimizer.get_master_weights()[case.name]
    return whole(found), found.placements == parameter.placements


def test_master_weights_of_shards_are_dtensors() -> None:
    case = next(case for case in SHARDED if case.name == "partial groups")
    (one, _), *_ = run_ranks(1, masters_of_shards, case, 1)
    for found, placed in run_ranks(3, masters_of_shards, case, 3):
        assert placed
        assert torch.equal(found, one)


def test_master_weights_that_do_not_fit_change_nothing() -> None:
    parameter = CASE.parameter()
    optimizer = FlashAdamW([("weight", parameter)], lr=1e-2)
    good = torch.ones(CASE.shape)
    for mapping, message in [
        ({"weight": good, "wait": good}, "no parameter named 'wait'"),
        ({"weight": good[:, 1:]}, "needs (6, 70)"),
        ({"weight": good.int()}, "floating-point"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer.set_master_weights(mapping)
        assert torch.equal(parameter, CASE.weight())


# ---------------------------------------------------------------------------------------------- check_numerics


@pytest.mark.parametrize(
    "bits, rounding, lost",
    [
        (None, "nearest", True),
        (None, "stochastic", False),
        (24, "nearest", True),
        (24, "stochastic", False),
        (32, "nearest", False),
    ],
)
def test_updates_too_small_are_counted(bits: int | None, rounding: str, lost: bool) -> None:
    """Weights of 1 moved by 1e-6: a quarter of a 24-bit ulp (2^-17 below 1, so a nearest one stays), 17 fp32 ones."""
    parameter = nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
    options: dict[str, Any] = {"master_weight_bits": bits, "rounding": rounding, "weight_decay": 0.0}
    optimizer = FlashAdamW([("weight", parameter)], lr=1e-6, check_numerics=True, **options)
    parameter.grad = torch.ones_like(parameter)
    parameter.grad[0] = 0.0
    if lost:
        with pytest.warns(UserWarning, match="'weight' on this rank were too small"):
            optimizer.step()
    else:
        optimizer.step()
    counts = optimizer.numerics_report().parameters["weight"]
    assert counts.updates == 3 * 64
    assert counts.too_small == (3 * 64 if lost else 0)


def counts_of_shards() -> tuple[int, int]:
    case = Case("counted", (5, 64))
    parameter = case.parameter(mesh(2))
    optimizer = FlashAdamW([("weight", parameter)], lr=1e-2, check_numerics=True)
    parameter.grad = case.place(torch.ones(case.shape, dtype=torch.bfloat16), parameter.device_mesh)
    optimizer.step()
    return optimizer.numerics_report().parameters["weight"].updates, parameter.to_local().numel()


def test_updates_are_counted_on_the_local_shard() -> None:
    results = run_ranks(2, counts_of_shards)
    assert [local for _, local in results] == [3 * 64, 2 * 64]
    assert all(updates == local for updates, local in results)


class Reads(TorchDispatchMode):
    """Counts what would wait for a GPU: numbers taken from tensors, and results whose size depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.removeprefix("aten::") in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"):
            self.operations.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer_type", ALL)
@pytest.mark.parametrize("tensors", [False, True], ids=["floats", "lr and coefficient on the device"])
def test_counting_reads_from_the_device_once_a_step(
    monkeypatch: pytest.MonkeyPatch, optimizer_type: type[FlashOptimizer], tensors: bool
) -> None:
    """However many parameters there are; blocks go through the definition, as those of a GPU do."""
    monkeypatch.setattr(eager, "step_block", lambda block, rule, scratch: definition.step_block(block, rule))
    monkeypatch.setattr(compiled, "use_compiled", lambda elements: False)
    lists: list[int] = []
    to_list = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: lists.append(tensor.numel()) or to_list(tensor))
    shapes = [(6, 70), (40, 32), (33,), (4, 3, 3, 3)] * 10
    parameters = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
    lr = torch.tensor(1e-3) if tensors else 1e-3
    groups = [{"params": parameters[:20], "lr": lr}, {"params": parameters[20:]}]
    optimizer = optimizer_type(groups, lr=2e-3, check_numerics=True)
    optimizer.init_state()  # a first step without it looks at the learning rates: is it a request for a template?
    for step in range(1, 4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if tensors:
            optimizer.clip_coefficient = torch.tensor(0.5)
        polled = step & (step - 1) == 0  # then the counters follow, in one copy that a GPU makes without waiting
        lists.clear()
        with Reads() as reads:
            optimizer.step()
        assert reads.operations == []
        assert len(lists) == 1 + polled, lists
    counts = optimizer.numerics_report().parameters
    assert [count.updates for count in counts.values()] == [3 * parameter.numel() for parameter in parameters]


def test_report_needs_the_option() -> None:
    with pytest.raises(RuntimeError, match="check_numerics=True"):
        FlashLion([CASE.parameter()]).numerics_report()


# ---------------------------------------------------------------------------------------------- refusals

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"differentiable": True}, ValueError, "differentiable=True is not supported"),
    ({"fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach`"),
    ({"foreach": "yes"}, ValueError, "foreach must be True, False or None"),
    ({"master_weight_bits": 16}, ValueError, "master_weight_bits must be 24, 32 or None"),
    ({"rounding": "up"}, ValueError, "rounding must be one of"),
    ({"quantize": 1}, ValueError, "quantize must be True or False"),
    ({"seed": -1}, ValueError, "seed must be an integer >= 0"),
    ({"lr": -1.0}, ValueError, "lr must be a finite number >= 0"),
    ({"lr": float("nan")}, ValueError, "lr must be a finite number >= 0"),
    ({"lr": "0.1"}, TypeError, "lr must be a number or a tensor, got '0.1'"),
    ({"lr": torch.tensor([1e-2, 1e-3])}, ValueError, "lr must be one number, got a tensor of shape (2,)"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay must be a finite number >= 0"),
    ({"weight_decay": float("inf")}, ValueError, "weight_decay must be a finite number >= 0"),
    ({"master_weight_bits": 24.0}, ValueError, "master_weight_bits must be 24, 32 or None"),
    ({"maximize": "no"}, ValueError, "maximize must be True or False, got 'no'"),
    ({"offload_states": "no"}, ValueError, "offload_states must be True or False, got 'no'"),
    ({"capturable": "no"}, ValueError, "capturable must be True, False or None, got 'no'"),
    ({"differentiable": "no"}, ValueError, "differentiable must be True, False or None, got 'no'"),
]


@pytest.mark.parametrize("options, error, message", REFUSED, ids=[message for _, _, message in REFUSED])
@pytest.mark.parametrize("optimizer_type", ALL)
def test_refused_with_a_reason(
    optimizer_type: type[FlashOptimizer], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        optimizer_type([CASE.parameter()], **options)


@pytest.mark.parametrize(
    "optimizer_type, options, message",
    [
        (FlashAdamW, {"amsgrad": True}, "amsgrad=True is not supported"),
        (FlashAdam, {"amsgrad": True}, "amsgrad=True is not supported"),
        (FlashAdamW, {"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1)"),
        (FlashLion, {"betas": (-0.1, 0.9)}, "betas must be two numbers in [0, 1)"),
        (FlashAdamW, {"betas": 0.9}, "betas must be two numbers in [0, 1), got 0.9"),
        (FlashLion, {"betas": ("0.9", "0.99")}, "betas must be two numbers in [0, 1)"),
        (FlashAdam, {"eps": -1.0}, "eps must be a finite number >= 0"),
        (FlashAdam, {"eps": float("inf")}, "eps must be a finite number >= 0"),
        (FlashAdam, {"decoupled_weight_decay": "no"}, "decoupled_weight_decay must be True or False"),
        (FlashAdamW, {"lr": 0.0, "decouple_lr": True}, "must not be 0"),
        (FlashSGD, {"momentum": -0.5}, "momentum must be a finite number >= 0"),
        (FlashSGD, {"momentum": float("inf")}, "momentum must be a finite number >= 0"),
        (FlashSGD, {"momentum": 0.9, "dampening": float("nan")}, "dampening must be a finite number"),
        (FlashSGD, {"momentum": 0.9, "nesterov": "no"}, "nesterov must be True or False"),
        (FlashSGD, {"nesterov": True}, "nesterov=True needs a momentum"),
        (FlashSGDW, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "no dampening"),
    ],
)
def test_refused_of_one(optimizer_type: type[FlashOptimizer], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer_type([CASE.parameter()], **options)


@pytest.mark.parametrize("name", ["check_numerics", "compress_state_dict", "offload_states"])
@pytest.mark.parametrize("optimizer_type", ALL)
def test_options_of_the_whole_optimizer_are_refused_in_a_group(optimizer_type: type[FlashOptimizer], name: str) -> None:
    optimizer = optimizer_type([CASE.parameter()])
    with pytest.raises(ValueError, match=f"parameter group 1: {name} holds for the whole optimizer"):
        optimizer.add_param_group({"params": [CASE.parameter()], name: True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("optimizer_type", [FlashAdam, FlashSGD])
def test_decouple_lr_is_refused_in_a_group_whose_decay_is_not_decoupled(optimizer_type: type[FlashOptimizer]) -> None:
    with pytest.raises(ValueError, match="parameter group 0: decouple_lr=True is for decoupled weight decay"):
        optimizer_type([{"params": [CASE.parameter()], "decouple_lr": True}])
    FlashAdam([{"params": [CASE.parameter()], "decouple_lr": True, "decoupled_weight_decay": True}])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("optimizer_type", ALL)
def test_a_parameter_given_twice_is_refused(optimizer_type: type[FlashOptimizer]) -> None:
    """torch warns, and steps it twice; in one launch two programs would write the same memory."""
    parameter = CASE.parameter()
    with pytest.raises(ValueError, match="parameter group 0 holds parameter 'b' twice"):
        optimizer_type([("a", CASE.parameter()), ("b", parameter), ("c", parameter)])


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("optimizer_type", ALL)
def test_switches_change_no_bit_on_cpu(optimizer_type: type[FlashOptimizer], options: dict[str, Any]) -> None:
    plain, switched = CASE.parameter(), CASE.parameter()
    for parameter, given in ((plain, {}), (switched, options)):
        CASE.step(optimizer_type([("w", parameter)], lr=1e-2, **given), parameter, 1)
    assert torch.equal(plain, switched)
    assert not torch.equal(plain, CASE.weight())
