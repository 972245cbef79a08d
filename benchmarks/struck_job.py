"""Strikes the workers of a rayzero job, one after another, and watches how it gets up again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

from benchmarks.strikes import MODEL, Strike, born, strike
from rayzero.engine.config import read_config
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import (
    FaultDetected,
    JobEvent,
    JobWarning,
    Repaired,
    WorkersReady,
)
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.messages import WorkerInfo

WAIT_S = 180.0
"""How long anything may take to come: a replacement, a quiet step, a repair."""
QUIET_STEPS = 10
ENDLESS = 10**7


@dataclass(frozen=True)
class Plan:
    """What is struck, how and how often.

    Args:
        fault: `kill` or `stop`.
        hang_timeout_s: after so long without progress a rank counts as hung.
        folder: where the job's output goes.
    """

    workers: int
    fault: str
    kills: int
    stage: int
    seed: int
    hang_timeout_s: float
    folder: Path


class Mailbox:
    """An observer that keeps what it sees, with the Unix time, for another thread to take."""

    def __init__(self) -> None:
        self._seen: SimpleQueue[tuple[float, JobEvent]] = SimpleQueue()

    def on_event(self, notice: JobEvent) -> None:
        self._seen.put((time.time(), notice))

    def take(self, timeout_s: float) -> tuple[float, JobEvent] | None:
        with suppress(Empty):
            return self._seen.get(timeout=timeout_s)
        return None


def job(plan: Plan) -> Job:
    """The demo's model on the demo's data, with no end but ours and no budget for faults."""
    config: dict[str, Any] = read_config(Path("examples/gpt/engine.json"))
    config["zero_optimization"] = {"stage": plan.stage}
    return Job(
        name="recovery",
        entrypoint="examples.gpt.train:train",
        engine=config,
        # 0.5 CPUs: three workers of one thread each fit on two cores
        workers=Workers(min=plan.workers - 1, max=plan.workers, cpus=0.5),
        args=MODEL,
        steps=ENDLESS,
        checkpoint={"path": str(plan.folder)},
        recovery={
            "hang_timeout_s": plan.hang_timeout_s,
            "max_faults": plan.kills + 10,
            # So short that a replacement is never delayed for the faults before.
            "fault_window_s": 1.0,
        },
    )


def strikes(plan: Plan, tell: Callable[[str], None]) -> list[Strike]:
    """Runs the job, strikes it, and ends it.

    Raises:
        RayzeroError: the job failed.
        TimeoutError: something did not come within WAIT_S.
    """
    mailbox = Mailbox()
    handle = job(plan).submit(observer=mailbox)
    ring = _Ring(plan, handle, mailbox)
    done = []
    try:
        for number in range(1, plan.kills + 1):
            ring.rest()
            one = ring.strike()
            done.append(one)
            tell(f"{plan.fault} {number} of {plan.kills}: rank {one.rank}, {one.total_s:.3f} s")
    finally:
        ring.let_go()
        handle.end()
    return done


class _Ring:
    """What is known of the job from its notices. Used by one thread."""

    def __init__(self, plan: Plan, handle: JobHandle, mailbox: Mailbox) -> None:
        self._plan = plan
        self._handle = handle
        self._mailbox = mailbox
        self._draw = random.Random(plan.seed)
        self._workers: list[WorkerInfo] = []
        self._usual: deque[float] = deque(maxlen=50)  # steps of a whole world, at rest
        self._struck: dict[int, int | None] = {}
        self._step = 0

    def rest(self) -> None:
        """Returns when the world is whole and some quiet steps are done."""
        quiet, generation = 0, 0
        for _, notice in self._notices("a quiet moment"):
            if isinstance(notice, StepRecord):
                whole = notice.world_size == self._plan.workers
                same = notice.generation == generation
                quiet = quiet + 1 if whole and same else 0
                generation = notice.generation
                if quiet > 1:
                    self._usual.append(notice.step_s)
            if quiet >= QUIET_STEPS:
                return

    def strike(self) -> Strike:
        """Strikes one worker and waits until the job is past it."""
        births = {one: born(one.pid) for one in self._workers}
        self._workers = [one for one in self._workers if births[one] is not None]
        victim = self._draw.choice(self._workers)
        others = [one for one in self._workers if one != victim]
        usual_s = median(self._usual)
        self._struck[victim.pid] = births[victim]
        struck_s = begun_s = strike(victim.pid, self._plan.fault, usual_s, self._draw)
        seen_s, rank, before = 0.0, None, self._step
        record: StepRecord | None = None
        for at_s, notice in self._notices("a repair"):
            if isinstance(notice, JobWarning) and f"pid {victim.pid}" in notice.text and not seen_s:
                begun_s = at_s if self._plan.fault == "stop" else begun_s
            elif isinstance(notice, FaultDetected) and notice.worker == victim:
                seen_s, rank = at_s, notice.rank
            elif isinstance(notice, StepRecord):
                before, record = before if seen_s else notice.step, notice
            elif isinstance(notice, Repaired) and seen_s and record is not None:
                return Strike(
                    rank,
                    before,
                    record.at_s - begun_s,
                    record.step_s,
                    usual_s,
                    notice.steps_redone,
                    sum(born(one.pid) != births[one] for one in others),
                    begun_s - struck_s,
                    {"sign": seen_s - begun_s, **notice.seconds},
                )
        raise TimeoutError  # not reached: _notices raises

    def let_go(self) -> None:
        """Leaves nobody stopped behind."""
        for pid, when in self._struck.items():
            if when is not None and born(pid) == when:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _notices(self, wanted: str) -> Iterator[tuple[float, JobEvent]]:
        """What is seen from now on, for as long as the job runs.

        Raises:
            RayzeroError: it failed.
            TimeoutError: WAIT_S are over.
        """
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            seen = self._mailbox.take(1.0)
            if seen is None:
                if self._handle.wait(0.0):
                    self._handle.result()
                continue
            match seen[1]:
                case WorkersReady(workers):
                    self._workers += workers
                case StepRecord(step=step):
                    self._step = step
            yield seen
        raise TimeoutError(f"{wanted} did not come within {WAIT_S:g} s")
