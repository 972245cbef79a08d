"""`rayzero logs`, `rayzero top`: what a job prints and how it progresses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.command import (
    DASHBOARD_SCHEMES,
    ClusterAddress,
    JobName,
    OptionalJobsPath,
    cluster_command,
    local_command,
    new_group,
)

if TYPE_CHECKING:
    from rayzero.orchestrator.top.source import SnapshotSource

commands = new_group()


@commands.command(epilog="Example: rayzero logs -f gpt")
@cluster_command
def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the job ends.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only what this rank prints.", metavar="RANK")
    ] = None,
    address: ClusterAddress = None,
    path: OptionalJobsPath = None,
) -> None:
    """Print a job's log: the output of its workers, and its events.

    Exit code 0: printed. 1: the job did not respond. 2: no such job, or its log is on another
    machine.
    """
    from rayzero.orchestrator.job.client import tail_log
    from rayzero.orchestrator.job.log import iter_log_lines
    from rayzero.orchestrator.job.lookup import (
        DEFAULT_CHECKPOINT_PATH,
        NoJournalError,
        RunningJob,
        check_job_name,
        find_any,
        status_from_journal,
    )

    try:
        job = find_any(check_job_name(name), address)
    except ConfigError as not_found:
        try:
            status = status_from_journal(path or DEFAULT_CHECKPOINT_PATH, name)
        except NoJournalError:
            raise not_found from None
        _print_from_disk(status.log, rank)
        return
    if isinstance(job, RunningJob):
        with closing(job.cluster):
            _print_lines(iter_log_lines(tail_log(job.process, follow), rank))
    elif path is not None:
        _print_from_disk(status_from_journal(path, name).log, rank)
    elif Path(job.status.log).is_file():
        _print_from_disk(job.status.log, rank)
    else:
        _print_from_head(name, address, rank)


@commands.command(epilog="Example: rayzero top gpt, rayzero top http://127.0.0.1:9400")
@local_command
def top(
    job: Annotated[
        str,
        typer.Argument(
            help="Name of the job, or the URL of its metrics endpoint (metrics.port).",
            metavar="NAME|URL",
        ),
    ],
    address: ClusterAddress = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the job's snapshots as JSON lines.")
    ] = False,
) -> int:
    """Watch a job: state, progress, loss, ranks, faults, lost time and checkpoints.

    By name in the cluster of --address; or by the URL of its metrics endpoint, from any machine
    that can connect to it.

    Exit code 0: the job has ended, in whatever state. 1: the job did not respond. 2: no such job or
    address. 130: interrupted by Ctrl-C.
    """
    from rayzero.orchestrator.top.follow import follow_job
    from rayzero.orchestrator.top.source import is_url

    if address is not None and address.startswith(DASHBOARD_SCHEMES) and not is_url(job):
        return _watch_remotely(job, address, once, as_json)
    with _open_source(job, address) as source:
        follow_job(source, as_json, once)
    return 0


def _print_from_disk(file: str, rank: int | None) -> None:
    from rayzero.orchestrator.job.client import read_ended_log
    from rayzero.orchestrator.job.log import iter_log_lines

    if not Path(file).is_file():
        raise ConfigError(
            f"the job's log {file!r} does not exist on this machine",
            allowed="the machine on which the job's controller ran",
            fix="run the command there, or give the --address of the job's cluster",
        )
    _print_lines(iter_log_lines(read_ended_log(file), rank))


def _print_from_head(name: str, address: str | None, rank: int | None) -> None:
    """From the disk of the head node of the cluster that has a record of the job."""
    from rayzero.orchestrator.cluster.connect import connect_each
    from rayzero.orchestrator.job.client import read_ended_log
    from rayzero.orchestrator.job.ended_jobs import load_ended
    from rayzero.orchestrator.job.log import iter_log_lines

    for cluster in connect_each(address):
        if (record := load_ended(name)) is not None:
            with closing(cluster):
                _print_lines(iter_log_lines(read_ended_log(record.status.log), rank))
                return
    raise ConfigError(
        f"no cluster has a record of job {name!r}",
        fix="--path: checkpoint.path of its job file; --address: the job's cluster",
    )


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _watch_remotely(name: str, address: str, once: bool, as_json: bool) -> int:
    """Shows the snapshots that the same command prints in the cluster, and stops it at the end."""
    from rayzero.orchestrator.cluster.job_submission import RemoteJobClient
    from rayzero.orchestrator.top.follow import SnapshotParser, open_display

    cluster = RemoteJobClient(address)
    job = cluster.submit(["top", name, "--json", *(["--once"] if once else [])], None)
    code: int | None = None
    try:
        with open_display(as_json, once) as show:
            parser = SnapshotParser(show, f"job {name!r}")
            code = cluster.follow(job, parser.feed)
    finally:
        if code is None:
            cluster.stop(job)
    if code:
        print("\n".join(parser.other_lines), file=sys.stderr)
    return code


@contextmanager
def _open_source(target: str, address: str | None) -> Iterator[SnapshotSource]:
    """Snapshots from the job's metrics endpoint (URL) or its process (name)."""
    from rayzero.orchestrator.errors import JobFailedError
    from rayzero.orchestrator.top.source import (
        SnapshotUnavailableError,
        check_snapshot,
        endpoint_source,
        is_url,
    )

    if is_url(target):
        yield endpoint_source(target)
        return
    # These import ray, which a URL does not need.
    from rayzero.orchestrator.job.actor import JobActor
    from rayzero.orchestrator.job.lookup import find_running

    job = find_running(target, address)

    def fetch_snapshot() -> dict[str, Any]:
        try:
            return check_snapshot(job.process.call(JobActor.snapshot), f"job {target!r}")
        except JobFailedError as error:
            raise SnapshotUnavailableError(error.seen) from None

    with closing(job.cluster):
        yield fetch_snapshot
