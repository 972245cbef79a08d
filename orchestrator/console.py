"""Consoles that show a job's events: a live progress bar, plain lines, JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from functools import partial
from time import monotonic
from typing import Any, TextIO, TypeAlias

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import job_events
from rayzero.orchestrator.event_text import event_lines, format_step, print_error, summary_lines
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepPace, StepRecord
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.top.format import format_duration
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import LogLine

WriteLine: TypeAlias = Callable[[str], None]
STEP_INTERVAL_S = 5.0


class PlainConsole:
    """Shows a job's events and its end as lines for a file or a pipe: steps at an interval, all
    other events at once. `on_event` is called in another thread."""

    def __init__(self, write: WriteLine, *, shows_end: bool = True) -> None:
        """
        Args:
            shows_end: whether `finish_ok` or `finish_error` will show how the job ended. Otherwise,
                as in a log, a fatal fault is shown.
        """
        self._write = write
        self._shows_end = shows_end
        self._steps: int | None = None
        self._next_print_s = 0.0
        self._unprinted_step: StepRecord | None = None

    def start(self, name: str, steps: int | None) -> None:
        """Shows the name of the job that starts. `steps` is None if their number is unknown."""
        self._steps = steps
        self._write(f"job {name}")

    def await_next(self, text: str) -> None:
        """Shows what the job waits for before its first event."""
        self._write(text)

    def on_event(self, event: job_events.JobEvent) -> None:
        if isinstance(event, StepRecord):
            self._unprinted_step = event
            if monotonic() >= self._next_print_s:
                self._next_print_s = monotonic() + STEP_INTERVAL_S
                self._print_step()
            return
        if isinstance(event, job_events.FaultDetected) and event.is_fatal and self._shows_end:
            return  # `finish_error` prints it
        if isinstance(event, job_events.StateEntered):
            self._print_step()
        for line in event_lines(event):
            self._write(line)

    def finish_ok(self, result: JobResult) -> None:
        for line in summary_lines(result):
            self._write(line)

    def finish_error(self, error: RayzeroError) -> None:
        self._print_step()
        print_error(error)

    def _print_step(self) -> None:
        if (step := self._unprinted_step) is not None:
            total = f"/{self._steps}" if self._steps else ""
            self._write(f"step {step.step}{total} | {format_step(step)}")
            self._unprinted_step = None


class LiveConsole(PlainConsole):
    """A progress bar at the bottom of the terminal; lines are printed above it."""

    def __init__(self, terminal: rich.console.Console) -> None:
        super().__init__(partial(terminal.print, markup=False, highlight=False, soft_wrap=True))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TextColumn("{task.fields[left]}"),
            console=terminal,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None, text="", left="")
        self._pace = StepPace()
        self._name = ""
        self.awaited = ""
        self._has_events = self._has_stepped = False

    def start(self, name: str, steps: int | None) -> None:
        self._name = name
        self._steps = steps
        self._bar.update(self._task, total=steps)
        self.await_next("starting the job's process")
        self._bar.start()

    def await_next(self, text: str) -> None:
        if not self._has_events:  # events come in another thread, and say more
            self._show_awaited(text)

    def _show_awaited(self, text: str) -> None:
        self.awaited = text
        self._bar.update(self._task, description=f"{self._name}: {text}")

    def on_event(self, event: job_events.JobEvent) -> None:
        self._has_events = True
        if isinstance(event, StepRecord):
            if not self._has_stepped:
                self._has_stepped = True
                self._show_awaited(State.RUNNING)
            self._pace.add(event)
            remaining_s = self._pace.remaining_s(event.step, self._steps)
            left = "" if remaining_s is None else f"{format_duration(remaining_s)} left"
            self._bar.update(self._task, completed=event.step, text=format_step(event), left=left)
        elif isinstance(event, job_events.StateEntered):
            awaited = event.state if self._has_stepped else _BEFORE_FIRST_STEP.get(event.state)
            self._show_awaited(awaited or event.state)
        else:
            super().on_event(event)
            if isinstance(event, job_events.WorkersReady) and not self._has_stepped:
                self._show_awaited("workers form a group")
            if isinstance(event, job_events.ResourcesAwaited):
                self._show_awaited("waiting for resources" if event.text else "workers start")

    def finish_ok(self, result: JobResult) -> None:
        self.stop()
        super().finish_ok(result)

    def finish_error(self, error: RayzeroError) -> None:
        self.stop()
        super().finish_error(error)

    def stop(self) -> None:
        self._bar.stop()


class JsonConsole:
    """One JSON object per line; the last is the summary or the error."""

    def __init__(self, write: WriteLine) -> None:
        self._write = write

    def start(self, name: str, steps: int | None) -> None:
        self._emit("job", {"name": name, "steps": steps})

    def await_next(self, text: str) -> None:
        """Ignores the text, which is for people only."""

    def on_event(self, event: job_events.JobEvent) -> None:
        fields = asdict(event)
        match event:
            case StepRecord():
                fields["tokens_per_s"] = event.tokens_per_s
            case job_events.Repaired() | job_events.Resized():
                fields["total_s"] = event.total_s
        self._emit(_EVENT_NAMES[type(event)], fields)

    def finish_ok(self, result: JobResult) -> None:
        self._emit("summary", result.metrics)

    def finish_error(self, error: RayzeroError) -> None:
        self._emit("error", {"kind": type(error).__name__, "text": str(error)})
        print_error(error)

    def _emit(self, name: str, fields: dict[str, Any]) -> None:
        self._write(json.dumps({"event": name, **fields}))


Console: TypeAlias = PlainConsole | JsonConsole


@contextmanager
def console_for(as_json: bool) -> Iterator[Console]:
    """Yields a console on stdout. The output of all other code goes to stderr meanwhile."""
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        if as_json:
            yield JsonConsole(_line_writer(stdout))
        else:
            with open_console(stdout) as console:
                yield console


@contextmanager
def open_console(out: TextIO) -> Iterator[PlainConsole]:
    """Yields a live bar on a terminal, which is removed at the end of the `with`; elsewhere a
    console that prints plain lines."""
    if out.isatty():
        bar = LiveConsole(rich.console.Console(file=out))
        try:
            yield bar
        finally:
            bar.stop()
    else:
        yield PlainConsole(_line_writer(out))


def _line_writer(out: TextIO) -> WriteLine:
    return partial(print, file=out, flush=True)


_BEFORE_FIRST_STEP = {State.STARTING: "workers start", State.RUNNING: "first step"}
"""Texts for what a job waits for, by state, before its first step."""

_EVENT_NAMES: dict[type[job_events.JobEvent], str] = {
    StepRecord: "step",
    job_events.StateEntered: "state",
    job_events.WorkersReady: "workers",
    LogLine: "log",
    job_events.ResourcesAwaited: "waiting",
    job_events.JobWarning: "warning",
    job_events.Resumed: "resumed",
    job_events.MetricsServed: "serving",
    job_events.RunAdopted: "adopted",
    job_events.Reattached: "reattached",
    job_events.FaultDetected: "fault",
    FaultFired: "injected",
    job_events.Repaired: "repaired",
    job_events.Resized: "resized",
    job_events.Checkpointed: "checkpoint",
    job_events.CheckpointFailed: "checkpoint_failed",
}
