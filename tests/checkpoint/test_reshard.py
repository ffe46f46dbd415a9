"""Any placement on any number of ranks to any other: states bit-equal, and training goes on as if uninterrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flashoptim_dist as fod
from flashoptim_dist import checkpoint
from tests.checkpoint.cases import Stage
from tests.checkpoint.models import OPTIMIZERS, build, differences, flash, gathered, steps, trainable
from tests.pool import run_ranks

CASES = [
    ("single", 1, "fsdp", 2),
    ("fsdp", 2, "single", 1),
    ("fsdp", 2, "fsdp", 4),
    ("fsdp", 4, "fsdp", 3),
    ("fsdp", 3, "hsdp", 4),
    ("hsdp", 4, "fsdp_tp", 4),
    ("fsdp_tp", 4, "shard1", 2),
    ("shard1", 2, "experts", 4),
    ("experts", 4, "fsdp", 1),
]
QUICK = [CASES[number] for number in (1, 3, 5, 7)]
"""Those of the fast tier, where each placement is read or written once."""


def _save(path: str, kind: str, placement: str) -> dict[str, Tensor]:
    net = build(placement)
    optimizer = OPTIMIZERS[kind](net)
    steps(net, optimizer, range(3))
    checkpoint.save(path, net, optimizer)
    saved = gathered(net, optimizer)
    steps(net, optimizer, range(3, 5))
    return saved | {f"later.{name}": value for name, value in gathered(net, optimizer).items()}


def _load(path: str, kind: str, placement: str) -> dict[str, Tensor]:
    net = build(placement, seed=5)
    optimizer = OPTIMIZERS[kind](net)
    checkpoint.load(path, net, optimizer)
    loaded = gathered(net, optimizer)
    steps(net, optimizer, range(3, 5))
    return loaded | {f"later.{name}": value for name, value in gathered(net, optimizer).items()}


def _marks(kind: str, case: tuple[str, int, str, int]) -> list[pytest.MarkDecorator]:
    if kind == "flash":
        return [] if case in QUICK else [pytest.mark.full]
    return [pytest.mark.full] if case in QUICK else [pytest.mark.full, pytest.mark.long]


@pytest.mark.parametrize(
    "before, ranks_before, after, ranks_after, kind",
    [pytest.param(*case, kind, marks=_marks(kind, case)) for case in CASES for kind in OPTIMIZERS],
)
def test_states_and_later_steps_are_bit_equal(
    tmp_path: Path, before: str, ranks_before: int, after: str, ranks_after: int, kind: str
) -> None:
    """A4, A6, B22, C35 of the collected bug reports: states misread or refused on other ranks or placements."""
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(ranks_before, _save, path, kind, before)[0]
    for loaded in run_ranks(ranks_after, _load, path, kind, after):
        assert differences(saved, loaded) == []
    assert any(name.endswith("exp_avg") for name in saved)


def _large_uneven(path: str, load: bool) -> Tensor:
    net = nn.Linear(1280, 1601, bias=False, dtype=torch.bfloat16)
    torch.manual_seed(7)
    nn.init.normal_(net.weight)
    from torch.distributed.fsdp import fully_shard

    from tests.pool import mesh

    fully_shard(net, mesh=mesh(dist.get_world_size()))
    optimizer = fod.FlashAdamW(net.named_parameters(), lr=1e-2)
    if load:
        checkpoint.load(path, net, optimizer)
    else:
        steps(net, optimizer, [0])
        checkpoint.save(path, net, optimizer)
    state = optimizer.state[net.weight]
    assert state["exp_avg"].shape == (1601, 1280)
    return state["exp_avg"].full_tensor()


def test_uneven_rows_keep_their_global_shape(tmp_path: Path) -> None:
    """B15 of the collected bug reports: 1601 rows on 4 ranks came back as 1604."""
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(4, _large_uneven, path, False)[0]
    assert torch.equal(run_ranks(3, _large_uneven, path, True)[0], saved)


def _tied(path: str, load: bool) -> tuple[dict[str, Tensor], bool]:
    net = build("fsdp", tied=True, seed=1 if load else 0)
    optimizer = flash(net)
    if load:
        checkpoint.load(path, net, optimizer)
    else:
        steps(net, optimizer, range(2))
        checkpoint.save(path, net, optimizer)
    return gathered(net, optimizer), net.head.weight is net.embed.weight


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    """C29 of the collected bug reports: one state for a tied weight, and it loads."""
    path = tmp_path / "checkpoint"
    saved, tied = run_ranks(2, _tied, str(path), False)[0]
    loaded, tied_after = run_ranks(3, _tied, str(path), True)[0]
    assert tied
    assert tied_after
    assert differences(saved, loaded) == []
    assert "model.head.weight" in saved
    assert not any(name.startswith("optimizer.head") for name in saved)
    on_disk = sum(file.stat().st_size for file in path.iterdir())
    untied = tmp_path / "untied"
    run_ranks(2, _save, str(untied), "flash", "fsdp")
    assert sum(file.stat().st_size for file in untied.iterdir()) > on_disk


def _never_stepped(path: str, load: bool) -> dict[str, Tensor]:
    net = build("fsdp")
    optimizer = flash(net)
    if load:
        checkpoint.load(path, net, optimizer)
        assert not optimizer.state
        steps(net, optimizer, [0])
    else:
        checkpoint.save(path, net, optimizer)
        assert not optimizer.state
        steps(net, optimizer, [0])
    return gathered(net, optimizer)


def test_an_optimizer_that_never_stepped_loads_as_one(tmp_path: Path) -> None:
    """A3, C25 of the collected bug reports: a state before the first step; no hidden step is taken."""
    path = str(tmp_path / "checkpoint")
    straight = run_ranks(2, _never_stepped, path, False)[0]
    assert differences(straight, run_ranks(2, _never_stepped, path, True)[0]) == []


def _freeze(path: str, kind: str, load: bool) -> dict[str, Tensor]:
    net = build("fsdp", seed=3 if load else 0)
    optimizer = OPTIMIZERS[kind](net)
    if load:
        net.up.requires_grad_(False)
        checkpoint.load(path, net, optimizer)
        net.up.requires_grad_(True)
    else:
        steps(net, optimizer, range(2))
        net.up.requires_grad_(False)
        steps(net, optimizer, [2])
        checkpoint.save(path, net, optimizer)
        net.up.requires_grad_(True)
    before = gathered(net, optimizer)
    steps(net, optimizer, [3])
    return before | {f"later.{name}": value for name, value in gathered(net, optimizer).items()}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "flash" else pytest.mark.full) for k in OPTIMIZERS])
def test_state_of_frozen_parameters_is_kept(tmp_path: Path, kind: str) -> None:
    """C26 of the collected bug reports: train, freeze, save, load, unfreeze."""
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _freeze, path, kind, False)[0]
    assert "optimizer.up.weight.exp_avg" in saved
    assert differences(saved, run_ranks(3, _freeze, path, kind, True)[0]) == []


def _groups(path: str, kind: str, load: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    net = build("fsdp", seed=3 if load else 0)
    matrices = [(name, p) for name, p in trainable(net) if p.ndim > 1]
    others = [(name, p) for name, p in trainable(net) if p.ndim <= 1]
    first, second = (others, matrices) if load else (matrices, others)
    if load:
        first, extra = first[:2], first[2:]
        parts = [(first, 0.5), (second, 0.5), (extra, 0.5)]
    else:
        parts = [(first, 0.25), (second, 0.0)]
    unnamed = kind == "adamw"
    make = torch.optim.AdamW if unnamed else fod.FlashAdamW
    groups = [
        {"params": [p for _, p in part] if unnamed else part, "weight_decay": decay, "lr": 0.1} for part, decay in parts
    ]
    optimizer = make(groups)
    if load:
        checkpoint.load(path, net, optimizer)
    else:
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.param_groups[1]["lr"] = 0.02
        steps(net, optimizer, range(2))
        checkpoint.save(path, net, optimizer)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return gathered(net, optimizer), decays, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_parameter_groups_in_another_order_and_split_are_matched_by_name(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "checkpoint")
    saved, decays, rates = run_ranks(2, _groups, path, kind, False)[0]
    loaded, decays_after, rates_after = run_ranks(2, _groups, path, kind, True)[0]
    assert differences(saved, loaded) == []
    assert (decays, rates) == ([0.25, 0.0], [0.01, 0.02])
    assert (decays_after, rates_after) == ([0.0, 0.25, 0.0], [0.02, 0.01, 0.02])


def _merged_groups(path: str) -> list[float]:
    net = build("fsdp")
    optimizer = fod.FlashAdamW([{"params": trainable(net), "weight_decay": 0.5, "lr": 0.1}])
    with pytest.warns(
        UserWarning, match="had different 'weight_decay' when they were saved; the group keeps its own, 0.5"
    ):
        checkpoint.load(path, net, optimizer)
    return [optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["lr"]]


def test_groups_with_different_options_put_into_one_keep_the_live_option(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(2, _groups, path, "flash", False)
    assert run_ranks(2, _merged_groups, path) == [[0.5, 0.1]] * 2


def _pipeline(path: str, stages: list[list[list[int]]], load: bool) -> dict[str, Tensor]:
    parts = [Stage(layers) for layers in stages[dist.get_rank()]]
    optimizers = [fod.FlashAdamW(part.named_parameters(), lr=1e-2) for part in parts]
    if load:
        with torch.no_grad():
            for parameter in [p for part in parts for p in part.parameters()]:
                parameter.zero_()
        checkpoint.load(path, parts, optimizers)
    else:
        for part, optimizer in zip(parts, optimizers, strict=True):
            steps(part, optimizer, range(2))
        checkpoint.save(path, parts, optimizers)
    mine: dict[str, Tensor] = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        mine |= gathered(part, optimizer)
    return mine


def test_pipeline_stages_can_be_spread_otherwise(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(2, _pipeline, path, [[[0, 1], [4]], [[2, 3], [5]]], False)
    loaded = run_ranks(3, _pipeline, path, [[[5, 0]], [[1, 2]], [[3], [4]]], True)
    assert differences(saved[0] | saved[1], loaded[0] | loaded[1] | loaded[2]) == []
