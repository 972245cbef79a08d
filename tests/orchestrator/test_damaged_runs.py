"""A run whose files are damaged is a row with an error; it hides no other run, ends no command and
is never waited for: in `ls`, `status`, `top` and the page of all jobs."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cli.jobs import _status_fields, job_table
from rayzero.orchestrator.cluster import connect
from rayzero.orchestrator.job.lookup import status_from_journal
from rayzero.orchestrator.job_events import (
    Checkpointed,
    FaultDetected,
    FaultRecorded,
    Repaired,
    StateEntered,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.jobs_page import JobsPage, RunIndex
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.top.board import render_board, snapshot_line
from rayzero.orchestrator.top.follow import check_snapshot
from rayzero.workers.messages import WorkerInfo
from tests.orchestrator.page.sample import START_S, history, sample
from tests.orchestrator.support import begun, write_journal
from tests.support.mutations import mutate_text, mutate_tree, read_mutations, to_json

FILES = ("job.json", "snapshot.json", "history.json")


def write_run(runs: Path, name: str) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    spec = {"name": name, "steps": 50, "workers": {"min": 1, "max": 2}, "checkpoint": {}}
    formed = StateEntered(State.RUNNING, 1, 2, 7)
    step = StepRecord(9, 2, 1, 0.5, 0.0, 0.5, {})
    fault = Fault(FaultCause.HANG, WorkerInfo(0, "n", "n", "i", 7), 0, 9, "")
    recorded = [FaultRecorded(fault), FaultDetected("hang", fault.worker, 0, 9, "text")]
    repaired = Repaired("hang", ("rank 0",), 9, 0, 2, 2, {"load": 1.0})
    events = [formed, step, *recorded, repaired, Checkpointed(9, "f", 1, 0.1, 0.0)]
    write_journal(folder, begun(spec), *events, at_s=START_S)
    (folder / "snapshot.json").write_text(json.dumps(sample() | {"job": name}))
    curves = {"loss": [[1, 2.5, 2.0, 3.0, 0], [2, None, None, None, 60]], "lr": [[1, 3e-4]]}
    shown = history(name) | {"curves": curves, "log": ["step 1/50"]}  # else a mutation takes 80 ms
    (folder / "history.json").write_text(json.dumps(shown))
    return folder


def change(path: Path, *keys: str, to: str) -> None:
    """Replaces a value by this JSON text."""
    document = json.loads(path.read_text())
    part = document
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = "@"
    path.write_text(json.dumps(document).replace('"@"', to))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "too large": lambda path: os.truncate(path, 2**27),
    "fifo": fifo,
    "folder": folder,
    "device": device,
}
VALUES = [
    ("snapshot.json", ("progress",), "5"),
    *(("snapshot.json", ("progress", "step"), it) for it in ('"7"', "-1", "1e400", "9" * 40)),
    *(("snapshot.json", ("at_s",), it) for it in ("NaN", "1e18", "-1e18", "null")),
    ("snapshot.json", ("training", "loss"), "Infinity"),
    ("snapshot.json", ("goodput", "ratio"), "[]"),
    ("job.json", ("step",), '"many"'),
    ("job.json", ("began_at_s",), "1e300"),
    ("job.json", ("last_at_s",), "-1e300"),
    ("job.json", ("step",), "9" * 40),
    ("job.json", ("end_state",), '"gone"'),
]
CASES: list[tuple[str, Callable[[Path], object]]] = [
    *((name, damage) for name in FILES for damage in DAMAGES.values()),
    *((name, lambda path, k=keys, t=to: change(path, *k, to=t)) for name, keys, to in VALUES),  # type: ignore[misc]
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damaged_run_hides_no_other(
    name: str, damage: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connect, "local_head_addresses", set)
    write_run(tmp_path, "good")
    damage(write_run(tmp_path, "bad") / name)
    listed = CliRunner().invoke(app, ["ls", "--path", str(tmp_path)])
    assert listed.exit_code == 0, listed.output
    states = {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines()}
    bad_state = "unreadable" if name == "job.json" else "lost"
    assert states == {"name": "state", "good": "lost", "bad": bad_state}
    status = CliRunner().invoke(app, ["status", "bad", "--path", str(tmp_path)])
    assert status.exit_code == (0 if name != "job.json" else status.exit_code)
    assert isinstance(status.exception, SystemExit | None), status.exception
    if name == "job.json":
        assert status.exit_code in (1, 2)
        assert "job.json" in status.stderr
    with closing(JobsPage(str(tmp_path), "127.0.0.1", 0)) as page:
        for _ in range(2):  # then from the cache
            with urlopen(f"{page.url}jobs.json", timeout=10) as response:
                rows = {row["name"]: row for row in json.loads(response.read())["jobs"]}
            assert rows["good"]["step"] == sample()["progress"]["step"]
            assert not rows["good"]["error"]
            assert (name != "history.json") == bool(rows["bad"]["error"])
        for served in FILES[1:]:
            with urlopen(f"{page.url}jobs/good/{served}", timeout=10) as response:
                assert response.status == 200
        if name != "job.json":
            with pytest.raises(HTTPError) as refused:
                urlopen(f"{page.url}jobs/bad/{name}", timeout=10)
            assert refused.value.code == 422
            assert name in refused.value.read().decode()


def test_any_snapshot_is_shown_or_refused() -> None:
    """By `top`, as a board, a line and JSON."""

    def make(rng: random.Random) -> Any:
        return mutate_tree(sample() | {"format": 2}, rng)

    def show(value: Any) -> None:
        now = check_snapshot(value, "a job")
        for width in (20, 200):
            Console(file=io.StringIO(), width=width).print(render_board(now))
        assert "\n" not in snapshot_line(now)

    assert 0.2 < read_mutations(make, show, seed=11) < 0.99


@pytest.mark.parametrize("name", FILES)
def test_any_file_is_shown_or_refused(name: str, tmp_path: Path) -> None:
    """By `ls` and `status`, and by the page, whose index is always JSON that a browser reads."""
    write_run(tmp_path, "good")
    path = write_run(tmp_path, "bad") / name
    original = path.read_bytes()
    index = RunIndex(str(tmp_path))

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutate_text(original, rng)
        return to_json(mutate_tree(json.loads(original), rng))

    def show(content: bytes) -> None:
        path.write_bytes(content)
        rows = {row["name"]: row for row in json.loads(json.dumps(index.rows(), allow_nan=False))}
        assert rows["good"]["state"]
        if name == "job.json":
            status = status_from_journal(str(tmp_path), "bad")
            assert len([*job_table([status], START_S, 100)]) == 2
            assert [status.describe(), *_status_fields(status)]
        elif (served := index.file("bad", name)) is not None:
            json.loads(served)

    assert read_mutations(make, show, seed=12) > 0.1


def test_folder_of_jobs_itself_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    assert RunIndex(str(tmp_path / "runs")).rows() == []
    with pytest.raises(RayzeroError):
        status_from_journal(str(tmp_path / "runs"), "gpt")
