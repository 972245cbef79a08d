"""A cluster's command server and its client, over HTTP; the dashboard is a server of two files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import pytest

from rayzero.orchestrator.cluster.command_client import (
    ARGUMENTS_HEADER,
    prove,
    run_at_command_server,
)
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.command_server import CommandServer

BOTH = Barrier(2)


def run_command(arguments: Sequence[str]) -> None:
    command, *rest = arguments
    print("arguments", *rest)
    print("careful", file=sys.stderr)
    if command == "logs":  # two at a time
        for number in range(100):
            BOTH.wait(10)
            print(rest[0], number)
    if command == "scale":
        raise ValueError("a bug")
    if command == "stop":
        raise ConnectionResetError
    raise SystemExit(3)


@contextmanager
def open_command_server(folder: Path) -> Iterator[tuple[CommandServer, str]]:
    """A command server, and the address of a dashboard with its file. Not a fixture: in a test's
    own time pytest does not replace the standard streams."""
    command_server = CommandServer("127.0.0.1", 0, run_command)
    command_server.publish(folder)
    file = folder / "rayzero-command-server.json"
    assert file.stat().st_mode & 0o077 == 0
    nodes = [{"node_id": "w", "is_head_node": False}, {"node_id": "h", "is_head_node": True}]
    found = json.dumps({"data": {"result": {"result": nodes}}}).encode()

    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_nodes = self.path.startswith("/api/v0/nodes")
            is_file = (
                "node_id=h&filename=rayzero-command-server.json" in self.path and file.is_file()
            )
            self.send_response(200 if is_nodes or is_file else 500)
            self.end_headers()
            self.wfile.write(found if is_nodes else file.read_bytes() if is_file else b"")

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield command_server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        command_server.stop(5)


def test_command_is_run_by_the_command_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_command_server(tmp_path) as (_, dashboard):
        lines: list[str] = []
        assert run_at_command_server(dashboard, ["status", "ä b"], lines.append) == 3
        assert lines == ["arguments ä b"]
        assert capsys.readouterr().err == "careful\n"
        assert run_at_command_server(dashboard, ["scale", "x"], lines.append) == 1
        assert "a bug" in capsys.readouterr().err
        assert run_at_command_server(dashboard, ["run", "x"], lines.append) == 1
        assert (
            capsys.readouterr().err == "error: run is not a command that the command server runs\n"
        )
        with pytest.raises(JobFailedError, match="command server has ended while the command ran"):
            run_at_command_server(dashboard, ["stop", "x"], lines.append)


def test_outputs_of_commands_do_not_mix(tmp_path: Path) -> None:
    with open_command_server(tmp_path) as (_, dashboard):
        outputs: dict[str, list[str]] = {"a": [], "b": []}
        threads = [
            Thread(
                target=run_at_command_server, args=(dashboard, ["logs", name], outputs[name].append)
            )
            for name in outputs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for name, lines in outputs.items():
            assert lines == [f"arguments {name}", *(f"{name} {number}" for number in range(100))]


def status_of(command_server: CommandServer, authorization: str, text: str) -> int:
    connection = HTTPConnection("127.0.0.1", command_server.port, timeout=10)
    headers = {"Authorization": authorization, ARGUMENTS_HEADER: text}
    connection.request("POST", "/command", headers=headers)
    return connection.getresponse().status


def test_command_without_proof_is_refused(tmp_path: Path) -> None:
    with open_command_server(tmp_path) as (command_server, _):
        connection = HTTPConnection("127.0.0.1", command_server.port, timeout=10)

        def nonce() -> str:
            connection.request("GET", "/nonce")
            return connection.getresponse().read().decode()

        def proven(secret: str, nonce: str, text: str) -> str:
            return f"{nonce}:{prove(secret, nonce, text)}"

        text, secret = '["status", "x"]', command_server.secret
        good = proven(secret, nonce(), text)
        assert status_of(command_server, good, text) == 200
        refused = {
            "a second time": good,
            "another secret": proven("0" * 64, nonce(), text),
            "of another command": proven(secret, nonce(), '["stop", "x"]'),
            "a nonce alone": nonce(),
            "a nonce of its own": proven(secret, "0" * 32, text),
        }
        for case, authorization in refused.items():
            assert status_of(command_server, authorization, text) == 403, case
        for nonsense in ("", ":", "\xc3\xa4:\xc3\xb6"):
            assert status_of(command_server, nonsense, text) == 403
        connection.request("GET", "/command")
        assert connection.getresponse().status == 404


def test_command_without_a_command_server_says_why_it_takes_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_command_server(tmp_path) as (command_server, dashboard):

        def note(address: str) -> str:
            assert run_at_command_server(address, ["ls"], print) is None
            return capsys.readouterr().err

        assert note("https://head") == (
            "note: the cluster's command server does not speak HTTPS; the command becomes a Ray "
            "job, which takes longer\n"
        )
        command_server.stop(5)
        assert f"command server at 127.0.0.1:{command_server.port} is out of reach: " in note(
            dashboard
        )
        (tmp_path / "rayzero-command-server.json").unlink()
        assert (
            "note: the cluster has no command server yet, which its first job or command starts"
            in note(dashboard)
        )
        assert note("http://127.0.0.1:1") == "", "Ray's client will tell"
