"""Memory planned without GPUs: against what real ranks hold, and against peaks measured on GPUs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import memory
import pytest
import torch
from llama_support.config import Config, read_config_file
from llama_support.errors import BadInput
from llama_support.memory_plan import MemoryPlan, measure_workspace, plan_memory
from llama_support.model import DEBUG_MODEL, build_model, model_folder, read_llama_config
from llama_support.optimizers import build_optimizer
from llama_support.world import start_world

from flashoptim_dist import memory_report
from flashoptim_dist.memory import CATEGORIES
from tests.pool import run_ranks

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def _plan(config: Config, world_size: int, rank: int = 0, root_holds_embeddings: bool = False) -> MemoryPlan:
    llama_config = read_llama_config(model_folder(config.model), config.sequence_length)
    return plan_memory(config, llama_config, world_size, rank=rank, root_holds_embeddings=root_holds_embeddings)


def _held(config: Config) -> list[dict[str, int]]:
    """Bytes by category and rank that the ranks hold after a step."""
    world = start_world("cpu", replicas=config.replicate)
    llama_config = read_llama_config(DEBUG_MODEL, config.sequence_length)
    model = build_model(config, DEBUG_MODEL, llama_config, world)
    optimizer = build_optimizer(config, model)
    ids = torch.ones(1, 8, dtype=torch.int64)
    model(input_ids=ids, loss_labels=ids, use_cache=False).backward()
    optimizer.step()
    report = memory_report(model, optimizer)
    assert report.total.predicted == 0
    return [{name: report.row(name).bytes_by_rank[rank] for name in CATEGORIES} for rank in range(world.size)]


@pytest.mark.parametrize(
    "config", [Config(), pytest.param(Config(optimizer="adamw"), marks=pytest.mark.full), Config(replicate=2)]
)
def test_states_are_those_of_real_ranks_to_the_byte(config: Config) -> None:
    held = run_ranks(2, _held, config)[0]
    assert [_plan(config, 2, rank).states for rank in range(2)] == held
    if config.replicate == 2:
        assert held[0] == held[1]


def test_shards_of_uneven_rows_add_up() -> None:
    whole = _plan(Config(), 1).states
    parts = [_plan(Config(), 5, rank).states for rank in range(5)]  # 5 divides no dimension of the model
    for name in ("weight", "correction", "gradient"):
        assert sum(part[name] for part in parts) == whole[name]
        assert max(part[name] for part in parts) == parts[0][name] > parts[4][name]


def test_what_a_layer_keeps() -> None:
    config = Config(sequence_length=64)
    llama_config = read_llama_config(DEBUG_MODEL, 64)
    full, selective, none = (
        measure_workspace(replace(config, activation_checkpointing=what), llama_config, 3)  # type: ignore[arg-type]
        for what in ("full", "selective", "none")
    )
    assert full.kept == full.hidden == 3 * 64 * llama_config.hidden_size * 2
    assert full.kept < selective.kept < none.kept
    assert full.layer > none.layer  # what is not kept is made again
    assert full.loss == selective.loss == none.loss


def test_release_and_accumulation() -> None:
    at_once = _plan(Config(global_batch=8, micro_batch=4), 2)
    in_parts = _plan(Config(global_batch=16, micro_batch=4), 2)
    assert (at_once.micro_batches, in_parts.micro_batches) == (1, 2)
    last = {release: list(at_once.moments(release=release))[-1].parts for release in (False, True)}
    assert last[False][1] == at_once.states["gradient"]
    assert last[True][1] < at_once.states["gradient"] // 1000
    # Earlier micro-batches leave whole gradients, which the last one frees.
    first = [next(in_parts.moments(release=release)).parts[1] for release in (False, True)]
    assert first == [in_parts.states["gradient"]] * 2
    assert next(at_once.moments(release=True)).parts[1] == 0


def test_replicas_must_divide_the_ranks() -> None:
    with pytest.raises(BadInput, match="--replicate 3 does not divide 8 ranks"):
        _plan(Config(replicate=3), 8)


def test_the_table_in_the_docs_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory.py", "--configs", "llama3_1b", "--world-sizes", "8"])
    assert memory.main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 8 ")]
    documented = [_cells(line) for line in (ROOT / "docs" / "memory.md").read_text().splitlines()]
    assert len(rows) == 1
    assert _cells(rows[0]) in documented


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "sequences", "optimizer", "release", "measured"),
    [
        (2, 4, "adamw", False, 129.6 / 2),
        (2, 4, "flash_adamw", False, 67.2 / 2),
        (2, 4, "flash_adamw", True, 55.8 / 2),
        (1, 1, "flash_adamw", False, 61.2),
        (1, 1, "flash_adamw", True, 48.2),
    ],
)
def test_peaks_of_an_8b_model_are_those_measured_on_gpus(
    world_size: int, sequences: int, optimizer: str, release: bool, measured: float
) -> None:
    """GiB per GPU of Llama-3.1-8B under plain FSDP2 units, with states of the same size as ours (docs/memory.md)."""
    options = {"global_batch": sequences, "optimizer": optimizer, "reduce_dtype": "fp32", "gradient_release": False}
    config = replace(read_config_file("llama3_8b"), **options)
    peak = _plan(config, world_size, root_holds_embeddings=True).peak(release=release).total / GIB
    assert peak == pytest.approx(measured, rel=0.04)
