"""Logs top scale chaos doctor.

`rayzero logs`: all that a job printed and told.

`rayzero top`: a job as it stands, live in a terminal.

`rayzero scale`: another number of workers for a running job.

`rayzero chaos`: faults for a running job, the words for them, and random ones for a job file.

One question to a running job, for the commands that ask one.

`rayzero doctor`: what is found, in lines or as one JSON value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.remote import with_exit_code
from rayzero.orchestrator.cluster.connect import connect_each, head_address
from rayzero.orchestrator.doctor.collect import Finding, Severity, collect_facts
from rayzero.orchestrator.doctor.diagnose import diagnose, worst_severity
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.interfaces import InjectFaults, ScaleWorkers
from rayzero.orchestrator.job import client as reach
from rayzero.orchestrator.job.client import read_ended, tail_running
from rayzero.orchestrator.job.ended_jobs import load_ended
from rayzero.orchestrator.job.log import iter_log_lines
from rayzero.orchestrator.job.lookup import (
    DEFAULT_CHECKPOINT_PATH,
    NoJournalError,
    RunningJob,
    check_job_name,
    find_any,
    find_running,
    status_from_journal,
)
from rayzero.orchestrator.job_file import parse_worker_limits
from rayzero.orchestrator.top.follow import SnapshotParser, follow_job, open_display, show_snapshot
from rayzero.orchestrator.top.source import (
    SnapshotSource,
    SnapshotUnavailableError,
    check_snapshot,
    endpoint_source,
    is_url,
)
from rayzero.workers.chaos.spec import (
    FAULT_KINDS,
    PHASES,
    example_fault,
    fault_usage,
    parse_fault,
    random_faults,
)


@with_exit_code
def print_logs(
    name: str, address: str | None, path: str | None, follow: bool, rank: int | None
) -> int:
    """All that a job printed and told; with `follow` until its end."""
    check_job_name(name)
    try:
        found = find_any(name, address)
    except ConfigError as absent:
        try:
            return _print_from_disk(
                status_from_journal(path or DEFAULT_CHECKPOINT_PATH, name).log, rank
            )
        except NoJournalError:
            raise absent from None
    if isinstance(found, RunningJob):
        with closing(found.cluster):
            return _print_running(found, follow, rank)
    if path is not None:
        return _print_from_disk(status_from_journal(path, name).log, rank)
    if Path(found.status.log).is_file():
        return _print_from_disk(found.status.log, rank)
    return _print_from_head(name, address, rank)


def _print_running(found: RunningJob, follow: bool, rank: int | None) -> int:
    try:
        file = found.call("status").log
        _print_lines(iter_log_lines(tail_running(found.actor, file, follow), rank))
    except (reach.JobUnavailableError, reach.JobProcessLostError) as error:
        raise JobFailedError(f"job {found.spec.name!r}: {error.seen}") from None
    return 0


def _print_from_disk(file: str, rank: int | None) -> int:
    if not Path(file).is_file():
        raise ConfigError(
            f"the log of the job is not here: {file}",
            allowed="the machine that the job's controller was on, or its cluster's --address",
        )
    _print_lines(iter_log_lines(read_ended(file), rank))
    return 0


def _print_from_head(name: str, address: str | None, rank: int | None) -> int:
    """Through the cluster that knows of it."""
    for cluster in connect_each(address):
        if (record := load_ended(name)) is not None:
            with closing(cluster):
                try:
                    _print_lines(iter_log_lines(read_ended(record.status.log), rank))
                except reach.JobProcessLostError as error:
                    raise JobFailedError(f"job {name!r}: {error.seen}") from None
                return 0
    raise ConfigError(f"the log of job {name!r} is nowhere to be found")


def _print_lines(found: Iterable[str]) -> None:
    for line in found:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


_URL_SCHEMES = ("http://", "https://")


@with_exit_code
def watch_job(target: str, address: str | None, once: bool, as_json: bool) -> int:
    if address is not None and address.startswith(_URL_SCHEMES) and not is_url(target):
        return _watch_remotely(target, address, once, as_json)
    with _open_source(target, address) as source:
        (show_snapshot if once else follow_job)(source, as_json)
    return 0


def _watch_remotely(name: str, address: str, once: bool, as_json: bool) -> int:
    """From outside the cluster: the same command prints snapshots there, and they are shown here.
    It ends with this one, however this one ends."""
    # Here, because it brings ray with it, and an address does not need it.
    from rayzero.orchestrator.cli.remote import RemoteJobClient

    cluster = RemoteJobClient(address)
    job = cluster.submit(["top", name, "--json", *(["--once"] if once else [])], None)
    code: int | None = None
    try:
        with open_display(as_json, once) as show:
            told = SnapshotParser(show, f"job {name!r}")
            code = cluster.follow(job, told.feed)
    finally:
        if code is None:
            cluster.stop(job)
    if code:
        print("\n".join(told.other_lines), file=sys.stderr)
    return code


@contextmanager
def _open_source(target: str, address: str | None) -> Iterator[SnapshotSource]:
    """By address from the job's endpoint, by name from its process."""
    if is_url(target):
        yield endpoint_source(target)
        return
    # Here, because it brings ray with it, and an address does not need it.
    from rayzero.orchestrator.job.lookup import find_running

    found = find_running(target, address)

    def ask() -> dict[str, Any]:
        try:
            return check_snapshot(found.call("snapshot"), f"job {target!r}")
        except JobFailedError as error:
            raise SnapshotUnavailableError(error.seen) from None

    try:
        yield ask
    finally:
        found.cluster.close()


def call_job(name: str, address: str | None, method: str, *args: Any) -> Any:
    """The job's answer. Raises as `find` and `RunningJob.ask`."""
    found = find_running(name, address)
    try:
        return found.call(method, *args)
    finally:
        found.cluster.close()


@with_exit_code
def scale_job(name: str, wanted: str, address: str | None) -> int:
    """Asks the job and prints its answer; returns the process's exit code."""
    print(call_job(name, address, "execute", ScaleWorkers(*parse_worker_limits(wanted))))
    return 0


@with_exit_code
def inject_faults(name: str, faults: Sequence[str], address: str | None, as_json: bool) -> int:
    """Asks the job and prints what it scheduled; returns the process's exit code."""
    for text in faults:
        parse_fault(text, step=1)  # what is no fault in any job needs none to be found
    answer = call_job(name, address, "execute", InjectFaults(tuple(faults)))
    print(json.dumps({"job": name, "scheduled": answer.splitlines()}) if as_json else answer)
    return 0


def print_fault_language(as_json: bool) -> int:
    """Prints the fault language."""
    if as_json:
        print(json.dumps([_fault_kind_json(name) for name in FAULT_KINDS]))
        return 0
    for name, kind in FAULT_KINDS.items():
        print(f"{fault_usage(name)}\n    {kind.description}\n    {example_fault(name)}")
    print(f"\nphases: {', '.join(PHASES)}")
    print("how: flip, cut, remove")
    print("rank, node: from 0, in the order of ranks; step: from 1, or the first chance after it")
    return 0


@with_exit_code
def print_random_faults(count: int, seed: int, ranks: int, steps: int, as_json: bool) -> int:
    """Prints a schedule for a job file."""
    faults = [str(fault) for fault in random_faults(seed, count, ranks, steps)]
    schedule = {"faults": faults}
    print(json.dumps(schedule) if as_json else yaml.safe_dump(schedule, width=1000).rstrip())
    return 0


def _fault_kind_json(name: str) -> dict[str, Any]:
    kind = FAULT_KINDS[name]
    return {
        "word": name,
        "where": kind.target,
        "does": kind.description,
        "required": kind.required,
        "defaults": dict(kind.defaults),
        "example": str(example_fault(name)),
    }


@with_exit_code
def run_doctor(place: str, address: str | None, as_json: bool) -> int:
    """Prints the report; 1 if something keeps jobs from running."""
    findings = diagnose(collect_facts(place, head_address(address)))
    level = worst_severity(findings)
    if as_json:
        print(json.dumps({"level": level, "findings": [asdict(one) for one in findings]}))
    else:
        for line in report_lines(findings):
            print(line)
    return 1 if level is Severity.FAIL else 0


def report_lines(findings: list[Finding]) -> list[str]:
    """A line for each finding, and one for what to change."""
    width = max(len(one.name) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{one.level:<4}  {one.name:<{width}}  {one.seen}")
        if one.fix and one.level is not Severity.OK:
            lines.append(f"{'':<6}{'':<{width}}  to change it: {one.fix}")
    return lines
