"""Names of parameters and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from flashoptim_dist.checkpoint import CheckpointError, layout
from flashoptim_dist.checkpoint.names import parameter_names
from tests.checkpoint.models import build
from tests.pool import run_ranks


def _wrapped(kind: str) -> nn.Module:
    net = build("single")
    if kind == "recomputed":
        net.up = checkpoint_wrapper(net.up)
    if kind == "compiled":
        return torch.compile(net)  # type: ignore[return-value]
    if kind == "compiled inside":
        net.up = torch.compile(net.up)
    if kind == "called module":
        return nn.ModuleDict({"module": nn.ModuleDict({"module": net})})
    return net


@pytest.mark.parametrize("kind", ["plain", "recomputed", "compiled", "compiled inside", "called module"])
def test_names_are_those_of_torch(kind: str) -> None:
    net = _wrapped(kind)
    ours = [name for names in parameter_names([net]).values() for name in names]
    assert set(ours) == set(get_model_state_dict(net)) - {"seen", "module.module.seen"}


def _data_parallel() -> tuple[set[str], set[str]]:
    net = DistributedDataParallel(build("single"))
    return {name for names in parameter_names([net]).values() for name in names}, set(get_model_state_dict(net))


def test_names_under_data_parallel_are_those_of_torch() -> None:
    ours, torchs = run_ranks(2, _data_parallel)[0]
    assert ours == torchs - {"seen"}


def test_tied_parameters_have_all_their_names() -> None:
    net = build("single", tied=True)
    assert parameter_names([net])[net.embed.weight] == ["embed.weight", "head.weight"]


def test_two_parts_may_not_share_a_name() -> None:
    with pytest.raises(CheckpointError, match="two parts of the model have a parameter 'weight'"):
        parameter_names([nn.Linear(2, 2), nn.Linear(2, 2)])
    part = nn.Linear(2, 2)
    assert len(parameter_names([part, part])) == 2


def test_steps_and_folders() -> None:
    for step in (0, 7, 12345678, 1234567890):
        assert layout.step_of(layout.step_name(step)) == step
    for name in ("latest", "step-7", "step-0000000x", ".step-00000001.saving-ab", "astep-00000001", "step-00000001x"):
        assert layout.step_of(name) is None


def test_only_whole_folders_count(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000020").mkdir()
    (tmp_path / "step-00000004").write_text("a file")
    (tmp_path / ".step-00000005.saving-abc").mkdir()
    assert layout.steps_in(tmp_path) == [3, 20]
    assert layout.steps_in(tmp_path / "none") == []


def test_leftovers_are_found_by_their_exact_name(tmp_path: Path) -> None:
    target = tmp_path / "a[1]*"
    mine = layout.staging_path(target, "0")
    mine.mkdir()
    layout.staging_path(tmp_path / "a1x", "0").mkdir()
    assert layout.leftovers(target) == [mine]
