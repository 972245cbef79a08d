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
from rayzero.engine.masking import hidden, masked
from rayzero.engine.validation import validated
from rayzero.orchestrator.admission import RefusedError
from rayzero.orchestrator.api import Job
from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.cli.run import run_spec
from rayzero.orchestrator.cluster import clusters, each
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.finding import find, look
from rayzero.orchestrator.head import reach
from rayzero.orchestrator.head.outcome import JobStatus
from rayzero.orchestrator.head.records import Record, recorded
from rayzero.orchestrator.journal.chronicle import Chronicle
from rayzero.orchestrator.journal.segments import Segments
from rayzero.orchestrator.lease.holding import take
from rayzero.orchestrator.loading import load_job
from rayzero.orchestrator.places import (
    DEFAULT_PATH,
    NoJournalError,
    archive,
    checked_name,
    names,
    past,
    remembered,
)
from rayzero.orchestrator.spec import JobSpec

STOP_S = 15.0
"""How long a stop may take beyond `checkpoint.notice_s`."""
ACCEPT_S = 60.0
"""How long a job's process may take to start, and to say that it takes the job."""
ANSWER_S = 15.0
"""How long one that runs may take to answer."""
LOOK_S = 0.5


@with_exit_code
def submit_job(path: Path, overrides: Sequence[str], address: str | None) -> int:
    """Starts a job that goes on without this process."""
    spec = load_job(path, overrides)
    cluster = address or os.environ.get("RAY_ADDRESS") or _only(clusters(None))
    handle = Job.from_spec(spec).submit(cluster)
    until_s = time.monotonic() + ACCEPT_S
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
def list_jobs(address: str | None, path: str, as_json: bool, ended: bool) -> int:
    """Jobs that run in the cluster, and those with a journal in a folder; with `ended` those too
    that the cluster knows the end of."""
    found = {one.name: one for one in _known(address, ended)}
    for name in names(path):
        if name not in found:
            found[name] = remembered(path, name)
    if as_json:
        print(json.dumps([asdict(one) for one in found.values()]))
        return 0
    for one in found.values():
        print(f"{one.name}: {line(one)}")
    if not found:
        print(f"no job runs here, and {masked(path)!r} has no journal of one", file=sys.stderr)
    return 0


@with_exit_code
def show_status(name: str, address: str | None, path: str | None, as_json: bool) -> int:
    """How one job stands, or stood."""
    checked_name(name)
    status = _status(name, address, path)
    if as_json:
        print(json.dumps(asdict(status)))
        return 0
    print(f"{name}: {line(status)}")
    for key, value in asdict(status).items():
        if key not in ("name", "state", "step", "steps") and value not in (None, "", 0, {}):
            print(f"  {key}: {_shown(key, value)}")
    return 0


@with_exit_code
def stop_job(name: str, address: str | None, path: str) -> int:
    """Ends a job cleanly and waits for that; gives a lost run up, so that it is not adopted."""
    checked_name(name)
    try:
        found = find(name, address)
    except ConfigError as absent:
        return _give_up(name, path, absent)
    limit_s = STOP_S + found.spec.checkpoint.notice_s
    until_s = time.monotonic() + limit_s
    try:
        found.ask("stop")
        while time.monotonic() < until_s:
            if found.ask("spec") is None:
                break
            time.sleep(LOOK_S / 5)
        else:
            raise JobFailedError(f"{name}: it did not stop within {limit_s:g} s")
        with suppress(JobFailedError):
            found.ask("fetched")
    except JobFailedError as gone:
        if reach.find(name) is not None:
            raise gone from None
    finally:
        found.cluster.close()
    print(f"{name}: stopped")
    return 0


@with_exit_code
def resume_job(name: str, address: str | None, path: str, as_json: bool) -> int:
    """Runs a job again by the spec in its journal, and follows it."""
    last = past(path, checked_name(name))
    if last.by_value or (taken := list(hidden(last.spec))):
        missing = "its training function" if last.by_value else ", ".join(taken)
        raise ConfigError(
            f"job {name!r} cannot be resumed from its journal, which does not hold {missing}",
            fix="submit its job file or run its script again: it goes on where it was",
        )
    spec = validated(JobSpec, last.spec, f"the journal of job {name!r}")
    if Path(last.working_dir).is_dir():
        os.chdir(last.working_dir)
    return run_spec(spec, address, as_json)


def line(status: JobStatus) -> str:
    """`running at step 12 of 100, 2 workers`"""
    state = "lost, can be resumed" if status.state is None else str(status.state)
    steps = f" of {status.steps}" if status.steps else ""
    workers = f", {status.world_size} worker{'s' * (status.world_size != 1)}"
    error = f": {status.error}" if status.error and status.state == "failed" else ""
    return f"{state} at step {status.step}{steps}{workers if status.is_running else ''}{error}"


def _status(name: str, address: str | None, path: str | None) -> JobStatus:
    """Of a running job from its process, else from its journal or the cluster."""
    try:
        found = look(name, address)
    except ConfigError as absent:
        try:
            return remembered(path or DEFAULT_PATH, name)
        except NoJournalError:
            raise absent from None
    if isinstance(found, Record):
        return found.status if path is None else remembered(path, name)
    with closing(found.cluster):
        status: JobStatus = found.ask("status")
        return status


def _known(address: str | None, ended: bool) -> Iterator[JobStatus]:
    """Those that run come behind those that have ended."""
    try:
        for _ in each(address):
            yield from (one.status for one in (recorded() if ended else ()))
            for name in reach.running():
                with suppress(RayzeroError):  # it has just ended
                    yield reach.call(reach.find(name), "status", timeout_s=ANSWER_S)
    except ConfigError as error:
        if address is not None or isinstance(error, RefusedError):
            raise  # else there is none on this machine


def _give_up(name: str, path: str, absent: ConfigError) -> int:
    try:
        last = past(path, name)
    except ConfigError:
        raise absent from None
    if last.ended:
        print(f"{name}: it has {last.ended} before")
        return 0
    lines: list[str] = []
    Chronicle(lines.append).note("ended", state="stopped", error="given up by `rayzero stop`")
    lease_s = last.spec["checkpoint"].get("lease_s", 20.0)
    lease = take(archive(path, name), name, lease_s, partial(print, file=sys.stderr))
    try:
        Segments(archive(path, name)).write(lines)
    finally:
        lease.release()
    print(f"{name}: the lost run is given up; it stood at step {last.step}")
    return 0


def _only(found: Sequence[str]) -> str:
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} Ray clusters run on this machine: {', '.join(found)}",
            fix="--address or RAY_ADDRESS, which say which of them",
        )
    return found[0]


def _shown(key: str, value: Any) -> str:
    if key.endswith("at_s"):
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
