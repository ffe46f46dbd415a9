"""SIGTERM and SIGINT: the step under way is finished and saved on all ranks, then the run ends.

A signal may reach one rank or all, at different moments. So that all stop after the same step, a rank that was asked
says so with the reduction that the loss needs anyway (`training.accumulate_gradient`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run was asked to end early, and has saved. The message is one line.

    Attributes:
        exit_code: for the process, see `Interrupts.exit_code`.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupts:
    """What this rank was asked, and what all ranks agreed on.

    Attributes:
        agreed: whether some rank had been asked to end when the ranks last agreed; the same on all ranks.
    """

    def __init__(self) -> None:
        self.agreed = False
        self._received: signal.Signals | None = None
        self._can_save = False

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT in this process. Only its main thread can; elsewhere nothing happens."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def start_saving(self) -> None:
        """From here on a signal waits for the end of the step. Before, nothing is to be saved: it ends the process."""
        self._can_save = True

    @property
    def asked(self) -> bool:
        """Whether this rank has received a signal."""
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a rank that has saved: 0 under torchrun, 128 + the signal's number without.

        A rank must not fail there: torchrun would start it again. The agent itself, where it was the one to be asked,
        tells that the run is not finished; launch/ranks.py does so with 128 + the signal's number.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return 0
        return 128 + (self._received or signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        insists = number == signal.SIGINT and self._received == signal.SIGINT
        if self._can_save and not insists:
            self._received = self._received or signal.Signals(number)
            return
        if os.environ.get("LOCAL_RANK", "0") == "0":
            # Not print: the signal may have come in the middle of one.
            what = "at once, without saving the step under way" if self._can_save else "before the first step"
            os.write(sys.stderr.fileno(), f"ended by {name} {what}; checkpoints stay as they are\n".encode())
        os._exit(128 + number)
