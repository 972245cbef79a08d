"""Job names are folder names: no name may lead out of the folder of jobs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.errors import ConfigError
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.cli.jobs import _status_fields
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.lookup import (
    check_job_name,
    check_journal_owner,
    job_folder,
    status_from_journal,
)
from rayzero.orchestrator.job_events import (
    RoleFault,
    RoleLimitsChanged,
    RoleWorkerEnded,
    RoleWorkerReady,
    RunBegun,
    RunEnded,
)
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.journal.entries import facts_json
from rayzero.orchestrator.journal.files import state_url
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import JobStatus, RoleStatus
from rayzero.orchestrator.spec import JobSpec, RoleSpec
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.vault.server import make_address

HOSTILE = ["..", ".", "", "../x", "/etc", "a/b", "a\\b/..", "a\0", "a\n", "\u202ea", "x" * 64]
HOSTILE += ["-a", ".a", " a", "a ", "a%2f", "\uff41", "~", "a?b", "a@b", "\ud800", "\u0430"]
NAMES = st.text(max_size=70) | st.lists(
    st.sampled_from(["..", ".", "/", "a", "Z9", "-", "_", "\0", "\n", "é", "@", "?", "\\"]),
    max_size=8,
).map("".join)


def as_spec(name: str) -> str:
    return validate_document(JobSpec, {"name": name, "entrypoint": "m:f"}, "job").name


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_name_is_rejected_everywhere(name: str):
    for check in (check_job_name, as_spec, lambda name: job_folder("runs", name)):
        with pytest.raises(ConfigError):
            check(name)


@given(NAMES)
def test_job_file_and_commands_accept_same_names(name: str):
    results = []
    for check in (check_job_name, as_spec):
        try:
            results.append(check(name) == name)
        except ConfigError:
            results.append(False)
    assert results[0] == results[1]
    if results[0]:
        path = os.path.normpath(state_url(job_folder("/top/runs", name)))
        assert path == f"/top/runs/{name}/job.json"
        assert (
            job_folder("s3://k:s@bucket/runs?region=x", name)
            == f"s3://k:s@bucket/runs/{name}?region=x"
        )


@given(NAMES)
def test_vault_address_is_plain_for_any_job_name(name: str):
    address = make_address(name)
    assert len(address) < 100
    assert address.isascii()
    assert not {"/", "\0", "\n"} & set(address)


@pytest.mark.parametrize("place", ["gpt", "gpt/job.json", "gpt/journal", "gpt/journal/x.jsonl"])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_resume_refuses_a_journal_that_others_can_write(
    place: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """To resume imports the entry point that a journal names."""
    (tmp_path / "gpt/journal").mkdir(parents=True, mode=0o700)
    for file in ("gpt/job.json", "gpt/journal/x.jsonl"):
        (tmp_path / file).touch(mode=0o600)
    check_journal_owner(str(tmp_path), "gpt")
    (tmp_path / place).chmod(mode)
    monkeypatch.setattr("rayzero.orchestrator.job.lookup._is_own_group", lambda gid: False)
    with pytest.raises(ConfigError, match=r"(?s)other users can write .*chmod -R go-w"):
        check_journal_owner(str(tmp_path), "gpt")


def test_resume_refuses_a_journal_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gpt").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: 4242)
    if os.stat(tmp_path).st_uid == 0:
        os.chown(tmp_path / "gpt", 4243, -1)
    with pytest.raises(ConfigError, match="other users can write"):
        check_journal_owner(str(tmp_path), "gpt")


def test_status_of_an_ended_job_has_its_roles(tmp_path: Path):
    spec = JobSpec(name="gpt", entrypoint="m:f", roles={"play": RoleSpec(entrypoint="m:play")})
    worker = WorkerInfo(0, "a", "a", "1.2.3.4", 7)
    facts = JobFacts(1.0)
    for event in (
        RunBegun("1", to_document(spec), "/", by_value=False),
        RoleWorkerReady("play", 0, worker, 1),
        RoleFault("play", 0, "lost", worker, "killed", 0),
        RoleLimitsChanged("play", 2, 5),
        RoleWorkerReady("play", 0, worker, 1),
        RoleWorkerEnded("play", 0, 0, has_returned=True),
        RunEnded("succeeded"),
    ):
        facts = facts.apply(event, 2.0)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt/job.json").write_bytes(facts_json(facts))
    status = status_from_journal(str(tmp_path), "gpt")
    assert status.roles == {"play": RoleStatus(0, 2, 5, finished=1, faults={"lost": 1})}
    assert dict(_status_fields(status))["role play"] == "2 to 5 workers, 1 finished"


def test_status_of_a_job_that_is_starting() -> None:
    plan = SimpleNamespace(spec=SimpleNamespace(name="gpt"), journal_url="j", log_path=Path("l"))
    actor: Any = SimpleNamespace(_run=None, _plan=plan)
    status = asyncio.run(JobActor.status(actor))
    assert status == JobStatus("gpt", State.PENDING, at_s=status.at_s, journal="j", log="l")
