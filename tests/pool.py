"""Multi-process tests: long-lived pools of gloo ranks on the CPU, one pool per world size.

    from tests.pool import mesh, run_ranks

    def _sum(value: float) -> float:                 # runs on every rank; a module-level function of the test file
        tensor = torch.tensor(value + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    def test_sum() -> None:
        assert run_ranks(2, _sum, 1.0) == [3.0, 3.0]  # the results, by rank

Arguments and results are pickled: tensors are fine, DTensors are not (return `full_tensor()` or `to_local()`). On the
ranks torch.distributed is initialized, torch and random are seeded alike, and there is one thread. To test that an
error is raised on every rank, better catch it inside the function and return its text: an exception that leaves the
function ends the whole pool, which costs the next call a second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Result = TypeVar("Result")

MAX_RANKS = 10  # ranks alive per pytest process: pools of 1, 2, 3 and 4 at once; more makes the longest unused pool go
DEFAULT_TIMEOUT_S = 180.0
START_TIMEOUT_S = 240.0  # importing torch takes 3 s, and a minute on a machine with much else to do
GRACE_S = 2.0  # how long the other ranks get to report too, once one has failed
SLICE_S = 5.0
PRELOAD_IF_USED = (
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
    "tests.torchtitan_v0_2.device",
)
"""Slow to import: where the test process has it already, it is imported before the ranks are forked, once for all."""
_WORKER = Path(__file__).resolve().with_name("pool_worker.py")
_LOG_TAIL = 6000


class RankError(RuntimeError):
    """A rank failed, died or did not answer. The message names the rank and holds its traceback and its last output."""


@dataclass
class _Rank:
    number: int
    pid: int
    connection: Connection
    log: Path
    log_start: int = 0
    """Length of the log when the call began: only what came later belongs to it."""

    def output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace")
        return text[-_LOG_TAIL:]


class _Forker:
    """The process that has imported torch and forks the ranks (`tests/pool_worker.py`)."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="flashoptim_dist-test-pool-"))
        self._log = self.directory / "forker.log"
        self._forks = 0
        near, far = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves to nothing must not matter
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_WORKER), str(far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        far.close()
        near.settimeout(START_TIMEOUT_S)
        self._control = near

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        try:
            socket.send_fds(self._control, [pickle.dumps(request)], list(descriptors))
            answer = self._control.recv(4096)
        except OSError as error:
            raise RankError(f"the process that forks the ranks failed: {error}\n{self._log.read_text()}") from error
        if not answer:
            raise RankError(f"the process that forks the ranks died:\n{self._log.read_text()}")
        return int(pickle.loads(answer))

    def fork(self, number: int, world_size: int, port: int) -> _Rank:
        self._forks += 1
        log = self.directory / f"{self._forks}-rank{number}-of-{world_size}.log"
        near, far = Pipe()
        request = {
            "operation": "fork",
            "rank": number,
            "world_size": world_size,
            "port": port,
            "log": str(log),
            "preload": [name for name in PRELOAD_IF_USED if name in sys.modules],
        }
        pid = self._ask(request, [far.fileno()])
        far.close()
        log.touch()
        return _Rank(number, pid, near, log)

    def wait(self, pid: int) -> int:
        """Exit code of a rank that has ended or been killed; negative: the number of the signal."""
        return self._ask({"operation": "wait", "pid": pid})

    def close(self) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class _Pool:
    """The ranks of one world size, joined in one process group."""

    def __init__(self, forker: _Forker, world_size: int) -> None:
        self._forker = forker
        self.world_size = world_size
        # Served from here: no port has to be guessed, and the store outlives every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [forker.fork(number, world_size, self._store.port) for number in range(world_size)]

    def call(self, request: bytes, name: str, timeout_s: float) -> list[Any]:
        """One call on all ranks. Whatever is raised, the pool can't be used after it and has to be closed."""
        for rank in self._ranks:
            rank.log_start = rank.log.stat().st_size
            with contextlib.suppress(OSError):  # a rank that is gone shows below, as the end of its connection
                rank.connection.send_bytes(request)
        pending = {rank.connection: rank for rank in self._ranks}
        results: dict[int, Any] = {}
        failures: list[tuple[_Rank, bytes, str]] = []
        left_s = timeout_s
        while pending and left_s > 0:
            # In slices, none of which counts for more than its length: a machine that stood still is no hanging rank.
            length_s = min(left_s, SLICE_S)
            start = time.monotonic()
            ready = wait(list(pending), timeout=length_s)
            left_s -= min(length_s, time.monotonic() - start) if ready else length_s
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    kind, *payload = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    failures.append((rank, b"", self._death(rank)))
                else:
                    if kind == "result":
                        results[rank.number] = pickle.loads(payload[0])
                    else:
                        failures.append((rank, payload[0], payload[1]))
            if failures:
                left_s = min(left_s, GRACE_S)
        if failures:
            self._raise_failures(failures, list(pending.values()), name)
        if pending:
            self._raise_timeout(list(pending.values()), name, timeout_s)
        return [results[number] for number in range(self.world_size)]

    def _death(self, rank: _Rank) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)  # it closed its connection; make sure that waiting for it ends
        code = self._forker.wait(rank.pid)
        self._ranks.remove(rank)
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"The process {how} during the call."

    def _raise_failures(self, failures: list[tuple[_Rank, bytes, str]], waiting: list[_Rank], name: str) -> None:
        parts = []
        # A rank that died comes first: gloo errors of the others may be read before the end of its connection.
        failures = sorted(failures, key=lambda failure: failure[0] in self._ranks)
        for rank, _, text in failures:
            output = rank.output().strip()
            parts.append(f"rank {rank.number} of {self.world_size} failed in {name}:\n{text.rstrip()}")
            if output:
                parts.append(f"last output of rank {rank.number}:\n{output}")
        if waiting:
            numbers = ", ".join(str(rank.number) for rank in waiting)
            parts.append(f"still running {GRACE_S:.0f} s later, and ended: rank {numbers}")
        error = RankError("\n\n".join(parts))
        pickled = failures[0][1]  # the first to fail: what the others report may only follow from it
        if pickled:
            raise pickle.loads(pickled) from error
        raise error

    def _raise_timeout(self, waiting: list[_Rank], name: str, timeout_s: float) -> None:
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)  # writes the stacks of all threads to the rank's log
        time.sleep(0.5)
        numbers = ", ".join(str(rank.number) for rank in waiting)
        parts = [f"rank {numbers} of {self.world_size} did not return from {name} within {timeout_s:g} s"]
        parts += [f"rank {rank.number} is here:\n{rank.output().strip()}\n{_threads(rank.pid)}" for rank in waiting]
        raise RankError("\n\n".join(parts))

    def close(self) -> None:
        for rank in self._ranks:
            rank.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)  # a rank may sit in a collective that nobody will join
        for rank in self._ranks:
            self._forker.wait(rank.pid)
            rank.log.unlink(missing_ok=True)
        self._ranks = []


def _threads(pid: int) -> str:
    """Name, state and place in the kernel of each thread of a process: Python's stacks don't show the others."""
    lines = ["threads, their states and what they wait for in the kernel:"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
            lines.append(f"{task.name} {name} {rest.split()[0]} {(task / 'wchan').read_text()}")
    return "\n".join(lines)


_forker: _Forker | None = None
_pools: dict[int, _Pool] = {}
"""By world size, the longest unused first."""


def _take_pool(world_size: int) -> _Pool:
    global _forker
    if _forker is None:
        _forker = _Forker()
        atexit.register(shut_down)
    pool = _pools.pop(world_size, None)
    while _pools and pool is None and sum(_pools) + world_size > MAX_RANKS:
        _pools.pop(next(iter(_pools))).close()
    return pool or _Pool(_forker, world_size)


def run_ranks(
    world_size: int, function: Callable[..., Result], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
) -> list[Result]:
    """Call `function(*args, **kwargs)` on every rank of a gloo group of `world_size` and return the results by rank.

    The function is a module-level function (or static method) of an importable file. `timeout_s` bounds this call and
    is not passed on. The first exception of any rank is raised here, with the tracebacks and outputs of all failed
    ranks as its cause; a rank that died or did not answer in time raises RankError. In each of these cases the ranks
    are killed, and the next call starts new ones.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, and must be at least 1")
    if dist.is_initialized():
        raise RuntimeError("run_ranks was called on a rank, or where torch.distributed is initialized already")
    name = getattr(function, "__qualname__", repr(function))
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None or "<" in name:
        raise ValueError(f"{name} can't be found by name on the ranks: pass a module-level function, not {function!r}")
    request = pickle.dumps((module.__name__, file, name, pickle.dumps((args, kwargs))))
    pool = _take_pool(world_size)
    try:
        results = pool.call(request, name, timeout_s)
    except BaseException:
        pool.close()
        raise
    _pools[world_size] = pool
    return results


def close_pools() -> None:
    """End all ranks. Later calls start new ones."""
    while _pools:
        _pools.popitem()[1].close()


def shut_down() -> None:
    """End all ranks and the process that forks them. Later calls start new ones."""
    global _forker
    close_pools()
    if _forker is not None:
        _forker.close()
        _forker = None


_meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
_MESH_NAMES = {1: ("dp_shard",), 2: ("dp_replicate", "dp_shard")}


def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The CPU device mesh of these sizes, made once per rank: each new mesh makes new process groups and threads.

    For use on the ranks; all of them must call. The names default to `dp_shard`, or `dp_replicate` and `dp_shard`.
    """
    chosen = _MESH_NAMES.get(len(sizes)) if names is None else names
    if chosen is None:
        raise ValueError(f"a mesh of {len(sizes)} dimensions needs names")
    key = (sizes, chosen)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", sizes, mesh_dim_names=chosen)
    return _meshes[key]
