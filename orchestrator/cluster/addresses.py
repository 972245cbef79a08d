"""Addresses of clusters: which one is meant, where it was given, and which server listens there.

This module does not import Ray, whose import takes a second.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.redact import redact_url

ADDRESS_VARIABLE = "RAY_ADDRESS"
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable: how many seconds a process lives on without the cluster's head."""
CLIENT_ADDRESS_VARIABLE = "RAYZERO_CLIENT_ADDRESS"
"""Set for a command that runs in the cluster, to the `--address` that its user gave."""
HOST_PORT = re.compile(r"(?P<host>\[[^\]]+\]|[^:/\s]+):(?P<port>\d{1,5})")
_DASHBOARD_SCHEMES = ("http://", "https://")
_RAY_CLIENT_SCHEME = "ray://"
_OVERRIDING_VARIABLES = (ADDRESS_VARIABLE, "RAY_API_SERVER_ADDRESS")

PROBE_VARIABLE = "RAYZERO_PROBE_S"
"""Variable that allows a busy dashboard or head more time than `DEFAULT_PROBE_S`, in seconds."""
DEFAULT_PROBE_S = 2.0
MAX_PROBE_S = 3600.0
_LEAST_WAIT_S = 0.01
CHECK_ALIVE_RPC = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # an empty request names no node
_RAY_CLIENT_RPC = "/ray.rpc.RayletDriver/ClusterInfo"
_MAX_REPLY_BYTES = 1 << 16
_SETTINGS_FRAME = b"\x04\x00"  # type and flags of the first frame of a server that speaks HTTP/2

DASHBOARD = "a Ray dashboard"
CLUSTER = "Ray's own port"
RAY_CLIENT = "a Ray Client server"
GRPC = "a gRPC server that is not of Ray's head node"
TLS = "a server that speaks TLS"
UNKNOWN = "a server that speaks neither HTTP nor gRPC"
SILENT = "a server that does not answer"


class AddressError(ConfigError):
    """There is no cluster at an address that was given."""


class NothingListensError(AddressError):
    """No server listens at the address: its cluster has ended, or is out of reach."""


@dataclass(frozen=True)
class Address:
    """The address of a cluster as it was given; empty if none was given. `is_variable` if it is the
    value of RAY_ADDRESS."""

    text: str
    is_variable: bool = False

    @property
    def is_dashboard(self) -> bool:
        return self.text.lower().startswith(_DASHBOARD_SCHEMES)

    @property
    def is_named(self) -> bool:
        """Whether the address names a cluster. An empty one, `auto` and `local` do not."""
        return self.text not in ("", "auto", "local")

    @property
    def host(self) -> str:
        """The host, for a proposal; `HOST` if there is none."""
        rest = self.text.partition("://")[2] or self.text
        return rest.split("/")[0].rpartition("@")[2].rpartition(":")[0] or "HOST"

    @property
    def shown(self) -> str:
        text = repr(redact_url(self.text))
        return f"{text}, the value of {ADDRESS_VARIABLE}" if self.is_variable else text

    def error(
        self,
        found: str,
        *proposals: str,
        kind: type[AddressError] = AddressError,
        setting: str = "",
    ) -> AddressError:
        """Returns the error that there is no cluster at this address, but what was `found`. The fix
        has `proposals` of other addresses, and a `setting` with which the cluster may be found."""
        option = f"{ADDRESS_VARIABLE}=" if self.is_variable else "--address "
        words = [f"{option}{text}" for text in proposals]
        words += [setting] if setting else []
        if self.is_variable:
            words.append(f"--address, which has precedence, or `unset {ADDRESS_VARIABLE}`")
        return kind(
            f"there is no Ray cluster at {self.shown}: {found}",
            allowed="host:port of the head node of a running cluster (Ray's own port, by default "
            "6379); from outside the cluster http://HOST:8265, its dashboard; or `auto`",
            fix="; or ".join(words) or "--address, or start the cluster (`ray start --head`)",
        )


def named_address(address: str | None) -> Address:
    """Returns `address`; if that is None, RAY_ADDRESS, or else an empty address. No other variable
    counts. Raises ConfigError for a text that is not an address."""
    named = Address((os.environ.get(ADDRESS_VARIABLE) or "").strip(), is_variable=True)
    if address is not None:
        named = Address(address.strip())
    elif not named.text:
        return named
    if named.is_dashboard or named.text in ("auto", "local"):
        return named
    if named.text.startswith(_RAY_CLIENT_SCHEME):
        raise named.error(
            "it is an address of Ray Client, which rayzero does not support",
            f"http://{named.host}:8265",
            f"{named.host}:6379 on a machine of the cluster",
        )
    if not HOST_PORT.fullmatch(named.text):
        raise named.error("it is not of the form host:port" if named.text else "it is empty")
    return named


def head_address(address: str | None) -> Address:
    """Returns the `named_address` for a process that joins the cluster. Raises ConfigError also for
    the address of a dashboard, which does not let a process join."""
    named = named_address(address)
    if named.is_dashboard:
        raise AddressError(
            f"address {named.shown} is a dashboard's, and a job in Python joins the cluster",
            allowed="host:port of a cluster that this machine is part of, or `auto`",
            fix=f"from outside the cluster: `ray job submit --address {redact_url(named.text)} -- "
            "python FILE.py`",
        )
    return named


@contextmanager
def only_given_address() -> Iterator[None]:
    """Hides environment variables inside the `with`, so that Ray's clients use the address that
    they are given. They would prefer the address in a variable."""
    hidden = {name: os.environ.pop(name) for name in _OVERRIDING_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class Deadline:
    """The end of a probe. Connection, TLS and answers share its time. Name resolution does not
    count, because only the system's resolver can limit it."""

    def __init__(self) -> None:
        """Raises ConfigError if the variable is not a valid number of seconds."""
        text = os.environ.get(PROBE_VARIABLE, str(DEFAULT_PROBE_S))
        try:
            self.limit_s = float(text)
        except ValueError:
            self.limit_s = 0.0
        if not 0 < self.limit_s <= MAX_PROBE_S:  # also true for nan
            raise ConfigError(
                f"{PROBE_VARIABLE}={text}",
                allowed=f"how long an address is probed: seconds, more than 0, at most "
                f"{MAX_PROBE_S:g}",
                fix=f"`unset {PROBE_VARIABLE}`, for {DEFAULT_PROBE_S:g}",
            )
        self._ends_s = time.monotonic() + self.limit_s

    @property
    def has_passed(self) -> bool:
        # A socket's timeout may end a little early.
        return time.monotonic() >= self._ends_s - _LEAST_WAIT_S

    @property
    def left_s(self) -> float:
        """The time that is left, but always more than 0, because a socket's timeout must be."""
        return max(_LEAST_WAIT_S, self._ends_s - time.monotonic())

    @property
    def extension(self) -> str:
        """The setting that allows more time, for an error."""
        return f"{PROBE_VARIABLE}={self.limit_s * 5:g}, if it takes longer"


def check_listens(named: Address) -> Deadline:
    """Checks that the server at host:port may be Ray's own, because `ray.init` would try for
    minutes without a way to interrupt it. Returns the deadline for further questions. Raises
    NothingListensError; ConfigError for a server of another kind."""
    match = HOST_PORT.fullmatch(named.text)
    if match is None:
        return Deadline()
    host, port = match["host"].strip("[]"), int(match["port"])
    uses_tls = os.environ.get("RAY_USE_TLS", "0") not in ("", "0")
    opened, deadline = _open(named, host, port)
    with closing(opened) as connection:
        if uses_tls:
            return deadline
        head = _ask(connection, host, "", deadline)
    if _is_http2(head):
        return deadline
    found = _found_by_http(head)
    proposals = [f"http://{named.text}"] if found == DASHBOARD else []
    raise _other_server_error(named, found, [*proposals, f"{named.host}:6379"], deadline)


def check_dashboard(named: Address) -> None:
    """Checks that the server at this URL may be a Ray dashboard. Raises NothingListensError;
    ConfigError for a server of another kind."""
    try:
        parts = urlsplit(named.text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host:
        raise named.error("it is not a URL")
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return  # only the proxy can tell
    port = port or (443 if parts.scheme == "https" else 80)
    opened, deadline = _open(named, host, port)
    with closing(opened) as connection:
        try:
            stream = connection
            if parts.scheme == "https":
                stream = _encrypted(connection, host, deadline)
        except TimeoutError:
            raise _other_server_error(named, SILENT, [], deadline) from None
        except OSError:
            raise named.error(
                "the server there does not speak TLS", f"http://{parts.netloc}"
            ) from None
        with closing(stream):
            head = _ask(stream, host, parts.path.rstrip("/"), deadline)
    if _is_http2(head):
        found = identify_grpc(f"{_bracketed(host)}:{port}", deadline)
    else:
        found = _found_by_http(head)
    if found == DASHBOARD:
        return
    if found == CLUSTER:
        proposals = [f"{parts.netloc} on a machine of the cluster", f"http://{host}:8265"]
    else:
        proposals = [f"http://{host}:8265"]
    others = [proposal for proposal in proposals if proposal != named.text]
    raise _other_server_error(named, found, others, deadline)


def identify_grpc(target: str, deadline: Deadline) -> str:
    """Returns which kind of gRPC server is at host:port."""
    import grpc  # slow to import

    for method, found in ((CHECK_ALIVE_RPC, CLUSTER), (_RAY_CLIENT_RPC, RAY_CLIENT)):
        with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                channel.unary_unary(method)(b"", timeout=deadline.left_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    continue
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return SILENT
            return found
    return GRPC


def other_grpc_error(named: Address, deadline: Deadline) -> ConfigError:
    """Returns the error for host:port of a gRPC server that is not a head node's."""
    found = identify_grpc(named.text, deadline)
    proposals = [f"{named.host}:6379", f"http://{named.host}:8265"]
    return _other_server_error(named, found, proposals, deadline)


def _other_server_error(
    named: Address, found: str, proposals: list[str], deadline: Deadline
) -> ConfigError:
    if found == SILENT and deadline.has_passed:
        found = f"{SILENT} within {deadline.limit_s:g} s"
        return named.error(f"{found} is there", *proposals, setting=deadline.extension)
    return named.error(f"{found} is there", *proposals)


def _open(named: Address, host: str, port: int) -> tuple[socket.socket, Deadline]:
    """Connects, and begins the probe. Returns the connection and the probe's deadline. Raises
    NothingListensError."""
    reason: Exception = OSError("the host has no address")
    setting = ""
    try:
        places = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
        deadline = Deadline()
        for tried, (family, kind, number, _, place) in enumerate(places):
            connection = socket.socket(family, kind, number)
            # Each of the remaining addresses gets the same part of the time.
            connection.settimeout(deadline.left_s / (len(places) - tried))
            try:
                connection.connect(place)
                return connection, deadline
            except OSError as error:
                connection.close()
                reason = error
        if isinstance(reason, TimeoutError):
            reason = OSError(f"no answer within {deadline.limit_s:g} s")
            setting = deadline.extension
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    found = f"nothing listens there ({text or first_line(reason)})"
    raise named.error(found, kind=NothingListensError, setting=setting) from None


def _encrypted(connection: socket.socket, host: str, deadline: Deadline) -> socket.socket:
    """Begins TLS without verifying the certificate. Ray's client does that, before it sends
    anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection.settimeout(deadline.left_s)
    return context.wrap_socket(connection, server_hostname=host)


def _ask(connection: socket.socket, host: str, folder: str, deadline: Deadline) -> bytes:
    """Requests a dashboard's version, and returns the beginning of the reply. A gRPC server, which
    speaks HTTP/2, sends its first frame whatever the request is."""
    request = f"GET {folder}/api/version HTTP/1.1\r\nHost: {_bracketed(host)}\r\n"
    reply = b""
    with suppress(OSError):  # silent or closed: what was read so far is the reply
        connection.sendall(f"{request}Connection: close\r\n\r\n".encode())
        for part in _parts(connection, deadline):
            reply += part
            if len(reply) > _MAX_REPLY_BYTES or not b"HTTP/".startswith(reply[:5]):
                break
    return reply


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _parts(connection: socket.socket, deadline: Deadline) -> Iterator[bytes]:
    while not deadline.has_passed:
        connection.settimeout(deadline.left_s)
        if not (part := connection.recv(4096)):
            return
        yield part


def _is_http2(reply: bytes) -> bool:
    return reply[:1] == b"\x00" and reply[3:5] == _SETTINGS_FRAME


def _found_by_http(reply: bytes) -> str:
    """Returns which kind of server sent this reply to `_ask`."""
    head, end, body = reply.partition(b"\r\n\r\n")
    if not end and b"HTTP/".startswith(reply[:5]):
        return SILENT
    status = re.match(rb"HTTP/1\.\d (\d{3})", head)
    if status is None:
        return TLS if reply[:2] == b"\x15\x03" else UNKNOWN
    code = int(status[1])
    if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or 300 <= code < 400:
        return DASHBOARD  # more cannot be known without the token
    with suppress(ValueError, TypeError):
        if "ray_version" in json.loads(body):
            return DASHBOARD
    name = re.search(rb"\r\nserver: *([^\r]*)", head, re.IGNORECASE)
    server = f" ({name[1].decode(errors='replace')})" if name else ""
    answer = f"{code} {HTTPStatus(code).phrase}" if code in {*HTTPStatus} else str(code)
    return f"an HTTP server{server} that is no Ray dashboard, with `{answer}` for /api/version,"
