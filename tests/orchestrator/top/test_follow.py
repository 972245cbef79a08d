"""Following a job by its endpoint or by the output of the command in another cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.registry import CollectorRegistry
from typer.testing import CliRunner

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cluster import job_submission
from rayzero.orchestrator.metrics.endpoint import Endpoint, Page, json_response
from rayzero.orchestrator.metrics.snapshot import SNAPSHOT_FORMAT
from rayzero.orchestrator.metrics.telemetry import SNAPSHOT_FILE
from rayzero.orchestrator.top import follow
from rayzero.orchestrator.top.follow import (
    SnapshotUnavailableError,
    endpoint_source,
)
from tests.orchestrator.page.sample import sample


class Responses:
    """A snapshot source that returns or raises these in order, and repeats the last one."""

    def __init__(self, *responses: dict[str, Any] | Exception) -> None:
        self._responses = list(responses)

    def __call__(self) -> dict[str, Any]:
        response = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
        if isinstance(response, Exception):
            raise response
        return response


NO_RESPONSE = SnapshotUnavailableError("no response")


class VirtualTime:
    s = 0.0

    def now(self) -> float:
        return self.s

    def wait(self, seconds: float) -> None:
        self.s += seconds


def shown_states(*responses: dict[str, Any] | Exception, clock: VirtualTime) -> list[str]:
    out = StringIO()
    follow.follow_job(Responses(*responses), True, False, out, clock.now, clock.wait)
    return [json.loads(line)["state"] for line in out.getvalue().splitlines()]


def test_following_ends_with_job_or_without_a_response_for_long() -> None:
    clock = VirtualTime()
    responses = (sample(), NO_RESPONSE, sample(state="recovering"), sample(state="failed"))
    assert shown_states(*responses, clock=clock) == ["running", "recovering", "failed"]
    clock = VirtualTime()
    with pytest.raises(SnapshotUnavailableError):
        shown_states(sample(), NO_RESPONSE, clock=clock)
    assert follow.LOST_CONTACT_S < clock.s <= follow.LOST_CONTACT_S + 2 * follow.LINE_INTERVAL_S
    clock = VirtualTime()
    with pytest.raises(SnapshotUnavailableError):
        shown_states(NO_RESPONSE, clock=clock)
    assert clock.s == 0, "at once without a first one"


@pytest.fixture
def pages() -> dict[str, Callable[[], Page]]:
    return {"/snapshot.json": lambda: json_response(sample(state="succeeded"))}


@pytest.fixture
def url(pages: dict[str, Callable[[], Page]]) -> Iterator[str]:
    with closing(Endpoint("127.0.0.1", range(1), CollectorRegistry(), pages)) as endpoint:
        yield endpoint.url


def test_command_shows_job(url: str) -> None:
    for path in ("", "/", "/metrics", "/snapshot.json?x=1"):
        assert endpoint_source(url + path)()["job"] == "gpt-stdlib"
    shown = CliRunner().invoke(app, ["top", url, "--once"])
    assert (shown.exit_code, shown.stdout.split(",")[0]) == (0, "gpt-stdlib: succeeded")
    shown = CliRunner().invoke(app, ["top", url, "--once", "--json"])
    assert json.loads(shown.stdout) == sample(state="succeeded")
    assert CliRunner().invoke(app, ["top", url]).exit_code == 0


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"format": 99}'])
def test_other_responses_are_rejected(
    pages: dict[str, Callable[[], Page]], url: str, body: bytes
) -> None:
    pages["/snapshot.json"] = lambda: ("application/json", body)
    with pytest.raises(ConfigError, match=r"did not return a job's snapshot|has format 99"):
        endpoint_source(url)()
    assert CliRunner().invoke(app, ["top", url, "--once"]).exit_code == 2


def test_unresponsive_endpoint_is_reported_in_one_line(
    pages: dict[str, Callable[[], Page]], url: str
) -> None:
    shown = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--once"])
    assert shown.exit_code == 1
    assert "no response from http://127.0.0.1:9/snapshot.json" in shown.stderr
    pages.clear()
    assert CliRunner().invoke(app, ["top", url, "--once"]).exit_code == 1


@pytest.mark.parametrize(
    "address", ["ftp://host/", "http://", "file:///etc/passwd", "http://[::1", "http://h:x"]
)
def test_other_urls_are_rejected(address: str) -> None:
    assert CliRunner().invoke(app, ["top", address]).exit_code == 2


RAY_LINE = "2026-01-01 INFO job_manager.py -- Runtime env is set up\n"


class RemoteCluster:
    """A cluster in which the command prints `prints` and ends with `code`."""

    prints, code = "", 0
    arguments: Sequence[str] = ()
    stopped_job = ""
    error: BaseException | None = None

    def __init__(self, address: str) -> None:
        assert address == "http://head:8265"

    def submit(self, arguments: Sequence[str], folder: Path | None) -> str:
        RemoteCluster.arguments = list(arguments)
        return "raysubmit_1"

    def follow(self, job: str, show_line: Callable[[str], object]) -> int:
        for line in self.prints.splitlines():
            show_line(line)
        if self.error is not None:
            raise self.error
        return self.code

    def stop(self, job: str) -> None:
        RemoteCluster.stopped_job = job


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> type[RemoteCluster]:
    subclass = type("Made", (RemoteCluster,), {})
    monkeypatch.setattr(job_submission, "RemoteJobClient", subclass)
    monkeypatch.setattr("rayzero.orchestrator.cluster.addresses.check_dashboard", lambda _: None)
    RemoteCluster.arguments, RemoteCluster.stopped_job = (), ""
    return subclass


def test_job_in_another_cluster_is_followed_by_name(remote: type[RemoteCluster]) -> None:
    remote.prints = RAY_LINE + "{}\n[]\n" + json.dumps(sample(state="succeeded")) + "\n"
    result = CliRunner().invoke(app, ["top", "gpt", "--address", "http://head:8265"])
    assert result.exit_code == 0
    assert "succeeded" in result.stdout
    assert "Runtime env" not in result.output
    assert RemoteCluster.arguments == ["top", "gpt", "--json"]
    assert RemoteCluster.stopped_job == ""
    once = ["top", "gpt", "--once", "--json", "--address", "http://head:8265"]
    assert json.loads(CliRunner().invoke(app, once).stdout)["state"] == "succeeded"
    assert RemoteCluster.arguments == ["top", "gpt", "--json", "--once"]


def test_error_of_remote_command_is_shown_with_its_code(
    remote: type[RemoteCluster],
) -> None:
    remote.prints, remote.code = "error: no running job is called 'gtp'\n", 2
    result = CliRunner().invoke(app, ["top", "gtp", "--address", "http://head:8265"])
    assert result.exit_code == 2
    assert "no running job is called 'gtp'" in result.stderr


def test_remote_command_is_stopped_by_ctrl_c(remote: type[RemoteCluster]) -> None:
    remote.prints, remote.error = json.dumps(sample()) + "\n", KeyboardInterrupt()
    result = CliRunner().invoke(app, ["top", "gpt", "--address", "http://head:8265"])
    assert result.exit_code == 130
    assert RemoteCluster.stopped_job == "raysubmit_1"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_last_state_while_it_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first response: what is known at once, of which nothing is left without one."""
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / follow.SNAPSHOT_FILE).write_text(json.dumps(sample(at_s=77.0)))
    shown: list[str] = []

    def respond() -> dict[str, Any]:
        shown.append(out.getvalue())
        return sample(state="succeeded")

    for folder, parts in (
        (tmp_path, ["connecting to head", "ago:", "running", "12,345/20,000"]),
        (tmp_path / "none", ["connecting to head"]),
    ):
        out = Terminal()
        first = follow.connecting_board("gpt", "head", folder)
        follow.follow_job(respond, False, False, out, first=first)
        assert all(part in shown[-1] for part in parts)
        assert "succeeded" in out.getvalue()
    for damaged in (b"", b"[]", b'{"format": 2}', b'{"format": 99}', b"\xff"):
        (tmp_path / follow.SNAPSHOT_FILE).write_bytes(damaged)
        assert str(follow.connecting_board("gpt", "head", tmp_path)) == "gpt  connecting to head"
    assert (follow.SNAPSHOT_FILE, follow.SUPPORTED_FORMAT) == (SNAPSHOT_FILE, SNAPSHOT_FORMAT)
    with pytest.raises(SnapshotUnavailableError):
        follow.follow_job(Responses(NO_RESPONSE), False, False, Terminal(), first=first)
