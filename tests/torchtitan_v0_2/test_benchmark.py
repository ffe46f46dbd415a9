"""The ranks of ``recipes/benchmarks/torchtitan_runs.py``: short runs of the debug model by torchtitan's Trainer."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.pool import run_ranks
from tests.torchtitan_v0_2.debug_run import cpu_shims
from tests.torchtitan_v0_2.device import train_spec

BENCHMARKS = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]

from torchtitan_support import worker  # noqa: E402
from torchtitan_support.cases import Case, Settings  # noqa: E402

STEPS = 2


def _settings(folder: Path) -> Settings:
    return Settings(
        processes=2,
        steps=STEPS,
        local_batch=1,
        sequence_length=32,
        checkpointing="full",
        corpus=folder / "corpus.pt",
        folder=folder,
    )


def _train(case: Case, settings: Settings) -> dict[str, Any]:
    """Train a case on this rank; beside its figures, what the weights are like."""
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(train_spec._extra_train_specs))
        worker.register_models()  # of torchtitan's Llama, before the shims' smaller one takes its name
        stack.enter_context(cpu_shims())
        trainer = worker.build_trainer(case, settings)
        modules = [module for module in trainer.model_parts[0].modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_force_sum_reduction_for_comms(True)
        weight = next(
            p for name, p in trainer.model_parts[0].named_parameters() if name.endswith("attention.wo.weight")
        )
        assert isinstance(weight, DTensor)
        try:
            figures = worker.train(trainer)
        finally:
            trainer.close()
        return {**figures, "fsdp": len(modules), "dtype": weight.dtype, "mesh": weight.device_mesh.mesh_dim_names}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of runs on a text of random tokens."""
    folder = tmp_path_factory.mktemp("benchmark")
    tokens = torch.randint(64, (4000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    torch.save({"tokens": tokens, "lengths": [200] * 20}, folder / "corpus.pt")
    return _settings(folder)


def _check(case: Case, run: dict[str, Any]) -> None:
    assert len(run["losses"]) == STEPS
    assert run["losses"][0] == pytest.approx(8.8, abs=0.3)  # log 4096 and what random weights add
    assert run["parameters"] == 7_212_288
    assert run["optimizer_class"] == {"adamw": "AdamW", "flash_adamw": "FlashAdamW"}[case.optimizer]
    assert run["dtype"] == {"adamw": torch.float32, "flash_adamw": torch.bfloat16}[case.optimizer]
    assert run["mesh"] == {"fsdp": ("fsdp",), "tp": ("fsdp", "tp")}[case.parallelism]
    assert run["fsdp"] == 10  # embedding, six layers, norm, output and the root; at degree 1 too
    assert run["tokens_per_second_per_process"] > 0
    assert run["seconds_per_step"] > 0


def test_a_case_trains(settings: Settings) -> None:
    case = Case("debug", "tp", "flash_adamw", 5)
    both = run_ranks(2, _train, case, settings)
    assert both[0]["losses"] == both[1]["losses"]
    _check(case, both[0])


@pytest.mark.full
@pytest.mark.long
def test_all_cases_train_on_the_text_of_their_seed(settings: Settings) -> None:
    losses = {}
    for optimizer in ("adamw", "flash_adamw"):
        for parallelism in ("fsdp", "tp"):
            case = Case("debug", parallelism, optimizer, 5)  # type: ignore[arg-type]
            run = run_ranks(2, _train, case, settings)[0]
            _check(case, run)
            losses[parallelism, optimizer] = run["losses"]
        # The same weights and the same sequences on both meshes; bf16 sums in other orders make the rest.
        assert losses["fsdp", optimizer][0] == pytest.approx(losses["tp", optimizer][0], abs=0.02)
    other = run_ranks(2, _train, Case("debug", "fsdp", "adamw", 6), settings)[0]
    assert other["losses"][0] != pytest.approx(losses["fsdp", "adamw"][0], abs=1e-3)


def test_a_rank_has_its_part_of_a_step() -> None:
    sequences = torch.arange(10)[:, None].expand(10, 3)
    batches = {}
    for ranks, batch in ((2, 2), (1, 4)):
        loaders = [iter(worker.CorpusLoader(sequences, batch, rank, ranks)) for rank in range(ranks)]
        steps = [[next(loader) for loader in loaders] for _ in range(3)]
        batches[ranks] = [torch.cat([inputs["input"] for inputs, _ in step])[:, 0].tolist() for step in steps]
    assert batches[1] == batches[2] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    inputs, labels = next(iter(worker.CorpusLoader(torch.arange(8).view(2, 4), 1, 1, 2)))
    assert inputs["input"].tolist() == [[4, 5, 6]]
    assert labels.tolist() == [[5, 6, 7]]


def test_the_large_model_has_llama_3_2_s_shape_without_its_tied_weights() -> None:
    spec = train_spec.get_train_spec("llama3")
    with torch.device("meta"):
        model = spec.model_cls(replace(worker.LLAMA_3_2_1B, max_seq_len=128))
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert sizes["layers.0.feed_forward.w2.weight"] == (2048, 8192)
    assert sizes["layers.15.attention.wk.weight"] == (512, 2048)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 1_235_814_400 + 128_256 * 2048
