"""Norms and clipping over several GPUs with NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.several_gpus import run_on_gpus


@pytest.mark.gpu
def test_norms_over_several_gpus_are_the_whole_model_s() -> None:
    """All layouts of two_gpus.py, by torchrun, in a process group that is bound to its device."""
    printed = run_on_gpus(Path(__file__).with_name("two_gpus.py"), torch.cuda.device_count() // 2 * 2)
    assert "the whole model's on cuda" in printed
