"""A job with a role on a real Ray cluster: its workers are started again alone, and scaled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rayzero
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job_events import FaultDetected, Repaired, RoleFault, RoleWorkerReady
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import LogLine
from tests.integration.steady_job import assert_names_sigkill
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_role_beside_the_ranks(no_leaks: None, tmp_path: Path):
    stop = tmp_path / "stop"

    def train(ctx: rayzero.Context) -> dict[str, Any]:
        step = 0
        while not stop.exists():
            step += 1
            ctx.report(step=step, loss=1.0)
            time.sleep(0.05)
        return {"pid": os.getpid()}

    def generate(ctx: rayzero.RoleContext) -> None:
        print("begins", ctx.args["text"], os.getpid())
        try:
            while True:
                ctx.report(reward=ctx.number, tokens=5)
                ctx.wait(0.05)
        finally:
            print("ends")

    log = EventLog()
    workers = rayzero.Workers(min=1, max=2, cpus=0.5)
    role = rayzero.Role(generate, workers=workers, args={"text": "in"})
    handle = rayzero.Job(
        "roles",
        train,
        workers=rayzero.Workers(min=1, cpus=0.5),
        roles={"rollout": role},
        checkpoint={"path": str(tmp_path)},
    ).submit(observer=log)
    wait_for(lambda: len(log.of(RoleWorkerReady)) == 2 and len(log.of(StepRecord)) > 2)
    wait_for(lambda: sum("begins" in line.text for line in log.of(LogLine)) == 2)
    first, second = log.of(RoleWorkerReady)
    fault_text = f'kill(role="rollout", worker={second.number})'
    assert fault_text[:-1] in handle.inject(fault_text)
    wait_for(lambda: bool(log.of(RoleFault)))
    assert [(it.role, it.rank) for it in log.of(FaultFired)] == [("rollout", second.number)]
    (fault,) = log.of(RoleFault)
    assert (fault.number, fault.cause) == (second.number, "lost")
    assert_names_sigkill(fault.text)
    wait_for(lambda: len(log.of(RoleWorkerReady)) == 3)
    assert log.of(RoleWorkerReady)[2].number == second.number
    assert "role rollout: 1 to 3 workers wanted; it has 2" in handle.scale((1, 3), role="rollout")
    wait_for(lambda: len(log.of(RoleWorkerReady)) == 4)

    seen: list[Any] = []

    def reports() -> bool:
        seen[:] = [handle._running_process().call(JobActor.snapshot)["roles"]["rollout"]]
        return bool(seen[0]["tokens_per_s"] and seen[0]["values"])

    wait_for(reports)
    assert 0 <= seen[0]["values"]["reward"]["mean"] <= 2
    status = handle.status()
    assert (status.roles["rollout"].workers, status.roles["rollout"].faults) == (3, {"lost": 1})
    assert (status.generation, status.faults, status.repairs) == (1, {}, 0)
    stop.touch()
    result = handle.result()
    steps = [record.step for record in log.of(StepRecord)]
    assert steps == list(range(1, len(steps) + 1))
    assert not log.of(FaultDetected) + log.of(Repaired)
    lines = list(handle.logs(role="rollout"))
    began = [line for line in lines if "begins in" in line]
    numbers = sorted([first.number, second.number, second.number, 2])
    assert sorted(int(line.split()[1].rstrip("]")) for line in began) == numbers
    assert sum("ends" in line for line in lines) == 3, "the killed one says nothing more"
    assert list(handle.logs(rank=0)) == []
    assert result.metrics["pid"] not in [event.worker.pid for event in log.of(RoleWorkerReady)]
