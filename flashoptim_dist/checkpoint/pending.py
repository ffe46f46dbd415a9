"""The save that runs in the background, if there is one: the next call waits for it and raises what went wrong."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path


class AsyncSave:
    """A save under way in a background thread."""

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        """Start ``write`` in a thread of its own."""
        self.path = path
        self._error: BaseException | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"saving {path.name}")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Return whether it ended, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is on disk and return its folder. No communication with other ranks.

        Args:
            timeout: seconds to wait at most; None: until it is done.

        Raises:
            CheckpointError: the save failed, on every rank.
            TimeoutError: it is not done yet.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path} is not saved yet after {timeout} s")
        self._raised = True
        if self._error is not None:
            raise self._error
        return self.path

    def wait(self) -> None:
        """Wait until it ended, well or not."""
        self._thread.join()

    def tell(self) -> None:
        """Note that what went wrong has been raised elsewhere."""
        self._raised = True

    @property
    def unreported(self) -> BaseException | None:
        """What went wrong, if nobody was told yet."""
        return None if self._raised else self._error


_pending: AsyncSave | None = None


def set_pending(handle: AsyncSave) -> None:
    """Remember a save that the next call has to wait for."""
    global _pending
    _pending = handle


def finish_pending() -> None:
    """Wait for the background save, if there is one.

    Raises:
        CheckpointError: it failed and ``result()`` was not called; the error is raised once.
    """
    global _pending
    handle, _pending = _pending, None
    if handle is None:
        return
    handle.wait()
    if handle.unreported is not None:
        handle.result()


@atexit.register
def _report_at_exit() -> None:
    if _pending is not None and _pending.done() and _pending.unreported is not None:
        print(f"error: a background save failed and nobody asked: {_pending.unreported}", file=sys.stderr, flush=True)
