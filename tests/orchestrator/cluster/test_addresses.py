"""The address that is given is the one that is used, and the error says what was found there. The
servers are real ones, of HTTP and gRPC, that keep what they were asked."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import grpc
import pytest
import ray
import typer
from aiohttp import web
from typer.testing import CliRunner

import rayzero
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cluster import addresses, connect
from rayzero.orchestrator.metrics.http_server import HttpServer

JOB = "{name: gpt, entrypoint: 'train:train', engine: {train_batch_size: 8}}\n"
COMMANDS: dict[str, str] = {
    "run": "job.yaml",
    "submit": "job.yaml",
    "resume": "gpt",
    "launch": "train.py",
    "ls": "",
    "status": "gpt",
    "stop": "gpt",
    "scale": "gpt 2",
    "logs": "gpt",
    "top": "gpt",
    "chaos": "gpt kill(rank=0)",
    "doctor": "",
}
"""Every command with `--address`, and its arguments."""
HANG_S = 10.0  # on a busy machine; Ray tries for minutes


class Server:
    """An HTTP server on a port of its own; `asked` has what it was asked."""

    def __init__(self, reply: Callable[[str], tuple[int, bytes]]) -> None:
        self.asked = asked = list[str]()

        async def answer(request: web.BaseRequest) -> web.Response:
            asked.append(f"{request.method} {request.path}")
            status, body = reply(request.path)
            return web.Response(status=status, body=body)

        self.server = HttpServer("127.0.0.1", 0, answer)
        self.address = f"127.0.0.1:{self.server.port}"


def dashboard(path: str) -> tuple[int, bytes]:
    """As Ray's, of a cluster in which nothing was started by rayzero, and that accepts no job."""
    if path == "/api/version":
        return 200, b'{"version": "4", "ray_version": "2.60.0", "ray_commit": "x"}'
    return 404, b"404: Not Found"


@contextmanager
def serving(reply: Callable[[str], tuple[int, bytes]]) -> Iterator[Server]:
    server = Server(reply)
    yield server
    server.server.stop(10)


@pytest.fixture
def named() -> Iterator[Server]:
    with serving(dashboard) as server:
        yield server


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """Another cluster's dashboard, that all variables name."""
    with serving(dashboard) as server:
        for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS"):
            monkeypatch.setenv(variable, f"http://{server.address}")
        monkeypatch.chdir(tmp_path)
        Path("job.yaml").write_text(JOB)
        Path("train.py").write_text("def train(ctx): ...\n")
        yield server


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def command(line: str, *options: str) -> str:
    """What it prints. It ends with a mistake."""
    name, *arguments = line.split()
    words = [name, *options, *arguments]  # a script's own arguments end the line of `launch`
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output
    assert result.exit_code == 2, result.output
    return result.output


def test_table_has_every_command_with_an_address() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    with_address = {
        name
        for name, it in commands.items()
        if any("--address" in parameter.opts for parameter in it.params)
    }
    assert with_address == {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_only_the_named_cluster_is_asked(
    name: str, named: Server, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `--address` is: a dashboard, nothing, a port, `auto`, mistakes."""
    monkeypatch.setattr(connect, "local_head_addresses", lambda: {free_address()})
    line = f"{name} {COMMANDS[name]}"
    if name == "resume":
        line += " --path nowhere"
    printed = command(line, "--address", f"http://{named.address}")
    if name != "doctor":
        assert "rejected the request" in printed
        assert any(asked.startswith(("POST", "PUT")) for asked in named.asked), named.asked
    dead, mistakes = free_address(), ("", " ", "head", "ray://head:10001", "head:port")
    assert dead in command(line, "--address", f"http://{dead}")
    for address in (*mistakes, *((dead, named.address, "auto") if name != "doctor" else ())):
        command(line, "--address", address)
    assert other.asked == []


def test_only_the_named_cluster_is_asked_in_python(other: Server) -> None:
    Path("train.py").write_text("def train(ctx): ...\n")
    job = rayzero.Job("gpt", "train:train", engine={"train_batch_size": 8})
    for address in ("", free_address(), f"http://{free_address()}", "ray://head:10001"):
        for act in (job.submit, job.run, lambda it: rayzero.Job.attach("gpt", it)):
            with pytest.raises(RayzeroError):
                act(address)
    assert other.asked == []


def test_connected_process_refuses_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(connect, "connected_address", lambda: "127.0.0.1:6379")
    host = socket.gethostname()
    for same in (None, "auto", "127.0.0.1:6379", "localhost:6379", f"{host}:6379"):
        assert not connect.connect(same).owned
        assert connect.find_clusters(same) == ["auto"]
    for another in ("127.0.0.1:6380", "192.0.2.77:6379"):
        with pytest.raises(RayzeroError, match="which this process is connected already"):
            connect.connect(another)
        with pytest.raises(RayzeroError, match=r"ray\.shutdown"):
            connect.find_clusters(another)


class RayHandler(grpc.GenericRpcHandler):
    """Has the method alone, and asks for a token, as Ray's servers do."""

    def __init__(self, method: str) -> None:
        self._method = method

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        def refuse(_: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return (
            grpc.unary_unary_rpc_method_handler(refuse) if details.method == self._method else None
        )


@contextmanager
def grpc_server(method: str) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[RayHandler(method)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(10)


@contextmanager
def raw_server(first: bytes) -> Iterator[str]:
    """Sends this to each connection, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            kept = []
            while True:
                try:
                    kept.append(listener.accept()[0])
                except OSError:
                    return
                kept[-1].sendall(first)

        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


@contextmanager
def web_server(reply: Callable[[str], tuple[int, bytes]] = dashboard) -> Iterator[str]:
    with serving(reply) as server:
        yield server.address


@contextmanager
def nothing() -> Iterator[str]:
    yield free_address()


def token_needed(path: str) -> tuple[int, bytes]:
    return 401, b"Unauthorized"


def other_page(path: str) -> tuple[int, bytes]:
    return 200, b"<html>"


CLIENT_RPC = "/ray.rpc.RayletDriver/ClusterInfo"
NO_DASHBOARD = "that is no Ray dashboard, with `200 OK` for /api/version"
NEITHER = "a server that speaks neither HTTP nor gRPC is there"
AT_DASHBOARD, AT_CLUSTER = "{option}http://{address}", "{option}127.0.0.1:6379"
FOUND: dict[str, tuple[Callable[[], AbstractContextManager[str]], str, str]] = {
    "dashboard": (web_server, "a Ray dashboard is there", AT_DASHBOARD),
    "token": (partial(web_server, token_needed), "a Ray dashboard is there", AT_DASHBOARD),
    "web": (partial(web_server, other_page), NO_DASHBOARD, AT_CLUSTER),
    "client": (
        partial(grpc_server, CLIENT_RPC),
        "a Ray Client server is there",
        "{option}http://127.0.0.1:8265",
    ),
    "grpc": (partial(grpc_server, "/other"), "a gRPC server that is not of Ray's", AT_CLUSTER),
    "redis": (partial(raw_server, b"-ERR unknown command\r\n"), NEITHER, AT_CLUSTER),
    "tls": (
        partial(raw_server, b"\x15\x03\x03\x00\x02\x02\x46"),
        "speaks TLS is there",
        AT_CLUSTER,
    ),
    "silent": (partial(raw_server, b""), "does not answer within 0.5 s is there", AT_CLUSTER),
    "nothing": (nothing, "nothing listens there (Connection refused)", ""),
}
FOUND_BY_HTTP = {
    "cluster": (
        partial(grpc_server, addresses.CHECK_ALIVE_RPC),
        "Ray's own port is there",
        "{option}{address} on a machine of the cluster",
    ),
    **{kind: FOUND[kind] for kind in ("web", "client", "grpc", "redis", "silent", "nothing")},
}


@pytest.mark.parametrize(
    ("scheme", "kind", "origin"),
    [
        *(("", kind, "option") for kind in FOUND),
        *(("http://", kind, "option") for kind in FOUND_BY_HTTP),
        *(("", kind, "variable") for kind in ("dashboard", "client", "silent", "nothing")),
        *(("http://", kind, "variable") for kind in ("cluster", "web")),
    ],
)
def test_error_says_what_is_at_the_address(
    scheme: str, kind: str, origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYZERO_PROBE_S", "0.5" if kind == "silent" else f"{HANG_S:g}")
    serve, found, proposal = (FOUND_BY_HTTP if scheme else FOUND)[kind]
    with serve() as address:
        given = f"{scheme}{address}"
        options = ("--address", given) if origin == "option" else ()
        monkeypatch.setenv("RAY_ADDRESS", given if origin == "variable" else "ray://other:1")
        began_s = time.monotonic()
        printed = command("scale gpt 2", *options)
        assert time.monotonic() - began_s < HANG_S
    assert ("RAYZERO_PROBE_S=2.5" in printed) is (kind == "silent")
    where = "" if origin == "option" else ", the value of RAY_ADDRESS"
    assert f"error: there is no Ray cluster at '{given}'{where}: " in printed
    assert found in printed
    option = "--address " if origin == "option" else "RAY_ADDRESS="
    if not (scheme and "6379" in proposal):
        assert proposal.format(option=option, address=address) in printed
    if origin == "variable":
        assert "`unset RAY_ADDRESS`" in printed


@pytest.mark.parametrize(
    ("scheme", "first"),
    [
        ("https://", b""),
        ("http://", b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
        ("http://", b"HTTP/1.1 200 OK\r\nServer: slow"),
    ],
    ids=["TLS", "gRPC", "half a head"],
)
def test_a_probe_has_one_limit_for_all_that_it_waits_for(
    scheme: str, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that takes the connection, and stops in the middle of an answer."""
    monkeypatch.setenv("RAYZERO_PROBE_S", "0.5")
    with raw_server(first) as address:
        printed = command("status gpt", "--address", f"{scheme}{address}")
    assert "a server that does not answer within 0.5 s is there" in printed
    assert "RAYZERO_PROBE_S=2.5, if it takes longer" in printed


def test_connection_that_is_not_taken_is_told_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYZERO_PROBE_S", "0.5")
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        printed = command("status gpt", "--address", f"127.0.0.1:{full.getsockname()[1]}")
    assert "nothing listens there (no answer within 0.5 s)" in printed
    assert "RAYZERO_PROBE_S=2.5" in printed


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "1e9"])
def test_time_limit_is_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYZERO_PROBE_S", text)
    assert f"error: RAYZERO_PROBE_S={text}\n" in command("status gpt", "--address", "127.0.0.1:1")


def test_lost_cluster_of_the_variable_leaves_its_journals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ls` after the loss of a cluster, in the terminal where its address was exported; not of
    one that was named, and not of a mistake."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    dead = free_address()
    monkeypatch.setenv("RAY_ADDRESS", dead)
    result = CliRunner().invoke(app, ["ls"])
    assert result.exit_code == 0
    assert f"note: there is no Ray cluster at '{dead}', the value of RAY_ADDRESS: " in result.stderr
    assert "unset RAY_ADDRESS" in result.stderr
    assert "nothing listens there" in command("ls", "--address", dead)
    for line in ("status gpt", "stop gpt"):
        assert "no running job" not in command(line, "--address", dead)
    with web_server() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert "a Ray dashboard is there" in command("ls")


def test_run_says_which_cluster_it_connects_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    Path("train.py").write_text("def train(ctx): ...\n")
    monkeypatch.setenv("RAY_ADDRESS", dead := free_address())
    line = f"connecting to the Ray cluster at '{dead}', the value of RAY_ADDRESS\n"
    assert line in command("run job.yaml")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    line = f"connecting to the Ray cluster at '{dead}'\n"
    assert line in command("run job.yaml", "--address", dead)
    with pytest.raises(RayzeroError, match="nothing listens"):
        rayzero.Job("gpt", "train:train").run(dead)
    assert line in capsys.readouterr().out
