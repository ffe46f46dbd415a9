"""Fixtures for all tests. The pools of ranks themselves are in `tests/pool.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import patch_once_per_launch
from tests.pool import shut_down

if not torch.cuda.is_available():
    # Triton reads this when it is imported, which any test file may do: the tests of the kernels run interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_once_per_launch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of the GPU where there is none, so that plain `pytest` runs what can run."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine shows none"))


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    shut_down()
