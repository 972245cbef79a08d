"""`rayzero run`: one job, from its file to an exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.api import Job, JobHandle
from rayzero.orchestrator.cli.console import Console, console_for
from rayzero.orchestrator.cli.signals import Signals
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.loading import load_job
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.spec import JobSpec

_LOOK_S = 0.1  # how often the main thread looks whether a signal came


def run_job(path: Path, overrides: Sequence[str], address: str | None, as_json: bool) -> int:
    """Runs the job in `path`; returns the process's exit code."""
    return _followed(lambda: load_job(path, overrides), address, as_json)


def run_spec(spec: JobSpec, address: str | None, as_json: bool) -> int:
    """Runs a checked job; returns the process's exit code."""
    return _followed(lambda: spec, address, as_json)


def _followed(load: Callable[[], JobSpec], address: str | None, as_json: bool) -> int:
    with console_for(as_json) as console, Signals() as signals:
        try:
            spec = load()
            console.expect(spec.name, spec.steps)
            return _run(Job.from_spec(spec), address, console, signals)
        except RayzeroError as error:
            console.failed(error)
            return exit_code(error)
        except KeyboardInterrupt:  # while the cluster was starting
            return signals.exit_code
        except SystemExit:  # likewise, after Ray took the SIGTERM handler over
            return 128 + signal.SIGTERM


def exit_code(error: RayzeroError) -> int:
    """2 for what the user wrote, 1 for what happened."""
    return 2 if isinstance(error, ConfigError) else 1


def _run(job: Job, address: str | None, console: Console, signals: Signals) -> int:
    handle = job.submit(address, console)
    signals.defer()  # after submit, because Ray takes the SIGTERM handler over when it starts
    _wait(handle, signals, console)
    try:
        console.succeeded(handle.result())
    except JobStoppedError as stopped:
        console.failed(stopped)
        return signals.exit_code or 1
    return 0


def _wait(handle: JobHandle, signals: Signals, console: Console) -> None:
    told = False
    while not handle.wait(_LOOK_S):
        if signals.exit_code and not told:
            handle.stop()
            console.see(Warned(f"{signals.name}: stopping the job; once more {handle.without}"))
            told = True
