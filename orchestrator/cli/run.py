"""`rayzero run`, `rayzero submit`, `rayzero resume`: start a job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.cli.command import (
    JOBS_FOLDER,
    ClusterAddress,
    JobFile,
    JobName,
    JobsPath,
    JsonLinesFlag,
    RestartFlag,
    SpecOverrides,
    StartAddress,
    cluster_command,
    exit_code_of,
    new_group,
    spec_overrides,
)

if TYPE_CHECKING:
    from rayzero.orchestrator.spec import JobSpec

commands = new_group()

ACCEPT_TIMEOUT_S = 60.0
"""How long a job's process may take to start and accept the job."""


@commands.command(epilog="Example: rayzero run examples/gpt/job.yaml --set steps=50 --json")
@cluster_command
def run(
    job: JobFile,
    address: StartAddress = None,
    overrides: SpecOverrides = None,
    restart: RestartFlag = False,
    as_json: JsonLinesFlag = False,
) -> int:
    """Run a job and wait until it ends.

    Exit code 0: the job succeeded. 1: it failed. 2: a mistake in the job file, the engine config or
    the entry point. 130: stopped by Ctrl-C; a second Ctrl-C ends the command at once.
    """
    from rayzero.orchestrator.job_file import load_job

    changes = spec_overrides(overrides, restart)
    return run_with_console(lambda: load_job(job, changes), address, as_json)


@commands.command(epilog="Example: rayzero submit job.yaml --address http://head:8265")
@cluster_command
def submit(
    job: JobFile,
    address: ClusterAddress = None,
    overrides: SpecOverrides = None,
    restart: RestartFlag = False,
) -> None:
    """Start a job that keeps running after this command has ended.

    Exit code 0: the job was accepted. 1: it failed while starting. 2: a mistake in the job file, or
    a job of this name is running already.
    """
    from rayzero.orchestrator.job_file import load_job

    spec = load_job(job, spec_overrides(overrides, restart))
    # Import Ray, which takes a second.
    from rayzero.orchestrator.cluster.addresses import CLIENT_ADDRESS_VARIABLE, named_address
    from rayzero.orchestrator.cluster.connect import find_clusters, only_cluster
    from rayzero.orchestrator.errors import JobFailedError
    from rayzero.orchestrator.job.api import Job

    if not named_address(address).text:
        address = only_cluster(find_clusters(None))
    handle = Job.from_spec(spec).submit(address)
    deadline_s = time.monotonic() + ACCEPT_TIMEOUT_S
    while not handle.wait(0.1) and time.monotonic() < deadline_s:
        with suppress(JobFailedError):  # still starting; or it has failed, which `result` raises
            status = handle.status()
            if status.is_running and status.state != "pending":
                break
    if handle.wait(0):
        if note := handle.result().note:
            print(f"{spec.name}: {note}")
            return
    else:
        handle.close()
    client_address = os.environ.get(CLIENT_ADDRESS_VARIABLE)
    option = f" --address {client_address}" if client_address else ""
    print(f"{spec.name}: submitted; `rayzero logs -f {spec.name}{option}` follows it")


@commands.command(epilog="Example: rayzero resume gpt --path s3://bucket/runs")
@cluster_command
def resume(
    name: JobName,
    address: ClusterAddress = None,
    path: JobsPath = JOBS_FOLDER,
    restart: RestartFlag = False,
    as_json: JsonLinesFlag = False,
) -> int:
    """Run a job again with the spec in its journal; a lost run continues at its last state.

    Exit codes: those of `run`.
    """
    from rayzero.engine.redact import redacted_keys
    from rayzero.engine.validation import validate_document
    from rayzero.orchestrator.job.lookup import (
        check_job_name,
        check_journal_owner,
        load_run_history,
    )
    from rayzero.orchestrator.spec import JobSpec, with_resume

    last_run = load_run_history(path, check_job_name(name))
    check_journal_owner(path, name)
    if last_run.by_value or (removed := list(redacted_keys(last_run.spec))):
        missing = "its training function" if last_run.by_value else ", ".join(removed)
        raise ConfigError(
            f"job {name!r} cannot be resumed from its journal, which does not contain {missing}",
            fix="submit its job file or run its script again; it continues at its last state",
        )
    spec = validate_document(JobSpec, last_run.spec, f"the journal of job {name!r}")
    # A run that was set aside is resumed in its folder NAME.1, not under the name in its journal.
    # A run that was submitted with `checkpoint.resume: scratch` does not start from scratch again.
    spec = spec.model_copy(update={"name": name})
    if restart or spec.checkpoint.resume == "scratch":
        spec = with_resume(spec, "scratch" if restart else "auto")
    if Path(last_run.working_dir).is_dir():
        os.chdir(last_run.working_dir)
    return run_with_console(lambda: spec, address, as_json)


def run_with_console(load: Callable[[], JobSpec], address: str | None, as_json: bool) -> int:
    """Runs the job that `load` returns, and shows its events. Returns the exit code."""
    from rayzero.orchestrator.cluster.addresses import head_address
    from rayzero.orchestrator.cluster.local_cluster import LocalCluster
    from rayzero.orchestrator.console import console_for
    from rayzero.orchestrator.errors import JobStoppedError
    from rayzero.orchestrator.job.entrypoint_check import check_early
    from rayzero.orchestrator.job.stop_signals import StopSignals, wait_stoppable
    from rayzero.orchestrator.plan import forked_worker_env

    with console_for(as_json) as console, ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        try:
            spec = load()
            console.start(spec.name, spec.steps)
            local = None
            named = head_address(address)
            if named.is_named:
                console.await_next(f"connecting to the Ray cluster at {named.shown}")
            if named.text in ("", "local"):
                check_early(spec, os.getcwd(), has_function=False)
                console.await_next("starting Ray on this machine")
                local = LocalCluster(forked_worker_env(spec))
                stack.callback(local.stop)
                signals.on_second = local.kill
            from rayzero.orchestrator.job.api import Job  # imports Ray, which takes a second

            handle = Job.from_spec(spec).submit_with(local, address, console)
            console.await_next("starting the job's process")
            signals.graceful()  # after submit: Ray replaces the SIGTERM handler when it starts
            wait_stoppable(handle, signals, console)
            console.finish_ok(handle.result())
        except JobStoppedError as stopped:
            console.finish_error(stopped)
            return signals.exit_code or 1
        except RayzeroError as error:
            console.finish_error(error)
            return exit_code_of(error)
        except KeyboardInterrupt:  # while the cluster was starting
            return signals.exit_code
        except SystemExit:  # likewise, after Ray replaced the SIGTERM handler
            return 128 + signal.SIGTERM
    return 0
