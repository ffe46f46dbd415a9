"""The far side of `tests/pool.py`: a parent process that imports torch once and forks the ranks, and the ranks' loop.

Started as a script. Forking from a process that has imported torch, and used it for nothing yet, makes a new rank cost
milliseconds and little memory of its own, so a pool can be thrown away after every failure.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the script's folder: a `tests/kernels` there would look like the top-level package `kernels`

import datetime
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

PRELOAD = (
    "torch",
    "torch._dynamo",  # torch.distributed.fsdp imports it at first use, which takes each rank a second
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
)
SEED = 0
GROUP_TIMEOUT = datetime.timedelta(hours=1)  # the caller's own timeout ends a hanging call long before


def register_namespace(name: str, directory: str) -> None:
    """Make `directory` importable as package `name` without putting its parent, the repository root, on sys.path."""
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [directory]
        sys.modules[name] = package


def find_function(module_name: str, file: str, qualified_name: str) -> Any:
    """The function `qualified_name` of the module in `file`, imported under the name it has in the calling process."""
    module = sys.modules.get(module_name)
    if module is None:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise  # the module is there and lacks something that it imports itself
        if module is None or not _same_file(module, file):
            spec = importlib.util.spec_from_file_location(module_name, file)
            if spec is None or spec.loader is None:
                raise ImportError(f"{file} is not a Python source file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[module_name]
                raise
    found: Any = module
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found


def _same_file(module: types.ModuleType, file: str) -> bool:
    own = getattr(module, "__file__", None)
    return own is not None and os.path.realpath(own) == os.path.realpath(file)


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # exceptions with a constructor of their own often don't survive pickling: the text says it all
        pickled = b""
    return pickle.dumps(("error", pickled, text))


def _answer(request: bytes) -> bytes:
    import torch

    try:
        module_name, file, qualified_name, arguments = pickle.loads(request)
        function = find_function(module_name, file, qualified_name)
        args, kwargs = pickle.loads(arguments)  # after the import: the arguments may be of classes of the test module
        random.seed(SEED)
        torch.manual_seed(SEED)
        torch.set_default_dtype(torch.float32)
        result = function(*args, **kwargs)
        return pickle.dumps(("result", pickle.dumps(result)))
    except BaseException as error:  # pytest's own outcomes (skip, fail) derive from BaseException
        return _failure(error)


def serve(connection: Connection, rank: int, world_size: int, port: int) -> NoReturn:
    """Loop of one rank: initialize torch.distributed, then answer calls until the connection is closed."""
    import torch
    import torch.distributed as dist

    parent = os.getppid()
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the caller asks a hanging rank where it is
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size=None, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    try:
        while True:
            connection.send_bytes(_answer(connection.recv_bytes()))
            gc.collect(1)
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # without the group's goodbye, which would wait for ranks that are gone


def main(control_descriptor: int, tests_directory: str) -> NoReturn:
    """Loop of the parent of all ranks: `fork` a rank (its end of the connection comes along) or `wait` for one."""
    control = socket.socket(fileno=control_descriptor)
    register_namespace("tests", tests_directory)
    for name in PRELOAD:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("tests.interpreter").patch_once_per_launch()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            os._exit(0)
        request = pickle.loads(message)
        if request["operation"] == "wait":
            control.sendall(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])))
            continue
        for name in request["preload"]:
            importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            control.close()
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            try:
                serve(Connection(descriptors[0]), request["rank"], request["world_size"], request["port"])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(descriptors[0])
        control.sendall(pickle.dumps(pid))


if __name__ == "__main__":
    main(int(sys.argv[1]), str(Path(__file__).resolve().parent))
