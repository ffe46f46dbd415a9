"""torchrun, with an ending a person can read: `python launch/ranks.py TORCHRUN-ARGUMENTS SCRIPT ARGUMENTS`.

torchrun answers every failure of a rank with its own traceback and exit code 1. Here exit code 2, which the recipes
give to bad input after one line that names it, stays 2 with nothing added, and ends the run without restarts; any other
failure gets one line. A signal to this process goes on to the ranks, which save; the code is then 128 + its number: the
run is not finished. Where a rank failed all the same, that is told, and the code is the failure's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

_BAD_INPUT = 2
_SECONDS_FOR_OTHER_NODES = 30
_SECONDS_TO_SAVE = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
_GO_ON = "started again with --resume auto it goes on from its last checkpoint"


class Agent(LocalElasticAgent):
    """torch's agent of a node, which does not start bad input again and lets nothing disturb ranks that save.

    Attributes:
        bad_input: whether a rank of this node ended with exit code 2 by itself, and none by a signal.
    """

    def __init__(self, **options: Any) -> None:
        # An agent whose ranks have ended waits for the agents of the other nodes: 5 minutes, deaf to signals, for one
        # that left on a signal of its own. The ranks of all nodes leave together, so far less is enough.
        super().__init__(exit_barrier_timeout=_SECONDS_FOR_OTHER_NODES, **options)
        self.bad_input = False

    def exit_codes(self) -> dict[int, int]:
        """The exit codes of those of the node's ranks that have ended, by rank; negative: the signal that ended it."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        codes = {self._worker_group.workers[i].global_rank: handler.proc.poll() for i, handler in handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Those that ended by themselves: once one has failed, the agent ends the others, in the call that finds it.
        before = [code for code in self.exit_codes().values() if code]
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            own = before or [failure.exitcode for failure in list(result.failures.values())[:1]]
            self.bad_input = _BAD_INPUT in own and all(code > 0 for code in own)
            if self.bad_input:
                self._remaining_restarts = 0
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        # Ranks that are to be started again have been dealt with: a signal meanwhile is not answered with their codes.
        self._pcontext = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *arguments: Any, **options: Any) -> None:
        if isinstance(sys.exc_info()[1], SignalException):
            # Another one would end the wait. The ranks save on SIGTERM and SIGINT alone, and get the time they have
            # here: releases of torch that do not know the variable would give them 30 seconds.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)
            death_sig = death_sig if death_sig == signal.SIGINT else signal.SIGTERM
            if self._pcontext:
                self._pcontext.close(death_sig, _SECONDS_TO_SAVE)
        super()._shutdown(death_sig, *arguments, **options)


def main() -> int:
    """Run the ranks to their end; the exit code is 0, 2 for bad input, 128 + signal if ended by one, or 1."""
    # These repeat each rank's exit code, which the line below tells.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    agents: list[Agent] = []

    def make_agent(**options: Any) -> Agent:
        agents.append(Agent(**options))
        return agents[-1]

    launcher.LocalElasticAgent = make_agent  # type: ignore[misc, assignment]  # torchrun has no option for it
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as failed:
        if agents[-1].bad_input:
            return _BAD_INPUT
        rank, first = failed.get_first_failure()
        print(f"rank {rank} ended with {_describe(first.exitcode)}, and with it the run; {_GO_ON}", file=sys.stderr)
        return 1
    except RendezvousError as failed:
        print(f"the nodes did not meet, or lost each other: {failed}", file=sys.stderr)
        return 1
    except SignalException as ended:
        return _code_after(signal.Signals(ended.sigval), agents[-1].exit_codes())
    return 0


def _code_after(number: signal.Signals, codes: dict[int, int]) -> int:
    """The exit code after a signal to this process, from those of its ranks.

    A rank that has saved ends with 0. One ends with 128 + the signal, or by the signal itself where Python is still
    starting, before it has trained a step: then no rank has, and others fail for want of it.
    """
    asked = 128 + number
    ends = {128 - code if code < 0 else code for code in codes.values()}
    failed = {rank: code for rank, code in codes.items() if code}
    if _BAD_INPUT in ends and all(code > 0 for code in failed.values()):
        return _BAD_INPUT
    if not failed or ends & {asked, 128 + signal.SIGTERM}:
        return asked
    rank, code = next(iter(failed.items()))
    print(
        f"rank {rank} ended with {_describe(code)} after {number.name}, and with it the run; {_GO_ON}", file=sys.stderr
    )
    return 1


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


if __name__ == "__main__":
    sys.exit(main())
