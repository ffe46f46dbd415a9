"""The store by which the ranks of one start find each other under torchrun."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_KEY = "llama_support/meeting"
_TRY_SECONDS = 5.0
_DEFAULT_SECONDS = 600.0


def agent_keeps_store() -> bool:
    """Whether the ranks' store is torchrun's own, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(rank: int, seconds: float | None = None) -> dist.Store:
    """A store that no earlier start of these ranks has written to. All ranks must call.

    torchrun keeps one store over all restarts (torch 2.11 and 2.13), and with it the addresses of ranks that are gone:
    a rank that reads one before its owner has written the new one is refused, and the restart fails. Here rank 0 makes
    a store of its own and leaves its address; who finds an old address tries again.

    Args:
        rank: of the caller.
        seconds: longest wait for rank 0, and of the store's own operations; None: 10 minutes.

    Raises:
        TimeoutError: rank 0 was not found in time.
    """
    seconds = _DEFAULT_SECONDS if seconds is None else seconds
    host, timeout = os.environ["MASTER_ADDR"], timedelta(seconds=seconds)
    agents = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if rank == 0:
        own = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        name = uuid.uuid4().hex
        own.set(_KEY, name)
        agents.set(_KEY, f"{own.port} {name}")
        return own
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        port, name = agents.get(_KEY).decode().split()
        store = _store_of(host, int(port), name)
        if store is not None:
            store.set_timeout(timeout)
            return store
        time.sleep(0.1)
    raise TimeoutError(f"rank {rank} found no rank 0 at {host} within {seconds:.0f} seconds")


def _store_of(host: str, port: int, name: str) -> dist.TCPStore | None:
    """The store at this address if it is the one of that name."""
    try:
        store = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=_TRY_SECONDS), wait_for_workers=False
        )
        return store if store.get(_KEY).decode() == name else None
    except dist.DistError:
        return None
