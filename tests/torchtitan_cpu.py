"""What torchtitan, of any version, needs to be imported on a machine without a GPU. For tests only."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from unittest import mock

import pytest

CPU = types.SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 34),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
)
"""Stands for torch.cuda."""


def require_torchtitan(wanted: str) -> None:
    """Skip the module that is being imported unless torchtitan `wanted`, such as "0.3", is installed."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        pytest.skip(
            f"torchtitan is not installed; ./launch/test torchtitan-{wanted} installs it", allow_module_level=True
        )
    if not found.startswith(f"{wanted}."):
        pytest.skip(f"tests of the adapter of torchtitan {wanted}; {found} is installed", allow_module_level=True)


@contextlib.contextmanager
def as_device() -> Iterator[None]:
    """Let torch say, for a while, that the CPU is its device."""
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=CPU),
    ):
        yield
