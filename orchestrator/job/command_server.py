"""The cluster's command server: `rayzero` commands for clients that only reach its dashboard.

Without the server such a command is a Ray job, which takes seconds to start. The server is one
actor on the head node, started by the cluster's first job, or by the first command that had to be a
Ray job. Its port and secret are in a file among Ray's logs, which the dashboard serves to clients
with the cluster's token. The secret is never sent with a command: the request proves that it knows
the secret by an HMAC over the command and a nonce, which is valid once.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from io import TextIOBase
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import ray
from ray.exceptions import RayError

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cluster import ray_api
from rayzero.orchestrator.cluster.addresses import CLIENT_ADDRESS_VARIABLE
from rayzero.orchestrator.cluster.command_client import (
    ARGUMENTS_HEADER,
    SERVED_COMMANDS,
    SERVER_FILE,
    prove,
)
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.errors import internal_error
from rayzero.workers.lifetimes import NAMESPACE

if TYPE_CHECKING:
    from aiohttp import web

PORT_VARIABLE = "RAYZERO_COMMAND_PORT"
"""Environment variable of the head node with the server's port, for a port-forward. Without the
variable any free port is used."""
_ACTOR_NAME = "command_server"
_MAX_NONCES = 256
_FOLLOW_LIMIT_S = 7 * 86400.0  # limit for a command: `logs -f` and `top` last as long as the job

RunCommand = Callable[[Sequence[str]], object]


def ensure_command_server() -> None:
    """Starts the connected cluster's command server, if the cluster has a dashboard and no server
    yet. Does not wait for the start. Raises RayError."""
    if not (dashboard := ray_api.dashboard_address()):
        return
    is_local = dashboard.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    actor = ray.remote(CommandServerActor).options(
        name=_ACTOR_NAME,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        resources=ray_api.ON_HEAD,
    )
    actor.remote("127.0.0.1" if is_local else "0.0.0.0")  # as the dashboard listens


def start_command_server() -> None:
    """Connects to the cluster, and calls `ensure_command_server`. Ignores errors."""
    with suppress(RayzeroError, RayError), closing(connect(None)):
        ensure_command_server()


class CommandServerActor:
    """The command server's process, which lives as long as the cluster."""

    def __init__(self, host: str) -> None:
        # By name, because the command line imports this module.
        app = import_module("rayzero.orchestrator.cli.app").app
        for name in ("RAY_ADDRESS", CLIENT_ADDRESS_VARIABLE):  # commands use this connection
            os.environ.pop(name, None)
        port = int(os.environ.get(PORT_VARIABLE, "0"))
        server = CommandServer(
            host, port, lambda arguments: app(list(arguments), prog_name="rayzero")
        )
        server.publish(Path(ray_api.log_folder()))


class CommandServer:
    """An HTTP server that runs commands, until `stop` or the end of the process. `HttpServer`
    answers requests in its own thread; each command runs in a new thread `rayzero-command`.

    Args:
        run_command: runs `rayzero ARGUMENTS` in the calling thread, printing to sys.stdout and
            sys.stderr; raises SystemExit.
    """

    def __init__(self, host: str, port: int, run_command: RunCommand) -> None:
        from rayzero.orchestrator.metrics.http_server import HttpServer  # imports aiohttp: slow

        self.secret = secrets.token_hex(32)
        self._run_command = run_command
        self._nonces: dict[str, None] = {}  # the oldest first
        self._outputs = ThreadOutput(sys.stdout), ThreadOutput(sys.stderr)
        sys.stdout, sys.stderr = self._outputs
        self._server = HttpServer(host, port, self._answer, _FOLLOW_LIMIT_S)
        self.port = self._server.port

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

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        match request.method, request.path:
            case "GET", "/nonce":
                nonce = secrets.token_hex(16)
                self._nonces[nonce] = None
                if len(self._nonces) > _MAX_NONCES:
                    del self._nonces[next(iter(self._nonces))]
                return web.Response(text=nonce)
            case "POST", "/command":
                text = request.headers.get(ARGUMENTS_HEADER, "")
                if self._is_proven(request.headers.get("Authorization", ""), text):
                    return await self._stream(request, json.loads(text))
                refusal = "not proven: the command server's file has its secret\n"
                return web.Response(status=403, text=refusal)
        return web.Response(status=404, text="available: GET /nonce, POST /command\n")

    def _is_proven(self, authorization: str, text: str) -> bool:
        nonce, _, proof = authorization.partition(":")
        if nonce not in self._nonces:
            return False
        del self._nonces[nonce]
        expected = prove(self.secret, nonce, text)
        return hmac.compare_digest(proof.encode(errors="surrogateescape"), expected.encode())

    async def _stream(self, request: web.BaseRequest, arguments: list[str]) -> web.StreamResponse:
        """Runs a command. The response streams its output, and finally its exit code."""
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.force_close()
        await response.prepare(request)  # the client knows that the command was accepted
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()

        def send(kind: str, value: str | int) -> None:
            """Sends a line of output, or the exit code. Raises OSError if the client has gone;
            CancelledError if the server stops."""
            line = json.dumps({kind: value}).encode() + b"\n"
            asyncio.run_coroutine_threadsafe(response.write(line), loop).result()

        def run() -> None:
            out, err = self._outputs
            with suppress(OSError, CancelledError, RuntimeError):
                with (
                    out.of_this_thread(lambda line: send("out", line)),
                    err.of_this_thread(lambda line: send("err", line)),
                ):
                    code = self._run(arguments)
                send("code", code)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(has_ended.set)

        threading.Thread(target=run, name="rayzero-command", daemon=True).start()
        await has_ended.wait()
        return response

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
        except (OSError, CancelledError):
            raise
        except Exception as error:  # noqa: BLE001  # the client must see every error
            known = error if isinstance(error, RayzeroError) else internal_error(error)
            print(f"error: {known}", file=sys.stderr)
        return 1


class ThreadOutput(TextIOBase):
    """Replaces a standard stream. Lines that a thread writes inside `of_this_thread` go to its
    function `take_line`; everything else goes to the replaced stream `other`."""

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
