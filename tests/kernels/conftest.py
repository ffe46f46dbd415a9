"""The device of the kernel tests: the same tests run interpreted on the CPU and compiled on a GPU (`-m gpu`).

Without a GPU the top conftest asks for Triton's interpreter. On a machine with one, `TRITON_INTERPRET=1 pytest
tests/kernels -m 'not gpu'` does.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_GPU = INTERPRETED or not torch.cuda.is_available()


@pytest.fixture(params=[pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("Triton compiles here: set TRITON_INTERPRET=1 to run its interpreter")
    if request.param == "cuda" and NO_GPU:
        pytest.skip("needs a CUDA device, and Triton without its interpreter")
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that are for a GPU alone where there is none."""
    skip = pytest.mark.skip(reason="needs a CUDA device, and Triton without its interpreter")
    for item in items:
        if NO_GPU and item.get_closest_marker("gpu") and "tests/kernels" in item.path.as_posix():
            item.add_marker(skip)
