"""Reported failures of gradient release elsewhere (section E of the collection), and what a loop may get wrong."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import flashoptim_dist as fod
from flashoptim_dist.checkpoint import load, save
from tests.numbers import assert_same_bits
from tests.pool import run_ranks
from tests.release.models import batch, build, everything, loss_of, train


def _assert_equal(state: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert state.keys() == expected.keys()
    for name, entries in expected.items():
        for entry, value in entries.items():
            assert_same_bits(state[name][entry], value, f"{entry} of {name}")


# ---------------------------------------------------------------------- E51: several model parts


def _two_parts(release: bool) -> dict[str, dict[str, Tensor]]:
    parts = [build(dist.get_world_size(), layers=1), build(dist.get_world_size(), layers=2)]
    optimizers = [
        fod.FlashAdamW(parts[0].named_parameters(), lr=1e-2),
        fod.FlashLion(parts[1].named_parameters(), lr=1e-3),
    ]
    if release:
        fod.enable_gradient_release(parts, optimizers[::-1])
    for step in range(2):
        for part in parts:
            loss_of(part, batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    first, second = (everything(part, optimizer) for part, optimizer in zip(parts, optimizers, strict=True))
    return {**{f"0.{name}": value for name, value in first.items()}, **second}


def test_e51_each_hook_is_bound_to_its_own_optimizer() -> None:
    """torchtitan#777: with two parts the hooks of the first used the optimizer of the last."""
    for state, expected in zip(run_ranks(2, _two_parts, True), run_ranks(2, _two_parts, False), strict=True):
        _assert_equal(state, expected)


def _reduced_by_the_schedule(release: bool) -> dict[str, dict[str, Tensor]]:
    """Backward passes without reduction, then FSDP2's post-backward called by hand, as pipeline schedules do."""
    model = build(dist.get_world_size(), layers=2)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    if release:
        fod.enable_gradient_release(model, optimizer)
    assert isinstance(model, FSDPModule)
    for step in range(2):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        for micro in range(2):
            loss_of(model, batch(step, micro)).backward()
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        state = model._get_fsdp_state()
        for inner in state._state_ctx.all_states:
            assert inner._fsdp_param_group is not None or not inner._fsdp_param_groups
            if inner._fsdp_param_group is not None:
                inner._fsdp_param_group.post_backward()
        state._root_post_backward_final_callback()
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer)


def test_e51_gradients_reduced_outside_of_a_backward() -> None:
    results = zip(run_ranks(2, _reduced_by_the_schedule, True), run_ranks(2, _reduced_by_the_schedule, False))
    for state, expected in results:
        _assert_equal(state, expected)


# ---------------------------------------------------------------------- E52: resume with hooks on


def _resumed(form: str, folder: str, release: bool) -> tuple[dict[str, dict[str, Tensor]], list[str], float]:
    """Three steps, a save, two more; and the two again, after a load into fresh objects with hooks on."""

    def fresh() -> tuple[Any, fod.FlashAdamW, Any]:
        model = build(dist.get_world_size(), layers=2)
        optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        if release:
            fod.enable_gradient_release(model, optimizer)
        return model, optimizer, scheduler

    model, optimizer, scheduler = fresh()
    train(model, optimizer, range(3), scheduler=scheduler)
    if form == "ours":
        save(folder, model, optimizer)
    else:
        states = get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": model.state_dict(), "optimizer": states}, checkpoint_id=folder)
    train(model, optimizer, range(3, 5), scheduler=scheduler)
    expected = everything(model, optimizer)
    names = sorted(
        f"{n}.{e}" for n, entries in get_optimizer_state_dict(model, optimizer)["state"].items() for e in entries
    )

    model, optimizer, scheduler = fresh()
    if form == "ours":
        load(folder, model, optimizer)
    else:
        weights, states = model.state_dict(), get_optimizer_state_dict(model, optimizer)
        assert states["state"], "a template of a fresh optimizer has entries to load into"
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        model.load_state_dict(weights)
        set_optimizer_state_dict(model, optimizer, states)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] / 4
    scheduler.last_epoch = 3
    train(model, optimizer, range(3, 5), scheduler=scheduler)
    _assert_equal(everything(model, optimizer), expected)
    return expected, names, float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("form", ["ours", pytest.param("dcp", marks=pytest.mark.full)])
def test_e52_resume_with_hooks_on(tmp_path: Path, form: str) -> None:
    """torchtune#2360: the state dict, its template and the resumed run are those of the ordinary loop."""
    on = run_ranks(2, _resumed, form, str(tmp_path / "on"), True)
    off = run_ranks(2, _resumed, form, str(tmp_path / "off"), False)
    for (state, names, lr), (expected, expected_names, expected_lr) in zip(on, off, strict=True):
        assert (names, lr) == (expected_names, expected_lr)
        _assert_equal(state, expected)


def test_e52_a_template_with_hooks_on_takes_no_step() -> None:
    model = build(0)
    optimizer = fod.FlashAdamW(model.named_parameters(), lr=1e-2)
    fod.enable_gradient_release(model, optimizer)
    template = get_optimizer_state_dict(model, optimizer)
    assert len(template["state"]) > 20
    assert {float(entries["step"]) for entries in template["state"].values()} == {0.0}


# ---------------------------------------------------------------------- E53: shared weights


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_e53_weights_shared_by_checkpointed_layers(use_reentrant: bool) -> None:
    """TE#3437: one update with the summed gradient; where torch hands the gradient over in parts, a refusal."""

    def run(release: bool) -> Tensor:
        torch.manual_seed(0)
        shared = nn.Linear(32, 32)
        optimizer = fod.FlashAdamW(shared.named_parameters(), lr=1e-2)
        if release:
            fod.enable_gradient_release(nn.ModuleList([shared]), optimizer)
        x = torch.randn(4, 32, requires_grad=True)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(shared, x, use_reentrant=use_reentrant)
        x.square().sum().backward()
        optimizer.step()
        return shared.weight.detach().clone()

    if use_reentrant:
        with pytest.raises(RuntimeError, match=r"'0\.(bias|weight)' got another gradient .*use_reentrant=False"):
            run(True)
    else:
        assert_same_bits(run(True), run(False), "the shared weight")


# ---------------------------------------------------------------------- E55: loops that release cannot guess


def _small() -> tuple[nn.Module, fod.FlashAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    return model, fod.FlashAdamW(model.named_parameters(), lr=1e-2)


def test_e55_a_second_backward_in_one_update_is_refused() -> None:
    """flashoptim stepped twice in silence."""
    model, optimizer = _small()
    fod.enable_gradient_release(model, optimizer)
    model(torch.ones(2, 32)).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter '2\.(weight|bias)' got another gradient .*accumulation_steps=1"):
        model(torch.ones(2, 32)).sum().backward()


def test_e55_a_second_backward_through_a_kept_graph() -> None:
    """With all but the last under accumulate() it is right; without, refused (by torch or by us), never wrong."""
    results = []
    for release in (False, True):
        model, optimizer = _small()
        handle = fod.enable_gradient_release(model, optimizer) if release else None
        loss = model(torch.ones(2, 32)).sum()
        if handle is not None:
            with handle.accumulate():
                loss.backward(retain_graph=True)
            assert all(parameter.grad is not None for parameter in model.parameters())
        else:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        results.append(model[0].weight.detach().clone())  # type: ignore[index]
    assert_same_bits(results[1], results[0], "weight")
    model, optimizer = _small()
    fod.enable_gradient_release(model, optimizer)
    loss = model(torch.ones(2, 32)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"got another gradient|modified by an inplace operation"):
        loss.backward()


def test_e55_gradients_are_freed_where_a_step_is_skipped() -> None:
    """flashoptim 0.1.3 kept them."""
    model, optimizer = _small()
    fod.enable_gradient_release(model, optimizer, skip_nonfinite=True)
    (model(torch.ones(2, 32)).sum() * float("nan")).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}


def test_zero_grad_before_step_is_refused() -> None:
    model, optimizer = _small()
    fod.enable_gradient_release(model, optimizer)
    model(torch.ones(2, 32)).sum().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) came between a backward pass.* and step"):
        optimizer.zero_grad()


def test_zero_grad_discards_what_was_accumulated() -> None:
    results = []
    for release in (False, True):
        model, optimizer = _small()
        if release:
            fod.enable_gradient_release(model, optimizer, accumulation_steps=2)
        model(torch.full((2, 32), 3.0)).sum().backward()
        optimizer.zero_grad()
        for scale in (1.0, 2.0):
            model(torch.full((2, 32), scale)).sum().backward()
        optimizer.step()
        results.append(model[0].weight.detach().clone())  # type: ignore[index]
    assert_same_bits(results[1], results[0], "weight")


def test_a_parameter_that_the_last_micro_batch_does_not_reach() -> None:
    """step() takes the gradient of the micro-batches before."""
    results = []
    for release in (False, True):
        model, optimizer = _small()
        if release:
            fod.enable_gradient_release(model, optimizer, accumulation_steps=2)
        model(torch.ones(2, 32)).sum().backward()
        model[0](torch.ones(2, 32)).sum().backward()  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
        results.append(model[2].weight.detach().clone())  # type: ignore[index]
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert_same_bits(results[1], results[0], "weight")


def test_a_closure() -> None:
    results = []
    for release in (False, True):
        model, optimizer = _small()
        if release:
            fod.enable_gradient_release(model, optimizer)

        def closure(model: nn.Module = model, optimizer: fod.FlashAdamW = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 32)).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        results.append(model[0].weight.detach().clone())  # type: ignore[index]
    assert_same_bits(results[1], results[0], "weight")


def test_parameters_frozen_later_unfrozen_later_and_of_nobody() -> None:
    results = []
    for release in (False, True):
        model, _ = _small()
        model[2].bias.requires_grad_(False)  # type: ignore[index]
        named = [pair for pair in model.named_parameters() if pair[0] != "0.bias"]
        optimizer = fod.FlashAdamW(named, lr=1e-2)
        if release:
            fod.enable_gradient_release(model, optimizer)
        for step in range(3):
            model[2].bias.requires_grad_(step > 0)  # type: ignore[index]
            model[0].weight.requires_grad_(step < 2)  # type: ignore[index]
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        assert model[0].bias.grad is not None  # type: ignore[index]
    for ours, expected in zip(results[1], results[0], strict=True):
        assert_same_bits(ours, expected, "weight")


def test_remove_gives_back_an_ordinary_loop() -> None:
    model, optimizer = _small()
    handle = fod.enable_gradient_release(model, optimizer)
    with pytest.raises(RuntimeError, match=r"gradient release is on already for parameter '0\.weight'"):
        fod.enable_gradient_release(model, optimizer)
    handle.remove()
    model(torch.ones(2, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not optimizer.state
    fod.enable_gradient_release(model, optimizer).remove()


def _wrapped() -> list[str]:
    words = []
    model, optimizer = _small()
    wrapped = DistributedDataParallel(model)
    for target in (wrapped, nn.Sequential(wrapped)):
        try:
            fod.enable_gradient_release(target, optimizer)
        except TypeError as error:
            words.append(str(error))
    handle = fod.enable_gradient_release(model, optimizer)  # the model behind DDP's back
    try:
        wrapped(torch.ones(2, 32))
    except TypeError as error:
        words.append(str(error))
    handle.remove()
    return words


def test_ddp_is_refused_by_name() -> None:
    for words in run_ranks(2, _wrapped):
        assert len(words) == 3
        assert all("DistributedDataParallel" in text and "shard_model" in text for text in words)


def test_what_cannot_be_released_is_refused() -> None:
    model, optimizer = _small()
    with pytest.raises(TypeError, match="which AdamW cannot"):
        fod.enable_gradient_release(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="own none of the model's parameters"):
        fod.enable_gradient_release(nn.Linear(3, 3), optimizer)
    with pytest.raises(ValueError, match="accumulation_steps must be at least 1"):
        fod.enable_gradient_release(model, optimizer, accumulation_steps=0)
    with pytest.raises(ValueError, match="clip_value must be a number >= 0, got -1"):
        fod.enable_gradient_release(model, optimizer, clip_value=-1.0)
    with pytest.raises(ValueError, match="exclude each other"):
        fod.enable_gradient_release(model, optimizer, clip_parameter_norm=1.0, clip_global_norm=1.0)
    handle = fod.enable_gradient_release(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=r"backward\(create_graph=True\) cannot be used"):
            model(torch.ones(2, 32)).sum().backward(create_graph=True)
    handle.remove()
