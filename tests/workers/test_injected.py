"""Faults that come while a worker runs: into its generation, and into those to come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayzero.workers.chaos.inject import read_fired_faults
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import Crashed, Finished, MirrorPolicy, StepReport
from tests.workers import repairs
from tests.workers.crew import Crew
from tests.workers.support import setup

pytestmark = pytest.mark.slow


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(
        setup(
            entrypoint="tests.workers.repairs:train",
            steps=100_000,
            engine_config=repairs.engine_config(2),
            output_dir=str(tmp_path),
            working_dir=os.getcwd(),
            import_paths=(os.getcwd(),),
            args={},
            mirror=MirrorPolicy(replicas=1, every_steps=1),
            faults=("raise_error(rank=7, step=1)",),
        ),
        1,
    )
    yield made
    made.close()


def test_a_fault_reaches_a_running_generation_and_the_next(crew: Crew, tmp_path: Path):
    worker = crew.workers[0]
    crew.form(1, [0])
    crew.wait(0, lambda one: isinstance(one, StepReport) and one.step >= 3)
    first = 'raise_error(rank=0, step=4, phase="reduce")'
    worker.call("inject", (first,))
    worker.call("inject", ())  # a list that was overtaken by the newer one
    crashed = crew.wait_end(0, 1)
    assert isinstance(crashed, Crashed)
    assert "injected in phase reduce" in crashed.error
    assert FaultFired(0, crashed.step, first) in crew.seen[0]

    second = f"raise_error(rank=0, step={crashed.step + 5})"
    worker.call("inject", (first, second))  # between two generations
    crew.form(2, [0], crew.slots(1, 1))
    again = crew.wait_end(0, 2)
    assert isinstance(again, Crashed)
    assert again.step == crashed.step + 5
    assert [one.fault for one in read_fired_faults(tmp_path)] == [first, second]
    assert not any(isinstance(one, Finished) for one in crew.seen[0])
