"""JobStatus, JobResult, summary.json.

What a job leaves behind when it succeeded: a JobResult, and the same as `summary.json`.

What a job's process tells of the job: how it stands, what is new, how it ended.
"""

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
        metrics: the summary, as it stands in `summary.json`.
        summary_path: where that is.
    """

    name: str
    metrics: dict[str, Any] = field(repr=False)
    summary_path: Path

    @property
    def steps(self) -> int:
        return int(self.metrics["steps"])


@dataclass(frozen=True)
class JobTotals:
    """What the controller knows of a finished job beside its progress.

    Args:
        seconds: from submission to the last rank's end.
        returned: what rank 0's training function returned.
        history: what the job went through: faults, repairs, steps_redone, checkpoints.
    """

    name: str
    world_size: int
    stage: int | None
    seconds: float
    return_value: dict[str, Any]
    history: dict[str, Any] = field(default_factory=dict)


def summarize(totals: JobTotals, progress: JobProgress) -> dict[str, Any]:
    """The summary; what the training function returned is merged in and wins."""
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
    """Writes `summary.json` so that it is there whole or not at all."""
    path = summary_path(output_dir)
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(half, path)
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
            JobFailedError, ConfigError: the job failed, and why.
            JobStoppedError: it was stopped.
        """
        if self.result is None:
            raise self.error or JobFailedError("the controller ended without a result")
        return self.result


@dataclass(frozen=True)
class EventPage:
    """What happened since somebody asked last.

    Args:
        run: which process tells it; another one counts its notices anew.
        notices: in order.
        upto: the number of the last of them; to be given with the next question.
        missed: how many were dropped because they were not fetched in time.
        ended: the end, once there is nothing more to come.
    """

    run: str
    events: tuple[JobEvent, ...]
    next_index: int
    dropped: int = 0
    ended: JobEnd | None = None


@dataclass(frozen=True)
class JobStatus:
    """How a job stands.

    Args:
        state: a `OptimizerStateMap`; None when its process is gone and no end was recorded.
        step: finished steps.
        steps: that were asked for; None when nobody knows.
        workers_min, workers_max: the limits as they are now.
        began_at_s, at_s: when it was submitted, and of when this is, as Unix time.
        faults: by cause.
        checkpoint_step: of the newest checkpoint.
        journal: the folder of its journal, a path or a URL.
        log: the file of all that it printed, on the cluster's head.
        error: why it failed; the first line.
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
