"""Run, signals.

`rayzero run`: one job, from its file to an exit code.

Ctrl-C and SIGTERM: the first asks for a clean end, the second ends the process at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.console import Console, console_for
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import JobWarning
from rayzero.orchestrator.job_file import load_job
from rayzero.orchestrator.spec import JobSpec

_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles the signals for the length of a `with`, in the main thread.

    Until `defer`, a signal raises KeyboardInterrupt. From then on the first one is only noted, and
    the main thread's loop acts on it. The second ends this process: a Ray cluster of our own dies
    with it, and on any other cluster the job's process finishes the stop by itself.
    """

    def __init__(self) -> None:
        self._first_signal: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number once one came, 0 before."""
        return 0 if self._first_signal is None else 128 + self._first_signal

    @property
    def name(self) -> str:
        return "" if self._first_signal is None else signal.Signals(self._first_signal).name

    def __enter__(self) -> StopSignals:
        self._previous_handlers = {
            number: signal.signal(number, self._raise_interrupt) for number in _HANDLED_SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def graceful(self) -> None:
        """Only notes the first signal from now on, whoever took the handlers over meanwhile."""
        for number in _HANDLED_SIGNALS:
            signal.signal(number, self._record_signal)

    def _raise_interrupt(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._first_signal = self._first_signal or number
        raise KeyboardInterrupt

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._first_signal is not None:
            os._exit(128 + number)
        self._first_signal = number


_SIGNAL_POLL_S = 0.1  # how often the main thread looks whether a signal came


def run_job(path: Path, overrides: Sequence[str], address: str | None, as_json: bool) -> int:
    """Runs the job in `path`; returns the process's exit code."""
    return _run_with_console(lambda: load_job(path, overrides), address, as_json)


def run_spec(spec: JobSpec, address: str | None, as_json: bool) -> int:
    """Runs a checked job; returns the process's exit code."""
    return _run_with_console(lambda: spec, address, as_json)


def _run_with_console(load: Callable[[], JobSpec], address: str | None, as_json: bool) -> int:
    with console_for(as_json) as console, StopSignals() as signals:
        try:
            spec = load()
            console.start(spec.name, spec.steps)
            return _submit_and_wait(Job.from_spec(spec), address, console, signals)
        except RayzeroError as error:
            console.finish_error(error)
            return error_exit_code(error)
        except KeyboardInterrupt:  # while the cluster was starting
            return signals.exit_code
        except SystemExit:  # likewise, after Ray took the SIGTERM handler over
            return 128 + signal.SIGTERM


def error_exit_code(error: RayzeroError) -> int:
    """2 for what the user wrote, 1 for what happened."""
    return 2 if isinstance(error, ConfigError) else 1


def _submit_and_wait(job: Job, address: str | None, console: Console, signals: StopSignals) -> int:
    handle = job.submit(address, console)
    signals.graceful()  # after submit, because Ray takes the SIGTERM handler over when it starts
    _wait_stoppable(handle, signals, console)
    try:
        console.finish_ok(handle.result())
    except JobStoppedError as stopped:
        console.finish_error(stopped)
        return signals.exit_code or 1
    return 0


def _wait_stoppable(handle: JobHandle, signals: StopSignals, console: Console) -> None:
    told = False
    while not handle.wait(_SIGNAL_POLL_S):
        if signals.exit_code and not told:
            handle.stop()
            console.on_event(
                JobWarning(f"{signals.name}: stopping the job; once more {handle._on_hard_exit}")
            )
            told = True
