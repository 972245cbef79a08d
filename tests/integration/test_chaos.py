"""Faults outside of the workers, injected into real jobs: they fire, at a known cost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    FaultDetected,
    JobWarning,
    Repaired,
    Resized,
    Resumed,
)
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from tests.integration.nodes import Nodes
from tests.integration.steady_job import (
    latest_step,
    steady_job,
    submitted,
    wait_for,
    world_size,
)
from tests.orchestrator.support import EventLog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CHECKPOINT_INTERVAL, LAST_STEP = 40, 200
STORE_FAULTS = [
    "full_disk(step=40)",
    "slow_store(seconds=2, step=80)",
    'tear_file(step=200, rank=1, how="cut")',
]
VAULT_FAULT = f"kill_vault(node=0, step={LAST_STEP + 20})"


def faulty_job(folder: Path, faults: list[str], **changes: Any) -> Job:
    checkpoint = {"path": str(folder), "every_steps": CHECKPOINT_INTERVAL}
    changes |= {"checkpoint": checkpoint, "workers": Workers(min=1, max=2), "faults": faults}
    return steady_job(folder, recovery={"mirror_every": 1}, **changes)


def test_job_survives_faults_of_stores_vaults_and_workers(nodes: Nodes, tmp_path: Path):
    """A job with store faults; its continuation with a lost vault and lost workers."""
    nodes.add()
    record = FaultRecord(tmp_path / "steady")
    _assert_store_faults_do_not_interrupt_training(tmp_path, record)
    event_log = EventLog()
    with submitted(faulty_job(tmp_path, [*STORE_FAULTS, VAULT_FAULT]), event_log) as handle:
        wait_for(handle, lambda: latest_step(event_log) > LAST_STEP)
        _assert_torn_checkpoint_is_skipped(event_log)
        _assert_lost_vault_is_restarted_and_refilled(handle, event_log)
        assert [event.fault for event in record.read()] == [*STORE_FAULTS, VAULT_FAULT], (
            "no fault is injected again"
        )
        _assert_faults_can_be_injected_by_command(handle, event_log, nodes, record)
    steps = [record.step for record in event_log.of(StepRecord)]
    first = LAST_STEP - CHECKPOINT_INTERVAL + 1
    assert steps == [*range(first, latest_step(event_log) + 1)], "no step was repeated"


def _assert_store_faults_do_not_interrupt_training(folder: Path, record: FaultRecord) -> None:
    event_log = EventLog()
    with submitted(faulty_job(folder, STORE_FAULTS, steps=LAST_STEP), event_log) as handle:
        assert handle.wait(400)
        assert handle.result().steps == LAST_STEP
    assert [event.fault for event in record.read()] == STORE_FAULTS
    assert {event.fault for event in event_log.of(FaultFired)} == set(STORE_FAULTS)
    assert [record.step for record in event_log.of(StepRecord)] == [*range(1, LAST_STEP + 1)]
    assert not event_log.of(FaultDetected), "the workers kept running"

    # The disk was full once: the failure was reported and the checkpoint was retried.
    (failed,) = event_log.of(CheckpointFailed)
    assert (failed.step, failed.tries) == (CHECKPOINT_INTERVAL, 1)
    assert "No space left on device" in failed.text
    stored = {event.step: event for event in event_log.of(Checkpointed)}
    assert [*stored] == [*range(CHECKPOINT_INTERVAL, LAST_STEP + 1, CHECKPOINT_INTERVAL)]
    # The slow store did not block training: steps completed during the write.
    slow = stored[2 * CHECKPOINT_INTERVAL]
    assert slow.seconds > 2
    before = event_log.events[: event_log.events.index(slow)]
    assert sum(isinstance(event, StepRecord) for event in before) > slow.step
    # The torn file is reported.
    (problem,) = verify_checkpoint(stored[LAST_STEP].folder)
    assert "rank-00001" in str(problem)


def _assert_torn_checkpoint_is_skipped(event_log: EventLog) -> None:
    assert [event.step for event in event_log.of(Resumed)] == [LAST_STEP - CHECKPOINT_INTERVAL]
    assert any("is skipped" in event.text for event in event_log.of(JobWarning))


def _assert_lost_vault_is_restarted_and_refilled(handle: JobHandle, event_log: EventLog) -> None:
    wait_for(handle, lambda: bool(event_log.of(Resized)))
    steps_so_far = latest_step(event_log)
    wait_for(handle, lambda: latest_step(event_log) > steps_so_far + 5)
    assert [event.fault for event in event_log.of(FaultFired)] == [VAULT_FAULT]
    assert any("the vault on node" in event.text for event in event_log.of(JobWarning))
    assert [event.reason for event in event_log.of(Resized)] == [
        "a vault was restarted and is empty"
    ]
    assert not event_log.of(FaultDetected), "the workers kept running"


def _assert_faults_can_be_injected_by_command(
    handle: JobHandle, event_log: EventLog, nodes: Nodes, record: FaultRecord
) -> None:
    recorded = len(record.read())
    command = [sys.executable, "-m", "rayzero", "chaos", "steady", "kill(rank=1)", "--address"]
    done = subprocess.run([*command, nodes.address], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(
        r"steady: (kill\(rank=1, step=\d+\)) at the next opportunity\n", done.stdout
    )
    assert match, done.stdout
    wait_for(handle, lambda: bool(event_log.of(Repaired)))
    assert [event.fault for event in record.read()[recorded:]] == [match[1]]
    wait_for(handle, lambda: world_size(event_log) == 2)
    # Faults requested before the replacement worker joined also apply to it.
    assert "from that step on" in handle.inject(f"kill(rank=0, step={latest_step(event_log) + 40})")
    wait_for(handle, lambda: len(event_log.of(Repaired)) == 2)
    with pytest.raises(ConfigError, match="the job has at most 2 workers"):
        handle.inject("kill(rank=2)")
    steps_so_far = latest_step(event_log)
    wait_for(handle, lambda: latest_step(event_log) > steps_so_far + 5)
    assert [event.steps_redone for event in event_log.of(Repaired)] == [0, 0]
