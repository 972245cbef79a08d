"""Faults injected while a worker runs: into the current generation and the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from rayzero.workers.messages import Crashed, Finished, MirrorPolicy, StepReport
from tests.workers import recovery_jobs
from tests.workers.local_workers import LocalWorkers
from tests.workers.support import setup

pytestmark = pytest.mark.slow


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalWorkers]:
    workers = LocalWorkers(
        setup(
            entrypoint="tests.workers.recovery_jobs:train",
            steps=100_000,
            engine_config=recovery_jobs.engine_config(2),
            output_dir=str(tmp_path),
            working_dir=os.getcwd(),
            args={},
            mirror=MirrorPolicy(replicas=1, every_steps=1),
            faults=("raise_error(rank=7, step=1)",),
        ),
        1,
    )
    yield workers
    workers.close()


def test_injected_faults_reach_current_and_next_generation(local: LocalWorkers, tmp_path: Path):
    worker = local.workers[0]
    local.form(1, [0])
    local.wait(0, lambda message: isinstance(message, StepReport) and message.step >= 3)
    first = 'raise_error(rank=0, step=4, phase="reduce")'
    worker.call("inject", [parse_fault(first)])
    worker.call("inject", [])  # an older list that arrives late
    crashed = local.wait_end(0, 1)
    assert isinstance(crashed, Crashed)
    assert "injected in phase reduce" in crashed.error
    assert FaultFired(0, crashed.step, first) in local.seen[0]

    second = f"raise_error(rank=0, step={crashed.step + 5})"
    local.faults = parse_fault(first), parse_fault(second)
    local.form(2, [0], local.slots(1, 1))
    second_crash = local.wait_end(0, 2)
    assert isinstance(second_crash, Crashed)
    assert second_crash.step == crashed.step + 5
    assert [message.fault for message in FaultRecord(tmp_path).read()] == [first, second]
    assert not any(isinstance(message, Finished) for message in local.seen[0])
