"""Fixtures for all tests. The pools of ranks themselves are in `tests/pool.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import shut_down


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    shut_down()
