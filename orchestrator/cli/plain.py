"""Lines for a file or a pipe, of which a person can follow a job."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cli.texts import notice_lines, print_error, step_text, summary_lines
from rayzero.orchestrator.notices import Notice, StateEntered
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.result import JobResult

Write: TypeAlias = Callable[[str], None]


class PlainLines:
    """Lines for a file or a pipe: a step now and then, everything else as it comes."""

    def __init__(
        self,
        write: Write,
        every_s: float = 5.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._write = write
        self._every_s = every_s
        self._clock = clock
        self._steps: int | None = None
        self._next_at_s = 0.0
        self._untold: StepRecord | None = None

    def expect(self, name: str, steps: int | None) -> None:
        self._steps = steps
        self._write(f"job {name}")

    def see(self, notice: Notice) -> None:
        if isinstance(notice, StepRecord):
            self._untold = notice
            if self._clock() >= self._next_at_s:
                self._next_at_s = self._clock() + self._every_s
                self._tell_step()
        else:
            if isinstance(notice, StateEntered):
                self._tell_step()
            for line in notice_lines(notice):
                self._write(line)

    def succeeded(self, result: JobResult) -> None:
        for line in summary_lines(result):
            self._write(line)

    def failed(self, error: RayzeroError) -> None:
        self._tell_step()
        print_error(error)

    def _tell_step(self) -> None:
        if self._untold is not None:
            total = f"/{self._steps}" if self._steps else ""
            self._write(f"step {self._untold.step}{total} | {step_text(self._untold)}")
            self._untold = None
