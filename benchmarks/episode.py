"""One job with a few random faults in it, and the judgement whether anything was lost."""

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

STEPS_A_FAULT = 20
LIMIT_S = 400.0
"""How long an episode may take."""
CHECK_S = 1.0
WORLD_SIZE = 3
RELATIVE, ABSOLUTE = 1e-9, 1e-12
CHECKPOINT_EVERY = 5
HANG_TIMEOUT_S = 4.0
CALM = ("slow", "tear_file", "full_disk", "slow_store")
"""Faults that nothing has to be repaired for."""


@dataclass(frozen=True)
class Plan:
    """An episode, wholly determined by its seed, and how many faults of which kinds it has."""

    number: int
    seed: int
    stage: int
    steps: int
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """A repair, or the refilling of a vault: what was the matter, and what it cost."""

    kind: str
    seconds: float
    steps_redone: int


@dataclass(frozen=True)
class Outcome:
    """What became of an episode. `lost`: what should not be so, in words."""

    plan: Plan
    seconds: float
    fired: list[str]
    ways: list[Way] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def plan(seed: int, number: int, count: int, kinds: Sequence[str], nodes: int) -> Plan:
    """The episode of that number in the soak of that seed."""
    draw = random.Random(f"{seed}-{number}")
    own = draw.randrange(2**31)
    steps = STEPS_A_FAULT * count
    faults = random_faults(own, count, WORLD_SIZE, steps, kinds)
    placed = (replace(fault, node=fault.node % nodes) for fault in faults)
    texts = tuple(str(fault) for fault in placed)
    return Plan(number, own, draw.randrange(4), steps + soak_job.TAIL, texts)


def run(of: Plan, folder: Path, refill: Callable[[], None]) -> Outcome:
    """Runs an episode in the Ray cluster that this process is connected to.

    Args:
        folder: a new one, for the job's files.
        refill: called again and again; it adds a node where one was lost.
    """
    begun_s = time.monotonic()
    job = Job(
        name="soak",
        entrypoint="benchmarks.soak_job:train",
        engine=soak_job.engine_config(of.stage),
        workers=Workers(min=1, max=WORLD_SIZE),
        args={"world_size": WORLD_SIZE, "faults": list(of.faults)},
        steps=of.steps,
        seed=of.seed,
        checkpoint={"path": str(folder), "every_steps": CHECKPOINT_EVERY},
        recovery={"hang_timeout_s": HANG_TIMEOUT_S, "max_faults": 1000, "fault_window_s": 1.0},
        faults=list(of.faults),
        ledger=True,
    )
    output_dir = folder / "soak"
    watch = _Watch(output_dir)
    handle = job.submit(observer=watch)
    lost = []
    try:
        while time.monotonic() < begun_s + LIMIT_S and not handle.wait(CHECK_S):
            refill()
        if handle.wait(0.0):
            handle.result()
        else:
            lost.append(f"the job did not end within {LIMIT_S:g} s")
    except RayzeroError as error:
        lost.append(f"the job failed: {error}")
    finally:
        handle.end()
    lost += [f"{one} did not happen" for one in soak_job.unfired(list(of.faults), str(output_dir))]
    if not lost:
        lost = [*_wrong_weights(of, output_dir), *_wrong_samples(of, output_dir)]
    happened = [one.fault for one in FaultRecord(output_dir).read()]
    return Outcome(of, time.monotonic() - begun_s, happened, watch.ways, lost)


def _wrong_weights(of: Plan, output_dir: Path) -> list[str]:
    found = torch.load(output_dir / "weights.pt", weights_only=True)
    right = soak_job.oracle(of.steps, of.seed)
    return [
        f"weights: {name} is not plain torch's"
        for name in right
        if not torch.allclose(found[name], right[name], rtol=RELATIVE, atol=ABSOLUTE)
    ]


def _wrong_samples(of: Plan, output_dir: Path) -> list[str]:
    order = SampleOrder(soak_job.LENGTH, of.seed)
    problems = check_ledger(output_dir / "ledger", order, soak_job.SAMPLES, of.steps)
    return [f"ledger: {one}" for one in problems]


class _Watch:
    """An observer that puts every way back down to the fault that it came from, and writes down
    what it is told: an episode in which something is lost leaves that behind."""

    def __init__(self, output_dir: Path) -> None:
        self.ways: list[Way] = []
        self._output_dir = output_dir
        self._known = 0
        self._begun_s = time.monotonic()
        self._steps = 0
        output_dir.mkdir(parents=True, exist_ok=True)

    def on_event(self, notice: JobEvent) -> None:
        if isinstance(notice, StepRecord):
            self._steps = notice.step
            return
        with (self._output_dir / "told.txt").open("a") as file:
            at_s = time.monotonic() - self._begun_s
            file.write(f"{at_s:7.2f} s, {self._steps:3} steps: {notice}\n")
        if isinstance(notice, Repaired):
            kind = self._cause(notice.cause)
            self.ways.append(Way(kind, _seconds(notice), notice.steps_redone))
        elif isinstance(notice, Resized) and "vault" in notice.reason:
            self.ways.append(Way("kill_vault", _seconds(notice), 0))

    def _cause(self, told: str) -> str:
        """The kind of the first fault since the last repair; as told, if none was injected."""
        happened = FaultRecord(self._output_dir).read()
        new = [parse_fault(one.fault).kind for one in happened[self._known :]]
        self._known = len(happened)
        return next((kind for kind in new if _disrupts(kind)), f"({told})")


def _seconds(passed: Repaired | Resized) -> float:
    """Without the rest of the step at hand, which a resize lets go on to its end. A rank that hangs
    in it is noticed in its own time."""
    return passed.total_s - passed.seconds.get("drain", 0.0)


def _disrupts(kind: str) -> bool:
    return kind not in CALM and FAULT_KINDS[kind].target != "vault"


def kind_of(text: str) -> str:
    fault: FaultSpec = parse_fault(text)
    return fault.kind
