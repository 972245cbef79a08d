"""A job in another cluster, seen through what is printed there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cluster import job_submission
from rayzero.orchestrator.top.follow import SnapshotParser
from tests.orchestrator.page.sample import sample

OURS = "2026-01-01 INFO job_manager.py -- Runtime env is set up\n"


def test_snapshots_come_in_any_pieces_among_other_lines() -> None:
    text = OURS + json.dumps(sample()) + "\n" + json.dumps(sample(state="failed")) + "\nerror: x\n"
    for size in (1, 7, 1000, len(text)):
        seen: list[str] = []
        told = SnapshotParser(lambda now, _, seen=seen: seen.append(now["state"]), "job 'gpt'")  # type: ignore[misc]
        for at in range(0, len(text), size):
            told.feed(text[at : at + size])
        assert seen == ["running", "failed"]
        assert told.other_lines == [OURS.strip(), "error: x"]


def test_a_snapshot_of_another_version_is_refused() -> None:
    told = SnapshotParser(lambda *_: None, "job 'gpt'")
    with pytest.raises(ConfigError, match="format 99"):
        told.feed(json.dumps({**sample(), "format": 99}) + "\n")


class Elsewhere:
    """A cluster in which the command prints what it is told to."""

    prints, code = "", 0
    began: Sequence[str] = ()
    ended = ""
    error: BaseException | None = None

    def __init__(self, address: str) -> None:
        assert address == "http://head:8265"

    def submit(self, arguments: Sequence[str], folder: Path | None) -> str:
        Elsewhere.began = list(arguments)
        return "raysubmit_1"

    def follow(self, job: str, write: Callable[[str], object]) -> int:
        write(self.prints)
        if self.error is not None:
            raise self.error
        return self.code

    def stop(self, job: str) -> None:
        Elsewhere.ended = job


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> type[Elsewhere]:
    made = type("Made", (Elsewhere,), {})
    monkeypatch.setattr(job_submission, "RemoteJobClient", made)
    Elsewhere.began, Elsewhere.ended = (), ""
    return made


def test_it_is_watched_by_name_from_outside(elsewhere: type[Elsewhere]) -> None:
    elsewhere.prints = OURS + json.dumps(sample(state="succeeded")) + "\n"
    done = CliRunner().invoke(app, ["top", "gpt", "--address", "http://head:8265"])
    assert done.exit_code == 0
    assert "succeeded" in done.stdout
    assert "Runtime env" not in done.output
    assert Elsewhere.began == ["top", "gpt", "--json"]
    assert Elsewhere.ended == ""
    once = ["top", "gpt", "--once", "--json", "--address", "http://head:8265"]
    assert json.loads(CliRunner().invoke(app, once).stdout)["state"] == "succeeded"
    assert Elsewhere.began == ["top", "gpt", "--json", "--once"]


def test_its_error_is_shown_with_its_code(elsewhere: type[Elsewhere]) -> None:
    elsewhere.prints, elsewhere.code = "error: no running job is called 'gtp'\n", 2
    done = CliRunner().invoke(app, ["top", "gtp", "--address", "http://head:8265"])
    assert done.exit_code == 2
    assert "no running job is called 'gtp'" in done.stderr


def test_it_ends_there_when_it_is_left_here(elsewhere: type[Elsewhere]) -> None:
    elsewhere.prints, elsewhere.error = json.dumps(sample()) + "\n", KeyboardInterrupt()
    done = CliRunner().invoke(app, ["top", "gpt", "--address", "http://head:8265"])
    assert done.exit_code == 130
    assert Elsewhere.ended == "raysubmit_1"
