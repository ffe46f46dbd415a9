"""State that version 1 of the number format wrote is read as what it meant, from a state dict and from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.optim.conversion import dequantize
from flashoptim_dist.optim.state import MomentSpec
from tests.numbers import assert_same_bits

ADAM = (MomentSpec("exp_avg", True), MomentSpec("exp_avg_sq", False))


def version1_entries(momentum: Tensor, variance: Tensor) -> dict[str, Tensor]:
    """What version 1 stored of moments [rows, 32 n], rounded to nearest: restated from its definition."""
    entries = {}
    for name, size, levels in (("exp_avg", momentum.abs(), 127), ("exp_avg_sq", variance.sqrt(), 255)):
        groups = size.reshape(size.shape[0], -1, 32)
        largest = groups.amax(-1).view(torch.int32)
        scale = (largest + 0xFFFF >> 16).to(torch.int16).view(torch.bfloat16)
        ratio = groups / scale.float().clamp(min=1e-30).unsqueeze(-1)
        codes = torch.round(ratio.sqrt() * levels).reshape(size.shape)
        if name == "exp_avg":
            entries[name] = (codes * momentum.sign()).to(torch.int8)
        else:
            entries[name] = torch.where(variance > 0, codes.clamp(min=3), 0.0).to(torch.uint8)
        entries[name + "_scale"] = scale
    return entries


def version1_values(entries: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The moments that they meant, fp64."""
    m, v = ((entries[n].double().reshape(8, -1, 32), entries[n + "_scale"].double()) for n in ("exp_avg", "exp_avg_sq"))
    y, z = m[0] / 127, v[0] / 255
    return (m[1].unsqueeze(-1) * y * y.abs()).reshape(8, 64), ((v[1].unsqueeze(-1) * z * z) ** 2).reshape(8, 64)


def parameter_and_optimizer(**options: Any) -> tuple[nn.Module, fod.FlashAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8, bias=False).bfloat16())
    return model, fod.FlashAdamW(model.named_parameters(), **options)


def entries() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = torch.exp(torch.randn(8, 64, generator=generator)) * 1e-3
    momentum = torch.randn(8, 64, generator=generator) * size
    variance = size * size
    momentum[0, :3] = variance[0, :3] = 0.0
    momentum[1, :32] = variance[1, :32] = 0.0
    correction = torch.randint(-128, 128, (8, 64), generator=generator).to(torch.int8)
    return {"step": torch.tensor(5.0), "error_bits": correction, **version1_entries(momentum, variance)}


def check(optimizer: fod.FlashAdamW, parameter: Tensor, saved: dict[str, Tensor]) -> None:
    state, layout = optimizer.state[parameter], optimizer._record(parameter).layout
    assert state["step"] == 5
    assert_same_bits(state["error_bits"], saved["error_bits"])
    found = [state[m.name] for m in ADAM]
    if "exp_avg_scale" in state:
        stored = [(state[m.name], state[m.scale_name]) for m in ADAM]
        found = dequantize(stored, [True, False], layout)
    momentum, variance = version1_values(saved)
    # One rounding to nearest: half a unit of 2^-3 at most of v; of m half a code of 127, of the largest x in its group.
    error = 0.0 if "exp_avg_scale" not in state else 1.0
    assert bool(((found[1].double() - variance).abs() <= (error * 2.0**-4 + 2.0**-20) * variance).all())
    root = variance.sqrt()
    x = (momentum / root.clamp(min=1e-30)).abs().reshape(8, -1, 32).amax(-1, keepdim=True).expand(8, 2, 32)
    # sqrt(2) from v to its unit and sqrt(2) back, a fifteenth for v's own rounding.
    allowed = error * 2.2 * (1 / 127 + 1 / 254**2) * x.reshape(8, 64) * root
    assert bool(((found[0].double() - momentum).abs() <= allowed + 2.0**-20 * momentum.abs()).all())


@pytest.mark.parametrize("quantize", [True, False])
def test_a_version_1_state_dict_is_converted(quantize: bool) -> None:
    model, optimizer = parameter_and_optimizer(quantize=quantize)
    parameter, saved = model[0].weight, entries()
    state = {"state": {0: saved}, "param_groups": optimizer.state_dict()["param_groups"]}
    spec = {**optimizer.format_spec(), "version": 1}
    with pytest.warns(UserWarning, match="moments of format version 1 to version 2"):
        optimizer.load_state_dict({**state, "format": spec})
    check(optimizer, parameter, saved)


def test_version_1_without_its_record_is_refused() -> None:
    """Of 128 scales an eighth is none of version 2's: that states of version 1 are taken for it is all but excluded."""
    _, optimizer = parameter_and_optimizer()
    saved = entries()
    saved["exp_avg_sq_scale"].view(torch.int16)[0, 0] |= 7
    state = {"state": {0: saved}, "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(ValueError, match=r"'exp_avg_sq_scale' of parameter '0.weight' .* never writes.*no record says"):
        optimizer.load_state_dict(state)
    assert not optimizer.state


def test_a_version_1_checkpoint_is_converted(tmp_path: Path) -> None:
    model, optimizer = parameter_and_optimizer()
    optimizer.init_state()
    parameter, saved = model[0].weight, entries()
    for name, value in saved.items():
        optimizer.state[parameter][name].copy_(value)
    spec = {**optimizer.format_spec(), "version": 1}
    optimizer.format_spec = lambda: spec  # type: ignore[method-assign]
    path = checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    model, optimizer = parameter_and_optimizer()
    with pytest.warns(UserWarning, match="moments of format version 1 to version 2"):
        checkpoint.load(path, model, optimizer)
    check(optimizer, model[0].weight, saved)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 6


def test_a_parameter_that_a_version_1_checkpoint_lacks_keeps_its_state(tmp_path: Path) -> None:
    """As one that was frozen when it was saved: its live state is of version 2 and must not be read as version 1's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False)).bfloat16()
    optimizer = fod.FlashAdamW([("0.weight", model[0].weight)])
    optimizer.init_state()
    for name, value in entries().items():
        optimizer.state[model[0].weight][name].copy_(value)
    spec = {**optimizer.format_spec(), "version": 1}
    optimizer.format_spec = lambda: spec  # type: ignore[method-assign]
    path = checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    optimizer = fod.FlashAdamW(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[model[1].weight].items()}
    with pytest.warns(UserWarning, match=r"version 1 to version 2 \(1x\)"):
        checkpoint.load(path, model, optimizer)
    check(optimizer, model[0].weight, entries())
    for name, value in optimizer.state[model[1].weight].items():
        assert_same_bits(value, before[name])
