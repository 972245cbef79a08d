"""What the user sees of a job: a live bar on a terminal, plain lines or JSON lines elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cli.plain import PlainLines, Write
from rayzero.orchestrator.cli.texts import (
    notice_lines,
    print_error,
    step_text,
    summary_lines,
)
from rayzero.orchestrator.notices import (
    Adopted,
    Checkpointed,
    CheckpointFailed,
    FaultSeen,
    Notice,
    Repaired,
    Resized,
    Resumed,
    Serving,
    StateEntered,
    Warned,
    WorkersUp,
)
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.result import JobResult
from rayzero.workers.messages import FaultFired, LogLine


class Console(Protocol):
    """An observer that also tells how the job ended. `see` is called in another thread."""

    def expect(self, name: str, steps: int | None) -> None:
        """A job of that name begins; None: nobody knows of how many steps."""

    def see(self, notice: Notice) -> None:
        """As `Observer.see`."""

    def succeeded(self, result: JobResult) -> None:
        """The job's end, well."""

    def failed(self, error: RayzeroError) -> None:
        """The job's end, badly."""


@contextmanager
def console_for(as_json: bool) -> Iterator[Console]:
    """The console of a process whose stdout is the job's: what others print goes to stderr."""
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        if as_json:
            yield JsonLines(_writer(stdout))
        else:
            with watching(stdout) as console:
                yield console


@contextmanager
def watching(out: TextIO) -> Iterator[Console]:
    """A live bar on a terminal, taken down at the end of the `with`; plain lines elsewhere."""
    if out.isatty():
        bar = LiveBar(rich.console.Console(file=out))
        try:
            yield bar
        finally:
            bar.take_down()
    else:
        yield PlainLines(_writer(out))


def _writer(out: TextIO) -> Write:
    return partial(print, file=out, flush=True)


class LiveBar:
    """A progress bar that stays at the bottom; lines are printed above it."""

    def __init__(self, terminal: rich.console.Console) -> None:
        self._terminal = terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=terminal,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None, text="")
        self._name = ""

    def expect(self, name: str, steps: int | None) -> None:
        self._name = name
        self._bar.update(self._task, total=steps, description=f"{name}: pending")
        self._bar.start()

    def see(self, notice: Notice) -> None:
        if isinstance(notice, StepRecord):
            self._bar.update(self._task, completed=notice.step, text=step_text(notice))
            return
        if isinstance(notice, StateEntered):
            self._bar.update(self._task, description=f"{self._name}: {notice.state}")
            return
        for line in notice_lines(notice):
            self._terminal.print(line, markup=False, highlight=False, soft_wrap=True)

    def succeeded(self, result: JobResult) -> None:
        self.take_down()
        for line in summary_lines(result):
            self._terminal.print(line, markup=False, highlight=False, soft_wrap=True)

    def failed(self, error: RayzeroError) -> None:
        self.take_down()
        print_error(error)

    def take_down(self) -> None:
        self._bar.stop()


class JsonLines:
    """One JSON object a line on stdout; the last is the summary or the error."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def expect(self, name: str, steps: int | None) -> None:
        self._emit("job", {"name": name, "steps": steps})

    def see(self, notice: Notice) -> None:
        match notice:
            case StepRecord():
                self._emit("step", asdict(notice) | {"tokens_per_s": notice.tokens_per_s})
            case StateEntered():
                self._emit("state", asdict(notice))
            case WorkersUp():
                self._emit("workers", asdict(notice))
            case LogLine():
                self._emit("log", asdict(notice))
            case Warned():
                self._emit("warning", asdict(notice))
            case Repaired() | Resized():
                self._emit(_NAMES[type(notice)], asdict(notice) | {"total_s": notice.total_s})
            case _:
                self._emit(_NAMES[type(notice)], asdict(notice))

    def succeeded(self, result: JobResult) -> None:
        self._emit("summary", result.metrics)

    def failed(self, error: RayzeroError) -> None:
        self._emit("error", {"kind": type(error).__name__, "text": str(error)})
        print_error(error)

    def _emit(self, event: str, fields: dict[str, Any]) -> None:
        self._write(json.dumps({"event": event, **fields}))


_NAMES: dict[type[Notice], str] = {
    Resumed: "resumed",
    Serving: "serving",
    Adopted: "adopted",
    FaultSeen: "fault",
    FaultFired: "injected",
    Repaired: "repaired",
    Resized: "resized",
    Checkpointed: "checkpoint",
    CheckpointFailed: "checkpoint_failed",
}
