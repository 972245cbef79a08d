"""`rayzero submit`, `ls`, `status`, `logs`, `stop`, `resume`: jobs by their names."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.redact import redact_url, redacted_keys
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.cli.remote import with_exit_code
from rayzero.orchestrator.cli.run import run_spec
from rayzero.orchestrator.cluster.connect import connect_each, find_clusters
from rayzero.orchestrator.cluster.ray_api import AuthRefusedError
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job import client
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord, list_ended
from rayzero.orchestrator.job.lease_holder import acquire_lease
from rayzero.orchestrator.job.lookup import (
    DEFAULT_CHECKPOINT_PATH,
    NoJournalError,
    check_job_name,
    find_any,
    find_running,
    job_folder,
    list_journaled_jobs,
    load_run_history,
    status_from_journal,
)
from rayzero.orchestrator.job_file import load_job
from rayzero.orchestrator.journal.writer import JournalSegments, JournalWriter
from rayzero.orchestrator.results import JobStatus
from rayzero.orchestrator.spec import JobSpec

STOP_MARGIN_S = 15.0
"""How long a stop may take beyond `checkpoint.notice_s`."""
ACCEPT_TIMEOUT_S = 60.0
"""How long a job's process may take to start, and to say that it takes the job."""
CALL_TIMEOUT_S = 15.0
"""How long one that runs may take to answer."""
POLL_S = 0.5


@with_exit_code
def submit_job(path: Path, overrides: Sequence[str], address: str | None) -> int:
    """Starts a job that goes on without this process."""
    spec = load_job(path, overrides)
    cluster = address or os.environ.get("RAY_ADDRESS") or _require_one_cluster(find_clusters(None))
    handle = Job.from_spec(spec).submit(cluster)
    until_s = time.monotonic() + ACCEPT_TIMEOUT_S
    while not handle.wait(0.1) and time.monotonic() < until_s:
        with suppress(JobFailedError):  # it is still starting, or the next look says what it was
            if handle.status().state not in (None, "pending"):
                break
    if handle.wait(0):
        handle.result()
    else:
        handle.close()
    print(f"{spec.name}: submitted; `rayzero logs -f {spec.name}` follows it")
    return 0


@with_exit_code
def print_jobs(address: str | None, path: str, as_json: bool, ended: bool) -> int:
    """Jobs that run in the cluster, and those with a journal in a folder; with `ended` those too
    that the cluster knows the end of."""
    found = {one.name: one for one in _cluster_statuses(address, ended)}
    for name in list_journaled_jobs(path):
        if name not in found:
            found[name] = status_from_journal(path, name)
    if as_json:
        print(json.dumps([asdict(one) for one in found.values()]))
        return 0
    for one in found.values():
        print(f"{one.name}: {status_line(one)}")
    if not found:
        print(f"no job runs here, and {redact_url(path)!r} has no journal of one", file=sys.stderr)
    return 0


@with_exit_code
def print_status(name: str, address: str | None, path: str | None, as_json: bool) -> int:
    """How one job stands, or stood."""
    check_job_name(name)
    status = _find_status(name, address, path)
    if as_json:
        print(json.dumps(asdict(status)))
        return 0
    print(f"{name}: {status_line(status)}")
    for key, value in asdict(status).items():
        if key not in ("name", "state", "step", "steps") and value not in (None, "", 0, {}):
            print(f"  {key}: {_format_field(key, value)}")
    return 0


@with_exit_code
def stop_job(name: str, address: str | None, path: str) -> int:
    """Ends a job cleanly and waits for that; gives a lost run up, so that it is not adopted."""
    check_job_name(name)
    try:
        found = find_running(name, address)
    except ConfigError as absent:
        return _abandon_lost_run(name, path, absent)
    limit_s = STOP_MARGIN_S + found.spec.checkpoint.notice_s
    until_s = time.monotonic() + limit_s
    try:
        found.call("stop")
        while time.monotonic() < until_s:
            if found.call("spec") is None:
                break
            time.sleep(POLL_S / 5)
        else:
            raise JobFailedError(f"{name}: it did not stop within {limit_s:g} s")
        with suppress(JobFailedError):
            found.call("acknowledge_end")
    except JobFailedError as gone:
        if client.find_job_actor(name) is not None:
            raise gone from None
    finally:
        found.cluster.close()
    print(f"{name}: stopped")
    return 0


@with_exit_code
def resume_job(name: str, address: str | None, path: str, as_json: bool) -> int:
    """Runs a job again by the spec in its journal, and follows it."""
    last = load_run_history(path, check_job_name(name))
    if last.by_value or (taken := list(redacted_keys(last.spec))):
        missing = "its training function" if last.by_value else ", ".join(taken)
        raise ConfigError(
            f"job {name!r} cannot be resumed from its journal, which does not hold {missing}",
            fix="submit its job file or run its script again: it goes on where it was",
        )
    spec = validate_document(JobSpec, last.spec, f"the journal of job {name!r}")
    if Path(last.working_dir).is_dir():
        os.chdir(last.working_dir)
    return run_spec(spec, address, as_json)


def status_line(status: JobStatus) -> str:
    """`running at step 12 of 100, 2 workers`"""
    state = "lost, can be resumed" if status.state is None else str(status.state)
    steps = f" of {status.steps}" if status.steps else ""
    workers = f", {status.world_size} worker{'s' * (status.world_size != 1)}"
    error = f": {status.error}" if status.error and status.state == "failed" else ""
    return f"{state} at step {status.step}{steps}{workers if status.is_running else ''}{error}"


def _find_status(name: str, address: str | None, path: str | None) -> JobStatus:
    """Of a running job from its process, else from its journal or the cluster."""
    try:
        found = find_any(name, address)
    except ConfigError as absent:
        try:
            return status_from_journal(path or DEFAULT_CHECKPOINT_PATH, name)
        except NoJournalError:
            raise absent from None
    if isinstance(found, EndedJobRecord):
        return found.status if path is None else status_from_journal(path, name)
    with closing(found.cluster):
        status: JobStatus = found.call("status")
        return status


def _cluster_statuses(address: str | None, ended: bool) -> Iterator[JobStatus]:
    """Those that run come behind those that have ended."""
    try:
        for _ in connect_each(address):
            yield from (one.status for one in (list_ended() if ended else ()))
            for name in client.list_running():
                with suppress(RayzeroError):  # it has just ended
                    yield client.call(
                        client.find_job_actor(name), "status", timeout_s=CALL_TIMEOUT_S
                    )
    except ConfigError as error:
        if address is not None or isinstance(error, AuthRefusedError):
            raise  # else there is none on this machine


def _abandon_lost_run(name: str, path: str, absent: ConfigError) -> int:
    try:
        last = load_run_history(path, name)
    except ConfigError:
        raise absent from None
    if last.end_state:
        print(f"{name}: it has {last.end_state} before")
        return 0
    lines: list[str] = []
    JournalWriter(lines.append).append("ended", state="stopped", error="given up by `rayzero stop`")
    lease_s = last.spec["checkpoint"].get("lease_s", 20.0)
    lease = acquire_lease(job_folder(path, name), name, lease_s, partial(print, file=sys.stderr))
    try:
        JournalSegments(job_folder(path, name)).write(lines)
    finally:
        lease.release()
    print(f"{name}: the lost run is given up; it stood at step {last.step}")
    return 0


def _require_one_cluster(found: Sequence[str]) -> str:
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} Ray clusters run on this machine: {', '.join(found)}",
            fix="--address or RAY_ADDRESS, which say which of them",
        )
    return found[0]


def _format_field(key: str, value: Any) -> str:
    if key.endswith("at_s"):
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
