"""torchtitan's CheckpointManager with our container on ranks: saves, resharding, and the export of master weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.pool import mesh, run_ranks
from tests.torchtitan.device import CheckpointManager, FlashCheckpointManager, ParamGroupConfig
from tests.torchtitan.models import assert_equal, container, make_model, schedulers, snapshot, train


def _model(kind: str, seed: int) -> Any:
    """Return the model, sharded: "fsdp 2", "hsdp 2 2", "tp 2 2" (FSDP times tensor parallelism); or, "stage 2", this
    rank's stage of a pipeline.
    """
    name, *sizes = kind.split()
    numbers = tuple(map(int, sizes))
    if name == "stage":
        model = make_model(seed=seed)
        if dist.get_rank() == 0:
            del model.layers["1"], model.norm, model.lm_head
        else:
            del model.tok_embeddings, model.layers["0"]
        return model
    if name != "tp":
        return make_model(mesh=mesh(*numbers), seed=seed)
    grid = mesh(*numbers, names=("dp_shard", "tp"))
    return make_model(mesh=grid["dp_shard"], seed=seed, tensor_parallel=grid["tp"])


def _world(kind: str) -> int:
    return math.prod(map(int, kind.split()[1:]))


class Run:
    """A model, its optimizers and what torchtitan's manager wants beside them."""

    def __init__(self, folder: str, kind: str, seed: int = 0, manager: Any = None, **options: Any) -> None:
        self.model = _model(kind, seed)
        self.optimizers = container(self.model, **options)
        self.schedulers = schedulers(self.optimizers)
        config = manager or CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0)
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )
        self.manager.states.pop("dataloader")

    def train(self, first: int, last: int) -> None:
        train(self.model, self.optimizers, self.schedulers, first, last)

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self.model, self.optimizers)


def _train_and_save(folder: str, kind: str, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was saved after step 3, and where training went by step 5."""
    manager = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0, async_mode=mode)
    run = Run(folder, kind, manager=manager)
    run.train(0, 3)
    saved = run.snapshot()
    assert run.manager.save(3)
    run.train(3, 5)  # while the save may be under way
    run.manager.maybe_wait_for_saving()
    dist.barrier()
    run.manager.close()
    return saved, run.snapshot()


def _load_and_train(folder: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    run = Run(folder, kind, seed=7)
    assert run.manager.load()
    loaded = run.snapshot()
    run.train(3, 5)
    return loaded, run.snapshot()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_two_ranks_resume_bit_for_bit(tmp_path: Path, mode: str) -> None:
    saved, trained = run_ranks(2, _train_and_save, str(tmp_path), "fsdp 2", mode)[0]
    loaded, resumed = run_ranks(2, _load_and_train, str(tmp_path), "fsdp 2")[0]
    assert_equal(saved, loaded)
    assert_equal(trained, resumed)
    metadata = FileSystemReader(tmp_path / "checkpoint" / "step-3").read_metadata().state_dict_metadata
    entry = metadata["optimizer.state.layers.0.w1.weight.exp_avg"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (entry.properties.dtype, len(entry.chunks)) == (torch.int8, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    "before, after",
    [
        ("fsdp 2", "fsdp 1"),
        ("fsdp 2", "fsdp 4"),
        ("fsdp 3", "fsdp 2"),
        ("fsdp 2", "hsdp 2 2"),
        ("hsdp 2 2", "fsdp 2"),
        ("fsdp 2", "tp 2 2"),
        ("tp 2 2", "fsdp 1"),
    ],
)
def test_other_numbers_of_ranks_and_placements_go_on_bit_for_bit(tmp_path: Path, before: str, after: str) -> None:
    saved, trained = run_ranks(_world(before), _train_and_save, str(tmp_path), before, "disabled")[0]
    loaded, resumed = run_ranks(_world(after), _load_and_train, str(tmp_path), after)[0]
    assert_equal(saved, loaded)
    assert_equal(trained, resumed)


@pytest.mark.full
def test_stages_of_a_pipeline_load_as_one_model_and_as_stages(tmp_path: Path) -> None:
    """Each has an optimizer of its own, whose first group is number 0 as that of the others."""
    saved = run_ranks(2, _train_and_save, str(tmp_path), "stage 2", "disabled")
    whole, _ = run_ranks(2, _load_and_train, str(tmp_path), "fsdp 2")[0]
    parts = [part for part, _ in saved]
    assert not parts[0].keys() & parts[1].keys()
    assert_equal({**parts[0], **parts[1]}, whole)
    for (part, trained), (loaded, resumed) in zip(
        saved, run_ranks(2, _load_and_train, str(tmp_path), "stage 2"), strict=True
    ):
        assert_equal(part, loaded)
        assert_equal(trained, resumed)


# ---------------------------------------------------------------------- export


def _export(folder: str, export_dtype: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the optimizers' master weights, the model's own, and what changed in the model by the export."""
    manager = FlashCheckpointManager.Config(enable=True, interval=100, keep_latest_k=0, export_dtype=export_dtype)
    run = Run(folder, "fsdp 2", manager=manager, **options)
    run.train(0, 4)
    masters: dict[str, Any] = {}
    for optimizer in run.optimizers:
        if hasattr(optimizer, "get_master_weights"):
            masters |= {name: value.full_tensor() for name, value in optimizer.get_master_weights(run.model).items()}
    before = run.snapshot()
    parameters = dict(run.model.named_parameters())
    assert run.manager.save(4, last_step=True)
    changed = [name for name, value in run.model.named_parameters() if value is not parameters[name]]
    assert_equal(before, run.snapshot())
    run.train(4, 5)  # still a model that trains
    weights = {key.removeprefix("model."): value for key, value in before.items() if key.startswith("model.")}
    return masters, weights, changed


def _read(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    assert sorted(metadata) == sorted(names)  # the model alone
    state = {name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype) for name, entry in metadata.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_last_save_holds_the_master_weights(tmp_path: Path) -> None:
    masters, weights, changed = run_ranks(2, _export, str(tmp_path), "float32")[0]
    exported = _read(tmp_path / "checkpoint" / "step-4", list(weights))
    assert changed == []
    for name, value in exported.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, masters[name]), name
    assert any(not torch.equal(exported[name], weights[name].float()) for name in weights)  # the corrections matter


@pytest.mark.full
def test_export_of_mixed_optimizers_takes_plain_weights_as_they_are(tmp_path: Path) -> None:
    group = ParamGroupConfig(pattern="lm_head", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
    masters, weights, _ = run_ranks(2, _export, str(tmp_path), "float32", param_groups=[group])[0]
    exported = _read(tmp_path / "checkpoint" / "step-4", list(weights))
    assert set(weights) - set(masters) == {"lm_head.weight"}
    for name, value in exported.items():
        assert torch.equal(value, masters.get(name, weights[name].float())), name


@pytest.mark.full
def test_export_in_bf16_is_the_nearest_bf16_weight(tmp_path: Path) -> None:
    masters, weights, _ = run_ranks(2, _export, str(tmp_path), "bfloat16")[0]
    exported = _read(tmp_path / "checkpoint" / "step-4", list(weights))
    for name, value in exported.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, masters[name].bfloat16()), name
