"""launch/torchrun: what it refuses, its log files, and two nodes of which one is lost and comes back."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.pool import run_ranks
from tests.recipes.inputs import small_run
from tests.recipes.runs import train

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ROOT / "launch" / "torchrun"
RECIPE = ROOT / "recipes" / "llama_finetune.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
for _variable in ("NODES", "ENDPOINT", "RUN_ID", "RANKS", "ADDRESS", "LOGS", "NCCL_SOCKET_IFNAME"):
    ENVIRONMENT.pop(_variable, None)


def _run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TORCHRUN, *arguments], env={**ENVIRONMENT, **variables}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "which script?"),
        (("nothing.py",), "there is no script nothing.py"),
        (("--bad", "1"), "--bad is no option of this script"),
        (("--nodes",), "--nodes needs a value"),
        (("--nodes", "two", RECIPE), "--nodes is 'two'; it must be a number, or a range such as 2:4"),
        (("--nodes", "3:2", RECIPE), "the smaller number comes first"),
        (("--nodes", "2", RECIPE), "more than one node needs --endpoint HOST[:PORT]"),
        (("--nodes", "2", "--endpoint", "localhost", RECIPE), "more than one node needs --id NAME"),
        (
            ("--join", "1", "--nodes", "2", "--endpoint", "no.invalid", "--id", "a", RECIPE),
            "--endpoint no.invalid has no address",
        ),
        (
            ("--nodes", "2", "--endpoint", "localhost:99999", "--id", "a", RECIPE),
            "--endpoint's port is '99999'; it must be at most 65535",
        ),
        (("--nodes", "2", "--endpoint", "localhost:", "--id", "a", RECIPE), "--endpoint's port is ''"),
        (("--nodes", "2", "--endpoint", ":29400", "--id", "a", RECIPE), "--endpoint is ':29400'; it must be HOST"),
        (("--timeout", "9" * 20, RECIPE), "it must be at most 100000000"),
        (("--restarts", "\u0663", RECIPE), "it must be a whole number of at least 0"),
        (("--ranks", "0", RECIPE), "--ranks is '0'"),
        (("--address", "192.0.2.77", RECIPE), "--address 192.0.2.77 is not one of this node's: 127.0.0.1 (lo)"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments: tuple[str | Path, ...], told: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interface_that_is_not_there_is_named() -> None:
    done = _run(RECIPE, NCCL_SOCKET_IFNAME="=absent0")
    assert done.returncode == 2
    assert "NCCL_SOCKET_IFNAME==absent0, but this node's interfaces are lo" in done.stderr


def test_help_needs_no_python() -> None:
    done = _run("--help", PYTHON="/no/python")
    assert done.returncode == 0
    assert "--endpoint HOST[:PORT]" in done.stdout
    assert "/no/python" in _run(RECIPE, PYTHON="/no/python").stderr


def test_each_rank_has_a_file_per_stream(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print('out', os.environ['RANK'], os.environ['COLLECTIVE_TIMEOUT_SECONDS'], *sys.argv[1:])\n"
        "print('err', os.environ['RANK'], file=sys.stderr)\n"
    )
    done = _run("--ranks", "2", "--timeout", "77", "--logs", tmp_path / "logs", script, "--an", "option")
    assert done.returncode == 0, done.stderr
    assert "out 0 77 --an option" in done.stdout
    assert "out 1" not in done.stdout
    [attempt] = (tmp_path / "logs" / socket.gethostname()).glob("*/attempt_0")
    for rank in range(2):
        assert (attempt / str(rank) / "stdout.log").read_text() == f"out {rank} 77 --an option\n"
        assert (attempt / str(rank) / "stderr.log").read_text() == f"err {rank}\n"


@dataclass
class Node:
    """A place to run an agent in: a network namespace with an address of its own, or just this machine."""

    address: str
    namespace: str = ""
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        with log.open("ab") as file:
            agent = subprocess.Popen([*inside, *command], env=ENVIRONMENT, stdout=file, stderr=file)
        self.agents.append(agent)
        return agent

    def lose_power(self) -> None:
        """Kill the agent and its ranks, as the loss of a machine would."""
        for agent in self.agents:
            if agent.poll() is None:
                ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
                for pid in (agent.pid, *map(int, ranks)):
                    os.kill(pid, signal.SIGKILL)
                agent.wait()


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes: network namespaces joined by a cable where this machine allows them, else two places on it."""
    names = [f"fod{os.getpid()}{end}" for end in "ab"]
    made: list[Node] = []
    try:
        if shutil.which("ip") and all(_ip("netns", "add", name) for name in names):
            cable = ("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1])
            works = _ip(*cable, "netns", names[1])
            for number, name in enumerate(names, 1):
                inside = ("-n", name)
                works &= _ip(*inside, "addr", "add", f"192.0.2.{number}/24", "dev", name)
                works &= _ip(*inside, "link", "set", name, "up") and _ip(*inside, "link", "set", "lo", "up")
                made.append(Node(f"192.0.2.{number}", name))
            if not works:
                made.clear()
        made = made or [Node("127.0.0.1"), Node("127.0.0.1")]
        yield made
    finally:
        for node in made:
            node.lose_power()
        for name in names:
            _ip("netns", "del", name)


def _wait_until(happened: Path, text: str, agents: list[subprocess.Popen[bytes]], log: Path) -> None:
    while not (happened.exists() and text in happened.read_text()):
        assert all(agent.poll() is None for agent in agents), log.read_text()
        time.sleep(0.05)


def _weights(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(checkpoint, scratch)
    weights: dict[str, torch.Tensor] = torch.load(scratch, weights_only=False)["model"]
    return weights


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_node_that_is_lost_comes_back_and_the_run_ends_with_the_same_weights(
    nodes: list[Node], tmp_path: Path
) -> None:
    values = {**small_run(tmp_path), "steps": 12, "save_every": 3, "evaluate_every": 0, "sample_tokens": 0}
    options = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    logs = ["--logs", str(tmp_path / "logs")]
    whole, lost, log = tmp_path / "whole", tmp_path / "lost", tmp_path / "agents.log"
    assert run_ranks(2, train, {**values, "output": str(whole)}) == [None, None]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"{nodes[0].address}:{free.getsockname()[1]}"
    meeting = ["--nodes", "2", "--endpoint", endpoint, "--id", "lost-node", "--ranks", "1", *logs]
    script = [str(RECIPE), *options, "--output", str(lost)]
    commands = [[str(TORCHRUN), *meeting, "--address", node.address, *script] for node in nodes]
    first = nodes[0].start(commands[0], log)
    # The node of the endpoint hosts the rendezvous; on one machine the one that comes first would.
    _wait_until(log, "torchrun: 1 ranks", [first], log)
    time.sleep(0 if nodes[0].namespace else 10)
    second = nodes[1].start(commands[1], log)
    _wait_until(lost / "metrics.jsonl", '"step": 5', [first, second], log)
    nodes[1].lose_power()
    assert first.poll() is None
    rejoined = nodes[1].start(commands[1], log)
    assert [first.wait(300), rejoined.wait(300)] == [0, 0], log.read_text()

    told = log.read_text()
    assert "from step 0 to 12" in told
    assert "from step 3 to 12" in told
    expected = _weights(whole / "checkpoints" / "step-00000012", tmp_path / "whole.pt")
    found = _weights(lost / "checkpoints" / "step-00000012", tmp_path / "lost.pt")
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name
