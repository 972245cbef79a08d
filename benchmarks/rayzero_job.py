"""Injects faults into the workers of a rayzero job and measures each recovery."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

from benchmarks.faults import MODEL, FaultCost, inject_fault, process_start_time
from benchmarks.hanging_gpt import HANGS, told_file
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

TIMEOUT_S = 180.0
"""For a replacement worker, undisturbed steps, or a repair."""
COMPILING_S = 600.0
"""The same, where each new worker compiles its model."""
UNDISTURBED_STEPS = 10
ENDLESS_STEPS = 10**7


@dataclass(frozen=True)
class Plan:
    """Configuration of a measurement.

    Args:
        fault: `kill`, `stop`, or one of `HANGS`.
        kills: number of faults.
        hang_timeout_s: `recovery.hang_timeout_s` of the job.
        folder: for the job's output.
        gpus: of each worker.
        model: changes of the model's arguments.
        compiled: by torch.compile.
        batch: samples of a step, in one micro-batch a rank; None for the example's.
        mirror_every: `recovery.mirror_every` of the job: with 1, no finished step is repeated.
    """

    workers: int
    fault: str
    kills: int
    stage: int
    seed: int
    hang_timeout_s: float | None
    folder: Path
    gpus: int = 0
    model: dict[str, int] = field(default_factory=dict)
    compiled: bool = False
    batch: int | None = None
    mirror_every: int | None = None

    @property
    def hangs(self) -> bool:
        """Whether the job hangs by itself when it is told to."""
        return self.fault in HANGS


class EventQueue:
    """An observer that queues events with their Unix time for another thread."""

    def __init__(self) -> None:
        self._events: SimpleQueue[tuple[float, JobEvent]] = SimpleQueue()

    def on_event(self, event: JobEvent) -> None:
        self._events.put((time.time(), event))

    def get(self, timeout_s: float) -> tuple[float, JobEvent] | None:
        with suppress(Empty):
            return self._events.get(timeout=timeout_s)
        return None


def make_job(plan: Plan) -> Job:
    """The GPT example as an endless job without an effective fault budget."""
    config: dict[str, Any] = read_config(Path("examples/gpt/engine.json"))
    config["zero_optimization"] = {"stage": plan.stage}
    config["compile"] = {"enabled": plan.compiled}
    if plan.batch is not None:
        config["train_batch_size"] = config["train_micro_batch_size_per_gpu"] = plan.batch
    return Job(
        name="recovery",
        entrypoint=f"{'benchmarks.hanging_gpt' if plan.hangs else 'examples.gpt.train'}:train",
        engine=config,
        # 0.5 CPUs: three single-threaded workers fit on two cores
        workers=Workers(min=max(1, plan.workers - 1), max=plan.workers, cpus=0.5, gpus=plan.gpus),
        args=MODEL | plan.model | ({"told": str(plan.folder)} if plan.hangs else {}),
        steps=ENDLESS_STEPS,
        checkpoint={"path": str(plan.folder)},
        recovery={
            "hang_timeout_s": plan.hang_timeout_s,
            "mirror_every": plan.mirror_every,
            "max_faults": plan.kills + 10,
            # So short that replacements are never delayed by earlier faults.
            "fault_window_s": 1.0,
        },
    )


def run(plan: Plan, log: Callable[[str], None]) -> list[FaultCost]:
    """Run the job, inject all faults, and stop it.

    Raises:
        RayzeroError: the job failed.
        TimeoutError: an expected event did not occur within TIMEOUT_S.
    """
    queue = EventQueue()
    handle = make_job(plan).submit(observer=queue)
    injector = _FaultInjector(plan, handle, queue)
    costs = []
    try:
        for number in range(1, plan.kills + 1):
            injector.wait_until_stable()
            cost = injector.inject()
            costs.append(cost)
            log(f"{plan.fault} {number} of {plan.kills}: rank {cost.rank}, {cost.total_s:.3f} s")
    finally:
        injector.resume_stopped()
        handle.end()
    return costs


class _FaultInjector:
    """Injects faults and tracks the job by its events. Not thread-safe."""

    def __init__(self, plan: Plan, handle: JobHandle, queue: EventQueue) -> None:
        self._plan = plan
        self._handle = handle
        self._queue = queue
        self._rng = random.Random(plan.seed)
        self._workers: list[WorkerInfo] = []
        self._step_times: deque[float] = deque(maxlen=50)  # undisturbed steps at full size
        self._victims: dict[int, int | None] = {}  # start time by pid
        self._step = 0

    def wait_until_stable(self) -> None:
        """Wait for some undisturbed steps at full world size."""
        undisturbed, generation = 0, 0
        for _, event in self._events("undisturbed training"):
            if isinstance(event, StepRecord):
                is_full = event.world_size == self._plan.workers
                same = event.generation == generation
                undisturbed = undisturbed + 1 if is_full and same else 0
                generation = event.generation
                if undisturbed > 1:
                    self._step_times.append(event.step_s)
            if undisturbed >= UNDISTURBED_STEPS:
                return

    def inject(self) -> FaultCost:
        """Inject a fault into a random worker and wait for the repair."""
        start_times = {worker: process_start_time(worker.pid) for worker in self._workers}
        self._workers = [w for w in self._workers if start_times[w] is not None]
        victim = self._rng.choice(self._workers)
        others = [worker for worker in self._workers if worker != victim]
        median_step_s = median(self._step_times)
        usual_step_s = sorted(self._step_times)[int(0.95 * (len(self._step_times) - 1))]
        self._victims[victim.pid] = start_times[victim]
        told = told_file(self._plan.folder, victim.pid) if self._plan.hangs else None
        fault = self._plan.fault
        fault_at_s = start_s = inject_fault(victim.pid, fault, median_step_s, self._rng, told)
        detected_at_s, rank, last_step = 0.0, None, self._step
        record: StepRecord | None = None
        for at_s, event in self._events("a repair"):
            if isinstance(event, JobWarning) and f"pid {victim.pid}" in event.text:
                if fault != "kill" and not detected_at_s:
                    start_s = at_s
            elif isinstance(event, FaultDetected) and event.worker == victim:
                detected_at_s, rank = at_s, event.rank
            elif isinstance(event, StepRecord):
                last_step, record = last_step if detected_at_s else event.step, event
                if fault == "read" and not detected_at_s:  # it trains on what was read ahead
                    fault_at_s = max(fault_at_s, event.at_s)
            elif isinstance(event, Repaired) and detected_at_s and record is not None:
                return FaultCost(
                    rank,
                    last_step,
                    record.at_s - start_s,
                    record.step_s,
                    median_step_s,
                    event.steps_redone,
                    sum(process_start_time(w.pid) != start_times[w] for w in others),
                    start_s - fault_at_s,
                    usual_step_s,
                    {"report": detected_at_s - start_s, **event.seconds},
                )
        raise TimeoutError  # not reached: _events raises

    def resume_stopped(self) -> None:
        """Continue all stopped processes that still exist."""
        for pid, start_time in self._victims.items():
            if start_time is not None and process_start_time(pid) == start_time:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _events(self, expected: str) -> Iterator[tuple[float, JobEvent]]:
        """Yield events with their Unix time until the job ends.

        Raises:
            RayzeroError: the job failed.
            TimeoutError: TIMEOUT_S have passed.
        """
        limit_s = COMPILING_S if self._plan.compiled else TIMEOUT_S
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            item = self._queue.get(1.0)
            if item is None:
                if self._handle.wait(0.0):
                    self._handle.result()
                continue
            match item[1]:
                case WorkersReady(workers):
                    self._workers += workers
                case StepRecord(step=step):
                    self._step = step
            yield item
        raise TimeoutError(f"{expected} did not occur within {limit_s:g} s")
