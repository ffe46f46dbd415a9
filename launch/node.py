"""What launch/torchrun asks about a node before any rank starts: is what was given possible here, and what follows.

Prints three lines: the number of ranks, whether this node is to host the rendezvous (1 or 0), and the network interface
of --address ("-" without one). Exit code 2 after one line that names what is wrong and the way out.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import struct
import sys
import time

_PORT = 29400


class Wrong(Exception):
    """Something given cannot be. The message is one line."""


def main() -> int:
    """Check the options of launch/torchrun on this node."""
    parser = argparse.ArgumentParser()
    for name in ("nodes", "endpoint", "id", "ranks", "restarts", "timeout", "join", "grace", "address"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    try:
        for name, least in (("restarts", 0), ("timeout", 1), ("join", 1), ("grace", 0)):
            _number(name, getattr(options, name), least)
        endpoint = _meeting(options.nodes, options.endpoint, options.id)
        interface = interface_of(options.address) if options.address else ""
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            _check_interface(variable, os.environ.get(variable, ""))
        ranks = _ranks(options.ranks)  # takes seconds, as it imports torch
        is_host = endpoint is None or _hosts(*endpoint, int(options.join))
    except Wrong as wrong:
        print(f"torchrun: {socket.gethostname()}: {wrong}", file=sys.stderr)
        return 2
    print(ranks, int(is_host), interface or "-", sep="\n")
    return 0


def _number(name: str, text: str, least: int, most: int = 10**8) -> int:
    if not (text.isascii() and text.isdecimal() and least <= int(text)):
        raise Wrong(f"--{name} is {text!r}; it must be a whole number of at least {least}")
    if int(text) > most:  # as seconds by default three years, which every timer takes
        raise Wrong(f"--{name} is {text!r}; it must be at most {most}")
    return int(text)


def _ranks(text: str) -> int:
    """Processes of this node: as asked, or one per GPU, or 2 without GPUs."""
    try:
        import torch

        import flashoptim_dist  # noqa: F401
    except ImportError as error:
        raise Wrong(
            f"{sys.executable} cannot import what training needs ({error}); install the project there (pip install"
            " -e '.[recipes]'), or name another Python by PYTHON. ./launch/doctor tells more"
        ) from error
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return gpus or 2
    ranks = _number("ranks", text, 1)
    if gpus and ranks > gpus:
        raise Wrong(f"--ranks {ranks} on a node that shows {gpus} GPUs; give at most as many")
    return ranks


def _meeting(nodes: str, endpoint: str, run: str) -> tuple[str, int] | None:
    """Host and port where the nodes meet; None for a single node. Raises Wrong for what cannot be."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        raise Wrong(f"--nodes is {nodes!r}; it must be a number, or a range such as 2:4")
    low, high = (int(part) for part in (nodes.split(":") * 2)[:2])
    if low > high:
        raise Wrong(f"--nodes {nodes}: the smaller number comes first")
    if nodes == "1":
        return None
    if not endpoint:
        raise Wrong("more than one node needs --endpoint HOST[:PORT], the node where all meet, the same on all")
    if not run:
        raise Wrong("more than one node needs --id NAME, the same on all, and of this run alone")
    host, colon, port_text = endpoint.partition(":")
    if not host:
        raise Wrong(f"--endpoint is {endpoint!r}; it must be HOST or HOST:PORT, an address that all nodes know")
    return host, _number("endpoint's port", port_text, 1, 2**16 - 1) if colon else _PORT


def _hosts(host: str, port: int, seconds: int) -> bool:
    """Whether this node is to host the rendezvous at the endpoint."""
    return any(_is_free_here(family, address) for family, address in _addresses(host, port, seconds))


def _addresses(host: str, port: int, seconds: int) -> list[tuple[int, object]]:
    """Family and address of each address of the host. A pod has a name only once it is there: that is waited for."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [(family, address) for family, _, _, _, address in found]
        except OSError as error:
            if time.monotonic() + 2 > deadline:
                known = "give a name or address that all nodes know"
                raise Wrong(f"--endpoint {host} has no address here after {seconds} s ({error}); {known}") from error
        time.sleep(2)


def _is_free_here(family: int, address: object) -> bool:
    """Whether the address is one of this node's and nothing listens there yet.

    torch compares names, and so misses addresses of further interfaces. Of two agents on one node one is the host.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)  # type: ignore[arg-type]
        except OSError:
            return False
        return True


def interface_of(address: str) -> str:
    """Name of the network interface that has the IPv4 address. Raises Wrong where none has it. Linux."""
    import fcntl

    seen = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), 0x8915, request)  # SIOCGIFADDR of netdevice(7)
            except OSError:
                continue  # no IPv4 address
            found = socket.inet_ntoa(answer[20:24])
            if found == address:
                return name
            seen.append(f"{found} ({name})")
    raise Wrong(f"--address {address} is not one of this node's: {', '.join(seen)}")


def _check_interface(variable: str, value: str) -> None:
    """NCCL takes a list of prefixes, "=" before exact names and "^" before excluded ones; gloo takes exact names."""
    names = [name for _, name in socket.if_nameindex()]
    if not value or value.startswith("^"):
        return
    for wanted in value.lstrip("=").split(","):
        exact = value.startswith("=") or variable.startswith("GLOO")
        if not any(name == wanted if exact else name.startswith(wanted) for name in names):
            raise Wrong(f"{variable}={value}, but this node's interfaces are {', '.join(names)}; unset or mend it")


if __name__ == "__main__":
    sys.exit(main())
