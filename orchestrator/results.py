"""The status, the events and the outcome of a job, as its process reports them; `summary.json`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job_events import JobEvent
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.top.format import count_of

OWN_KEYS = frozenset(
    (
        "job world_size stage loss tokens_per_s seconds peak_bytes world_sizes faults repairs "
        "steps_redone checkpoints newest_checkpoint resumed_from steps steps_trained note"
    ).split()
)
"""Keys of `summary.json` that rayzero sets, unless the training function returns them."""


@dataclass(frozen=True, repr=False)
class JobResult:
    """The outcome of a successful job.

    Args:
        metrics: the contents of `summary.json`.
        summary_path: the path of that file.
        returned: what the training function returned on rank 0; `metrics` has it, too.
    """

    name: str
    metrics: dict[str, Any]
    summary_path: Path
    returned: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        loss = (self.metrics.get("loss") or {}).get("last")
        shown = "" if loss is None else f", loss {loss:.6g}"
        return f"<JobResult {self.name!r}: {self.steps} steps{shown}, {self.summary_path}>"

    @property
    def steps(self) -> int:
        return int(self.metrics["steps"])

    @property
    def note(self) -> str:
        """Why no step was trained; empty if one was."""
        return str(self.metrics.get("note", ""))

    def summary(self) -> bytes:
        """Returns the content of `summary.json`."""
        return f"{json.dumps(self.metrics, indent=2)}\n".encode()


def write_summary(result: JobResult) -> None:
    """Writes `summary.json` atomically."""
    temporary = result.summary_path.with_suffix(".tmp")
    temporary.write_bytes(result.summary())
    os.replace(temporary, result.summary_path)


def final_state(outcome: JobResult | RayzeroError) -> State:
    if isinstance(outcome, JobResult):
        return State.SUCCEEDED
    return State.STOPPED if isinstance(outcome, JobStoppedError) else State.FAILED


@dataclass(frozen=True)
class RoleStatus:
    """A snapshot of a role.

    Args:
        workers: number of workers whose function runs; `finished`: whose function has returned.
        workers_min, workers_max: the role's limits.
        faults: number of faults by cause.
    """

    workers: int
    workers_min: int
    workers_max: int
    finished: int = 0
    faults: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class JobStatus:
    """A snapshot of a job.

    Args:
        state: None if its process is gone and no outcome was recorded.
        step, steps: numbers of finished and of requested steps; None if unknown.
        began_at_s, at_s: when it was submitted, and when this snapshot was taken, as Unix time.
        faults: number of faults by cause.
        journal: the state file of its journal, a path or a URL.
        log: path of its log file, on the head node.
        error: the first line of the error it failed with.
        remaining_s: estimated time to its last step; None if unknown.
        goodput: fraction of the time so far that went into steps that count.
        waiting_for: resources that its first workers wait for, and who holds them; else empty.
        roles: the status of each role, by its name.
    """

    name: str
    state: State | None
    step: int = 0
    steps: int | None = None
    generation: int = 0
    world_size: int = 0
    workers_min: int = 0
    workers_max: int = 0
    loss: float | None = None
    began_at_s: float = 0.0
    at_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    repairs: int = 0
    checkpoint_step: int | None = None
    journal: str = ""
    log: str = ""
    error: str = ""
    remaining_s: float | None = None
    goodput: float | None = None
    waiting_for: str = ""
    roles: dict[str, RoleStatus] = field(default_factory=dict)

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        return f"<JobStatus {self.name!r}: {self.describe()}{loss}>"

    @property
    def is_running(self) -> bool:
        return self.state is not None and not self.state.is_final

    def describe(self) -> str:
        """Returns `running at step 12 of 100, 2 workers`."""
        state = "lost" if self.state is None else str(self.state)
        steps = f" of {self.steps}" if self.steps else ""
        text = f"{state} at step {self.step}{steps}"
        if self.waiting_for:
            return f"{text}, waiting for {self.waiting_for}"
        if self.is_running:
            return f"{text}, {count_of(self.world_size, 'worker')}"
        if self.state is None and self.checkpoint_step is None:
            return f"{text}; `rayzero resume {self.name}` starts from scratch: it has no checkpoint"
        if self.state is None:
            newest = f"continues from its newest checkpoint, of step {self.checkpoint_step}"
            return f"{text}; `rayzero resume {self.name}` {newest}"
        return f"{text}: {self.error}" if self.error and self.state == "failed" else text


@dataclass(frozen=True)
class EndedJob:
    """How a job ended, at `status.at_s`."""

    status: JobStatus
    outcome: JobResult | RayzeroError

    def result(self) -> JobResult:
        """Raises JobFailedError or ConfigError if it failed, JobStoppedError if it was stopped."""
        if isinstance(self.outcome, RayzeroError):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True)
class EventPage:
    """The events since the last request.

    Args:
        run: id of the process that sent the page; each process numbers its own events.
        next_index: where the next request starts.
        dropped: number of events that were dropped because they were not fetched in time.
        ended: the job's end, once no more events follow.
    """

    run: str = ""
    events: tuple[JobEvent, ...] = ()
    next_index: int = 0
    dropped: int = 0
    ended: EndedJob | None = None
