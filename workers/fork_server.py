"""A server that forks Ray's workers from a process that has imported their modules, so that each
worker starts in a fraction of the time.

The server imports the modules that its caller names, starts no threads of its own, runs no user
code, and forks once for each request. The client is this file, run as a script, in place of the
script with which Ray prepares a worker's environment (`setup_worker_path`). The client imports
nothing slow, and sends what Ray gave it: arguments, environment, working directory, limits,
standard files. The forked process continues as Ray's worker. Ray's own script still starts a worker
that has another interpreter, a command before it, or variables that are read when the server's
modules are imported.

Used for a cluster on one machine that ends with the process that started it: the server ends when
its standard input is closed, by that process or by its death.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

ADDRESS_VARIABLE = "RAYZERO_FORK_SERVER"
"""Environment variable with the address of the server's socket, in the processes of a cluster that
has a server: a name in Linux's abstract namespace, without its leading NUL."""
REQUEST_TIMEOUT_S = 5.0  # for a client to send its request
_HEADER = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


SETUP_SCRIPT = os.path.abspath(__file__)
"""The script that Ray starts in a cluster whose processes have `ADDRESS_VARIABLE`."""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def serve(listening_file: int, modules: Sequence[str]) -> None:
    """Serves until the standard input is closed. In a forked process, returns when the Ray worker
    that the process has become has ended.

    Args:
        modules: modules to import for workers. Not Ray, which reads a worker's environment on
            import.
    """
    gc.disable()
    listener = socket.socket(fileno=listening_file)
    import numpy as np

    for module in modules:
        import_module(module)

    gc.freeze()  # a collection in a child would copy all pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    is_child = False
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError):
            connection.settimeout(REQUEST_TIMEOUT_S)
            request, files = _receive(connection)
            try:
                if is_child := os.fork() == 0:
                    break
                connection.sendall(b"\0")
            finally:
                if not is_child:
                    for file in files:
                        os.close(file)
    listener.close()
    np.random.seed()  # otherwise every worker would draw the same numbers
    _continue_as(request, files)


def _continue_as(request: dict[str, Any], files: list[int]) -> None:
    """Becomes what the client would have become by executing Python with the same arguments."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.setpgid(0, 0)  # as Ray starts its workers
    resource.setrlimit(resource.RLIMIT_NOFILE, request["nofile"])
    with suppress(OSError):  # only root may set a lower nice value than the server's
        os.setpriority(os.PRIO_PROCESS, 0, request["priority"])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file_:
        file_.write(request["oom_score_adj"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["arguments"]
    gc.enable()
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receives a request with its three files. Raises OSError or ValueError if none is complete in
    time, ValueError if another user sent it: an abstract socket has no permissions."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.geteuid():
        raise ValueError("another user")
    header, files, _, _ = socket.recv_fds(connection, _HEADER.size, 3)
    try:
        (missing,) = _HEADER.unpack(header)
        content = bytearray()
        while len(content) < missing:
            if not (part := connection.recv(missing - len(content))):
                raise ConnectionError("incomplete request")
            content += part
        return json.loads(content), files
    except (OSError, ValueError, struct.error) as error:
        for file in files:
            os.close(file)
        raise ValueError(str(error)) from None


def _request_fork(address: str, arguments: list[str]) -> None:
    """Asks the server to fork a worker with these arguments. Raises OSError if it does not fork."""
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read()
    request = {
        "arguments": arguments,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": oom_score_adj,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + address)  # no time limit: the server may still be importing
        socket.send_fds(connection, [_HEADER.pack(len(content))], [0, 1, 2])
        connection.sendall(content)
        if not connection.recv(1):
            raise ConnectionError("the server has refused or ended")


def _forked_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a worker to fork, and sets its variables in this process's
    environment. Raises ValueError if the worker cannot be forked."""
    words = [word for word in arguments if not word.startswith((_CONTEXT, _LANGUAGE))]
    if not words[0].endswith(".py"):
        raise ValueError("this is not one of Ray's workers, or has options for Python")
    for word in arguments:
        if word.startswith(_CONTEXT):
            context = json.loads(word.removeprefix(_CONTEXT))
            variables = context.pop("env_vars", {})
            executable = context.pop("py_executable", sys.executable)
            if executable != sys.executable or any(context.values()):
                raise ValueError("the worker's runtime environment has more than variables")
            for name, value in variables.items():
                if name.startswith(("PYTHON", "LD_")) or "$" in value:
                    raise ValueError(f"the worker's environment sets {name}")
            os.environ.update(variables)
    return words


def main(arguments: list[str]) -> None:
    """Runs as the program that Ray starts, with the worker's script and its arguments."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    try:
        _request_fork(address, _forked_arguments(arguments))
        return
    except ValueError:
        pass
    except OSError as error:
        text = f"the fork server is not used: {error}; this worker imports what it needs"
        print(text, file=sys.stderr)
    if any(word.startswith(_CONTEXT) for word in arguments):
        script = next(word for word in arguments if not word.startswith("-"))
        arguments = [os.path.join(os.path.dirname(script), "setup_worker.py"), *arguments]
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
