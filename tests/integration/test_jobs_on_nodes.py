"""Whole jobs on clusters of several nodes: lost, added and drained nodes."""

from __future__ import annotations

import re
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
from tests.integration.nodes import Nodes
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow
TIMEOUT_S = 200
START_S = 3.0
"""How long a new worker's function takes to come to its engine."""


@contextmanager
def running_job(folder: Path, event_log: EventLog, **workers: Any) -> Iterator[JobHandle]:
    """Yield a job after its first steps and stop it at the end, after some more."""
    handle = Job(
        "steady",
        "tests.integration.jobs.steady:train",
        engine=ENGINE,
        args={"pause_s": 0.1, "start_s": START_S},
        workers=Workers(**workers),
        steps=1_000_000,
        checkpoint={"path": str(folder)},
    ).submit(observer=event_log)
    try:
        wait_for(handle, lambda: latest_step(event_log) > 5)
        yield handle
        steps_so_far = latest_step(event_log)
        wait_for(handle, lambda: latest_step(event_log) > steps_so_far + 5)
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


def test_job_moves_off_drained_node_survives_lost_node_and_is_resized(nodes: Nodes, tmp_path: Path):
    """On nodes with room for one worker each, and at last on one for two."""
    first_nodes = {nodes.add(cpus=1), nodes.add(cpus=1)}
    event_log = EventLog()
    with running_job(tmp_path, event_log, min=1, max=1) as handle:
        check_drained_node(handle, event_log, nodes, first_nodes)
        handle.scale("1:2")
        check_growth(handle, event_log, nodes.add(cpus=1), world_size_after=2)
        assert not event_log.of(FaultDetected)
        assert not event_log.of(Repaired)
        check_lost_node(handle, event_log)
        assert handle.scale("1:3") == "steady: 1 to 3 workers wanted; it has 1"
        check_growth(handle, event_log, nodes.add(cpus=2), world_size_after=3)
        fault_count = len(event_log.of(FaultDetected))
        assert handle.scale("1:2") == "steady: 1 to 2 workers wanted; it has 3"
        wait_for(handle, lambda: world_size(event_log) == 2)
        assert handle.scale("1") == "steady: 1 worker wanted; it has 2"
        wait_for(handle, lambda: world_size(event_log) == 1)
    assert [(r.world_size_before, r.world_size) for r in event_log.of(Resized)][-2:] == [
        (3, 2),
        (2, 1),
    ]
    assert len(event_log.of(FaultDetected)) == fault_count
    assert len(event_log.of(Repaired)) == 1


def check_drained_node(
    handle: JobHandle, event_log: EventLog, nodes: Nodes, node_ids: set[str]
) -> None:
    """Drain the node that all workers run on: they move to the other one."""
    (drained,) = added_nodes(event_log, 0)
    nodes.drain(drained)
    wait_for(handle, lambda: any("draining" in event.text for event in event_log.of(JobWarning)))
    wait_for(handle, lambda: len(event_log.of(Resized)) > 0)
    assert added_nodes(event_log, 1) == node_ids - {drained}


def check_growth(
    handle: JobHandle, event_log: EventLog, node_id: str, world_size_after: int
) -> None:
    """The others train while the new workers' functions come to their engines."""
    resizes = len(event_log.of(Resized))
    wait_for(handle, lambda: world_size(event_log) == world_size_after)
    assert node_id in added_nodes(event_log, 1)
    wait_for(handle, lambda: len(event_log.of(Resized)) > resizes)
    assert sum(event_log.of(Resized)[-1].seconds.values()) < START_S


def check_lost_node(handle: JobHandle, event_log: EventLog) -> None:
    steps_so_far = latest_step(event_log)
    wait_for(handle, lambda: latest_step(event_log) > steps_so_far + 20)
    with pytest.raises(ConfigError, match="shares its network with the job's contr"):
        handle.inject("partition(node=1, seconds=5)")
    answer = handle.inject("drop_node(node=1)")
    assert re.fullmatch(r"steady: drop_node\(.*, step=\d+\) at the next opportunity", answer)
    wait_for(handle, lambda: bool(event_log.of(Repaired)))
    (fired,) = event_log.of(FaultFired)
    assert fired.fault.startswith("drop_node(node=1, ")
    (repaired,) = event_log.of(Repaired)
    assert (repaired.world_size_before, repaired.world_size) == (2, 1)
    assert repaired.step > 0, "the state came from the other node's memory"
    assert world_size(event_log) == 1


def added_nodes(event_log: EventLog, first_event: int) -> set[str]:
    """Nodes of the workers that became ready, from that event on."""
    events = event_log.of(WorkersReady)[first_event:]
    return {worker.node_id for event in events for worker in event.workers}
