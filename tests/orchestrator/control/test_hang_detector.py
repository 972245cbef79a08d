"""The hang detector's alarms on simulated steps in virtual time: none that is false, and none late.

The detector, its limits and the inbox are the product's; steps are drawn here, and what ranks
answer follows from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.aio import WORKER_POLL_S
from rayzero.orchestrator.job_events import FaultDetected
from rayzero.orchestrator.spec import RecoverySpec
from rayzero.workers.messages import Heartbeat, StepReport
from rayzero.workers.step_rows import combine, combine_beats
from tests.orchestrator.support import Harness

RANKS = 4
STEPS = 10_000
BASE_S = 4.0
CHECK_S = 1.5
PHASES = {"outside": 0.01, "data": 0.01, "forward": 0.06, "backward": 0.9, "update": 0.02}
"""Of a rank's own time in a step; it waits for the others before the update."""
FOREVER_S = 1e6
DEFAULTS = RecoverySpec().model_dump()

Steps = Callable[[random.Random, int], float]
DISTRIBUTIONS: dict[str, Steps] = {
    "uniform": lambda rng, _: 0.4 * BASE_S * rng.uniform(1, 5),
    "bimodal": lambda rng, _: BASE_S * (5 if rng.random() < 0.01 else 1),
    "drift": lambda rng, step: BASE_S * (1 + 4 * step / STEPS) * rng.uniform(0.9, 1.0),
}


@dataclass
class Course:
    """What one rank does in a step: phases, with their seconds."""

    phases: list[tuple[str, float]]
    begun_s: float
    at_peers_s: float = 0.0
    """When it comes to where it waits for the others."""
    released_s: float = FOREVER_S

    def beat(self, rank: int, step: int, at_s: float) -> Heartbeat:
        since_s = self.begun_s
        for phase, seconds in self.phases:
            if phase == "update":
                if at_s < self.released_s:
                    return Heartbeat(rank, step, "reduce", at_s - since_s, 7 * step, waiting=True)
                since_s = self.released_s
            if at_s < since_s + seconds:
                return Heartbeat(rank, step, phase, at_s - since_s, 7 * step - (phase != "update"))
            since_s += seconds
        return Heartbeat(rank, step, "outside", at_s - since_s, 7 * step)


@dataclass
class SimulatedSteps:
    """A generation of `RANKS`, whose steps take as long as they are told to."""

    harness: Harness
    draw: Steps
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    step: int = 3
    courses: list[Course] = field(default_factory=list)
    stalled: frozenset[int] = frozenset()
    """Ranks whose processes use no CPU."""

    def __post_init__(self) -> None:
        parts = self.harness.controller._parts
        self.detector, self.inbox = parts.hang_detector, parts.inbox
        self.generation = self.detector._members.generation
        self.clock: Any = self.harness.clock
        cluster = self.harness.cluster
        cluster.beat_of = lambda worker: self._beat(worker, self.clock._now)

    @property
    def hung(self) -> list[int | None]:
        return [it.rank for it in self.harness.log.of(FaultDetected)]

    def _beat(self, rank: int, at_s: float) -> Heartbeat:
        return self.courses[rank].beat(rank, self.step, at_s)

    async def run(
        self, extra: dict[int, dict[str, float]] | None = None, scale: float = 1
    ) -> float:
        """A step of all ranks. Returns how long it took, until an alarm if there is one.

        Args:
            extra: by rank, seconds more in a phase.
        """
        begun_s, self.courses = self.clock._now, []
        own = []
        for rank in range(RANKS):
            own_s = scale * self.draw(self.rng, self.step)
            phases = {phase: share * own_s for phase, share in PHASES.items()}
            for phase, seconds in (extra or {}).get(rank, {}).items():
                phases[phase] += seconds
            own.append(phases)
            before = sum(phases.values()) - phases["update"]
            self.courses.append(Course([*phases.items()], begun_s, begun_s + before))
        released_s = max(it.at_peers_s for it in self.courses)
        ends = [released_s + it["update"] for it in own]
        for course in self.courses:
            course.released_s = released_s
        await self._check_until(max(ends))
        took_s = self.clock._now - begun_s
        if self.hung:
            return took_s
        self.clock._now, took_s = max(ends), max(ends) - begun_s
        reports = []
        for rank, phases in enumerate(own):
            gauges = {f"phases/{name}": seconds for name, seconds in phases.items()}
            gauges["phases/other"] = gauges.pop("phases/outside")
            waited_s = released_s - self.courses[rank].at_peers_s
            gauges |= {"step_s": took_s, "exposed_comm_s": waited_s, "phases/reduce": waited_s}
            reports.append(StepReport(self.generation.number, rank, self.step, {}, gauges))
        self.inbox._add_to_history(combine(range(RANKS), reports))
        self.step += 1
        return took_s

    async def end(self) -> None:
        """Ends the job, whose workers do not train."""
        self.harness.run.cancel()
        await self.clock.advance(60)
        assert self.harness.run.done()

    async def _check_until(self, end_s: float) -> None:
        """Checks from when the detector may see a silence of some seconds on: the others return at
        once."""
        self.clock._now += 6.0
        while self.clock._now < end_s and not self.hung:
            now_s = self.clock._now
            polled_s = max(self.courses[0].begun_s, now_s - now_s % WORKER_POLL_S)
            for rank in range(RANKS):
                beats = combine_beats([rank], [self._beat(rank, polled_s)])
                self.inbox._heartbeats[rank] = beats
                self.inbox._last_heard_s[rank] = polled_s
                self.inbox.states[rank] = "S" if rank in self.stalled else ""
            await self.detector._check_running(self.generation)
            self.clock._now += CHECK_S


async def simulated(folder: Path, draw: Steps) -> SimulatedSteps:
    harness = await Harness(folder, RANKS, workers=(RANKS, RANKS), recovery=DEFAULTS).started()
    return SimulatedSteps(harness, draw)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
async def test_no_alarm_is_false(folder: Path, name: str):
    """Steps that vary by a factor of 5, the first 60 times as long, and one of a later generation;
    evaluations, by all ranks and by one; a store that stalls all ranks, some of which have read
    ahead."""
    run = await simulated(folder, DISTRIBUTIONS[name])
    everyone = {rank: {"outside": 40.0} for rank in range(RANKS)}
    await run.run(scale=60 / 5 if name == "uniform" else 60)
    for number in range(STEPS):
        extra = None
        run.stalled = run.harness.cluster.reading = frozenset()
        if number % 100 == 99:
            extra = everyone if number % 200 == 199 else {0: {"outside": 30.0}}
        elif number % 1000 == 500:
            slow = range(RANKS) if number % 2000 == 500 else (2,)
            run.stalled = frozenset(slow)
            run.harness.cluster.reading = frozenset(range(RANKS))
            extra = {rank: {"data": 60.0} for rank in slow}
        if number == STEPS // 2:
            run.inbox.history.start_generation()
            await run.run(scale=60 / 5 if name == "uniform" else 60 / 3)
        await run.run(extra)
        assert run.hung == [], (number, run.harness.warnings)
    assert len(run.inbox.history.times[0]._own_s) == 200
    await run.end()


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update", "outside"])
@pytest.mark.parametrize("base_s", [0.1, 4.0])
async def test_hang_is_found_in_time(folder: Path, phase: str, base_s: float):
    """10 s, of which the repair has the last; or 5 of the 5 % longest steps."""
    run = await simulated(folder, lambda rng, _: base_s * rng.uniform(1, 2))
    for _ in range(30):
        await run.run()
    usual_s = run.inbox.history.times[2].usual_s
    run.stalled = frozenset({2})  # as in a read; what computes between two steps is left in peace
    took_s = await run.run({2: {phase: FOREVER_S}})
    assert run.hung == [2]
    assert took_s <= max(9.0, 5 * usual_s + 2) + base_s * 2, took_s
    assert "rank 2 on node host-a (pid 102) has been silent for" in run.harness.warnings
    await run.end()
