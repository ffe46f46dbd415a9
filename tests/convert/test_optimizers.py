"""Between this library's states and plain ones: bit for bit where the format allows, and within its code elsewhere."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import CheckpointError, CheckpointFormatError
from flashoptim_dist.convert import convert, inspect
from tests.checkpoint.models import Net, adamw, build, differences, flash, gathered, steps, trainable
from tests.convert.inputs import (
    LAYOUTS,
    expected_plain,
    half_code_bounds,
    load_plain,
    plain_values,
    save_ours,
    save_plain,
    trained,
)
from tests.pool import run_ranks


def _plain(seed: int = 7, tied: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    net = build("single", seed=seed, dtype=torch.float32, tied=tied)
    return net, adamw(net)


def _ours(seed: int = 7, tied: bool = False, **options: Any) -> tuple[Net, Any]:
    net = build("single", seed=seed, tied=tied)
    return net, flash(net, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ours_to_adamw_is_the_master_weights_and_the_decoded_moments(tmp_path: Path, layout: Any) -> None:
    net, optimizer = trained()
    source = save_ours(tmp_path / "ours", net, optimizer)
    convert(source, tmp_path / "adamw", "adamw", layout=layout)
    assert inspect(tmp_path / "adamw").layout == layout
    plain, plain_optimizer = _plain()
    load_plain(tmp_path / "adamw", plain, plain_optimizer, layout)
    expected = expected_plain(net, optimizer)
    assert differences(expected, plain_values(plain, plain_optimizer)) == []
    assert torch.equal(plain.frozen.weight, net.frozen.weight.float())
    assert torch.equal(plain.seen, net.seen)


def test_ours_to_adamw_loads_with_our_own_loader_and_trains_on(tmp_path: Path) -> None:
    net, optimizer = trained()
    save_ours(tmp_path / "ours", net, optimizer)
    convert(tmp_path / "ours", tmp_path / "adamw", "adamw")
    plain, plain_optimizer = _plain()
    checkpoint.load(tmp_path / "adamw", plain, plain_optimizer, verify="full")
    assert differences(expected_plain(net, optimizer), plain_values(plain, plain_optimizer)) == []
    group = plain_optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"])) == (1e-2, (0.9, 0.999))
    steps(plain, plain_optimizer, [5])
    assert float(plain_optimizer.state[plain.up.weight]["step"]) == 6.0


@pytest.mark.parametrize("through", ["dcp", "file"])
@pytest.mark.parametrize("tied", [False, True])
def test_ours_to_adamw_and_back(tmp_path: Path, through: str, tied: bool) -> None:
    """Weights, corrections and steps come back bit for bit, moments within half a code; dtypes as they were."""
    net, optimizer = trained(tied=tied, seed=3)
    save_ours(tmp_path / "ours", net, optimizer)
    middle = tmp_path / ("adamw" if through == "dcp" else "adamw.pt")
    convert(tmp_path / "ours", middle, "adamw")
    convert(middle, tmp_path / "back", "flash_adamw")
    again, again_optimizer = _ours(tied=tied)
    checkpoint.load(tmp_path / "back", again, again_optimizer, verify="full")
    for name in differences(gathered(net, optimizer), gathered(again, again_optimizer)):
        assert name.startswith("optimizer.")
        assert name.rsplit(".", 1)[1] in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    bounds, before, after = half_code_bounds(net, optimizer), expected_plain(net, optimizer), None
    after = expected_plain(again, again_optimizer)
    for key, bound in bounds.items():
        assert bool(((before[key] - after[key]).abs() <= bound * 1.02 + 1e-30).all()), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adamw_to_ours_is_what_the_optimizer_itself_makes_of_it(tmp_path: Path, layout: str) -> None:
    net, optimizer = trained("adamw")
    save_plain(tmp_path / "adamw", net, optimizer, layout)
    convert(tmp_path / "adamw", tmp_path / "ours", "flash_adamw", layout="nested")
    loaded, loaded_optimizer = _ours()
    checkpoint.load(tmp_path / "ours", loaded, loaded_optimizer, verify="full")
    expected, expected_optimizer = _ours()
    expected.load_state_dict(net.state_dict())
    expected_optimizer.load_state_dict(optimizer.state_dict())
    expected_optimizer.set_master_weights({name: value.detach() for name, value in trainable(net)}, expected)
    assert differences(gathered(expected, expected_optimizer), gathered(loaded, loaded_optimizer)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adamw_to_ours_loads_with_torchs_own_functions(tmp_path: Path, layout: str) -> None:
    net, optimizer = trained("adamw")
    save_plain(tmp_path / "adamw", net, optimizer, layout)
    convert(tmp_path / "adamw", tmp_path / "ours", "flash_adamw")  # in the layout of the source
    loaded, loaded_optimizer = _ours()
    load_plain(tmp_path / "ours", loaded, loaded_optimizer, layout)
    masters = loaded_optimizer.get_master_weights()
    for name, weight in trainable(net):
        assert bool(((masters[name] - weight).abs() <= weight.abs() * 2.0**-16).all()), name


def test_adamw_to_ours_and_back_stays_within_the_format(tmp_path: Path) -> None:
    """24 bits keep a weight to 2**-17 of its binade; 32 keep all of it. A moment is what the codes hold."""
    net, optimizer = trained("adamw")
    save_plain(tmp_path / "adamw", net, optimizer, "nested")
    for bits, relative in ((24, 2.0**-16), (32, 0.0)):
        ours = tmp_path / f"ours-{bits}"
        convert(tmp_path / "adamw", ours, "flash_adamw", options={"master_weight_bits": bits})
        convert(ours, tmp_path / f"back-{bits}", "adamw")
        back, back_optimizer = _plain()
        checkpoint.load(tmp_path / f"back-{bits}", back, back_optimizer)
        held, held_optimizer = _ours(master_weight_bits=bits)
        checkpoint.load(ours, held, held_optimizer)
        assert differences(expected_plain(held, held_optimizer), plain_values(back, back_optimizer)) == []
        for (name, left), (_, right) in zip(trainable(net), trainable(back), strict=True):
            assert bool(((left - right).abs() <= left.abs() * relative).all()), name
        bounds = half_code_bounds(held, held_optimizer)
        before, after = plain_values(net, optimizer), plain_values(back, back_optimizer)
        for key, value in after.items():
            if key.rsplit(".", 1)[1].startswith("exp_avg") and "unused" not in key:
                assert bool(((before[key] - value).abs() <= bounds[key] * 1.02 + 1e-30).all()), key


def test_a_tied_weight_that_was_written_twice_is_one_again(tmp_path: Path) -> None:
    net, optimizer = trained("adamw", tied=True)
    save_plain(tmp_path / "adamw", net, optimizer, "nested")
    convert(tmp_path / "adamw", tmp_path / "ours", "flash_adamw")
    found = inspect(tmp_path / "ours")
    assert found.aliases in ({"head.weight": "embed.weight"}, {"embed.weight": "head.weight"})
    loaded, loaded_optimizer = _ours(tied=True)
    checkpoint.load(tmp_path / "ours", loaded, loaded_optimizer)
    master = loaded_optimizer.master_weight(loaded.embed.weight)
    assert bool(((master - net.embed.weight).abs() <= net.embed.weight.abs() * 2.0**-16).all())


def _save_sharded(directory: str, placement: str) -> dict[str, Tensor]:
    net = build(placement)
    optimizer = flash(net)
    steps(net, optimizer, range(3))
    checkpoint.save(directory, net, optimizer)
    return gathered(net, optimizer)


def _load_sharded(directory: str, kind: str) -> dict[str, Tensor]:
    net = build("fsdp", seed=9, dtype=torch.float32 if kind == "adamw" else torch.bfloat16)
    optimizer = adamw(net) if kind == "adamw" else flash(net)
    checkpoint.load(directory, net, optimizer, verify="full")
    return gathered(net, optimizer)


@pytest.mark.parametrize("placement", ["fsdp", pytest.param("shard1", marks=pytest.mark.full)])
def test_a_sharded_checkpoint_converts_in_one_process_and_loads_on_any(tmp_path: Path, placement: str) -> None:
    saved = run_ranks(2, _save_sharded, str(tmp_path / "ours"), placement)[0]
    convert(tmp_path / "ours", tmp_path / "adamw", "adamw")
    convert(tmp_path / "adamw", tmp_path / "back", "flash_adamw")
    convert(tmp_path / "ours", tmp_path / "same", "flash_adamw")
    on_one = run_ranks(1, _load_sharded, str(tmp_path / "adamw"), "adamw")[0]
    on_two = run_ranks(2, _load_sharded, str(tmp_path / "adamw"), "adamw")[0]
    assert differences(on_one, on_two) == []
    moments = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    for world_size in (1, 2):
        assert differences(saved, run_ranks(world_size, _load_sharded, str(tmp_path / "same"), "flash")[0]) == []
        back = run_ranks(world_size, _load_sharded, str(tmp_path / "back"), "flash")[0]
        assert all(name.endswith(moments) for name in differences(saved, back))


def _convert_on_ranks(source: str, target: str, to: str) -> int:
    return convert(source, target, to).tensors


def test_ranks_share_a_conversion(tmp_path: Path) -> None:
    net, optimizer = trained()
    save_ours(tmp_path / "ours", net, optimizer)
    for name in ("adamw", "adamw.pt"):
        counts = run_ranks(2, _convert_on_ranks, str(tmp_path / "ours"), str(tmp_path / "two" / name), "adamw")
        convert(tmp_path / "ours", tmp_path / "one" / name, "adamw")
        assert counts[0] == counts[1] == len(inspect(tmp_path / "one" / name).tensors)
        convert(tmp_path / "two" / name, tmp_path / f"back-two-{name}-", "flash_adamw")
        convert(tmp_path / "one" / name, tmp_path / f"back-one-{name}-", "flash_adamw")
        states = []
        for count in ("one", "two"):
            loaded, loaded_optimizer = _ours()
            checkpoint.load(tmp_path / f"back-{count}-{name}-", loaded, loaded_optimizer, verify="full")
            states.append(gathered(loaded, loaded_optimizer))
        assert differences(*states) == []
    assert len(list((tmp_path / "two" / "adamw").glob("*.distcp"))) == 2


# ---------------------------------------------------------------------- other families and options


class _Lion(torch.optim.Optimizer):
    """Lion as its paper has it, with plain states: torch has none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group["betas"][1])
                    parameter.sub_(momentum.sign(), alpha=group["lr"])


def _optimizer_of(kind: str, net: nn.Module) -> Any:
    named = trainable(net)
    return {
        "lion": lambda: _Lion([p for _, p in named], 1e-3),
        "flash_lion": lambda: fod.FlashLion(named, lr=1e-3),
        "sgd": lambda: torch.optim.SGD([p for _, p in named], lr=1e-2, momentum=0.9, foreach=False),
        "flash_sgd": lambda: fod.FlashSGD(named, lr=1e-2, momentum=0.9),
        "sgd_plain": lambda: torch.optim.SGD([p for _, p in named], lr=1e-2, foreach=False),
        "flash_sgd_plain": lambda: fod.FlashSGD(named, lr=1e-2),
        "adam": lambda: torch.optim.Adam([p for _, p in named], lr=1e-3, foreach=False),
        "flash_adam": lambda: fod.FlashAdam(named, lr=1e-3),
    }[kind]()


@pytest.mark.parametrize("kind", ["lion", "sgd", "sgd_plain", "adam"])
def test_other_optimizers_go_both_ways(tmp_path: Path, kind: str) -> None:
    net = build("single")
    optimizer = _optimizer_of(f"flash_{kind}", net)
    steps(net, optimizer, range(3))
    save_ours(tmp_path / "ours", net, optimizer)
    to = kind.removesuffix("_plain")
    convert(tmp_path / "ours", tmp_path / "plain", to)
    plain = build("single", dtype=torch.float32, seed=4)
    plain_optimizer = _optimizer_of(kind, plain)
    checkpoint.load(tmp_path / "plain", plain, plain_optimizer)
    for name, weight in trainable(plain):
        assert torch.equal(weight, optimizer.get_master_weights(net)[name]), name
    expected = {key: value for key, value in expected_plain(net, optimizer).items() if not key.endswith(".step")}
    found = plain_values(plain, plain_optimizer)
    assert [key for key in found if key.endswith((".exp_avg", ".momentum_buffer")) and key not in expected] == []
    for key, value in expected.items():
        if key in found:
            assert torch.equal(value, found[key]), key
    assert kind == "sgd_plain" or any(key.endswith((".exp_avg", ".momentum_buffer")) for key in found)
    convert(tmp_path / "plain", tmp_path / "back", f"flash_{to}")
    again = build("single", seed=4)
    again_optimizer = _optimizer_of(f"flash_{kind}", again)
    checkpoint.load(tmp_path / "back", again, again_optimizer, verify="full")
    masters = again_optimizer.get_master_weights(again)
    assert all(torch.equal(value, masters[name]) for name, value in optimizer.get_master_weights(net).items())


def test_parameter_groups_keep_their_options(tmp_path: Path) -> None:
    net = build("single")
    named = trainable(net)
    groups: list[Any] = [
        {"params": [pair for pair in named if pair[1].ndim > 1], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [pair for pair in named if pair[1].ndim <= 1], "weight_decay": 0.0, "eps": 1e-6},
    ]
    optimizer = fod.FlashAdamW(groups, lr=1e-3)
    steps(net, optimizer, range(2))
    save_ours(tmp_path / "ours", net, optimizer)
    for layout in ("nested", "flattened"):
        convert(tmp_path / "ours", tmp_path / layout, "adamw", layout=layout)  # type: ignore[arg-type]
        plain = build("single", dtype=torch.float32)
        pairs = trainable(plain)
        plain_groups = [[p for _, p in pairs if p.ndim > 1], [p for _, p in pairs if p.ndim <= 1]]
        plain_optimizer = torch.optim.AdamW([{"params": parameters} for parameters in plain_groups], foreach=False)
        checkpoint.load(tmp_path / layout, plain, plain_optimizer)
        first, second = plain_optimizer.param_groups
        assert (first["weight_decay"], first["lr"], first["eps"]) == (0.1, 3e-3, 1e-8)
        assert (second["weight_decay"], second["lr"], second["eps"]) == (0.0, 1e-3, 1e-6)
        assert first["decoupled_weight_decay"] is True


@pytest.mark.parametrize(
    "options",
    [
        {"master_weight_bits": 32},
        pytest.param({"master_weight_bits": None}, marks=pytest.mark.full),
        pytest.param({"quantize": False}, marks=pytest.mark.full),
        {"rounding": "nearest", "seed": 5},
    ],
    ids=str,
)
def test_options_of_the_format(tmp_path: Path, options: dict[str, Any]) -> None:
    net, optimizer = trained()
    save_ours(tmp_path / "ours", net, optimizer)
    convert(tmp_path / "ours", tmp_path / "other", "flash_adamw", options=options)
    loaded, loaded_optimizer = _ours(**options)
    checkpoint.load(tmp_path / "other", loaded, loaded_optimizer, verify="full")
    expected, expected_optimizer = _ours(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that options differ
        checkpoint.load(tmp_path / "ours", expected, expected_optimizer)
    assert differences(gathered(expected, expected_optimizer), gathered(loaded, loaded_optimizer)) == []
    assert {name: inspect(tmp_path / "other").formats[0][name] for name in options} == options


def test_modules_can_be_kept_in_fp32(tmp_path: Path) -> None:
    net, optimizer = trained("adamw")
    save_plain(tmp_path / "adamw", net, optimizer, "nested")
    convert(tmp_path / "adamw", tmp_path / "ours", "flash_adamw", keep_fp32=["norm", "fro*"])
    loaded = build("single", dtype=torch.float32, seed=2)
    fod.cast_model(loaded, torch.bfloat16, keep_fp32=["norm", "fro*"])
    optimizer = flash(loaded)
    checkpoint.load(tmp_path / "ours", loaded, optimizer)
    assert torch.equal(loaded.norm.weight, net.norm.weight)
    assert loaded.up.weight.dtype == torch.bfloat16
    with pytest.raises(CheckpointFormatError, match=r"'norms' of keep_fp32 matches no module; close names: norm"):
        convert(tmp_path / "adamw", tmp_path / "no", "flash_adamw", keep_fp32=["norms"])


def test_weights_in_fp16(tmp_path: Path) -> None:
    net, optimizer = trained("adamw")
    save_plain(tmp_path / "adamw", net, optimizer, "nested")
    convert(tmp_path / "adamw", tmp_path / "ours", "flash_adamw", dtype=torch.float16)
    loaded = build("single", dtype=torch.float16)
    optimizer = flash(loaded)
    checkpoint.load(tmp_path / "ours", loaded, optimizer)
    for name, master in optimizer.get_master_weights(loaded).items():
        torch.testing.assert_close(master, dict(net.named_parameters())[name].detach(), rtol=2e-6, atol=1e-9)


# ---------------------------------------------------------------------- torch.save


def test_a_torch_save_file_of_both_with_names(tmp_path: Path) -> None:
    net = build("single", dtype=torch.float32)
    optimizer = torch.optim.AdamW(trainable(net), lr=1e-2, foreach=False)
    steps(net, optimizer, range(3))
    save_plain(tmp_path / "dcp", net, optimizer, "nested")
    torch.save(
        {"model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, tmp_path / "a.pt"
    )
    states = []
    for source in (tmp_path / "dcp", tmp_path / "a.pt"):
        convert(source, tmp_path / f"ours-{source.stem}", "flash_adamw")
        loaded, loaded_optimizer = _ours()
        checkpoint.load(tmp_path / f"ours-{source.stem}", loaded, loaded_optimizer)
        states.append(gathered(loaded, loaded_optimizer))
    assert differences(*states) == []


def test_numbered_parameters_are_named_where_shapes_leave_one_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 40), nn.Linear(40, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        net(torch.randn(3, 40)).square().sum().backward()
        optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", "flash_adamw")
    result = torch.load(tmp_path / "b.pt", weights_only=True)
    assert result["optimizer"]["param_groups"][0]["param_names"] == [name for name, _ in net.named_parameters()]
    loaded = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 40), nn.Linear(40, 8)).to(torch.bfloat16)
    loaded.load_state_dict(result["model"])
    flash_optimizer = fod.FlashAdamW(loaded.named_parameters())
    flash_optimizer.load_state_dict(result["optimizer"])
    for (name, master), weight in zip(flash_optimizer.get_master_weights().items(), net.parameters(), strict=True):
        assert bool(((master - weight).abs() <= weight.abs() * 2.0**-16).all()), name


def test_numbered_parameters_that_could_be_either_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = [{"params": [net[1].weight, net[1].bias]}, {"params": [net[0].weight, net[0].bias]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    net(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointFormatError, match=r"a\.pt: its optimizer knows parameters by number only"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", "flash_adamw")
    assert not (tmp_path / "b.pt").exists()


def test_an_optimizers_state_alone(tmp_path: Path) -> None:
    net = build("single", dtype=torch.float32)
    optimizer = adamw(net)
    steps(net, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    done = convert(tmp_path / "optimizer.pt", tmp_path / "flash.pt", "flash_adamw")
    assert any("only optimizer states" in note for note in done.notes)
    loaded, loaded_optimizer = _ours()
    state = torch.load(tmp_path / "flash.pt", weights_only=True)
    assert "param_names" not in state["param_groups"][0]
    loaded_optimizer.load_state_dict(state)
    expected, expected_optimizer = _ours()
    expected_optimizer.load_state_dict(optimizer.state_dict())
    differing = differences(gathered(expected, expected_optimizer), gathered(loaded, loaded_optimizer))
    assert [name for name in differing if name.startswith("optimizer.")] == []


def test_corrections_are_not_dropped_in_silence(tmp_path: Path) -> None:
    net, optimizer = trained()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(net.state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointFormatError, match=r"'embed\.weight' has corrections .* give the weights too"):
        convert(tmp_path / "optimizer.pt", tmp_path / "adamw.pt", "adamw")
    convert(tmp_path / "optimizer.pt", tmp_path / "adamw.pt", "adamw", weights=tmp_path / "model.pt")
    state = torch.load(tmp_path / "adamw.pt", weights_only=True)
    masters = optimizer.get_master_weights()
    assert all(torch.equal(state["model"][name], value) for name, value in masters.items())


# ---------------------------------------------------------------------- what is refused


def test_what_can_not_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    net, optimizer = trained()
    save_ours(tmp_path / "ours", net, optimizer)
    with pytest.raises(CheckpointFormatError, match=r"holds the states of FlashAdamW, and flash_lion keeps other ones"):
        convert(tmp_path / "ours", tmp_path / "lion", "flash_lion")
    with pytest.raises(CheckpointFormatError, match="there is no optimizer 'muon'"):
        convert(tmp_path / "ours", tmp_path / "lion", "muon")
    with pytest.raises(CheckpointError, match=r"nothing-here does not exist"):
        convert(tmp_path / "nothing-here", tmp_path / "lion", "adamw")
    plain = build("single", dtype=torch.float32)
    amsgrad = adamw(plain, amsgrad=True)
    steps(plain, amsgrad, [0])
    save_plain(tmp_path / "amsgrad", plain, amsgrad, "nested")
    with pytest.raises(CheckpointFormatError, match="AMSGrad"):
        convert(tmp_path / "amsgrad", tmp_path / "lion", "flash_adamw")
    torch.save({"model": plain.state_dict()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointFormatError, match=r"model\.pt holds no optimizer states"):
        convert(tmp_path / "model.pt", tmp_path / "lion", "flash_adamw")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointFormatError, match=r"list\.pt holds a list"):
        convert(tmp_path / "list.pt", tmp_path / "lion", "flash_adamw")
    assert not (tmp_path / "lion").exists()


def test_states_and_weights_of_different_models_are_refused(tmp_path: Path) -> None:
    net, optimizer = trained("adamw")
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = [name for name, _ in trainable(net)]
    state["state"][1]["exp_avg"] = torch.zeros(3, 5)
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    message = r"exp_avg of parameter 'up.weight' has shape \(3, 5\), and the parameter \(256, 128\)"
    with pytest.raises(CheckpointFormatError, match=message):
        convert(tmp_path / "a.pt", tmp_path / "b", "flash_adamw")
    state["state"][1].pop("exp_avg")
    torch.save({"model": net.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    with pytest.raises(CheckpointFormatError, match=r"'up.weight' has no exp_avg in its optimizer state"):
        convert(tmp_path / "a.pt", tmp_path / "b", "flash_adamw")


def test_a_run_goes_on_after_it_was_converted_to_itself(tmp_path: Path) -> None:
    """Scheduler, random states and extras come along."""
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    scheduler.step()
    extras = {"tokens": 5, "average": torch.arange(3.0)}
    checkpoint.save(tmp_path / "a", net, optimizer, scheduler=scheduler, extras=extras)
    convert(tmp_path / "a", tmp_path / "b", "flash_adamw")
    loaded, loaded_optimizer = _ours()
    loaded_scheduler = torch.optim.lr_scheduler.LambdaLR(loaded_optimizer, lambda step: 0.9**step)
    torch.manual_seed(123)
    found = checkpoint.load(tmp_path / "b", loaded, loaded_optimizer, scheduler=loaded_scheduler).extras
    assert (found["tokens"], found["average"].tolist()) == (5, [0.0, 1.0, 2.0])
    assert loaded_scheduler.last_epoch == 1
    assert differences(gathered(net, optimizer), gathered(loaded, loaded_optimizer)) == []
