"""Faults beyond the workers, in real jobs: they happen, and this is what they cost."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.checkpoint.reader import verify_checkpoint
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
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.spec import Workers
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from tests.integration.jobs.steady import ENGINE
from tests.integration.nodes import Nodes
from tests.integration.test_jobs_on_nodes import size, step, wait
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow

EVERY, LAST = 40, 200
FAULTS = [
    "full_disk(step=40)",
    "slow_store(seconds=2, step=80)",
    'tear_file(step=200, rank=1, how="cut")',
]


@contextmanager
def submitted(
    folder: Path, notes: EventLog, steps: int = 1_000_000, **settings: Any
) -> Iterator[JobHandle]:
    """A job of at most two workers; stopped at the end."""
    handle = Job(
        "steady",
        "tests.integration.jobs.steady:train",
        engine=ENGINE,
        workers=Workers(min=1, max=2),
        steps=steps,
        **{"checkpoint": {"path": str(folder)}, **settings},
    ).submit(observer=notes)
    try:
        yield handle
    finally:
        handle.stop()
        assert handle.wait(120)


def run(folder: Path, steps: int, notes: EventLog) -> JobResult:
    checkpoint = {"path": str(folder), "every_steps": EVERY}
    with submitted(folder, notes, steps, checkpoint=checkpoint, faults=FAULTS) as handle:
        assert handle.wait(400)
        return handle.result()


def test_the_store_fails_and_nothing_is_lost(nodes: Nodes, tmp_path: Path):
    nodes.add()
    notes = EventLog()
    assert run(tmp_path, LAST, notes).steps == LAST
    output_dir = tmp_path / "steady"
    assert [one.fault for one in FaultRecord(output_dir).read()] == FAULTS
    assert {one.fault for one in notes.of(FaultFired)} == set(FAULTS)
    assert [record.step for record in notes.of(StepRecord)] == [*range(1, LAST + 1)]
    assert not notes.of(FaultDetected), "the workers went on"

    # The disk was full once: told, tried again, whole.
    (failed,) = notes.of(CheckpointFailed)
    assert (failed.step, failed.tries) == (EVERY, 1)
    assert "No space left on device" in failed.text
    stored = {one.step: one for one in notes.of(Checkpointed)}
    assert [*stored] == [*range(EVERY, LAST + 1, EVERY)]
    # The slow store held no step up: some were done while it wrote.
    slow = stored[2 * EVERY]
    assert slow.seconds > 2
    before = notes.events[: notes.events.index(slow)]
    assert sum(isinstance(one, StepRecord) for one in before) > slow.step
    # The torn file is named, and its checkpoint is not begun from; nothing breaks a second time.
    (problem,) = verify_checkpoint(stored[LAST].folder)
    assert "rank-00001" in str(problem)
    later = EventLog()
    assert run(tmp_path, LAST + 20, later).steps == LAST + 20
    assert [one.step for one in later.of(Resumed)] == [LAST - EVERY]
    assert any("is skipped" in one.text for one in later.of(JobWarning))
    assert [record.step for record in later.of(StepRecord)] == [*range(LAST - EVERY + 1, LAST + 21)]
    assert len(FaultRecord(output_dir).read()) == len(FAULTS)


def test_a_lost_vault_is_opened_again_and_filled(nodes: Nodes, tmp_path: Path):
    nodes.add()
    notes = EventLog()
    fault = "kill_vault(node=0, step=20)"
    with submitted(tmp_path, notes, faults=[fault]) as handle:
        wait(handle, lambda: bool(notes.of(Resized)))
        reached = step(notes)
        wait(handle, lambda: step(notes) > reached + 5)
    assert [one.fault for one in FaultRecord(tmp_path / "steady").read()] == [fault]
    assert any("the vault on node" in one.text for one in notes.of(JobWarning))
    assert [one.reason for one in notes.of(Resized)] == ["a vault was restarted and is empty"]
    assert not notes.of(FaultDetected), "the workers went on"
    assert [record.step for record in notes.of(StepRecord)] == [*range(1, step(notes) + 1)]


def test_a_running_job_is_struck_by_command_and_goes_on(nodes: Nodes, tmp_path: Path):
    nodes.add()
    notes = EventLog()
    with submitted(tmp_path, notes) as handle:
        wait(handle, lambda: step(notes) > 5)
        command = [sys.executable, "-m", "rayzero", "chaos", "steady", "kill(rank=1)", "--address"]
        done = subprocess.run(
            [*command, nodes.address], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        told = re.fullmatch(
            r"steady: (kill\(rank=1, step=\d+\)) at the next opportunity\n", done.stdout
        )
        assert told, done.stdout
        wait(handle, lambda: bool(notes.of(Repaired)))
        assert [one.fault for one in FaultRecord(tmp_path / "steady").read()] == [told[1]]
        wait(handle, lambda: size(notes) == 2)
        # The replacement hears of what was wished for before it came.
        assert "from that step on" in handle.inject(f"kill(rank=0, step={step(notes) + 40})")
        wait(handle, lambda: len(notes.of(Repaired)) == 2)
        with pytest.raises(ConfigError, match="the job has at most 2 workers"):
            handle.inject("kill(rank=2)")
        reached = step(notes)
        wait(handle, lambda: step(notes) > reached + 5)
    assert [one.steps_redone for one in notes.of(Repaired)] == [0, 0]
    steps = [record.step for record in notes.of(StepRecord)]
    assert steps == sorted({*steps}), "no step was done again"
