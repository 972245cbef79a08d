"""The arguments of the commands about jobs by their names. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from rayzero.orchestrator.cli.remote import run_remotely

JobName = Annotated[str, typer.Argument(help="The job's name.", metavar="NAME")]


ClusterAddress = Annotated[
    str | None,
    typer.Option(
        help="host:port of a Ray cluster, or http://HOST:8265 of its dashboard from outside. "
        "Default: RAY_ADDRESS, or else every cluster whose head runs on this machine."
    ),
]


JobsPath = Annotated[
    str,
    typer.Option("--path", help="checkpoint.path of the job file, for jobs that do not run."),
]


OptionalJobsPath = Annotated[
    str | None,
    typer.Option(
        "--path",
        help="checkpoint.path of the job file, for jobs that do not run. Default: what the cluster "
        "knows of the job's end, or else `runs`.",
    ),
]


JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]


SpecOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key of the job file: steps=10."),
]


JobFile = Annotated[Path, typer.Argument(help="The job file (YAML).", metavar="JOB.yaml")]


def _path_args(path: str | None) -> list[str]:
    return [] if path is None else ["--path", path]


def submit(job: JobFile, address: ClusterAddress = None, overrides: SpecOverrides = None) -> None:
    """Start a job that goes on without this command.

    Exit code 0: it was taken. 1: it failed at once. 2: a mistake in the job, or another job of that
    name runs.
    """
    run_remotely(address, "submit", job, sets=overrides, folder=job.parent)
    from rayzero.orchestrator.cli.jobs import submit_job

    raise typer.Exit(submit_job(job, overrides or (), address))


def ls(
    address: ClusterAddress = None,
    path: JobsPath = "runs",
    ended: Annotated[
        bool, typer.Option("--all", help="Those too that ended, as the cluster knows.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the jobs that run, and those with a journal in a folder."""
    run_remotely(address, "ls", "--path", path, *(["--all"] if ended else []), as_json=as_json)
    from rayzero.orchestrator.cli.jobs import print_jobs

    raise typer.Exit(print_jobs(address, path, as_json, ended))


def status(
    name: JobName,
    address: ClusterAddress = None,
    path: OptionalJobsPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell how a job stands; of one that does not run, how it ended or stood.

    Exit code 0: told. 1: it does not answer. 2: no such job.
    """
    run_remotely(address, "status", name, *_path_args(path), as_json=as_json)
    from rayzero.orchestrator.cli.jobs import print_status

    raise typer.Exit(print_status(name, address, path, as_json))


def logs(
    name: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="To the job's end.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="What this rank printed, and nothing else.")
    ] = None,
    address: ClusterAddress = None,
    path: OptionalJobsPath = None,
) -> None:
    """Print all that a job printed and told.

    Exit code 0: printed. 1: it does not answer. 2: no such job, or its log is not here.
    """
    of_rank = [] if rank is None else ["--rank", rank]
    run_remotely(address, "logs", name, *_path_args(path), *(["-f"] if follow else []), *of_rank)
    from rayzero.orchestrator.cli.running_job import print_logs

    raise typer.Exit(print_logs(name, address, path, follow, rank))


def stop(name: JobName, address: ClusterAddress = None, path: JobsPath = "runs") -> None:
    """End a job cleanly, with a last checkpoint; a lost run is given up, and not adopted any more.

    Exit code 0: it has stopped. 1: it did not in time. 2: no such job.
    """
    run_remotely(address, "stop", name, "--path", path)
    from rayzero.orchestrator.cli.jobs import stop_job

    raise typer.Exit(stop_job(name, address, path))


def resume(
    name: JobName,
    address: ClusterAddress = None,
    path: JobsPath = "runs",
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines on stdout: events, then the summary.")
    ] = False,
) -> None:
    """Run a job again by the spec in its journal: a lost run goes on where it was.

    Exit codes as of `run`.
    """
    run_remotely(address, "resume", name, "--path", path, as_json=as_json)
    from rayzero.orchestrator.cli.jobs import resume_job

    raise typer.Exit(resume_job(name, address, path, as_json))


COMMAND_EXAMPLES: Mapping[Callable[..., None], str] = {
    submit: "rayzero submit job.yaml --address http://head:8265",
    ls: "rayzero ls --json",
    status: "rayzero status gpt",
    logs: "rayzero logs -f gpt",
    stop: "rayzero stop gpt",
    resume: "rayzero resume gpt --path s3://bucket/runs",
}


def add_job_commands(app: typer.Typer) -> None:
    for command, example in COMMAND_EXAMPLES.items():
        app.command(epilog=f"Example: {example}")(command)
