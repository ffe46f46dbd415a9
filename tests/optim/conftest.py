"""Fixtures of the tests of the optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashoptim_dist.optim import cpu_backend


@pytest.fixture(autouse=True)
def _cpu_backend_stays() -> Iterator[None]:
    before = cpu_backend()
    yield
    cpu_backend(before)
