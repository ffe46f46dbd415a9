"""One kind of error for everything a user can mend, and one way out of the process for it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch.distributed as dist

from .interrupts import Interrupted

EXIT_BAD_INPUT = 2
"""Exit code of every rank after a `BadInput`."""

_EXIT_BARRIER_SECONDS = 20.0


class BadInput(Exception):
    """What was given cannot be used. The message is one line: it names the thing and the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def exit_on_bad_input(run: Callable[[], None]) -> None:
    """Call `run` and leave the process; a `BadInput` becomes one line on rank 0's stderr and exit code 2 on every rank.

    After an `Interrupted` they leave with its exit code, and rank 0 prints its line.

    The ranks leave together, so that torchrun sees every one of them end with code 2 instead of ending the slower ones
    itself. A rank that is not on its way out cannot hold the others: after 20 seconds they leave without it. Any other
    exception keeps its traceback and ends the process with code 1 at once: torchrun then ends the other ranks.
    """
    try:
        run()
    except BadInput as error:
        if _speaks():
            print(f"error: {error}", file=sys.stderr)
        _leave_together(EXIT_BAD_INPUT)
    except Interrupted as ended:
        if _speaks():
            print(ended, file=sys.stderr)
        _leave_together(ended.exit_code)
    except Exception:
        traceback.print_exc()
        _leave(1)
    # All is saved and closed. Python's own way out would meet gloo's threads, which now and then abort the process.
    _leave_together(0)


def _speaks() -> bool:
    # Once the ranks can agree, all have the same to say. Before, each machine may have something of its own.
    return int(os.environ.get("RANK" if dist.is_initialized() else "LOCAL_RANK", "0")) == 0


def _leave_together(code: int) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        watchdog = threading.Timer(_EXIT_BARRIER_SECONDS, _leave, args=(code,))
        watchdog.daemon = True
        watchdog.start()
        # An error here: another rank is gone already. This one leaves with its own code all the same.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    _leave(code)


def _leave(code: int) -> None:
    # Not sys.exit: tearing down a process group whose peers are gone can wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
