"""Runs a command in a cluster that this machine is not part of: by the cluster's command server
(`rayzero.orchestrator.job.command_server`), found through its dashboard, or as a Ray job."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from rayzero.engine.redact import redact_url
from rayzero.orchestrator.errors import JobFailedError

SERVED_COMMANDS = frozenset({"ls", "status", "stop", "scale", "logs", "top", "chaos"})
"""Commands that need no files of the client."""
SERVER_FILE = "rayzero-command-server.json"
ARGUMENTS_HEADER = "Rayzero-Arguments"
_NO_SERVER = "the cluster has no command server yet, which its first job or command starts"
_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_REPLY_TIMEOUT_S = 5.0  # for the dashboard to answer, and for a connection to the command server
_MAX_REPLY_BYTES = 1 << 20


class ServerUnreachableError(Exception):
    """The command server cannot be reached. The message says why. It is empty if the dashboard
    cannot be reached either, because Ray's client reports that."""


def prove(secret: str, nonce: str, text: str) -> str:
    """Returns a proof that the sender of the command `text` knows the secret. The server accepts a
    nonce, and so the proof, only once."""
    return hmac.new(secret.encode(), f"{nonce}\n{text}".encode(), hashlib.sha256).hexdigest()


def run_remotely(
    dashboard: str,
    arguments: Sequence[str],
    show_out: Callable[[str], object],
    folder: Path | None = None,
) -> int:
    """Runs `rayzero ARGUMENTS` in the cluster with that dashboard, with the files of a folder, and
    shows the output line by line. Returns the exit code. If this process is interrupted, stops a
    Ray job that runs one of `SERVED_COMMANDS`."""
    is_served = arguments[0] in SERVED_COMMANDS
    if is_served:
        code = run_at_command_server(dashboard, arguments, show_out)
        if code is not None:
            return code
    from rayzero.orchestrator.cluster import job_submission  # imports Ray: slow

    cluster = job_submission.RemoteJobClient(dashboard)
    upload = None
    if folder is not None:
        upload = job_submission.select_upload(folder)
        for line in upload.describe():
            print(f"warning: {line}", file=sys.stderr, flush=True)
    job = cluster.submit(arguments, upload)
    try:
        return cluster.follow(job, show_out)
    except BaseException:
        if is_served:
            cluster.stop(job)
        raise


def run_at_command_server(
    dashboard: str, arguments: Sequence[str], show_out: Callable[[str], object]
) -> int | None:
    """Runs `rayzero ARGUMENTS` by the command server of the cluster with that dashboard, and shows
    the output line by line. Returns the exit code; None if the server cannot be reached, after a
    line on stderr. Raises JobFailedError if the connection is lost later."""
    try:
        response = _request(dashboard, json.dumps(list(arguments)))
    except ServerUnreachableError as error:
        if text := str(error):
            text = redact_url(f"note: {text}; the command becomes a Ray job, which takes longer")
            print(text, file=sys.stderr, flush=True)
        return None
    with response:
        try:
            for line in response:
                [(kind, value)] = json.loads(line).items()
                if kind == "code":
                    return int(value)
                if kind == "out":
                    show_out(value.removesuffix("\n"))
                else:
                    print(value, end="", file=sys.stderr, flush=True)
        except (OSError, HTTPException, ValueError) as error:
            text = f"the connection to the cluster's command server was lost: {error}"
            raise JobFailedError(text) from None
    raise JobFailedError("the cluster's command server has ended while the command ran")


def _request(dashboard: str, text: str) -> HTTPResponse:
    """Sends a command to the command server, and returns the response with the command's output.
    Raises ServerUnreachableError if the server does not accept the command."""
    parts = urlsplit(dashboard)
    if parts.scheme != "http" or parts.hostname is None:
        raise ServerUnreachableError("the cluster's command server does not speak HTTPS")
    port, secret = _find(dashboard.rstrip("/"))
    connection = HTTPConnection(parts.hostname, port, timeout=_REPLY_TIMEOUT_S)
    try:
        connection.request("GET", "/nonce")
        nonce = connection.getresponse().read(64).decode()
        headers = {
            "Authorization": f"{nonce}:{prove(secret, nonce, text)}",
            ARGUMENTS_HEADER: text,
        }
        connection.request("POST", "/command", headers=headers)
        own_socket = connection.sock  # `getresponse` takes the socket away from the connection
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise ServerUnreachableError(
                f"the cluster's command server has refused: {response.reason}"
            )
        own_socket.settimeout(None)  # a job may print nothing for hours
        own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return response
    except (OSError, HTTPException) as error:
        where = f"{parts.hostname}:{port}"
        raise ServerUnreachableError(
            f"the cluster's command server at {where} is out of reach: {error}"
        ) from None


def _find(dashboard: str) -> tuple[int, str]:
    """Returns the command server's port and secret, from its file among the head's logs. Raises
    ServerUnreachableError."""
    try:
        nodes = json.loads(_get(f"{dashboard}/api/v0/nodes"))["data"]["result"]["result"]
        head = next(node["node_id"] for node in nodes if node["is_head_node"])
        query = f"node_id={quote(head)}&filename={SERVER_FILE}&lines=10"
        found = json.loads(_get(f"{dashboard}/api/v0/logs/file?{query}"))
        return int(found["port"]), str(found["secret"])
    except HTTPError as error:
        raise ServerUnreachableError("" if error.code in _REFUSALS else _NO_SERVER) from None
    except (OSError, HTTPException):
        raise ServerUnreachableError("") from None
    except (ValueError, KeyError, TypeError, StopIteration):
        raise ServerUnreachableError(_NO_SERVER) from None


def _get(url: str) -> bytes:
    try:
        return _read(Request(url))
    except HTTPError as error:
        if error.code not in _REFUSALS:
            raise
    from rayzero.orchestrator.cluster.ray_api import auth_headers  # Ray's import takes long

    return _read(Request(url, headers=auth_headers()))


def _read(request: Request) -> bytes:
    with urlopen(request, timeout=_REPLY_TIMEOUT_S) as response:
        content: bytes = response.read(_MAX_REPLY_BYTES)
        return content
