"""The command line ``flashoptim-dist``: inspect, verify, convert, export-hf, import-hf.

One process, or several under torchrun, which then share the work out. Exit code 0: done; 2: something that was given
can't be used, or a checkpoint is not sound, said in one line on stderr; 130: interrupted; 141: whoever read the output
had enough of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from flashoptim_dist.checkpoint.errors import CheckpointError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: without the program's name; default those of the process.
    """
    try:
        from flashoptim_dist.convert import commands
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] not in ("tyro", "rich"):
            raise
        way_out = "pip install 'flashoptim-dist[cli]'"
        print(f"error: the command line needs the package {error.name}: {way_out}", file=sys.stderr)
        return EXIT_BAD_INPUT
    command = commands.parse(None if arguments is None else list(arguments))
    with _ranks():
        try:
            code: int = command.run()
            if sys.stdout is not None:
                sys.stdout.flush()  # what goes wrong with it is told here
            return code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes into it at the end
            return EXIT_BROKEN_PIPE
        except (CheckpointError, OSError, ValueError) as error:
            commands.complain(str(error))
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            commands.complain("interrupted; nothing was left behind")
            return EXIT_INTERRUPTED


@contextlib.contextmanager
def _ranks() -> Iterator[None]:
    """Join the ranks that torchrun started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # another rank is gone: this one leaves all the same
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
