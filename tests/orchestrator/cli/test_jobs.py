"""Commands for jobs that do not run: their journals, and invalid names."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner, Result

import rayzero
from rayzero.orchestrator.cli import run
from rayzero.orchestrator.cli.app import app
from rayzero.orchestrator.cli.jobs import PLAIN_WIDTH
from rayzero.orchestrator.job_events import Checkpointed, JobEvent, RunEnded, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics import jobs_page
from rayzero.orchestrator.metrics.jobs_page import JobsPage
from rayzero.orchestrator.progress import StepRecord
from tests.orchestrator import support
from tests.orchestrator.support import begun, plan


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def write_journal(
    runs: Path, *events: JobEvent, began_at_s: float = 1000.0, **changes: Any
) -> None:
    job = plan(runs, **changes)
    formed = StateEntered(State.RUNNING, 3, 2, 40)
    support.write_journal(job.job_folder, begun(job), formed, *events, at_s=began_at_s)


def test_lost_job_is_listed_and_marked_as_stopped(tmp_path: Path):
    write_journal(tmp_path, steps=100)
    path_option = ("--path", tmp_path)
    result = command("status", "job", *path_option)
    assert result.exit_code == 0, result.output
    origin = "starts from scratch: it has no checkpoint"
    line = f"job: lost at step 40 of 100; `rayzero resume job` {origin}\n"
    assert result.stdout.startswith(line)
    heads, row = command("ls", *path_option).stdout.splitlines()
    assert heads.split() == ["name", "state", "workers", "age", "step", "loss"]
    assert row.split()[:3] == ["job", "lost", "2"]
    assert row.endswith("40/100     -  `rayzero resume job` starts from scratch")
    stopped = command("stop", "job", *path_option)
    assert stopped.stdout == "job: the lost run is marked as stopped; its last step is 40\n"
    (status,) = json.loads(command("ls", "--json", *path_option).stdout)
    assert (status["state"], status["step"], status["generation"]) == ("stopped", 40, 3)
    stopped = command("stop", "job", *path_option)
    assert stopped.stdout == "job: not running, it has stopped already\n"


def test_lost_job_continues_from_its_newest_checkpoint(tmp_path: Path):
    stored = Checkpointed(30, f"{tmp_path}/job/step-30", 5, 0.1, 0.0)
    write_journal(tmp_path, stored, steps=100)
    row = command("ls", "--path", tmp_path).stdout.splitlines()[1]
    assert row.endswith("`rayzero resume job` continues from step 30")
    line, *lines = command("status", "job", "--path", tmp_path).stdout.splitlines()
    assert line == (
        "job: lost at step 40 of 100; `rayzero resume job` continues from its newest checkpoint, "
        "of step 30"
    )
    assert "  newest checkpoint: step 30" in lines
    assert not any("_s:" in line for line in lines)  # labels are words


def test_page_of_a_folder_is_served_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_journal(tmp_path, steps=100)

    def open_page(*options: Any) -> NoReturn:
        with (
            closing(JobsPage(*options)) as page,
            urlopen(page.url + "jobs.json", timeout=60) as answer,
        ):
            served.append(answer.read())
        raise KeyboardInterrupt

    served = list[bytes]()
    monkeypatch.setattr(jobs_page, "JobsPage", open_page)
    result = command("page", "--path", tmp_path, "--port", 0)
    assert result.exit_code == 130, result.output
    assert b'"job"' in served[0]


def test_ls_without_jobs(tmp_path: Path):
    result = command("ls", "--path", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no job is running" in result.stderr
    assert json.loads(command("ls", "--json", "--path", tmp_path).stdout) == []


def test_ls_is_a_table_of_the_newest_jobs_first(tmp_path: Path):
    """With the first line of an error, cut to the width, and a row for a damaged run."""
    step = StepRecord(41, 2, 3, 0.123456, 0.0, 0.5, {})
    ended = RunEnded("failed", f"the data has a hole {'x' * 200}\nmore")
    write_journal(tmp_path, step, ended, name="old", began_at_s=1000.0)
    write_journal(tmp_path, name="new", began_at_s=5000.0, steps=100)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "job.json").write_text('{"format": 2, "spec": {')
    result = command("ls", "--path", tmp_path)
    heads, *rows = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [row.split()[:3] for row in rows] == [
        *(["new", "lost", "2"], ["old", "failed", "2"], ["torn", "unreadable", "-"])
    ]
    assert rows[1].split("  the data")[0].split()[-2:] == ["41", "0.1235"]
    assert rows[1].index("the data has a hole") > heads.index("loss")
    assert len(rows[1]) == PLAIN_WIDTH
    assert rows[1].endswith("x…")
    assert rows[2].rpartition("-  ")[2].startswith("the journal ")
    jobs = json.loads(command("ls", "--json", "--path", tmp_path).stdout)
    assert [status["name"] for status in jobs] == ["new", "old", "torn"]
    line = command("status", "old", "--path", tmp_path).stdout.splitlines()[0]
    assert line.startswith("old: failed at step 41: the data has a hole")


def test_version_is_printed():
    assert command("--version").stdout == f"rayzero {rayzero.__version__}\n"


def test_job_with_redacted_values_cannot_be_resumed(tmp_path: Path):
    write_journal(tmp_path, args={"hf_token": "abc"})
    result = command("resume", "job", "--path", tmp_path)
    assert result.exit_code == 2
    assert "which does not contain args.hf_token" in result.output


def test_job_is_resumed_from_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_journal(tmp_path, steps=7, seed=3)
    specs: list[Any] = []
    monkeypatch.setattr(run, "run_with_console", lambda load, *_: specs.append(load()) or 0)
    monkeypatch.chdir(tmp_path)
    assert command("resume", "job", "--path", tmp_path).exit_code == 0
    assert (specs[0].name, specs[0].steps, specs[0].seed) == ("job", 7, 3)


@pytest.mark.parametrize(
    ("subcommand", "name"),
    [
        *(("status", name) for name in ("../x", "a/b", "", ".hidden", "-x", "a" * 64, "a\n")),
        *((subcommand, "../x") for subcommand in ("logs", "stop", "resume")),
    ],
)
def test_invalid_names_are_rejected(subcommand: str, name: str):
    result = command(subcommand, "--", name)
    assert result.exit_code == 2, result.output
    assert "is not a valid job name" in result.output


def test_unknown_job(tmp_path: Path):
    for subcommand in ("status", "logs", "stop"):
        result = command(subcommand, "nosuch", "--path", tmp_path)
        assert result.exit_code == 2
        assert "no Ray cluster runs on this machine" in result.output
