"""A job is followed to its end, and its silence is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from threading import Thread
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.top import follow
from rayzero.orchestrator.top.follow import SnapshotUnavailableError, endpoint_source
from tests.orchestrator.page.sample import sample


class Told:
    """Answers one after another; an error is raised, the last one stays."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self._answers = list(answers)

    def __call__(self) -> dict[str, Any]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s

    def wait(self, seconds: float) -> None:
        self.s += seconds


GONE = SnapshotUnavailableError("nothing answers")


def lines(told: Told, clock: Clock) -> list[str]:
    out = StringIO()
    follow.follow_job(told, True, False, out, clock.now, clock.wait)
    return [json.loads(line)["state"] for line in out.getvalue().splitlines()]


def test_lines_end_with_the_job() -> None:
    told = Told(sample(), GONE, sample(state="recovering"), sample(state="failed"))
    assert lines(told, Clock()) == ["running", "recovering", "failed"]


def test_lines_end_when_a_job_is_silent_for_long() -> None:
    clock = Clock()
    with pytest.raises(SnapshotUnavailableError):
        lines(Told(sample(), GONE), clock)
    assert follow.LOST_CONTACT_S < clock.s <= follow.LOST_CONTACT_S + 2 * follow.LINE_INTERVAL_S


def test_a_job_that_never_answered_is_told_at_once() -> None:
    clock = Clock()
    with pytest.raises(SnapshotUnavailableError):
        lines(Told(GONE), clock)
    assert clock.s == 0


class Handler(BaseHTTPRequestHandler):
    bodies: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        body = self.bodies.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args: Any) -> None:
        """Not the test's output."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.bodies = {"/snapshot.json": json.dumps(sample(state="succeeded")).encode()}
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/snapshot.json?x=1"])
def test_a_job_is_found_by_any_address_of_its(url: str, path: str) -> None:
    assert endpoint_source(url + path)()["job"] == "gpt-stdlib"


def test_the_command_shows_a_job(url: str) -> None:
    shown = CliRunner().invoke(app, ["top", url, "--once"])
    assert (shown.exit_code, shown.stdout.split(",")[0]) == (0, "gpt-stdlib: succeeded")
    shown = CliRunner().invoke(app, ["top", url, "--once", "--json"])
    assert json.loads(shown.stdout) == sample(state="succeeded")
    assert CliRunner().invoke(app, ["top", url]).exit_code == 0


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"format": 99}'])
def test_what_is_no_snapshot_is_refused(url: str, body: bytes) -> None:
    Handler.bodies = {"/snapshot.json": body}
    with pytest.raises(ConfigError, match=r"did not return a job's snapshot|has format 99"):
        endpoint_source(url)()
    assert CliRunner().invoke(app, ["top", url, "--once"]).exit_code == 2


def test_nobody_there_is_one_line(url: str) -> None:
    shown = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--once"])
    assert shown.exit_code == 1
    assert "no response from http://127.0.0.1:9/snapshot.json" in shown.stderr
    Handler.bodies = {}
    assert CliRunner().invoke(app, ["top", url, "--once"]).exit_code == 1


@pytest.mark.parametrize(
    "address", ["ftp://host/", "http://", "file:///etc/passwd", "http://[::1", "http://h:x"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    assert CliRunner().invoke(app, ["top", address]).exit_code == 2
