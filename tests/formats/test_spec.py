"""The record of the format that a checkpoint carries."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from flashoptim_dist.formats import FormatSpec


def test_spec_is_json_and_says_all_a_reader_needs() -> None:
    spec = FormatSpec(optimizer="FlashAdamW", master_weight_bits=24, quantize=True, rounding="stochastic", seed=7)
    record = json.loads(json.dumps(spec.to_dict()))
    assert record == {
        "name": "fd1",
        "version": 2,
        "group_size": 32,
        "optimizer": "FlashAdamW",
        "master_weight_bits": 24,
        "quantize": True,
        "rounding": "stochastic",
        "seed": 7,
    }
    assert FormatSpec(**record) == spec
    with pytest.raises(FrozenInstanceError):
        spec.seed = 8  # type: ignore[misc]
