"""Saves in the background: what lands is the state at the call, and a failure surfaces at the next call."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import Checkpointer, CheckpointError, async_saving, saving, staging
from tests.checkpoint.models import OPTIMIZERS, build, differences, flash, gathered, steps
from tests.pool import run_ranks


class Gate:
    """Holds the background thread back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        write = saving.write

        def held(*arguments: Any) -> None:
            assert threading.current_thread() is not threading.main_thread()
            self.open.wait()
            write(*arguments)

        monkeypatch.setattr(saving, "write", held)


def _overwritten_while_saving(path: str, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    net = build()
    optimizer = OPTIMIZERS[kind](net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    steps(net, optimizer, range(2))
    extras = {"log": [1, 2], "average": torch.ones(5)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        before = gathered(net, optimizer)
        handle = checkpoint.async_save(path, net, optimizer, scheduler=scheduler, extras=extras)
        # Everything changes before the first byte is written.
        steps(net, optimizer, range(2, 5))
        scheduler.step()
        torch.manual_seed(77)
        extras["log"].append(3)
        extras["average"].zero_()
        optimizer.param_groups[0]["lr"] = 123.0
        assert not handle.done()
        assert not os.path.exists(path)
        with pytest.raises(TimeoutError, match="not saved yet"):
            handle.result(timeout=0.01)
        gate.open.set()
        assert handle.result() == Path(path)
    net = build(seed=3)
    optimizer = OPTIMIZERS[kind](net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    found: dict[str, Any] = {}
    checkpoint.load(path, net, optimizer, scheduler=scheduler, extras=found, verify="full")
    facts = found["log"], found["average"].tolist(), optimizer.param_groups[0]["lr"], scheduler.last_epoch
    return before, gathered(net, optimizer), facts


@pytest.mark.parametrize(
    "world_size, kind",
    [
        pytest.param(ranks, kind, marks=[] if (ranks == 2) == (kind == "flash") else pytest.mark.full)
        for ranks in (1, 2)
        for kind in OPTIMIZERS
    ],
)
def test_what_lands_is_the_state_at_the_call(tmp_path: Path, kind: str, world_size: int) -> None:
    """C38 of the collected bug reports: training changed tensors while they were being saved."""
    for before, after, facts in run_ranks(world_size, _overwritten_while_saving, str(tmp_path / "x"), kind):
        assert differences(before, after) == []
        assert facts == ([1, 2], [1.0] * 5, 1e-2, 0)


def test_latest_moves_only_when_the_data_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C38 of the collected bug reports: `latest` moved before the data was durable."""
    net = build("single")
    optimizer = flash(net)
    with Checkpointer(tmp_path, net, optimizer, background=True, keep_last=1) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        with monkeypatch.context() as inner:
            gate = Gate(inner)
            checkpointer.save(2)
            assert (tmp_path / "latest").read_text() == "step-00000001\n"
            assert checkpointer.steps() == [1]
            gate.open.set()
            checkpointer.wait()
        assert (tmp_path / "latest").read_text() == "step-00000002\n"
        assert checkpointer.steps() == [2]


def test_a_failed_background_save_surfaces_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("single")
    optimizer = flash(net)
    checkpointer = Checkpointer(tmp_path, net, optimizer, background=True)
    checkpointer.save(1)
    checkpointer.wait()
    calls: dict[str, Any] = {
        "save": lambda: checkpointer.save(3),
        "load": checkpointer.load,
        "wait": checkpointer.wait,
        "close": checkpointer.close,
        "free save": lambda: checkpoint.save(tmp_path / "free", net, optimizer),
        "free async_save": lambda: checkpoint.async_save(tmp_path / "free", net, optimizer),
        "free load": lambda: checkpoint.load(tmp_path / "step-00000001", net, optimizer),
    }
    for name, call in calls.items():
        with monkeypatch.context() as inner:
            inner.setattr(saving, "write_manifest", _no_space)
            checkpointer.save(2)
            with pytest.raises(CheckpointError, match=r"step-00000002 failed.*No space left on device"):
                call()
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"], name
    checkpointer.wait()  # it is told once
    assert checkpointer.load() == 1


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_on_the_way_out_does_not_hide_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("single")
    optimizer = flash(net)
    monkeypatch.setattr(saving, "write_manifest", _no_space)
    with pytest.raises(ZeroDivisionError):
        _save_and_fail(Checkpointer(tmp_path, net, optimizer, background=True), 0)
    with pytest.raises(CheckpointError, match="No space left"):
        _save_and_fail(Checkpointer(tmp_path, net, optimizer, background=True), 1)


def _save_and_fail(checkpointer: Checkpointer, divisor: int) -> None:
    with checkpointer:
        checkpointer.save(1)
        _ = 1 / divisor


def test_staging_memory_is_reused_and_given_back(tmp_path: Path) -> None:
    net = build("single")
    optimizer = flash(net)
    steps(net, optimizer, [0])
    memory = async_saving.staging_for(optimizer)
    checkpoint.async_save(tmp_path / "1", net, optimizer).result()
    block, size = memory._block, memory.nbytes
    needed = sum(value.nbytes for value in gathered(net, optimizer).values())
    assert needed <= size <= needed + 64 * len(gathered(net, optimizer))
    checkpoint.async_save(tmp_path / "2", net, optimizer).result()
    assert memory._block is block
    Checkpointer(tmp_path, net, optimizer).close()
    assert memory.nbytes == 0
    checkpoint.async_save(tmp_path / "3", net, optimizer).result()
    files = [sorted((tmp_path / name).iterdir()) for name in "123"]
    sizes = [[file.stat().st_size for file in names if file.name.endswith(".distcp")] for names in files]
    assert sizes[0] == sizes[1] == sizes[2]
    del optimizer
    gc.collect()
    assert memory not in async_saving._stagings.values()


def _staging_fails(path: str) -> str:
    net = build()
    optimizer = flash(net)
    if dist.get_rank() == 1:
        async_saving.staging_for(optimizer).stage = _no_memory  # type: ignore[method-assign]
    handle = checkpoint.async_save(path, net, optimizer)
    try:
        handle.result()
    except CheckpointError as error:
        return str(error)
    return ""


def _no_memory(*_: Any) -> None:
    raise MemoryError("no room for a copy")


def test_staging_that_fails_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    expected = f"saving {path} failed: rank 1: MemoryError: no room for a copy"
    assert run_ranks(2, _staging_fails, str(path)) == [expected] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_failure_that_nobody_asks_for_is_told_at_the_end(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"""
import torch, flashoptim_dist as fod
from flashoptim_dist import checkpoint
from flashoptim_dist.checkpoint import saving
def fail(*_): raise OSError(28, "No space left on device")
saving.write_manifest = fail
net = torch.nn.Linear(64, 64)
checkpoint.async_save({str(tmp_path / "x")!r}, net, fod.FlashAdamW(net.named_parameters()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "error: a background save failed and nobody asked" in result.stderr
    assert "No space left on device" in result.stderr


def _call_in_turns(path: str, mark: str) -> bool:
    net = build()
    optimizer = flash(net)
    steps(net, optimizer, [0])
    checkpoint.save(path + "-first", net, optimizer)  # the group of the background threads is made by all
    if dist.get_rank() == 1:
        while not os.path.exists(mark):
            time.sleep(0.01)
    handle = checkpoint.async_save(path, net, optimizer)
    returned_alone = dist.get_rank() == 0 and not handle.done()
    if dist.get_rank() == 0:
        Path(mark).touch()
    handle.result()
    return returned_alone


def test_the_call_waits_for_no_other_rank(tmp_path: Path) -> None:
    """A rank that comes late must not stall the others; here it comes only when the first has returned."""
    assert run_ranks(2, _call_in_turns, str(tmp_path / "x"), str(tmp_path / "mark"), timeout_s=60.0) == [True, False]
    net = build("single")
    checkpoint.load(tmp_path / "x", net, flash(net), verify="full")


class Unwilling:
    """Something whose state can't be had on the second rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("the worker is gone")
        return {}


def _collecting_fails(path: str) -> str:
    net = build()
    handle = checkpoint.async_save(path, net, flash(net), dataloader=Unwilling())
    try:
        handle.result()
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_goes_wrong_in_the_call_is_told_to_all_ranks_by_the_handle(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    expected = f"saving {path} failed: rank 1: RuntimeError: the worker is gone"
    assert run_ranks(2, _collecting_fails, str(path)) == [expected] * 2
    assert list(tmp_path.iterdir()) == []


class Interrupting:
    def state_dict(self) -> dict[str, Any]:
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_call_and_the_save(tmp_path: Path) -> None:
    net = build("single")
    with pytest.raises(KeyboardInterrupt):
        checkpoint.async_save(tmp_path / "x", net, flash(net), dataloader=Interrupting())
    checkpoint.save(tmp_path / "y", net, flash(net))
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def test_a_learning_rate_tensor_is_saved_as_it_was_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build("single")
    optimizer = flash(net)
    rate = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    gate = Gate(monkeypatch)
    handle = checkpoint.async_save(tmp_path / "x", net, optimizer)
    rate.fill_(7.0)
    gate.open.set()
    handle.result()
    checkpoint.load(tmp_path / "x", net, optimizer)
    assert rate == 0.5


def test_threads_copy_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(staging, "_threads", lambda: 3)
    whole = torch.arange(5000, dtype=torch.int64)
    tensors = {
        "long": whole,
        "strided": whole[:4000].view(40, 100).t(),
        "bytes": whole.to(torch.int8),
        "bf16": whole.to(torch.bfloat16).view(50, 100),
        "scalar": torch.tensor(3.0),
        "nothing": torch.ones(0, 4),
    }
    copies, event = staging.Staging().stage(tensors)
    assert event is None
    assert copies.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor), name
        assert copies[name].shape == tensor.shape
    before = {name: copy.clone() for name, copy in copies.items()}
    whole.zero_()
    assert all(torch.equal(copies[name], before[name]) for name in copies)


def test_each_rank_uses_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    for ranks, threads in (("1", 8), ("3", 4), ("12", 1), ("64", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert staging._threads() == threads
