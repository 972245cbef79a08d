"""A job with a few random faults, and the check that nothing was lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks import soak_job
from rayzero.engine.data.sample_ledger import check_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import JobEvent, Repaired, Resized
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FAULT_KINDS, FaultSpec, parse_fault, random_faults

STEPS_PER_FAULT = 20
TIMEOUT_S = 400.0
"""For a whole episode."""
POLL_INTERVAL_S = 1.0
WORLD_SIZE = 3
RTOL, ATOL = 1e-9, 1e-12
CHECKPOINT_INTERVAL = 5
HANG_TIMEOUT_S = 4.0
NON_DISRUPTIVE = ("slow", "tear_file", "full_disk", "slow_store")
"""Faults that require no repair."""


@dataclass(frozen=True)
class Plan:
    """An episode, fully determined by its seed and its number and kinds of faults."""

    number: int
    seed: int
    stage: int
    steps: int
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Recovery:
    """A repair, or the refill of a vault: its cause and cost."""

    kind: str
    seconds: float
    steps_redone: int


@dataclass(frozen=True)
class Outcome:
    """Result of an episode. `lost` lists the violated requirements."""

    plan: Plan
    seconds: float
    fired: list[str]
    recoveries: list[Recovery] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def plan(seed: int, number: int, count: int, kinds: Sequence[str], nodes: int) -> Plan:
    """Plan the episode with the given number for the given soak seed."""
    rng = random.Random(f"{seed}-{number}")
    episode_seed = rng.randrange(2**31)
    steps = STEPS_PER_FAULT * count
    faults = random_faults(episode_seed, count, WORLD_SIZE, steps, kinds)
    faults_on_nodes = (replace(fault, node=fault.node % nodes) for fault in faults)
    texts = tuple(str(fault) for fault in faults_on_nodes)
    return Plan(number, episode_seed, rng.randrange(4), steps + soak_job.TAIL, texts)


def run(episode: Plan, folder: Path, replace_lost_nodes: Callable[[], None]) -> Outcome:
    """Run an episode on the Ray cluster that this process is connected to.

    Args:
        folder: an empty folder for the job's files.
        replace_lost_nodes: called periodically.
    """
    start_s = time.monotonic()
    job = Job(
        name="soak",
        entrypoint="benchmarks.soak_job:train",
        engine=soak_job.engine_config(episode.stage),
        workers=Workers(min=1, max=WORLD_SIZE),
        args={"world_size": WORLD_SIZE, "faults": list(episode.faults)},
        steps=episode.steps,
        seed=episode.seed,
        checkpoint={"path": str(folder), "every_steps": CHECKPOINT_INTERVAL},
        recovery={"hang_timeout_s": HANG_TIMEOUT_S, "max_faults": 1000, "fault_window_s": 1.0},
        faults=list(episode.faults),
        ledger=True,
    )
    output_dir = folder / "soak"
    log = _EventLogger(output_dir)
    handle = job.submit(observer=log)
    lost = []
    try:
        while time.monotonic() < start_s + TIMEOUT_S and not handle.wait(POLL_INTERVAL_S):
            replace_lost_nodes()
        if handle.wait(0.0):
            handle.result()
        else:
            lost.append(f"the job did not end within {TIMEOUT_S:g} s")
    except RayzeroError as error:
        lost.append(f"the job failed: {error}")
    finally:
        handle.end()
    lost += [
        f"{fault} did not fire"
        for fault in soak_job.unfired_faults(list(episode.faults), str(output_dir))
    ]
    if not lost:
        lost = [*_check_weights(episode, output_dir), *_check_samples(episode, output_dir)]
    fired = [event.fault for event in FaultRecord(output_dir).read()]
    return Outcome(episode, time.monotonic() - start_s, fired, log.recoveries, lost)


def _check_weights(episode: Plan, output_dir: Path) -> list[str]:
    weights = torch.load(output_dir / "weights.pt", weights_only=True)
    expected = soak_job.train_reference(episode.steps, episode.seed)
    return [
        f"weights: {name} differs from plain torch"
        for name in expected
        if not torch.allclose(weights[name], expected[name], rtol=RTOL, atol=ATOL)
    ]


def _check_samples(episode: Plan, output_dir: Path) -> list[str]:
    order = SampleOrder(soak_job.LENGTH, episode.seed)
    problems = check_ledger(output_dir / "ledger", order, soak_job.SAMPLES, episode.steps)
    return [f"ledger: {problem}" for problem in problems]


class _EventLogger:
    """An observer that attributes each recovery to its fault and logs all events to a file."""

    def __init__(self, output_dir: Path) -> None:
        self.recoveries: list[Recovery] = []
        self._output_dir = output_dir
        self._num_attributed = 0
        self._start_s = time.monotonic()
        self._steps = 0
        output_dir.mkdir(parents=True, exist_ok=True)

    def on_event(self, event: JobEvent) -> None:
        if isinstance(event, StepRecord):
            self._steps = event.step
            return
        with (self._output_dir / "events.txt").open("a") as file:
            elapsed_s = time.monotonic() - self._start_s
            file.write(f"{elapsed_s:7.2f} s, {self._steps:3} steps: {event}\n")
        if isinstance(event, Repaired):
            kind = self._cause(event.cause)
            self.recoveries.append(Recovery(kind, _seconds(event), event.steps_redone))
        elif isinstance(event, Resized) and "vault" in event.reason:
            self.recoveries.append(Recovery("kill_vault", _seconds(event), 0))

    def _cause(self, reported: str) -> str:
        """Kind of the first fault since the last repair; the reported cause if there is none."""
        fired = FaultRecord(self._output_dir).read()
        new = [parse_fault(event.fault).kind for event in fired[self._num_attributed :]]
        self._num_attributed = len(fired)
        return next((kind for kind in new if _disrupts(kind)), f"({reported})")


def _seconds(recovery: Repaired | Resized) -> float:
    """Duration, excluding the current step, which a resize allows to finish."""
    return recovery.total_s - recovery.seconds.get("drain", 0.0)


def _disrupts(kind: str) -> bool:
    return kind not in NON_DISRUPTIVE and FAULT_KINDS[kind].target != "vault"


def kind_of(text: str) -> str:
    fault: FaultSpec = parse_fault(text)
    return fault.kind
