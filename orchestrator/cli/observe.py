"""`rayzero logs`, `rayzero top`: what a job prints and how it progresses."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.command import (
    JOBS_FOLDER,
    ClusterAddress,
    JobName,
    JsonLinesFlag,
    OptionalJobsPath,
    RoleName,
    cluster_command,
    local_command,
    new_group,
)
from rayzero.orchestrator.cli.jobs import find_job

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rayzero.orchestrator.job.lookup import RunningJob
    from rayzero.orchestrator.results import EndedJob, JobStatus
    from rayzero.orchestrator.top.board import Snapshot

commands = new_group()


@commands.command(epilog="Example: rayzero logs -f gpt, rayzero logs gpt --path s3://bucket/runs")
@cluster_command
def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the job ends.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0, help="Only lines of this rank, or of this worker of --role.", metavar="RANK"
        ),
    ] = None,
    role: RoleName = "",
    address: ClusterAddress = None,
    path: OptionalJobsPath = None,
) -> None:
    """Print a job's log: the output of its workers, and its events. With a URL as --path, the log
    of all of the job's controllers is read there, without a cluster.

    Exit code 0: printed. 1: the job or the store did not respond, or a part of the log is damaged.
    2: no such job, or its log is on another machine.
    """
    from rayzero.orchestrator.job.log import iter_log_lines

    if path is not None and "://" in path:
        parts = _stored_parts(path, name, follow)
    else:
        parts = _log_parts(find_job(name, address, path), address, follow)
    for line in iter_log_lines(parts, rank, role):
        print(line, flush=True)


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
    as_json: JsonLinesFlag = False,
) -> int:
    """Watch a job: state, progress, loss, ranks, faults, lost time and checkpoints.

    The job is found by name in the cluster of --address; or by the URL of its metrics endpoint,
    from any machine that can connect to it.

    Exit code 0: the job has ended, in whatever state. 1: the job did not respond. 2: no such job or
    address. 130: interrupted by Ctrl-C.
    """
    from rayzero.orchestrator.top.follow import connecting_board, endpoint_source, follow_job

    if "://" in job:
        follow_job(endpoint_source(job), as_json, once)
        return 0
    from rayzero.orchestrator.cluster.addresses import check_dashboard, named_address

    named = named_address(address)
    folder = Path(JOBS_FOLDER, job)
    first = connecting_board(job, named.text or "the cluster of this machine", folder)
    if named.is_dashboard:
        check_dashboard(named)
        return _watch_remotely(job, named.text, once, as_json, first)
    with ExitStack() as stack:
        follow_job(_job_source(job, address, stack), as_json, once, first=first)
    return 0


@commands.command(
    epilog="Example: rayzero page --path /shared/runs, rayzero page --path s3://bucket/runs"
)
@local_command
def page(
    path: Annotated[
        str, typer.Option("--path", help="checkpoint.path of the job files: a folder, or a URL.")
    ] = JOBS_FOLDER,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one.")
    ] = 9500,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all interfaces.")
    ] = "127.0.0.1",
) -> None:
    """Serve one page of all jobs in a folder or a store, running and ended, with a comparison of
    their runs, until Ctrl-C. The page reads files that the jobs write, and needs no cluster.

    Exit code 1: the store cannot be read. 2: no such folder, or the port is taken. 130: ended by
    Ctrl-C.
    """
    from threading import Event

    from rayzero.engine.checkpoint.store import folder_exists, is_remote, local_path
    from rayzero.engine.redact import redact_url
    from rayzero.orchestrator.metrics.jobs_page import JobsPage

    if not folder_exists(path):
        raise ConfigError(
            f"{path!r} is not a folder on this machine",
            allowed="checkpoint.path of the job files",
            fix="change --path",
        )
    url = path if is_remote(path) else str(Path(local_path(path)).resolve())
    with closing(JobsPage(url, host, port)) as served:
        print(f"page: {served.url} (jobs in {redact_url(path)}; Ctrl-C ends it)", flush=True)
        Event().wait()


def _log_parts(
    job: RunningJob | EndedJob | JobStatus, address: str | None, follow: bool
) -> Iterator[bytes]:
    """Yields the log of a running job. The log of an ended job is read from this machine's disk,
    or else from the head node of the cluster that has its record, or else from its store."""
    from rayzero.engine.checkpoint.store import split_url
    from rayzero.engine.redact import REDACTED
    from rayzero.orchestrator.cluster.connect import connect_each
    from rayzero.orchestrator.job.actor import JobActor
    from rayzero.orchestrator.job.client import read_job_log
    from rayzero.orchestrator.job.ended_jobs import load_ended
    from rayzero.orchestrator.job.lookup import RunningJob
    from rayzero.orchestrator.results import EndedJob

    if isinstance(job, RunningJob):
        with closing(job.cluster):
            path = job.process.call(JobActor.status).log
            yield from read_job_log(path, job.process, follow)
        return
    status = job.status if isinstance(job, EndedJob) else job
    if Path(status.log).is_file():
        yield from read_job_log(status.log)
        return
    for cluster in connect_each(address) if isinstance(job, EndedJob) else ():
        if (record := load_ended(status.name)) is not None:
            with closing(cluster):
                parts = read_job_log(record.status.log)
                if first := next(parts, b""):
                    yield first
                    yield from parts
                    return
    folder, _ = split_url(status.journal)
    path, _ = split_url(folder)
    if "://" in path and REDACTED not in path:  # a new head has another disk
        yield from _stored_parts(path, status.name, follow=False)
        return
    raise ConfigError(
        f"the job's log {status.log!r} does not exist on this machine",
        allowed="the machine on which the job's controller ran",
        fix="run the command there; give the --address of the job's cluster, or as --path the URL "
        "that is its checkpoint.path",
    )


def _stored_parts(path: str, name: str, follow: bool) -> Iterator[bytes]:
    from rayzero.orchestrator.job.stored_log import StoredLog

    return StoredLog(path, name, partial(print, "note:", file=sys.stderr)).parts(follow)


def _watch_remotely(
    name: str, address: str, once: bool, as_json: bool, first: RenderableType
) -> int:
    """Shows the snapshots that the same command prints in the cluster."""
    from rayzero.orchestrator.cluster.command_client import run_remotely
    from rayzero.orchestrator.top.follow import open_display, parse_snapshot

    words = ["top", name, "--json", *(["--once"] if once else [])]
    other_lines: deque[str] = deque(maxlen=50)
    with open_display(as_json, once, first=first) as show:

        def show_line(line: str) -> None:
            if (snapshot := parse_snapshot(line, f"job {name!r}")) is not None:
                show(snapshot, None)
            elif line.strip():
                other_lines.append(line)

        code = run_remotely(address, words, show_line)
    if code:
        print("\n".join(other_lines), file=sys.stderr)
    return code


def _job_source(name: str, address: str | None, stack: ExitStack) -> Callable[[], Snapshot]:
    """Returns a source of snapshots of a running job. Its first call finds the job; `stack` then
    closes the connection to the cluster."""
    found: list[RunningJob] = []

    def fetch() -> Snapshot:
        from rayzero.orchestrator.errors import JobFailedError
        from rayzero.orchestrator.job.actor import JobActor  # imports Ray: seconds
        from rayzero.orchestrator.job.lookup import find_running
        from rayzero.orchestrator.top.follow import SnapshotUnavailableError, check_snapshot

        if not found:
            found.append(find_running(name, address))
            stack.enter_context(closing(found[0].cluster))
        try:
            return check_snapshot(found[0].process.call(JobActor.snapshot), f"job {name!r}")
        except JobFailedError as error:
            raise SnapshotUnavailableError(error.seen) from None

    return fetch
