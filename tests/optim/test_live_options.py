"""Options of the format that are changed in a live group: the next step goes by them, as after a load."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from flashoptim_dist import FlashAdamW, FlashLion, FlashSGD
from flashoptim_dist.optim import FlashOptimizer
from tests.numbers import assert_same_bits
from tests.optim.cases import KINDS_OF_PARAMETERS, whole_state
from tests.pool import mesh, run_ranks

KINDS: dict[str, tuple[type[FlashOptimizer], dict[str, Any]]] = {
    "AdamW": (FlashAdamW, {}),
    "Lion": (FlashLion, {}),
    "SGD": (FlashSGD, {"momentum": 0.9}),
}

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "24 to 32 bits": ({}, {"master_weight_bits": 32}, ("corrections of 8 bits to 16 (4x)",)),
    "32 to 24 bits": ({"master_weight_bits": 32}, {"master_weight_bits": 24}, ("corrections of 16 bits to 8 (4x)",)),
    "24 bits to none": ({}, {"master_weight_bits": None}, ("weights with a correction to weights without (4x)",)),
    "no masters to 24 bits": (
        {"master_weight_bits": None},
        {"master_weight_bits": 24},
        ("16-bit weights without correction to weights with one (4x)",),
    ),
    "8-bit to fp32 moments": ({}, {"quantize": False}, ("8-bit moments to fp32",)),
    "fp32 to 8-bit moments": ({"quantize": False}, {"quantize": True}, ("floating-point moments to 8 bits",)),
    "no masters and fp32 moments to 24 bits": (
        {"master_weight_bits": None, "quantize": False},
        {"master_weight_bits": 24},
        ("16-bit weights without correction to weights with one (4x)",),
    ),
    "both": (
        {"quantize": False},
        {"quantize": True, "master_weight_bits": 32},
        ("floating-point moments to 8 bits", "corrections of 8 bits to 16 (4x)"),
    ),
    "rounding": ({}, {"rounding": "nearest"}, ()),
    "seed": ({}, {"seed": 3}, ()),
}
"""Options before, options set in the live group, and what is said of the conversion."""


class Model(nn.Module):
    """One parameter per case, by the case's name; cut over the ranks of this world, or plain."""

    def __init__(self, sharded: bool = False) -> None:
        super().__init__()
        self.cut = mesh(2) if sharded else None
        for case in KINDS_OF_PARAMETERS:
            self.register_parameter(case.name, case.parameter(self.cut))

    def step(self, optimizer: FlashOptimizer, step: int) -> list[str]:
        """Take a step; return what was warned of."""
        for case in KINDS_OF_PARAMETERS:
            self.get_parameter(case.name).grad = case.place(case.gradient(step), self.cut)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        return [str(warning.message) for warning in caught]


def change(kind: str, what: str, sharded: bool, fused: bool | None) -> None:
    """A group changed live goes on, bit for bit, as an optimizer made with those options that loads the state."""
    optimizer_type, hyperparameters = KINDS[kind]
    before, set_live, expected = CHANGES[what]
    model = Model(sharded)
    made = {**hyperparameters, **before}
    optimizer = optimizer_type(model.named_parameters(), lr=1e-2, fused=fused, **made)
    for step in (1, 2):
        model.step(optimizer, step)
    other_model = Model(sharded)
    other_model.load_state_dict(model.state_dict())
    other = optimizer_type(other_model.named_parameters(), lr=1e-2, fused=fused, **{**made, **set_live})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    optimizer.param_groups[0].update(set_live)
    said = model.step(optimizer, 3)
    assert len(said) == bool(expected), said
    assert all(text in said[0] for text in (*expected, "options that were changed in its groups") if expected)
    other_model.step(other, 3)
    assert model.step(optimizer, 4) == []
    other_model.step(other, 4)
    for name, parameter in model.named_parameters():
        states = whole_state(optimizer, parameter), whole_state(other, other_model.get_parameter(name))
        assert states[0].keys() == states[1].keys()
        for entry, value in states[0].items():
            assert_same_bits(value, states[1][entry], f"{entry} of {name}")


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_goes_by_an_option_changed_in_a_live_group(kind: str, what: str) -> None:
    change(kind, what, sharded=False, fused=None)


@pytest.mark.parametrize(
    "what",
    [
        "both",
        *(pytest.param(w, marks=pytest.mark.full) for w in ("24 to 32 bits", "8-bit to fp32 moments", "rounding")),
    ],
)
def test_the_kernels_go_by_it_too(what: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    change("AdamW", what, sharded=False, fused=True)


@pytest.mark.parametrize("what", ["both", "8-bit to fp32 moments", "24 bits to none", "rounding"])
def test_shards_go_by_it_too(what: str) -> None:
    run_ranks(2, change, "AdamW", what, True, None)


def test_one_group_changes_and_the_other_stays() -> None:
    first, second = KINDS_OF_PARAMETERS[0].parameter(), KINDS_OF_PARAMETERS[3].parameter()
    optimizer = FlashAdamW([{"params": [first]}, {"params": [second]}], lr=1e-2)
    for parameter, case in ((first, KINDS_OF_PARAMETERS[0]), (second, KINDS_OF_PARAMETERS[3])):
        parameter.grad = case.gradient(1)
    optimizer.step()
    kept = dict(optimizer.state[second])
    optimizer.param_groups[0]["master_weight_bits"] = 32
    with pytest.warns(UserWarning, match=re.escape("corrections of 8 bits to 16 (1x)")):
        optimizer.step()
    assert optimizer.state[first]["error_bits"].dtype == torch.int16
    assert all(optimizer.state[second][name] is value for name, value in kept.items())


def test_a_state_dict_after_the_change_is_in_the_new_form() -> None:
    parameter = KINDS_OF_PARAMETERS[0].parameter()
    optimizer = FlashAdamW([("matrix", parameter)], lr=1e-2, compress_state_dict=False)
    KINDS_OF_PARAMETERS[0].step(optimizer, parameter, 1)
    moments = {name: v.clone() for name, v in optimizer.state_dict()["state"][0].items() if name.startswith("exp")}
    optimizer.param_groups[0].update(quantize=False)
    with pytest.warns(UserWarning, match="8-bit moments to fp32"):
        saved = optimizer.state_dict()["state"][0]
    for name, value in moments.items():
        assert_same_bits(saved[name], value, name)


def test_a_momentum_that_rested_meanwhile_is_converted_when_it_is_used_again() -> None:
    case = KINDS_OF_PARAMETERS[0]
    parameter = case.parameter()
    optimizer = FlashSGD([("matrix", parameter)], lr=1e-2, momentum=0.9)
    case.step(optimizer, parameter, 1)
    rested = optimizer.state_dict()
    optimizer.param_groups[0]["momentum"] = 0.0
    case.step(optimizer, parameter, 2)
    optimizer.param_groups[0]["quantize"] = False
    case.step(optimizer, parameter, 3)
    optimizer.compress_state_dict = False
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].dtype == torch.float32
    fresh = FlashSGD([("matrix", case.parameter())], momentum=0.9, quantize=False)
    with pytest.warns(UserWarning, match="8-bit moments to fp32"):
        fresh.load_state_dict(rested)
    (expected,) = (state["momentum_buffer"].clone() for state in fresh.state.values())
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.warns(UserWarning, match=re.escape("8-bit moments to fp32 (1x)")):
        case.step(optimizer, parameter, 4)
    found = optimizer.state[parameter]["momentum_buffer"]
    torch.testing.assert_close(found, 0.9 * expected + case.gradient(4).float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("before", [24, None])
def test_masters_that_are_set_after_the_change_are_as_wide_as_it_says(before: int | None) -> None:
    case = KINDS_OF_PARAMETERS[0]
    parameter = case.parameter()
    optimizer = FlashAdamW([("matrix", parameter)], lr=1e-2, master_weight_bits=before)
    case.step(optimizer, parameter, 1)
    optimizer.param_groups[0]["master_weight_bits"] = 32
    value = torch.randn(case.shape, generator=torch.Generator().manual_seed(1))
    with pytest.warns(UserWarning, match="options that were changed in its groups"):
        optimizer.set_master_weights({"matrix": value})
    assert torch.equal(optimizer.master_weight(parameter), value)
    assert not torch.equal(parameter.float(), value)


def test_lists_of_parameters_and_names_that_do_not_match_are_refused() -> None:
    kind = KINDS_OF_PARAMETERS[0]
    parameters = [kind.parameter(), kind.parameter()]
    optimizer = FlashAdamW([("first", parameters[0]), ("second", parameters[1])], lr=1e-2)
    for parameter in parameters:
        parameter.grad = kind.gradient(1)
    optimizer.step()
    optimizer.param_groups[0]["params"].pop()
    parameters[1].grad = None
    with pytest.raises(RuntimeError, match=r"group 0 holds 1 parameters and 2 names: .* 'param_names' together"):
        optimizer.init_state()
    optimizer.param_groups[0]["param_names"].pop()
    optimizer.step()
    assert [int(optimizer.state[parameter]["step"]) for parameter in parameters] == [2, 1]


def test_a_group_appended_by_hand_is_refused_with_the_way_out() -> None:
    kind = KINDS_OF_PARAMETERS[0]
    parameters = [kind.parameter(), kind.parameter()]
    optimizer = FlashAdamW(parameters[:1], lr=1e-2)
    for parameter in parameters:
        parameter.grad = kind.gradient(1)
    optimizer.step()
    before = parameters[0].detach().clone()
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": parameters[1:]})
    with pytest.raises(RuntimeError, match=r"holds 2 groups .* made 1: .* optimizer\.add_param_group\(group\)"):
        optimizer.step()
    assert torch.equal(parameters[0], before)
    optimizer.add_param_group(optimizer.param_groups.pop())
    optimizer.step()
    assert all(optimizer.state[parameter] for parameter in parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_a_learning_rate_of_several_numbers_in_a_live_group_is_refused(kind: str) -> None:
    optimizer_type, options = KINDS[kind]
    parameter = KINDS_OF_PARAMETERS[0].parameter()
    optimizer = optimizer_type([parameter], lr=1e-2, **options)
    parameter.grad = KINDS_OF_PARAMETERS[0].gradient(1)
    optimizer.step()
    before = parameter.detach().clone()
    optimizer.param_groups[0]["lr"] = torch.tensor([1e-3, 2e-3])
    with pytest.raises(ValueError, match=r"lr must be one number, got a tensor of shape \(2,\)"):
        optimizer.step()
    assert torch.equal(parameter, before)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounding": "up"}, "parameter group 1: rounding must be one of"),
        ({"master_weight_bits": 16}, "parameter group 1: master_weight_bits must be 24, 32 or None"),
        ({"quantize": None}, "parameter group 1: quantize must be True or False"),
        ({"decouple_lr": True, "initial_lr": 0.0}, "parameter group 1: decouple_lr=True scales the decay"),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_group(options: dict[str, Any], message: str) -> None:
    parameters = [KINDS_OF_PARAMETERS[0].parameter(), KINDS_OF_PARAMETERS[0].parameter()]
    optimizer = FlashAdamW([{"params": [parameter]} for parameter in parameters], lr=1e-2)
    for parameter in parameters:
        parameter.grad = KINDS_OF_PARAMETERS[0].gradient(1)
    optimizer.step()
    before = [whole_state(optimizer, parameter) for parameter in parameters]
    optimizer.param_groups[1].update(options)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.step()
    for parameter, entries in zip(parameters, before, strict=True):
        for name, value in whole_state(optimizer, parameter).items():
            assert_same_bits(value, entries[name], name)


# ---------------------------------------------------------------------------------------------- through torch's helpers

LOADS = [what for what, (_, _, said) in CHANGES.items() if said]


def by_helper(what: str, sharded: bool, flat: bool) -> list[str]:
    """Load a state by torch's functions into an optimizer with other options; return what was said."""
    before, after, _ = CHANGES[what]
    model, other_model = Model(sharded), Model(sharded)
    optimizer = FlashAdamW(model.named_parameters(), lr=1e-2, **before)
    model.step(optimizer, 1)
    other_model.load_state_dict(model.state_dict())
    other, direct = (FlashAdamW(other_model.named_parameters(), lr=1e-2, **{**before, **after}) for _ in range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(other_model, other, saved, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        direct.load_state_dict(optimizer.state_dict())
    for name, parameter in other_model.named_parameters():
        expected = whole_state(direct, parameter)
        for entry, value in whole_state(other, parameter).items():
            assert_same_bits(value, expected[entry], f"{entry} of {name}")
    return [str(w.message) for w in caught if "optimizer state was converted" in str(w.message)]


@pytest.mark.parametrize("what", LOADS)
def test_torchs_helpers_convert_and_say_so_once(what: str) -> None:
    (said,) = by_helper(what, sharded=False, flat=False)
    assert all(text in said for text in CHANGES[what][2])


@pytest.mark.parametrize("what", ["both", "8-bit to fp32 moments"])
def test_torchs_helpers_convert_shards(what: str) -> None:
    for (said,) in run_ranks(2, by_helper, what, True, False):
        assert all(text in said for text in CHANGES[what][2])


@pytest.mark.parametrize("what", [what for what in LOADS if what not in ("8-bit to fp32 moments", "24 bits to none")])
def test_torchs_flattened_form_converts_what_it_keeps(what: str) -> None:
    (said,) = by_helper(what, sharded=False, flat=True)
    assert all(text in said for text in CHANGES[what][2])


def test_torchs_flattened_form_without_the_scales_is_refused_with_the_way_out() -> None:
    """torch reads the entries that the live optimizer has and passes over all others: codes come without scales."""
    with pytest.raises(ValueError, match=r"flattened form.*quantize=True"):
        by_helper("8-bit to fp32 moments", sharded=False, flat=True)
