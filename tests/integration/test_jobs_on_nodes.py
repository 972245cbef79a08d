"""Whole jobs on clusters of several nodes: lost, added and drained nodes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import (
    FaultDetected,
    JobWarning,
    Repaired,
    Resized,
    WorkersReady,
)
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.chaos.spec import FaultFired
from tests.integration.jobs.steady import ENGINE
from tests.integration.namespaces import run_in_namespaces
from tests.integration.nodes import Nodes
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow
TIMEOUT_S = 200


@contextmanager
def running_job(folder: Path, event_log: EventLog, **workers: Any) -> Iterator[JobHandle]:
    """Yield a job after its first 20 steps and stop it at the end."""
    handle = Job(
        "steady",
        "tests.integration.jobs.steady:train",
        engine=ENGINE,
        workers=Workers(**workers),
        steps=1_000_000,
        checkpoint={"path": str(folder)},
    ).submit(observer=event_log)
    try:
        wait_for(handle, lambda: latest_step(event_log) > 20)
        yield handle
        steps_so_far = latest_step(event_log)
        wait_for(handle, lambda: latest_step(event_log) > steps_so_far + 20)
    finally:
        handle.stop()
        assert handle.wait(120)
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


def test_job_survives_lost_node(nodes: Nodes, tmp_path: Path):
    first, second = nodes.add(), nodes.add()
    event_log = EventLog()
    with running_job(tmp_path, event_log, min=2, max=4) as handle:
        initial = [worker for event in event_log.of(WorkersReady) for worker in event.workers]
        assert {worker.node_id for worker in initial} == {first, second}
        wait_for(handle, lambda: world_size(event_log) == 4 and latest_step(event_log) > 60)
        with pytest.raises(ConfigError, match="shares its network with the job's contr"):
            handle.inject("partition(node=1, seconds=5)")
        answer = handle.inject("drop_node(node=1)")
        assert re.fullmatch(r"steady: drop_node\(.*, step=\d+\) at the next opportunity", answer)
        wait_for(handle, lambda: bool(event_log.of(Repaired)))
        assert world_size(event_log) == 2
        third = nodes.add()
        wait_for(handle, lambda: len(event_log.of(StepRecord)) > 0 and world_size(event_log) == 4)
        added = [worker for event in event_log.of(WorkersReady)[1:] for worker in event.workers]
        assert third in {worker.node_id for worker in added}
    (fired,) = event_log.of(FaultFired)
    assert fired.fault.startswith("drop_node(node=1, ")
    repaired = event_log.of(Repaired)[0]
    assert (repaired.world_size_before, repaired.world_size) == (4, 2)
    assert repaired.step > 0, "the state came from the other node's memory"


def test_job_grows_onto_new_node_and_shrinks_on_request(nodes: Nodes, tmp_path: Path):
    nodes.add()
    event_log = EventLog()
    with running_job(tmp_path, event_log, min=1, max=4) as handle:
        assert world_size(event_log) == 2
        nodes.add()
        wait_for(handle, lambda: world_size(event_log) == 4)
        assert handle.scale("1:3") == "steady: 1 to 3 workers; now 4"
        wait_for(handle, lambda: world_size(event_log) == 3)
        command = [sys.executable, "-m", "rayzero", "scale", "steady", "2", "--address"]
        done = subprocess.run(
            [*command, nodes.address], capture_output=True, text=True, timeout=200
        )
        assert (done.returncode, done.stdout) == (0, "steady: 2 to 2 workers; now 3\n")
        wait_for(handle, lambda: world_size(event_log) == 2)
    assert [(r.world_size_before, r.world_size) for r in event_log.of(Resized)][-2:] == [
        (4, 3),
        (3, 2),
    ]
    assert not event_log.of(FaultDetected)


def test_drained_node_is_not_a_fault(nodes: Nodes, tmp_path: Path):
    first, second = nodes.add(), nodes.add()
    event_log = EventLog()
    with running_job(tmp_path, event_log, min=2, max=2) as handle:
        (ready,) = event_log.of(WorkersReady)
        (drained,) = {worker.node_id for worker in ready.workers}
        nodes.drain(drained)
        wait_for(
            handle, lambda: any("draining" in event.text for event in event_log.of(JobWarning))
        )
        wait_for(handle, lambda: len(event_log.of(Resized)) > 0)
    added = [worker for event in event_log.of(WorkersReady)[1:] for worker in event.workers]
    assert {worker.node_id for worker in added} == {first, second} - {drained}
    assert not event_log.of(FaultDetected)
    assert not event_log.of(Repaired)


def test_job_survives_partitioned_host():
    result = run_in_namespaces("tests.integration.two_hosts", "partition")
    assert result["fired"] == ["partition"]
    assert result["world_sizes"] == [4, 2]
    assert result["repair_s"] < 150
    assert result["step"] > 0, "the state came from memory"
