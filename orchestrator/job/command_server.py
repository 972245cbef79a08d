"""The cluster's command server: `rayzero` commands for clients that only reach its dashboard.

Without it such a command is a Ray job, which takes seconds to start. It is one actor on the head
node, started by the cluster's first job, or by the first command that had to be a Ray job. Its port
and secret are in a file among Ray's logs, which the dashboard serves to clients with the cluster's
token. The secret itself is never sent: a request proves it by an HMAC over a nonce, which is valid
once, and the command.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from io import TextIOBase
from pathlib import Path
from socket import AddressFamily
from typing import Any, TextIO

import ray
from ray.exceptions import RayError

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cluster import ray_api
from rayzero.orchestrator.cluster.command_client import (
    ARGUMENTS_HEADER,
    CLIENT_ADDRESS_VARIABLE,
    SERVED_COMMANDS,
    SERVER_FILE,
    prove,
)
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.errors import internal_error
from rayzero.orchestrator.metrics.http_server import BoundedHttpServer

PORT_VARIABLE = "RAYZERO_COMMAND_PORT"
"""In the head's environment: the server's port, for a port-forward. Default: any free one."""
_ACTOR_NAME = "command_server"
_MAX_NONCES = 256
_FOLLOW_LIMIT_S = 7 * 86400.0  # of one command: `logs -f` and `top` last as long as their job

Start = Callable[[str, list[tuple[str, str]]], Callable[[bytes], object]]
RunCommand = Callable[[Sequence[str]], object]


def ensure_command_server() -> None:
    """Starts the connected cluster's command server, if that has a dashboard and none yet. Does not
    wait for it. Raises RayError."""
    if not (dashboard := ray_api.dashboard_address()):
        return
    is_local = dashboard.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    actor = ray.remote(CommandServerActor).options(
        name=_ACTOR_NAME,
        namespace=ray_api.NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=ray_api.on_head_node(),
    )
    actor.remote("127.0.0.1" if is_local else "0.0.0.0")  # as the dashboard listens


def start_command_server() -> None:
    """`ensure_command_server` in a process that is not connected; errors are ignored."""
    with suppress(RayzeroError, RayError), closing(connect(None)):
        ensure_command_server()


class CommandServerActor:
    """The command server's process, which lives as long as the cluster."""

    def __init__(self, host: str) -> None:
        app = import_module("rayzero.orchestrator.cli.app").app  # by name: it imports this module
        for name in ("RAY_ADDRESS", CLIENT_ADDRESS_VARIABLE):  # commands use this connection
            os.environ.pop(name, None)
        port = int(os.environ.get(PORT_VARIABLE, "0"))
        server = CommandServer(
            host, port, lambda arguments: app(list(arguments), prog_name="rayzero")
        )
        server.publish(Path(ray_api.log_folder()))


class CommandServer:
    """Serves in threads of its own until the process ends, or `stop`.

    Args:
        run_command: runs `rayzero ARGUMENTS` in the calling thread, printing to sys.stdout and
            sys.stderr; raises SystemExit.
    """

    def __init__(self, host: str, port: int, run_command: RunCommand) -> None:
        self.secret = secrets.token_hex(32)
        self._run_command = run_command
        self._nonces: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._outputs = ThreadOutput(sys.stdout), ThreadOutput(sys.stderr)
        sys.stdout, sys.stderr = self._outputs
        self._server = BoundedHttpServer(AddressFamily.AF_INET, (host, port), _FOLLOW_LIMIT_S)
        self.port = int(self._server.server_address[1])
        self._server.set_app(self._handle)
        self._server.start()

    def stop(self, timeout_s: float) -> None:
        self._server.stop(timeout_s)
        sys.stdout, sys.stderr = (output.other for output in self._outputs)

    def publish(self, folder: Path) -> None:
        """Writes the file by which clients find the command server; only this user may read it."""
        path = folder / SERVER_FILE
        temporary = path.with_suffix(f".{os.getpid()}")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"port": self.port, "secret": self.secret}, file)
        temporary.replace(path)

    def _handle(self, environ: dict[str, Any], start: Start) -> list[bytes]:
        match environ["REQUEST_METHOD"], environ["PATH_INFO"]:
            case "GET", "/nonce":
                start("200 OK", [("Content-Type", "text/plain")])
                return [self._new_nonce().encode()]
            case "POST", "/command":
                return self._command(environ, start)
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"available: GET /nonce, POST /command\n"]

    def _new_nonce(self) -> str:
        nonce = secrets.token_hex(16)
        with self._lock:
            self._nonces[nonce] = None
            if len(self._nonces) > _MAX_NONCES:
                self._nonces.popitem(last=False)
        return nonce

    def _is_proven(self, environ: dict[str, Any], text: str) -> bool:
        nonce, _, proof = environ.get("HTTP_AUTHORIZATION", "").partition(":")
        with self._lock:
            if self._nonces.pop(nonce, 0) == 0:
                return False
        return hmac.compare_digest(proof.encode(), prove(self.secret, nonce, text).encode())

    def _command(self, environ: dict[str, Any], start: Start) -> list[bytes]:
        text = environ.get(f"HTTP_{ARGUMENTS_HEADER.upper().replace('-', '_')}", "")
        if not self._is_proven(environ, text):
            start("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"not proven: the command server's file has its secret\n"]
        arguments = json.loads(text)
        write = start("200 OK", [("Content-Type", "application/x-ndjson")])
        write(b"")  # the client knows that the command was accepted

        def send(kind: str, value: str | int) -> None:
            write(json.dumps({kind: value}).encode() + b"\n")

        out, err = self._outputs
        with (
            out.of_this_thread(lambda line: send("out", line)),
            err.of_this_thread(lambda line: send("err", line)),
        ):
            code = self._run(arguments)
        send("code", code)
        return []

    def _run(self, arguments: list[str]) -> int:
        try:
            if arguments[0] in SERVED_COMMANDS:
                self._run_command(arguments)
                return 0
            print(
                f"error: {arguments[0]} is not a command that the command server runs",
                file=sys.stderr,
            )
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        except OSError:
            raise  # the client has gone
        except Exception as error:  # noqa: BLE001  # the client must see every error
            known = error if isinstance(error, RayzeroError) else internal_error(error)
            print(f"error: {known}", file=sys.stderr)
        return 1


class ThreadOutput(TextIOBase):
    """A standard stream whose lines go to a function of the thread that writes, if it has one."""

    def __init__(self, other: TextIO) -> None:
        self.other = other
        self._local = threading.local()

    @contextmanager
    def of_this_thread(self, take_line: Callable[[str], object]) -> Iterator[None]:
        self._local.take_line, self._local.rest = take_line, ""
        try:
            yield
            if self._local.rest:
                take_line(self._local.rest)
        finally:
            self._local.take_line = None

    def write(self, text: str) -> int:
        if (take_line := getattr(self._local, "take_line", None)) is None:
            return self.other.write(text)
        *lines, self._local.rest = (self._local.rest + text).split("\n")
        for line in lines:
            take_line(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        with suppress(ValueError):  # closed at exit
            self.other.flush()
