"""Training under torchtitan 0.3's CUDA graphs, which are its default: forward and backward are replayed, ours steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.several_gpus import ROOT, torchrun
from tests.torchtitan import device
from tests.torchtitan.models import assert_equal

assert device.CPU is not None  # skips the file where torchtitan is not installed

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

# torchtitan takes the device that it finds when it is imported, so a GPU needs processes of its own.
WORKER = """
import os
import sys
import torch

sys.path.append(sys.argv[3])  # last: kernels/ in it is no package of that name
from tests.torchtitan import debug_run
from torchtitan.tools.logging import init_logger

init_logger()  # it says whether it records a graph
disabled = sys.argv[2] == "eager"
change = {"training.disable_cuda_graphs": disabled, "training.seq_len": 64, "training.local_batch_size": 4}
trained = debug_run.run(debug_run.llama, sys.argv[1], steps=20, change=change)
if os.environ["RANK"] == "0":  # states are whole on all ranks
    torch.save(vars(trained), sys.argv[1] + "/trained.pt")
"""


def _train(folder: Path, mode: str, kind: str, ranks: int) -> tuple[dict[str, Any], str]:
    """Return what training in processes of its own left (debug_run.Trained, as a dict), and what they printed."""
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER)
    # Sums in one order, so that runs can be compared bit for bit.
    variables = {"TORCHTITAN_TEST_DEVICE": kind, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    printed = torchrun(ranks, script, str(folder), mode, str(ROOT), variables=variables)
    return torch.load(folder / "trained.pt", weights_only=False), printed


@pytest.mark.parametrize(
    "kind, ranks",
    [
        pytest.param("cpu", 1, marks=pytest.mark.long),
        pytest.param("cuda", 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, marks=pytest.mark.gpu),
    ],
)
def test_training_under_cuda_graphs_is_the_same(tmp_path: Path, kind: str, ranks: int) -> None:
    """On a CPU torchtitan says that there are no graphs, and goes on without."""
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    (graphs, printed), (eager, _) = (_train(tmp_path / mode, mode, kind, ranks) for mode in ("graphs", "eager"))
    assert ("Recorded CUDA graph" in printed) == (kind == "cuda")
    assert graphs["optimizers"] == ["FlashAdamW"]
    losses, expected = ([loss for _, loss, _ in trained["metrics"]] for trained in (graphs, eager))
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.5
    assert losses == expected
    assert_equal(graphs["state"], eager["state"])
