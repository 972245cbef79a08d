"""The status, the events and the outcome of a job, as its process reports them; `summary.json`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job_events import JobEvent
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import JobProgress


@dataclass(frozen=True)
class JobResult:
    """The outcome of a successful job.

    Args:
        metrics: the contents of `summary.json`.
        summary_path: the path of that file.
    """

    name: str
    metrics: dict[str, Any] = field(repr=False)
    summary_path: Path

    @property
    def steps(self) -> int:
        return int(self.metrics["steps"])


@dataclass(frozen=True)
class JobTotals:
    """Data about a finished job beside its progress.

    Args:
        seconds: from submission to the last rank's end.
        return_value: the return value of rank 0's training function.
        history: faults, repairs, steps_redone, checkpoints.
    """

    name: str
    world_size: int
    stage: int | None
    seconds: float
    return_value: dict[str, Any]
    history: dict[str, Any] = field(default_factory=dict)


def summarize(totals: JobTotals, progress: JobProgress) -> dict[str, Any]:
    """The summary; the training function's return value is merged in and takes precedence."""
    return {
        "job": totals.name,
        "steps": progress.steps,
        "world_size": totals.world_size,
        "stage": totals.stage,
        "loss": {"first": progress.first_loss, "last": progress.last_loss},
        "tokens_per_s": progress.tokens_per_s,
        "seconds": totals.seconds,
        "peak_bytes": dict(sorted(progress.peak_bytes.items())),
        "world_sizes": list(progress.world_sizes),
        **totals.history,
        **totals.return_value,
    }


def write_summary(output_dir: Path, summary: dict[str, Any]) -> Path:
    """Writes `summary.json` atomically."""
    path = summary_path(output_dir)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def summary_path(output_dir: Path) -> Path:
    return output_dir / "summary.json"


def remove_summary(output_dir: Path) -> None:
    """Removes an earlier run's summary: it exists if and only if the last run succeeded."""
    summary_path(output_dir).unlink(missing_ok=True)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: with a result, or with an error."""

    result: JobResult | None = None
    error: RayzeroError | None = None

    def unwrap(self) -> JobResult:
        """
        Raises:
            JobFailedError, ConfigError: the job failed.
            JobStoppedError: it was stopped.
        """
        if self.result is None:
            raise self.error or JobFailedError("the controller ended without a result")
        return self.result


@dataclass(frozen=True)
class EventPage:
    """The events since the last request.

    Args:
        run: id of the process that sent it; another process numbers its events anew.
        events: in order.
        next_index: where the next request starts.
        dropped: number of events that were dropped because they were not fetched in time.
        ended: the outcome, once no more events follow.
    """

    run: str
    events: tuple[JobEvent, ...]
    next_index: int
    dropped: int = 0
    ended: JobEnd | None = None


@dataclass(frozen=True)
class JobStatus:
    """A snapshot of a job.

    Args:
        state: None if its process is gone and no outcome was recorded.
        step: number of finished steps.
        steps: number of requested steps; None if unknown.
        workers_min, workers_max: the current limits.
        began_at_s, at_s: when it was submitted, and when this snapshot was taken, as Unix time.
        faults: number of faults by cause.
        checkpoint_step: step of the newest checkpoint.
        journal: the folder of its journal, a path or a URL.
        log: path of its log file, on the head node.
        error: the first line of the error it failed with.
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

    @property
    def is_running(self) -> bool:
        return self.state is not None and not self.state.is_final
