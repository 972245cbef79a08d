"""What a job leaves behind when it succeeded: a JobResult, and the same as `summary.json`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
class Totals:
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
    returned: dict[str, Any]
    history: dict[str, Any] = field(default_factory=dict)


def summarize(totals: Totals, progress: JobProgress) -> dict[str, Any]:
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
        **totals.returned,
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


def forget_summary(output_dir: Path) -> None:
    """Removes an earlier run's summary: it exists if and only if the last run succeeded."""
    summary_path(output_dir).unlink(missing_ok=True)
