"""Whole jobs on clusters of several nodes: lost, added and drained nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import (
    FaultDetected,
    JobWarning,
    NodeChecked,
    Repaired,
    Resized,
    WorkersReady,
)
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from tests.integration.nodes import Nodes
from tests.integration.steady_job import latest_step, running_job, wait_for, world_size
from tests.orchestrator.support import EventLog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


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
        assert not event_log.of(NodeChecked), "all nodes are well"
        check_slow_node(handle, event_log, FaultRecord(tmp_path / "steady"))
    assert [(r.world_size_before, r.world_size) for r in event_log.of(Resized)][-3:] == [
        (3, 2),
        (2, 1),
        (1, 2),
    ]
    assert len(event_log.of(FaultDetected)) == fault_count + 1
    assert len(event_log.of(Repaired)) == 2


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
    """The others train while the new workers' functions come to their engines, in `START_S`."""
    resizes = len(event_log.of(Resized))
    wait_for(handle, lambda: world_size(event_log) == world_size_after)
    assert node_id in added_nodes(event_log, 1)
    wait_for(handle, lambda: len(event_log.of(Resized)) > resizes)
    events = [it for it in event_log.events if isinstance(it, WorkersReady | StepRecord | Resized)]
    resized = max(index for index, it in enumerate(events) if isinstance(it, Resized))
    ready = max(index for index, it in enumerate(events[:resized]) if isinstance(it, WorkersReady))
    assert resized - ready > 2, "steps meanwhile"


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


def check_slow_node(handle: JobHandle, event_log: EventLog, record: FaultRecord) -> None:
    """After a fault of a worker its node, which is slow, is checked again, named and avoided."""
    resizes = len(event_log.of(Resized))
    handle.scale("1:2")
    wait_for(handle, lambda: len(event_log.of(Resized)) > resizes)
    fired = len(record.read())
    handle.inject("slow_node(node=1)")
    wait_for(handle, lambda: len(record.read()) > fired)
    handle.inject("kill(rank=1)")
    wait_for(handle, lambda: bool(event_log.of(NodeChecked)))
    assert [it.fault.partition("(")[0] for it in record.read()[fired:]] == [
        "slow_node",
        "kill",
    ]
    (checked,), lost = event_log.of(NodeChecked), event_log.of(FaultDetected)[-1].worker
    assert checked.node_id == lost.node_id
    assert re.search(r"memory bandwidth .* GB/s, limit .* of the median of \d nodes", checked.text)
    seen = len(event_log.of(WorkersReady))
    steps_so_far = latest_step(event_log)  # in this time a replacement would be there
    wait_for(handle, lambda: latest_step(event_log) > steps_so_far + 50)
    assert len(event_log.of(WorkersReady)) == seen
    assert world_size(event_log) == 1


def added_nodes(event_log: EventLog, first_event: int) -> set[str]:
    """Nodes of the workers that became ready, from that event on."""
    events = event_log.of(WorkersReady)[first_event:]
    return {worker.node_id for event in events for worker in event.workers}
