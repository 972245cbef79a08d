"""Commands about jobs that do not run: what the journal tells of them, and where names may lead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import rayzero
from rayzero.orchestrator.cli import run
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.journal.files import JournalFiles, JournalUpdate
from rayzero.orchestrator.journal.writer import JournalWriter
from tests.orchestrator.support import plan


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def written(runs: Path, *notes: tuple[str, dict[str, Any]], **changes: Any) -> None:
    updates: list[JournalUpdate] = []
    made = plan(runs, **changes)
    note = JournalWriter(updates.append, now_s=lambda: 1000.0).append
    note(
        "begun",
        run="1",
        adopted=False,
        spec=to_document(made.spec),
        working_dir="/",
        by_value=False,
    )
    note("moved", state="running", event="e", generation=3, world_size=2, step=40)
    for kind, fields in notes:
        note(kind, **fields)
    JournalFiles(made.job_folder).write(updates)


def test_a_lost_job_is_told_as_such_listed_and_given_up(tmp_path: Path):
    written(tmp_path, steps=100)
    at = ("--path", tmp_path)
    told = command("status", "job", *at)
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("job: lost, can be resumed at step 40 of 100\n")
    assert command("ls", *at).stdout == "job: lost, can be resumed at step 40 of 100\n"
    gave = command("stop", "job", *at)
    assert gave.stdout == "job: the lost run is marked as stopped; its last step is 40\n"
    (status,) = json.loads(command("ls", "--json", *at).stdout)
    assert (status["state"], status["step"], status["generation"]) == ("stopped", 40, 3)
    assert command("stop", "job", *at).stdout == "job: not running, it has stopped already\n"


def test_where_no_job_is_that_is_said(tmp_path: Path):
    done = command("ls", "--path", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no job is running" in done.stderr
    assert json.loads(command("ls", "--json", "--path", tmp_path).stdout) == []


def test_the_version_is_told():
    assert command("--version").stdout == f"rayzero {rayzero.__version__}\n"


def test_why_a_job_failed_is_still_known(tmp_path: Path):
    written(tmp_path, ("ended", {"state": "failed", "error": "the data has a hole\nmore"}))
    told = command("status", "job", "--path", tmp_path).stdout
    assert told.startswith("job: failed at step 40: the data has a hole\n")


def test_what_was_taken_out_of_the_journal_cannot_be_resumed(tmp_path: Path):
    written(tmp_path, args={"hf_token": "abc"})
    done = command("resume", "job", "--path", tmp_path)
    assert done.exit_code == 2
    assert "which does not contain args.hf_token" in done.output


def test_a_job_is_resumed_by_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, steps=7, seed=3)
    ran: list[Any] = []
    monkeypatch.setattr(run, "run_with_console", lambda load, *_: ran.append(load()) or 0)
    monkeypatch.chdir(tmp_path)
    assert command("resume", "job", "--path", tmp_path).exit_code == 0
    assert (ran[0].name, ran[0].steps, ran[0].seed) == ("job", 7, 3)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "-x", "a" * 64, "a\n"])
@pytest.mark.parametrize("verb", ["status", "logs", "stop", "resume"])
def test_no_name_leads_out_of_the_folder_of_jobs(verb: str, name: str):
    done = command(verb, "--", name)
    assert done.exit_code == 2, done.output
    assert "is not a valid job name" in done.output


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_a_job_that_nobody_knows(verb: str, tmp_path: Path):
    done = command(verb, "nosuch", "--path", tmp_path)
    assert done.exit_code == 2
    assert "no Ray cluster runs on this machine" in done.output


def test_a_dashboard_that_does_not_answer():
    done = command("ls", "--address", "http://127.0.0.1:1")
    assert done.exit_code == 2
    assert "the cluster at http://127.0.0.1:1 rejected the request" in done.output
