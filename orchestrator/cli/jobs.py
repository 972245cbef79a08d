"""`rayzero ls`, `status`, `stop`, `scale`: jobs by name."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.orchestrator.cli.command import (
    JOBS_FOLDER,
    ClusterAddress,
    JobName,
    JobsPath,
    JsonValueFlag,
    OptionalJobsPath,
    RoleName,
    cluster_command,
    new_group,
)
from rayzero.orchestrator.top.format import (
    count_of,
    cut_text,
    format_duration,
    format_number,
    format_time,
    printable_text,
    table_lines,
)

if TYPE_CHECKING:
    from rayzero.orchestrator.job.lookup import RunningJob
    from rayzero.orchestrator.results import EndedJob, JobStatus

commands = new_group()

STOP_POLL_S = 0.1
PLAIN_WIDTH = 140
"""Width of a table, in columns, if stdout is not a terminal."""

_HEADS = ("name", "state", "workers", "age", "step", "loss", "")


@commands.command(epilog="Example: rayzero ls --json")
@cluster_command
def ls(
    address: ClusterAddress = None,
    path: JobsPath = JOBS_FOLDER,
    running: Annotated[bool, typer.Option("--running", help="Only running jobs.")] = False,
    as_json: JsonValueFlag = False,
) -> None:
    """List jobs, the newest first: running jobs, ended jobs of which the cluster has a record, and
    jobs with a journal in a folder. `rayzero status NAME` shows a job with its whole error."""
    from rayzero.engine.redact import redact_url
    from rayzero.orchestrator.job.lookup import list_journaled_jobs

    found = {status.name: status for status in _cluster_statuses(address, ended=not running)}
    if not running:
        for name in list_journaled_jobs(path):
            if name not in found:
                found[name] = _journaled_status(path, name)
    jobs = sorted(found.values(), key=lambda job: job.began_at_s or job.at_s, reverse=True)
    if as_json:
        print(json.dumps([asdict(status) for status in jobs]))
        return
    if not jobs:
        others = f", none has ended, and none has a journal in {redact_url(path)!r}"
        print(f"no job is running{'' if running else others}", file=sys.stderr)
        return
    for line in job_table(jobs, time.time(), output_width()):
        print(line)


@commands.command(epilog="Example: rayzero status gpt")
@cluster_command
def status(
    name: JobName,
    address: ClusterAddress = None,
    path: OptionalJobsPath = None,
    as_json: JsonValueFlag = False,
) -> None:
    """Print the state of a job; for a job that is not running, its last known state.

    Exit code 0: printed. 1: the job did not respond. 2: no such job.
    """
    from rayzero.orchestrator.job.actor import JobActor
    from rayzero.orchestrator.job.lookup import RunningJob
    from rayzero.orchestrator.results import EndedJob

    job = find_job(name, address, path)
    if isinstance(job, RunningJob):
        with closing(job.cluster):
            status = job.process.call(JobActor.status)
    else:
        status = job.status if isinstance(job, EndedJob) else job
    if as_json:
        print(json.dumps(asdict(status)))
        return
    print(f"{name}: {status.describe()}")
    for label, text in _status_fields(status):
        print(f"  {label}: {text}")


@commands.command(epilog="Example: rayzero stop gpt")
@cluster_command
def stop(name: JobName, address: ClusterAddress = None, path: JobsPath = JOBS_FOLDER) -> None:
    """Stop a job; with checkpoint.every_steps, after a last checkpoint. A lost run is marked as
    stopped and not adopted again.

    Exit code 0: it has stopped. 1: it did not stop in time. 2: no such job.
    """
    from rayzero.orchestrator.errors import JobFailedError
    from rayzero.orchestrator.job.actor import JobActor
    from rayzero.orchestrator.job.client import JobProcess
    from rayzero.orchestrator.job.handle import stop_limit_s
    from rayzero.orchestrator.job.lookup import check_job_name, find_running
    from rayzero.workers.lifetimes import end_owned

    try:
        job = find_running(check_job_name(name), address)
    except ConfigError as not_found:
        check_may_be_lost(not_found, address)
        ended = _end_leftovers(name, address)
        try:
            _abandon_lost_run(name, path, not_found)
        except ConfigError:
            if not ended:
                raise
        return
    limit_s = stop_limit_s(job.spec)
    deadline_s = time.monotonic() + limit_s
    with closing(job.cluster):
        try:
            job.process.call(JobActor.stop)
            while job.process.call(JobActor.spec) is not None:
                if time.monotonic() >= deadline_s:
                    raise JobFailedError(
                        f"job {name!r} did not stop within {limit_s:g} s",
                        fix="set a longer checkpoint.grace_period_s for its last checkpoint",
                    )
                time.sleep(STOP_POLL_S)
            with suppress(JobFailedError):
                job.process.call(JobActor.acknowledge_end)
        except JobFailedError:
            if JobProcess.find(name) is not None:
                raise
            end_owned(name)
    print(f"{name}: stopped")


@commands.command(epilog="Example: rayzero scale gpt 2:8")
@cluster_command
def scale(
    name: JobName,
    workers: Annotated[
        str,
        typer.Argument(
            help="Minimum and maximum number of workers, or one number.", metavar="MIN:MAX"
        ),
    ],
    role: RoleName = "",
    address: ClusterAddress = None,
) -> None:
    """Change the number of workers of a running job at a step boundary, or of one of its roles.

    Exit code 0: accepted. 1: the job did not respond. 2: no such job, or a number of workers that
    the job cannot have.
    """
    from rayzero.orchestrator.job.actor import JobActor
    from rayzero.orchestrator.job.lookup import find_running
    from rayzero.orchestrator.job_file import parse_worker_limits

    limits = parse_worker_limits(workers)
    job = find_running(name, address)
    with closing(job.cluster):
        print(job.process.call(JobActor.scale, *limits, role))


def find_job(name: str, address: str | None, path: str | None) -> RunningJob | EndedJob | JobStatus:
    """Returns the running job, or else its last status. With a `path` the status is from the
    journal there; otherwise from the cluster's record, or else from the journal in the default
    folder. Raises as `find_any`."""
    from rayzero.orchestrator.job import lookup

    try:
        job = lookup.find_any(lookup.check_job_name(name), address)
    except ConfigError as not_found:
        check_may_be_lost(not_found, address)
        try:
            return lookup.status_from_journal(path or JOBS_FOLDER, name)
        except lookup.NoJournalError:
            raise not_found from None
    if path is None or isinstance(job, lookup.RunningJob):
        return job
    return lookup.status_from_journal(path, name)


def check_may_be_lost(error: ConfigError, address: str | None) -> None:
    """Raises the error again if the given address cannot be a cluster's. If RAY_ADDRESS has the
    address of a cluster that has ended, only prints a note, because a job's journal may be left."""
    from rayzero.orchestrator.cluster.addresses import AddressError, NothingListensError

    has_ended = isinstance(error, NothingListensError)
    if isinstance(error, AddressError) and (address is not None or not has_ended):
        raise error
    if has_ended:
        print(f"note: {error.seen}; fix: {error.fix}", file=sys.stderr)


def _journaled_status(path: str, name: str) -> JobStatus:
    """Calls `status_from_journal`. For a journal that cannot be read, returns a status with only
    the error."""
    from rayzero.orchestrator.job.lookup import status_from_journal
    from rayzero.orchestrator.results import JobStatus

    try:
        return status_from_journal(path, name)
    except RayzeroError as error:
        return JobStatus(name, None, error=first_line(error))


def _cluster_statuses(address: str | None, ended: bool) -> Iterator[JobStatus]:
    """Yields the status of each job of the clusters. Ended jobs come first, so that a running job
    of the same name replaces them."""
    from rayzero.orchestrator.cluster.connect import connect_each
    from rayzero.orchestrator.cluster.ray_api import AuthRefusedError
    from rayzero.orchestrator.job.actor import JobActor
    from rayzero.orchestrator.job.client import list_running
    from rayzero.orchestrator.job.ended_jobs import list_ended

    try:
        for _ in connect_each(address):
            if ended:
                yield from (record.status for record in list_ended())
            for process in list_running():
                with suppress(RayzeroError):  # the job has ended meanwhile
                    yield process.call(JobActor.status)
    except ConfigError as error:
        if address is not None or isinstance(error, AuthRefusedError):
            raise
        check_may_be_lost(error, address)  # otherwise no cluster runs on this machine


def _end_leftovers(name: str, address: str | None) -> int:
    """Ends what a lost job has left in its cluster, if that still runs. Returns the number."""
    from rayzero.orchestrator.job.lookup import end_leftovers

    try:
        number = end_leftovers(name, address)
    except ConfigError:
        return 0
    if number:
        print(f"{name}: ended {number} actors and reservations that it had left")
    return number


def _abandon_lost_run(name: str, path: str, not_found: ConfigError) -> None:
    """Writes into the journal of a run whose process is lost that the run was stopped."""
    from rayzero.orchestrator.job.claims import new_claim
    from rayzero.orchestrator.job.lease import acquire_lease
    from rayzero.orchestrator.job.lookup import NoJournalError, job_folder, load_run_history
    from rayzero.orchestrator.journal.files import write_end

    try:
        last_run = load_run_history(path, name)
    except NoJournalError:
        raise not_found from None
    if last_run.end_state:
        print(f"{name}: not running, it has {last_run.end_state} already")
        return
    folder = job_folder(path, name)
    lease_s = last_run.spec["checkpoint"].get("lease_s", 20.0)
    lease = acquire_lease(folder, new_claim(name, lease_s), partial(print, file=sys.stderr))
    try:
        write_end(folder, last_run, "stopped by `rayzero stop`")
    finally:
        lease.release()
    print(f"{name}: the lost run is marked as stopped; its last step is {last_run.step}")


def _status_fields(status: JobStatus) -> Iterator[tuple[str, str]]:
    """Yields label and text of each value that `describe` does not show."""
    if status.loss is not None:
        yield "loss", f"{status.loss:.6g}"
    if status.is_running:
        yield "workers", f"{status.world_size} (of {status.workers_min} to {status.workers_max})"
    for name, role in status.roles.items():
        limits = f"{role.workers_min} to {role.workers_max}"
        text = f"{limits} workers"
        if status.is_running:
            text = f"{count_of(role.workers, 'worker')} (of {limits})"
        yield f"role {name}", text + (f", {role.finished} finished" if role.finished else "")
        if role.faults:
            counts = ", ".join(f"{cause} {count}" for cause, count in role.faults.items())
            yield f"faults of {name}", counts
    if status.remaining_s is not None:
        yield "time left", format_duration(status.remaining_s)
    if status.goodput is not None:
        yield "goodput", f"{status.goodput:.1%} of the time went into steps that count"
    if status.began_at_s:
        yield "began", format_time(status.began_at_s)
    if status.at_s:
        yield "as of" if status.is_running else "ended", format_time(status.at_s)
    if status.faults:
        counts = ", ".join(f"{name} {count}" for name, count in status.faults.items())
        yield "faults", f"{counts}; repaired: {status.repairs}"
    if status.checkpoint_step is not None:
        yield "newest checkpoint", f"step {status.checkpoint_step}"
    for label, text in (("journal", status.journal), ("log", status.log), ("error", status.error)):
        if text:
            yield label, text


def output_width() -> int:
    """Returns the width of the terminal; `PLAIN_WIDTH` for a pipe or a file."""
    return get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH


def job_table(jobs: Sequence[JobStatus], now_s: float, width: int) -> Iterator[str]:
    """Yields a header line, and a line for each job. Lines are cut to `width`."""
    rows = [_row(job, now_s) for job in jobs]
    for line in table_lines([_HEADS, *rows], left=(0, 1)):
        yield cut_text(line, width)


def _row(job: JobStatus, now_s: float) -> tuple[str, ...]:
    if job.state is None and job.error:
        return (job.name, "unreadable", *["-"] * 4, printable_text(job.error))
    return (
        job.name,
        "lost" if job.state is None else str(job.state),
        str(job.world_size),
        format_duration(now_s - job.began_at_s if job.began_at_s else None),
        f"{job.step}/{job.steps}" if job.steps else str(job.step),
        format_number(job.loss),
        printable_text(_remark(job)),
    )


def _remark(job: JobStatus) -> str:
    """Returns why a failed job failed, or the command that resumes a lost job."""
    if job.state is None:
        step = job.checkpoint_step
        origin = "starts from scratch" if step is None else f"continues from step {step}"
        return f"`rayzero resume {job.name}` {origin}"
    return job.error if job.state == "failed" else ""
