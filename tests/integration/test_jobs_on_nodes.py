"""Whole jobs on clusters of several nodes: a node is lost, one comes, one drains."""

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
from tests.integration.namespaces import alone
from tests.integration.nodes import Nodes
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow
LIMIT_S = 200


@contextmanager
def running(folder: Path, notes: EventLog, **workers: Any) -> Iterator[JobHandle]:
    """A job past its first steps; stopped at the end."""
    handle = Job(
        "steady",
        "tests.integration.jobs.steady:train",
        engine=ENGINE,
        workers=Workers(**workers),
        steps=1_000_000,
        checkpoint={"path": str(folder)},
    ).submit(observer=notes)
    try:
        wait(handle, lambda: step(notes) > 20)
        yield handle
        reached = step(notes)
        wait(handle, lambda: step(notes) > reached + 20)
    finally:
        handle.stop()
        assert handle.wait(120)
    assert_every_step_once(notes)


def assert_every_step_once(notes: EventLog) -> None:
    """In order, but for those that a repair went back over."""
    steps = [record.step for record in notes.of(StepRecord)]
    back = [now for before, now in pairwise([0, *steps]) if now != before + 1]
    assert back == [one.step + 1 for one in notes.of(Repaired) if one.steps_redone]


def wait(handle: JobHandle, there: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not there():
        if handle.wait(0.05):
            handle.result()
        assert time.monotonic() < until


def step(notes: EventLog) -> int:
    return max((record.step for record in notes.of(StepRecord)), default=0)


def size(notes: EventLog) -> int:
    return notes.of(StepRecord)[-1].world_size


def test_job_survives_a_lost_node(nodes: Nodes, tmp_path: Path):
    first, second = nodes.add(), nodes.add()
    notes = EventLog()
    with running(tmp_path, notes, min=2, max=4) as handle:
        up = [worker for one in notes.of(WorkersReady) for worker in one.workers]
        assert {worker.node_id for worker in up} == {first, second}
        wait(handle, lambda: size(notes) == 4 and step(notes) > 60)
        with pytest.raises(ConfigError, match="shares its network with the job's contr"):
            handle.inject("partition(node=1, seconds=5)")
        answer = handle.inject("drop_node(node=1)")
        assert re.fullmatch(r"steady: drop_node\(.*, step=\d+\) at the next opportunity", answer)
        wait(handle, lambda: bool(notes.of(Repaired)))
        assert size(notes) == 2
        third = nodes.add()
        wait(handle, lambda: len(notes.of(StepRecord)) > 0 and size(notes) == 4)
        late = [worker for one in notes.of(WorkersReady)[1:] for worker in one.workers]
        assert third in {worker.node_id for worker in late}
    (fired,) = notes.of(FaultFired)
    assert fired.fault.startswith("drop_node(node=1, ")
    repaired = notes.of(Repaired)[0]
    assert (repaired.world_size_before, repaired.world_size) == (4, 2)
    assert repaired.step > 0, "the state came from the other node's memory"


def test_job_grows_with_a_node_and_shrinks_when_told(nodes: Nodes, tmp_path: Path):
    nodes.add()
    notes = EventLog()
    with running(tmp_path, notes, min=1, max=4) as handle:
        assert size(notes) == 2
        nodes.add()
        wait(handle, lambda: size(notes) == 4)
        assert handle.scale("1:3") == "steady: 1 to 3 workers; now 4"
        wait(handle, lambda: size(notes) == 3)
        command = [sys.executable, "-m", "rayzero", "scale", "steady", "2", "--address"]
        done = subprocess.run(
            [*command, nodes.address], capture_output=True, text=True, timeout=200
        )
        assert (done.returncode, done.stdout) == (0, "steady: 2 to 2 workers; now 3\n")
        wait(handle, lambda: size(notes) == 2)
    assert [(r.world_size_before, r.world_size) for r in notes.of(Resized)][-2:] == [(4, 3), (3, 2)]
    assert not notes.of(FaultDetected)


def test_a_drained_node_costs_no_fault(nodes: Nodes, tmp_path: Path):
    first, second = nodes.add(), nodes.add()
    notes = EventLog()
    with running(tmp_path, notes, min=2, max=2) as handle:
        (up,) = notes.of(WorkersReady)
        (old,) = {worker.node_id for worker in up.workers}
        nodes.drain(old)
        wait(handle, lambda: any("draining" in one.text for one in notes.of(JobWarning)))
        wait(handle, lambda: len(notes.of(Resized)) > 0)
    late = [worker for one in notes.of(WorkersReady)[1:] for worker in one.workers]
    assert {worker.node_id for worker in late} == {first, second} - {old}
    assert not notes.of(FaultDetected)
    assert not notes.of(Repaired)


def test_a_job_goes_on_without_a_host_that_cut_itself_off():
    seen = alone("tests.integration.linked", "partition")
    assert seen["fired"] == ["partition"]
    assert seen["sizes"] == [4, 2]
    assert seen["back_s"] < 150
    assert seen["step"] > 0, "the state came from memory"
