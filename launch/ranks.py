"""torchrun, with an ending a person can read: `python launch/ranks.py TORCHRUN-ARGUMENTS SCRIPT ARGUMENTS`.

torchrun answers every failure of a rank with its own traceback and exit code 1. Here exit code 2, which the recipes
give to bad input after one line that names it, stays 2 with nothing added; any other failure gets one line. A signal to
this process goes on to the ranks, which save; the code is then 128 + its number: the run is not finished.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

_SECONDS_FOR_OTHER_NODES = 30


def main() -> int:
    """Run the ranks to their end; the exit code is 0, 2 for bad input, 128 + signal if ended by one, or 1."""
    # These repeat each rank's exit code, which the line below tells.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    # An agent whose ranks have ended waits for the agents of the other nodes: 5 minutes, deaf to signals, for one that
    # left on a signal of its own. The ranks of all nodes leave together, so far less is enough. torchrun has no option.
    launcher.LocalElasticAgent = functools.partial(  # type: ignore[misc, assignment]
        LocalElasticAgent, exit_barrier_timeout=_SECONDS_FOR_OTHER_NODES
    )
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode == 2:
            return 2
        how = f"exit code {first.exitcode}" if first.exitcode >= 0 else signal.Signals(-first.exitcode).name
        advice = "started again with --resume auto it goes on from its last checkpoint"
        print(f"rank {rank} ended with {how}, and with it the run; {advice}", file=sys.stderr)
        return 1
    except RendezvousError as failed:
        print(f"the nodes did not meet, or lost each other: {failed}", file=sys.stderr)
        return 1
    except SignalException as ended:
        return 128 + int(ended.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
