"""The stream of training steps: the same global order on any number of ranks, and resumed exactly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import numpy as np
import pytest
import torch
from llama_support.config import Config
from llama_support.data import StepBatches, TrainingSteps, load_data, rank_batches
from llama_support.encode import Document
from llama_support.errors import BadInput
from llama_support.model import DEBUG_MODEL, load_tokenizer
from llama_support.packing import IGNORED
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.recipes.inputs import write_rows

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13


def _documents(count: int = 50) -> list[Document]:
    # Every document has tokens of its own, so a batch says which documents it holds.
    sizes = np.random.default_rng(0).integers(2, 17, count)
    return [
        Document(np.arange(100 * i, 100 * i + size, dtype=np.int32), np.ones(size, dtype=np.bool_))
        for i, size in enumerate(sizes)
    ]


def _loader(
    rank: int = 0, world_size: int = 1, *, micro_batch: int = 2, global_batch: int = 6, seed: int = 0
) -> StatefulDataLoader:
    steps = TrainingSteps(
        _documents(),
        sequence_length=16,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    return StatefulDataLoader(steps, batch_size=None, num_workers=0)


def _take(loader: StatefulDataLoader, count: int) -> list[StepBatches]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def _sequences(steps: list[StepBatches]) -> list[torch.Tensor]:
    return [batch["input_ids"] for step in steps for batch in step.micro_batches]


def _trained(step: StepBatches) -> int:
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in step.micro_batches)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_together_see_the_global_batches_of_one_rank(world_size: int) -> None:
    alone = _take(_loader(), 5)
    ranks = [_take(_loader(rank, world_size, micro_batch=1), 5) for rank in range(world_size)]
    for step in range(5):
        expected = torch.cat(_sequences([alone[step]]))
        together = torch.cat([ids for rank in ranks for ids in _sequences([rank[step]])])
        assert torch.equal(together[: len(expected)], expected)
        assert not together[len(expected) :].any()
        trained = sum(_trained(rank[step]) for rank in ranks)
        assert {rank[step].trained_tokens for rank in ranks} == {trained} == {alone[step].trained_tokens}
        assert len({len(rank[step].micro_batches) for rank in ranks}) == 1


def test_an_epoch_holds_every_document_once_and_the_next_has_another_order() -> None:
    steps = TrainingSteps(_documents(), sequence_length=16, global_batch=1, micro_batch=1, seed=0, rank=0, world_size=1)
    epochs: dict[int, list[int]] = {0: [], 1: []}
    iterator = iter(steps)
    while True:
        epoch = steps.state_dict()["epoch"]
        if epoch == 2:
            break
        (batch,) = next(iterator).micro_batches
        starts = batch["input_ids"][(batch["position_ids"] == 0) & (batch["labels"] != IGNORED)]
        epochs[epoch] += (starts // 100).tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]


def test_another_seed_gives_another_order() -> None:
    first, other = (_sequences(_take(_loader(seed=seed), 1)) for seed in (0, 1))
    assert not torch.equal(torch.cat(first), torch.cat(other))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_position_means_the_same_on_any_number_of_ranks(world_size: int) -> None:
    loader = _loader()
    iterator = iter(loader)
    for _ in range(7):  # into the second epoch
        next(iterator)
    state = loader.state_dict()
    assert state == _advanced(_loader(1, 2), 7).state_dict()
    expected = torch.cat(_sequences([next(iterator) for _ in range(3)]))
    resumed = []
    for rank in range(world_size):
        other = _loader(rank, world_size, micro_batch=6 // world_size)
        other.load_state_dict(state)
        resumed.append(_sequences(_take(other, 3)))
    assert torch.equal(torch.cat([ids for step in zip(*resumed) for ids in step]), expected)


def _advanced(loader: StatefulDataLoader, steps: int) -> StatefulDataLoader:
    _take(loader, steps)
    return loader


def test_a_position_in_other_data_is_refused() -> None:
    state = _advanced(_loader(seed=0), 1).state_dict()
    loader = _loader(seed=1)
    loader.load_state_dict(state)
    with pytest.raises(BadInput, match="in other data"):
        next(iter(loader))


def test_fewer_sequences_than_a_global_batch() -> None:
    steps = TrainingSteps(
        _documents(3), sequence_length=16, global_batch=10, micro_batch=10, seed=0, rank=0, world_size=1
    )
    first = next(iter(steps))
    assert first.micro_batches[0]["input_ids"].shape == (10, 16)
    assert _trained(first) == first.trained_tokens > 0


def test_every_rank_gets_as_many_validation_batches() -> None:
    sequences = [[document] for document in _documents(7)]
    ranks = [rank_batches(sequences, 16, 2, rank, 4) for rank in range(4)]
    shapes = [[tuple(batch["input_ids"].shape) for batch in rank] for rank in ranks]
    assert shapes == [[(2, 16)]] * 4
    trained = sum(int((batch["labels"] != IGNORED).sum()) for rank in ranks for batch in rank)
    assert trained == sum(len(document.tokens) - 1 for [document] in sequences)


def test_data_of_a_file_is_split_encoded_and_counted(tmp_path: Path) -> None:
    config = Config(data=str(write_rows(tmp_path / "rows.jsonl", 100)), validation_fraction=0.2, sequence_length=64)
    data = load_data(config, load_tokenizer(DEBUG_MODEL), 4096, 0, 1)
    training, validation = (int(part.split(" rows")[0].split()[-1]) for part in data.summary.split(";"))
    assert training + validation == 100
    assert 8 < validation < 35
    assert data.fingerprint == load_data(config, load_tokenizer(DEBUG_MODEL), 4096, 1, 2).fingerprint
    with pytest.raises(BadInput, match=r"gives token \d+ .* has 600 embeddings"):
        load_data(config, load_tokenizer(DEBUG_MODEL), 600, 0, 1)


def test_validation_data_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "validation.jsonl"
    own.write_text(json.dumps({"text": "the only row"}))
    config = Config(data=str(write_rows(tmp_path / "rows.jsonl", 20)), validation_data=str(own), sequence_length=64)
    tokenizer = load_tokenizer(DEBUG_MODEL)
    data = load_data(config, tokenizer, 4096, 0, 1)
    assert "training: 20 rows" in data.summary
    tokens = tokenizer("the only row")["input_ids"]
    assert data.validation[0]["input_ids"][0, : len(tokens)].tolist() == tokens
