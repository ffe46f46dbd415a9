"""Packed sequences: nothing lost, nothing cut, and the same loss as one document at a time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llama_support.attention import document_causal_mask
from llama_support.encode import Document
from llama_support.loss import LlamaWithLoss
from llama_support.packing import IGNORED, collate, pack, trained_positions
from llama_support.training import summed_loss
from transformers import LlamaConfig


@given(st.lists(st.integers(1, 40), max_size=300))
def test_packing_places_every_document_once_and_within_the_capacity(lengths: list[int]) -> None:
    packed = pack(lengths, 40)
    assert sorted(index for sequence in packed for index in sequence) == list(range(len(lengths)))
    rooms = [40 - sum(lengths[index] for index in sequence) for sequence in packed]
    assert all(room >= 0 for room in rooms)
    if 2 <= len(packed) <= 64:  # all sequences were open throughout: no two of them could have been one
        assert sum(sorted(rooms)[-2:]) < 40


def test_the_fullest_sequence_with_room_is_taken() -> None:
    assert pack([6, 8, 2, 4], 10) == [[0, 3], [1, 2]]


def test_a_document_above_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 11 positions"):
        pack([1, 11], 10)


def _document(tokens: list[int], prompt: int) -> Document:
    trained = np.arange(len(tokens)) >= prompt
    return Document(np.array(tokens, dtype=np.int32), trained)


def test_layout_of_a_packed_sequence() -> None:
    batch = collate([[_document([1, 2, 3, 4], 2), _document([5, 6], 0)], []], 6)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 5, 0, 0], [0] * 6]
    assert batch["labels"].tolist() == [[IGNORED, 3, 4, 6, IGNORED, IGNORED], [IGNORED] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1], list(range(6))]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 2, 2], [0] * 6]


def test_attention_stays_within_a_document_and_looks_back_only() -> None:
    mask = document_causal_mask(torch.tensor([[0, 0, 1, 1, 1]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_packed_loss_and_gradient_equal_those_of_single_documents() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    model = LlamaWithLoss(config).double()
    generator = np.random.default_rng(0)
    documents = [_document(generator.integers(0, 64, size).tolist(), size // 3) for size in (9, 2, 14, 5, 7)]
    packed = [[documents[index] for index in sequence] for sequence in pack([8, 1, 13, 4, 6], 20)]
    assert max(len(sequence) for sequence in packed) > 1

    def loss_and_gradient(sequences: list[list[Document]], length: int) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        total = sum(summed_loss(model, collate([sequence], length), torch.device("cpu")) for sequence in sequences)
        assert isinstance(total, torch.Tensor)
        total.backward()
        return total.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    packed_loss, packed_gradient = loss_and_gradient(packed, 20)
    singles = [loss_and_gradient([[document]], len(document.tokens) - 1) for document in documents]
    assert packed_loss == pytest.approx(sum(loss for loss, _ in singles), rel=1e-6)
    expected = torch.stack([gradient for _, gradient in singles]).sum(0)
    torch.testing.assert_close(packed_gradient, expected, rtol=1e-5, atol=1e-6)
    assert sum(trained_positions(document) for document in documents) == 26
