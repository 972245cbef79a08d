"""Generators that stop, hang, and die for good, on a real Ray cluster: the trainer goes on, or its
job fails with their role's name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.data.sample_ledger import read_ledger
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job_events import JobEvent, MetricsServed, RoleFault, RoleWorkerReady
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.weights import reader
from tests.deploy.prometheus import check_alert_fires, installed_program
from tests.integration.scraping import Scrape
from tests.orchestrator.support import EventLog
from tests.workers.recovery_jobs import SAMPLES, engine_config, make_model
from tests.workers.rollouts.jobs import GROUP, PROMPTS, make_sample

pytestmark = pytest.mark.slow
STEPS = 12
"""Of the trainer, before its reader is stopped, and meanwhile."""
HANG_S = 4.0
SLOW_S = 1.5
START_TIMEOUT_S = 20.0
STALE_STEPS = 10
"""From which on the alert is to fire."""
MAX_FAULTS = 4
"""Of a role: one more than it has."""


def wait_for(condition: Callable[[], bool], limit_s: float = 200) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def wait_while_exists(path: str) -> str:
    while Path(path).exists():
        time.sleep(0.1)
    return path


class Barrier:
    """A process that unpickles it waits while a file exists."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return wait_while_exists, (self.path,)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class TimedLog(EventLog):
    """Also when each step ended, by the monotonic clock."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_s: list[float] = []

    def on_event(self, event: JobEvent) -> None:
        super().on_event(event)
        if isinstance(event, StepRecord):
            self.steps_s.append(time.monotonic())

    def step_s(self, since_s: float, until_s: float) -> float:
        """The median time of the steps meanwhile."""
        ends_s = [it for it in self.steps_s if since_s <= it <= until_s]
        return median(after - before for before, after in pairwise(ends_s))


def test_generators_that_stop_hang_and_die(no_leaks: None, tmp_path: Path):
    may_stop, may_hang, may_be_slow, may_not_start = (
        tmp_path / name for name in ("stop", "hang", "slow", "start")
    )
    barrier = Barrier(may_not_start)

    def train(ctx: rayzero.Context) -> None:
        engine, *_ = ctx.initialize(model=make_model(torch.float64))
        for x, y in ctx.rollouts(PROMPTS, engine).until(ctx.steps):
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
            time.sleep(0.05)

    def read(ctx: rayzero.RoleContext) -> None:
        """Stops within a refresh, once: between the reading and the check of what was read."""
        original, model = reader._read_model, make_model(torch.float64)

        def stopping(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if may_stop.exists():
                may_stop.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)

        reader._read_model = stopping
        while True:
            ctx.weights.refresh(model)
            ctx.wait(0.01)

    def generate(ctx: rayzero.RoleContext) -> None:
        assert barrier is not None
        for task in ctx.tasks(prompts=2):
            with suppress(FileNotFoundError):  # one of them
                may_hang.unlink()
                time.sleep(3600)
            time.sleep(SLOW_S if may_be_slow.exists() else 0.0)
            task.done([[make_sample(prompt, it) for it in range(GROUP)] for prompt in task.prompts])

    def role(function: Any, takes: str | None, most: int, hang_s: float) -> rayzero.Role:
        workers = rayzero.Workers(min=1, max=most, cpus=0.25, start_timeout_s=START_TIMEOUT_S)
        recovery = {"hang_timeout_s": hang_s, "max_faults": MAX_FAULTS}
        return rayzero.Role(function, workers, recovery=recovery, takes=takes)

    log = TimedLog()
    handle = rayzero.Job(
        "stuck",
        train,
        engine=engine_config(1),
        workers=rayzero.Workers(min=1, cpus=0.25),
        steps=100_000,
        rollouts=rayzero.Rollouts(group=GROUP),
        roles={
            "rollout": role(generate, "prompts", 2, HANG_S),
            "reader": role(read, None, 1, 600),  # not while it is stopped
        },
        checkpoint={"path": str(tmp_path)},
        metrics={"port": 0},
        ledger=True,
    ).submit(observer=log)

    def pids(name: str) -> list[int]:
        return [it.worker.pid for it in log.of(RoleWorkerReady) if it.role == name]

    # A reader that is stopped within a refresh is nothing to the trainer.
    wait_for(lambda: len(log.steps_s) > 10)
    wait_for(lambda: (len(pids("rollout")), len(pids("reader"))) == (2, 1))

    def train_on() -> float:
        """The median time of the next steps."""
        began_s, steps = time.monotonic(), len(log.steps_s)
        wait_for(lambda: len(log.steps_s) > steps + STEPS)
        return log.step_s(began_s, time.monotonic())

    before_s = train_on()
    may_stop.touch()
    (stopped,) = pids("reader")
    wait_for(lambda: is_stopped(stopped))
    assert train_on() < 2 * before_s + 0.2  # 0.2 s: other tests run at the same time
    assert is_stopped(stopped)
    (serving,) = log.of(MetricsServed)
    wait_for(lambda: lag_steps(Scrape(serving.url)) > STALE_STEPS)
    stale = Scrape(serving.url)
    os.kill(stopped, signal.SIGCONT)

    # A task that does not end is another's, and its worker is started again.
    may_hang.touch()
    wait_for(lambda: bool(log.of(RoleFault)))
    (hung,) = log.of(RoleFault)
    assert (hung.role, hung.cause) == ("rollout", "hang")
    assert "sleep" in hung.text
    steps = len(log.steps_s)
    wait_for(lambda: len(log.steps_s) > steps + 10 and len(pids("rollout")) == 3)

    # Slow ones: the time is booked where a step ends.
    may_be_slow.touch()
    slow = list[Scrape]()
    for _ in range(2):
        steps = len(log.steps_s)
        wait_for(lambda: len(log.steps_s) > steps + 1)  # noqa: B023  called within the loop
        slow.append(Scrape(serving.url))
    may_be_slow.unlink()

    # None is left, and none can start.
    may_not_start.touch()
    dead_s = time.monotonic()
    newest = {it.number: it.worker for it in log.of(RoleWorkerReady) if it.role == "rollout"}
    for worker in newest.values():
        os.kill(worker.pid, signal.SIGKILL)
    wait_for(lambda: len(log.of(RoleFault)) == MAX_FAULTS - 1)
    dead = Scrape(serving.url)
    with pytest.raises(JobFailedError, match="role rollout has 0 of at least 1 workers"):
        handle.result()
    assert time.monotonic() - dead_s < START_TIMEOUT_S + 60
    consumed = read_ledger(tmp_path / "stuck" / "ledger").values()
    numbers = [number for step in consumed for number in step]
    assert len({*numbers}) == len(numbers) >= steps * SAMPLES
    check_alerts(stale, slow, dead, tmp_path)


def lag_steps(scrape: Scrape) -> float:
    """How far the reader's weights are behind, more than is allowed."""
    published = scrape.value("rayzero_rollout_published_version")
    version = scrape.value("rayzero_role_oldest_version", role="reader")
    return published - version - scrape.value("rayzero_rollout_max_lag_steps")


def check_alerts(stale: Scrape, slow: list[Scrape], dead: Scrape, folder: Path) -> None:
    """The alerts of roles, with the numbers of this job: the rules themselves where promtool is."""
    first, last = slow
    assert lag_steps(stale) > STALE_STEPS
    waits = [it.value("rayzero_time_seconds_total", cause="data") for it in slow]
    assert waits[1] - waits[0] > 0.5 * (last.at_s - first.at_s)
    faults = dead.value("rayzero_role_faults_in_window", role="rollout")
    assert faults >= 0.75 * dead.value("rayzero_role_fault_budget", role="rollout")
    if installed_program("promtool"):
        check_alert_fires("RayzeroStaleGenerators", stale.continued(), folder)
        check_alert_fires("RayzeroTrainerStarving", last.continued(first), folder)
        check_alert_fires("RayzeroRoleBudgetNearlySpent", dead.continued(), folder)
