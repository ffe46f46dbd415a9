"""Failures that users of other optimizers reported and that a step or a load of ours must not repeat (see also
test_bug_reports, which saves and reshards; freezing over a checkpoint, C26, is in checkpoint/test_reshard, a scheduler
after a load, C33, in checkpoint/test_run_state).
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from flashoptim_dist import FlashAdam, FlashAdamW, FlashLion, FlashSGD
from flashoptim_dist.optim import FlashOptimizer, compiled, eager
from tests.optim.cases import Case, whole
from tests.pool import mesh, run_ranks

MATRIX = Case("reported matrix", (64, 32), None)
NORM = Case("reported norm", (64,), None, dtype=torch.float32)


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 3) -> None:
    """Steps with gradients of each parameter's own; fp32 copies get the same numbers."""
    for step in range(1, steps + 1):
        for parameter, case in zip(parameters, (MATRIX, NORM), strict=True):
            parameter.grad = case.gradient(step).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("moments_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ours, peer, options",
    [
        (FlashAdamW, torch.optim.AdamW, {}),
        (FlashAdam, torch.optim.Adam, {}),
        (FlashSGD, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_a5_mixed_dtypes_load_a_vanilla_state(
    ours: type[FlashOptimizer], peer: type[torch.optim.Optimizer], options: dict[str, Any], moments_dtype: torch.dtype
) -> None:
    """flashoptim: all scales were read as bf16 as soon as one weight was, and fp32 parameters lost their moments."""
    vanilla = [nn.Parameter(MATRIX.weight().float()), nn.Parameter(NORM.weight())]
    theirs = peer(vanilla, lr=1e-3, **options)
    trained(theirs, vanilla)
    saved = theirs.state_dict()
    for entries in saved["state"].values():
        for name in entries:
            if name != "step" and entries[name] is not None:
                entries[name] = entries[name].to(moments_dtype)
    before = {key: {n: v.clone() for n, v in e.items() if v is not None} for key, e in saved["state"].items()}

    parameters = [MATRIX.parameter(), NORM.parameter()]
    optimizer = ours(parameters, lr=1e-3, **options)
    with pytest.warns(UserWarning, match="8 bits"):
        optimizer.load_state_dict(saved)
    matrix, norm = (optimizer.state[parameter] for parameter in parameters)
    for spec in optimizer.moment_specs:
        exact = before[1][spec.name].float()
        assert norm[spec.name].dtype == torch.float32
        assert torch.equal(norm[spec.name], exact)
        assert matrix[spec.name].dtype == (torch.int8 if spec.signed else torch.uint8)
        if "exp_avg_sq" in matrix:
            continue  # Adam's momentum is in a unit of its own, and a variance's scale holds more than the largest
        # The largest element of a group is its scale, rounded up to bf16, so at most 2^-7 above.
        wanted = before[0][spec.name].float().abs().amax(dim=1)
        scale = matrix[spec.scale_name].float().flatten()
        assert bool(((scale >= wanted * (1 - 1e-6)) & (scale <= wanted * (1 + 2.0**-5))).all())
    for key, entries in before.items():  # the caller's state is left alone
        assert all(torch.equal(saved["state"][key][name], value) for name, value in entries.items())
    trained(optimizer, parameters, 1)


def test_a5_lion_state_loads() -> None:
    parameters = [MATRIX.parameter(), NORM.parameter()]
    momenta = [MATRIX.gradient(1).float(), NORM.gradient(1)]
    optimizer = FlashLion(parameters, lr=1e-3)
    saved = optimizer.state_dict()
    del saved["format"]
    saved["state"] = {key: {"exp_avg": momentum} for key, momentum in enumerate(momenta)}
    with pytest.warns(UserWarning, match="8 bits"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[parameters[0]]["exp_avg"].dtype == torch.int8
    assert torch.equal(optimizer.state[parameters[1]]["exp_avg"], momenta[1])


def test_a7_masters_set_before_the_first_step_survive_it() -> None:
    """flashoptim: the low bits of fp32 weights set on a fresh optimizer were lost with its first step."""
    parameter = MATRIX.parameter()
    optimizer = FlashAdamW([("weight", parameter)], lr=1e-3, weight_decay=0.0, master_weight_bits=32)
    value = torch.randn(MATRIX.shape, generator=torch.Generator().manual_seed(2))
    optimizer.set_master_weights({"weight": value})
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(optimizer.master_weight(parameter), value)
    assert not torch.equal(parameter.float(), value)


def small_parameters(count: int) -> list[nn.Parameter]:
    """A model's small tensors: two thirds norms, the rest matrices."""
    shapes = [(64,), (48,), (2, 64)]
    return [nn.Parameter(torch.ones(shapes[number % 3], dtype=torch.bfloat16)) for number in range(count)]


@pytest.mark.parametrize("ours", [FlashAdamW, FlashLion, FlashSGD])
def test_a9_many_small_parameters_share_blocks(monkeypatch: pytest.MonkeyPatch, ours: type[FlashOptimizer]) -> None:
    """flashoptim: one launch per parameter made models of many small tensors slow (1.5 times foreach AdamW's step)."""
    steps: list[int] = []
    step_block = eager.step_block
    monkeypatch.setattr(compiled, "use_compiled", lambda elements: False)
    monkeypatch.setattr(eager, "step_block", lambda b, *rest: steps.append(b.weight.numel()) or step_block(b, *rest))
    blocks = []
    for count in (6, 600):
        parameters = small_parameters(count)
        optimizer = ours(parameters, lr=1e-2)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        steps.clear()
        optimizer.step()
        assert sum(steps) >= sum(parameter.numel() for parameter in parameters)
        assert all(bool((parameter != 1.0).all()) for parameter in parameters)
        blocks.append(len(steps))
    # Vectors without codes and matrices with them, whatever their number; SGD without momentum has no codes at all.
    kinds = 1 if ours is FlashSGD else 2
    assert blocks == [kinds, kinds]


def test_a9_the_number_of_launches_is_not_the_number_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here: set TRITON_INTERPRET=1 to run its interpreter")
    from flashoptim_dist.optim import fused

    launched: list[str] = []
    run, advance = fused.KernelLaunch.run, fused.advance
    monkeypatch.setattr(fused.KernelLaunch, "run", lambda self: launched.append("step") or run(self))
    monkeypatch.setattr(fused, "advance", lambda *arguments: launched.append("count") or advance(*arguments))
    counts = []
    for count in (6, 30):
        parameters = small_parameters(count)
        optimizer = FlashAdamW(parameters, lr=1e-2, fused=True)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        launched.clear()
        optimizer.step()
        assert all(bool((parameter != 1.0).all()) for parameter in parameters)
        counts.append(sorted(launched))
    assert counts[0] == counts[1]
    assert counts[0].count("count") == 1  # one group
    assert 1 <= counts[0].count("step") <= 4  # with codes or without, and the whole blocks of each or the rest


@pytest.mark.parametrize("ours", [FlashAdamW, FlashLion, FlashSGD])
def test_a11_parameters_all_fp32_work_with_the_defaults(ours: type[FlashOptimizer]) -> None:
    """flashoptim: a ValueError unless master_weight_bits was None, which upcasting launchers ran into."""
    parameters = [nn.Parameter(MATRIX.weight().float()), NORM.parameter()]
    optimizer = ours(parameters, lr=1e-3)
    trained(optimizer, parameters)
    for parameter in parameters:
        assert "error_bits" not in optimizer.state[parameter]
        assert torch.equal(optimizer.master_weight(parameter), parameter)


def test_c26_state_without_a_gradient_is_made_once_others_have_it() -> None:
    """torch: parameters without state never got it in a template once others had some, so their keys were missing."""
    parameters = [MATRIX.parameter(), NORM.parameter()]
    optimizer = FlashAdamW(parameters, lr=1e-3)
    parameters[0].grad = MATRIX.gradient(1)
    optimizer.step()
    saved = optimizer.state_dict()["state"]
    assert sorted(saved) == [0, 1]
    assert float(saved[1]["step"]) == 0.0
    assert not saved[1]["exp_avg"].any()


class Two(nn.Module):
    """One layer that is trained and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(32, 8, bias=False, dtype=torch.bfloat16)
        self.idle = nn.Linear(32, 8, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("kind", ["AdamW", "plain SGD"])
def test_c27_never_stepped_parameters_and_plain_sgd_in_torchs_forms(kind: str, flat: bool) -> None:
    """torch: a TypeError or KeyError without a name, or empty entries, in the flattened form."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def build() -> tuple[Two, FlashOptimizer]:
        torch.manual_seed(0)
        module = Two()
        named = module.named_parameters()
        return module, (FlashAdamW(named, lr=1e-2) if kind == "AdamW" else FlashSGD(named, lr=1e-2))

    module, optimizer = build()
    module.used.weight.grad = torch.ones_like(module.used.weight)
    optimizer.step()
    saved = get_optimizer_state_dict(module, optimizer, options=options)
    if flat:
        assert {key.split(".")[1] for key in saved if key.startswith("state.")} == {"used", "idle"}
    else:
        assert set(saved["state"]) == {"used.weight", "idle.weight"}
        assert all(entries for entries in saved["state"].values())
    fresh_module, fresh = build()
    set_optimizer_state_dict(fresh_module, fresh, saved, options=options)
    assert float(fresh.state[fresh_module.used.weight]["step"]) == 1.0
    assert float(fresh.state[fresh_module.idle.weight]["step"]) == 0.0
    for name, entry in optimizer.state[module.used.weight].items():
        assert torch.equal(fresh.state[fresh_module.used.weight][name], entry)


def test_c33_scheduler_after_a_load_finds_initial_lr() -> None:
    parameter = MATRIX.parameter()
    optimizer = FlashAdamW([{"params": [parameter], "lr": 3e-3}], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    parameter.grad = MATRIX.gradient(1)
    optimizer.step()
    scheduler.step()
    saved = optimizer.state_dict()
    fresh = FlashAdamW([{"params": [parameter], "lr": 9.0}], lr=1e-3)
    fresh.load_state_dict(saved)
    later = torch.optim.lr_scheduler.LambdaLR(fresh, lambda step: 0.5**step, last_epoch=1)
    assert later.get_last_lr() == [3e-3 * 0.25]


def test_d44_the_precision_of_each_parameter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """torch: an upcast that did nothing went unseen. (Mixed dtypes in one FSDP unit are tested in sharding.)"""
    optimizer = FlashAdamW([MATRIX.parameter(), NORM.parameter()], lr=1e-3)
    with caplog.at_level(logging.INFO, logger="flashoptim_dist"):
        optimizer.init_state()
    assert "1 x bfloat16 with 24-bit master weights, 8-bit moments" in caplog.text
    assert "1 x float32, fp32 moments" in caplog.text


@pytest.mark.parametrize("bits", [24, 32])
def test_d47_weights_loaded_without_the_optimizer_stay(bits: int) -> None:
    """Megatron-LM: the first step after it put the old master weights back."""
    module = Two()
    optimizer = FlashAdamW(module.named_parameters(), lr=1e-2, weight_decay=0.0, master_weight_bits=bits)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.manual_seed(9)
    new = Two().state_dict()
    module.load_state_dict(new)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, new[name])
        assert torch.equal(optimizer.master_weight(parameter), new[name].float())


def overflow_on_one_rank() -> tuple[bool, float, int, list[bool]]:
    # fp32 gradients: torch refuses to unscale fp16 ones.
    case = Case("overflow", (6, 64), dtype=torch.float16, gradient_dtype=torch.float32)
    parameter = case.parameter(mesh(2))
    optimizer = FlashAdamW([("weight", parameter)], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    changed = []
    for step in range(1, 4):
        before = whole(parameter)
        gradient = case.gradient(step)
        parameter.grad = case.place(gradient * 8.0, parameter.device_mesh)
        if step == 2 and dist.get_rank() == 1:
            parameter.grad.to_local()[0, 0] = float("inf")
        scaler.scale(torch.ones(()))  # the scale comes into being with the first loss
        scaler.unscale_(optimizer)
        found = next(iter(scaler._found_inf_per_device(optimizer).values()))
        dist.all_reduce(found, op=dist.ReduceOp.MAX)  # what a sharded scaler does
        scaler.step(optimizer)
        scaler.update()
        changed.append(not torch.equal(before, whole(parameter)))
    state = optimizer.state[parameter]
    return bool(torch.isfinite(whole(parameter)).all()), float(state["step"]), optimizer.skipped_steps, changed


def test_d50_an_inf_on_one_rank_stops_the_step_on_all() -> None:
    """torch: ranks disagreed on found_inf, and skipped steps could not be seen."""
    assert run_ranks(2, overflow_on_one_rank) == [(True, 2.0, 1, [True, False, True])] * 2


def test_loading_says_once_what_it_converted() -> None:
    """A state of other master_weight_bits and rounding: one warning, and no second one for the same form."""
    parameters: list[nn.Parameter] = [MATRIX.parameter(), NORM.parameter()]
    source = FlashAdamW(parameters, lr=1e-3, master_weight_bits=32, rounding="nearest")
    trained(source, parameters)
    target = FlashAdamW(parameters, lr=1e-3)
    with pytest.warns(UserWarning, match="was converted") as said:
        target.load_state_dict(source.state_dict())
    assert len([w for w in said if "was converted" in str(w.message)]) == 1
    assert "rounding 'nearest' to 'stochastic'" in str(said[0].message)
    assert target.state[parameters[0]]["error_bits"].dtype == torch.int8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = FlashAdamW(parameters, lr=1e-3)
        again.load_state_dict(target.state_dict())
    entry: Tensor = again.state[parameters[0]]["error_bits"]
    assert torch.equal(entry, target.state[parameters[0]]["error_bits"])


# ------------------------------------------------------------------------------------- casts and initial rates


def _linear(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64, bias=False).to(dtype)


def _step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()


@pytest.mark.parametrize("looked_at_by", ["get_master_weights", "step"])
def test_a_weight_cast_to_bf16_later_gets_its_correction(looked_at_by: str) -> None:
    model = _linear(torch.float32)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-6, weight_decay=0.0)
    if looked_at_by == "step":
        _step(model, optimizer)
    else:
        optimizer.get_master_weights()
    model.to(torch.bfloat16)
    before = model.weight.detach().float()
    for _ in range(200):
        _step(model, optimizer)
    assert optimizer.state[model.weight]["error_bits"].dtype == torch.int8
    # Updates of about lr each, where a unit of a bf16 weight below 1/8 is up to 5e-4: only masters can hold them.
    moved = (before - optimizer.master_weight(model.weight)).mean()
    assert float(moved) == pytest.approx(200e-6, rel=0.05)


def test_masters_are_set_of_a_weight_cast_to_bf16_later() -> None:
    model = _linear(torch.float32)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-3, master_weight_bits=32)
    _step(model, optimizer)
    model.to(torch.bfloat16)
    value = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(1))
    optimizer.set_master_weights({"weight": value})
    assert torch.equal(optimizer.master_weight(model.weight), value)
    _step(model, optimizer)
    assert optimizer.state[model.weight]["error_bits"].dtype == torch.int16


def test_a_weight_cast_to_fp32_later_goes_on_without_a_correction() -> None:
    model = _linear(torch.bfloat16)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-3)
    _step(model, optimizer)
    model.to(torch.float32)
    before = model.weight.detach().clone()
    _step(model, optimizer)
    assert "error_bits" not in optimizer.state[model.weight]
    assert (model.weight < before).all()
    fresh = FlashAdamW(model.named_parameters(), lr=1e-3)
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_decouple_lr_keeps_the_first_rate_over_a_load() -> None:
    options: dict[str, Any] = {"weight_decay": 1e-3, "decouple_lr": True}
    model, other = _linear(torch.bfloat16), _linear(torch.bfloat16)
    saved = FlashAdamW(model.named_parameters(), lr=1e-2, **options)
    _step(model, saved)
    saved.param_groups[0]["lr"] = 5e-3
    loaded = FlashAdamW(other.named_parameters(), lr=1e-3, **options)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.param_groups[0]["lr"] * loaded._decay_rate(0) == pytest.approx(5e-4)


def test_kernels_and_counting_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="check_numerics=True counts in the pure-torch step"):
        FlashAdamW(_linear(torch.bfloat16).parameters(), fused=True, check_numerics=True)
