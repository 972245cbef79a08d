"""A job that trains until it is stopped, and what its observer has seen of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import Repaired
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from tests.orchestrator.support import EventLog

ENGINE = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
    "gradient_clipping": 0,
    "zero_optimization": {"stage": 2},
}
TIMEOUT_S = 400
START_S = 3.0
"""How long a new worker's function takes to come to its engine."""


def steady_job(folder: Path, name: str = "steady", **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "engine": ENGINE,
        "workers": Workers(min=2),
        "steps": 1_000_000,
        "checkpoint": {"path": str(folder), "every_steps": 20},
    }
    return Job(name, "tests.integration.jobs.steady:train", **(settings | changes))


@contextmanager
def submitted(job: Job, event_log: EventLog) -> Iterator[JobHandle]:
    """Yield a job's handle; stop the job at the end."""
    handle = job.submit(observer=event_log)
    try:
        yield handle
    finally:
        handle.stop()
        assert handle.wait(120)


@contextmanager
def running_job(folder: Path, event_log: EventLog, **workers: Any) -> Iterator[JobHandle]:
    """Yield a job after its first steps and stop it at the end, after some more."""
    args = {"pause_s": 0.1, "start_s": START_S}
    changes = {"args": args, "workers": Workers(**workers), "checkpoint": {"path": str(folder)}}
    changes["health"] = {"after_faults": 1, "limit_s": 60}
    with submitted(steady_job(folder, **changes), event_log) as handle:
        wait_for(handle, lambda: latest_step(event_log) > 5)
        yield handle
        steps_so_far = latest_step(event_log)
        wait_for(handle, lambda: latest_step(event_log) > steps_so_far + 5)
    assert_no_step_is_missing(event_log)


def assert_no_step_is_missing(event_log: EventLog) -> None:
    """Steps are consecutive, except where a repair rolled back."""
    steps = [record.step for record in event_log.of(StepRecord)]
    restarts = [step for previous, step in pairwise([0, *steps]) if step != previous + 1]
    assert restarts == [event.step + 1 for event in event_log.of(Repaired) if event.steps_redone]


def wait_for(handle: JobHandle, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if handle.wait(0.05):
            handle.result()
        assert time.monotonic() < deadline


def latest_step(event_log: EventLog) -> int:
    return max((record.step for record in event_log.of(StepRecord)), default=0)


def world_size(event_log: EventLog) -> int:
    return event_log.of(StepRecord)[-1].world_size


def assert_names_sigkill(text: str) -> None:
    """The node's agent says how a process ended, and not Ray; the kernel tells it since Linux
    6.15."""
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15):
        assert "its process was killed by SIGKILL" in text
    else:
        assert "exit" in text or "killed" in text
