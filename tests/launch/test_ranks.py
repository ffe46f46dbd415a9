"""launch/ranks.py: how a failed rank is told and what code it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANKS = Path(__file__).resolve().parents[2] / "launch" / "ranks.py"


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PATH": ""}
# Rank 1, once both have begun: the other is ended at once then, also before it has left its line.
_FAILS_FIRST = (
    "rank == 1 or time.sleep(600)\n"
    "while open(os.path.join(os.path.dirname(sys.argv[0]), 'starts')).read().count('\\n') % 2: time.sleep(0.02)\n"
)


def _command(tmp_path: Path, body: str, *options: str) -> list[str]:
    """Run `body` on two ranks, each of which leaves a line in `starts` when it begins; it knows `rank`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        f"open({str(tmp_path / 'starts')!r}, 'a').write(f'{{rank}}\\n')\n"
        f"{body}\n"
    )
    return [sys.executable, str(RANKS), "--standalone", "--nproc-per-node", "2", *options, str(script)]


def _starts(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "starts").read_text().split())


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        pytest.param("pass", 0, "", marks=pytest.mark.full),
        pytest.param("sys.exit(3 if rank == 1 else 0)", 1, "rank 1 ended with exit code 3", marks=pytest.mark.full),
        pytest.param(
            "rank == 1 and os.kill(os.getpid(), signal.SIGKILL)",
            1,
            "rank 1 ended with SIGKILL",
            marks=pytest.mark.full,
        ),
    ],
)
def test_ending(tmp_path: Path, ending: str, code: int, told: str) -> None:
    command = _command(tmp_path, ending)
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "starts"),
    [
        # The other rank is ended by the agent, with a signal that says nothing about the input.
        (f"{_FAILS_FIRST}sys.exit(2)", 2, 1),
        pytest.param(f"{_FAILS_FIRST}sys.exit(3)", 1, 3, marks=pytest.mark.full),
        pytest.param(f"{_FAILS_FIRST}os.kill(os.getpid(), signal.SIGKILL)", 1, 3, marks=pytest.mark.full),
    ],
)
def test_bad_input_is_the_one_failure_after_which_the_ranks_are_not_started_again(
    tmp_path: Path, ending: str, code: int, starts: int
) -> None:
    command = _command(tmp_path, ending, "--max-restarts", "2")
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert _starts(tmp_path) == sorted(["0", "1"] * starts)
    assert "Traceback" not in done.stderr


def _after_signals(tmp_path: Path, body: str, numbers: list[int], **variables: str) -> tuple[int, str]:
    """Exit code and errors of a launcher that gets signals once both ranks are in the middle of `body`."""
    begun = "open(sys.argv[0] + str(rank), 'w').close(); time.sleep(600)"
    command = _command(tmp_path, f"{body}\n{begun}", "--max-restarts", "2")
    launcher = subprocess.Popen(command, env={**ENVIRONMENT, **variables}, stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / f"script.py{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.02)
    for number in numbers:
        launcher.send_signal(number)
        time.sleep(0.3)
    _, errors = launcher.communicate(timeout=120)
    assert _starts(tmp_path) == ["0", "1"]
    assert "Traceback" not in errors
    return launcher.returncode, errors


def _answer(code: str) -> str:
    return f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), os._exit({code})))"


@pytest.mark.full
@pytest.mark.parametrize(
    ("answer", "numbers", "code", "told"),
    [
        (_answer("0"), [signal.SIGTERM], 143, ""),
        # Before the first step the recipes end with 143 themselves; while Python is starting, by the signal.
        (_answer("143"), [signal.SIGTERM], 143, ""),
        ("", [signal.SIGTERM], 143, ""),
        # The ranks are left alone while they save, whatever the launcher gets meanwhile.
        (_answer("0"), [signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 143, ""),
        (_answer("0"), [signal.SIGHUP], 129, ""),
        (_answer("rank"), [signal.SIGTERM], 1, "rank 1 ended with exit code 1 after SIGTERM"),
        (_answer("2 * rank"), [signal.SIGTERM], 2, ""),
    ],
)
def test_a_signal_is_told_as_such_only_where_all_ranks_ended_well(
    tmp_path: Path, answer: str, numbers: list[int], code: int, told: str
) -> None:
    found, errors = _after_signals(tmp_path, answer, numbers)
    assert found == code, errors
    assert told in errors


@pytest.mark.full
def test_a_rank_that_does_not_end_in_the_time_it_has_is_told(tmp_path: Path) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 1 else lambda *_: os._exit(0))"
    found, errors = _after_signals(tmp_path, ignore, [signal.SIGTERM], TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    assert found == 1, errors
    assert "rank 1 ended with SIGKILL after SIGTERM" in errors


@pytest.mark.parametrize("ranks", ["two", "-1", "1.5"])
def test_quickstart_names_a_number_of_ranks_that_is_none(ranks: str) -> None:
    command = ["bash", RANKS.parent / "quickstart"]
    environment = {**os.environ, "RANKS": ranks}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"quickstart: RANKS={ranks} is no number of processes; give one, such as RANKS=2\n"
