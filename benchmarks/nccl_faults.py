"""Random schedules of faults for workers on NCCL's semantics: nothing is lost, nothing believed.

Each schedule is a job of 3 workers on a local Ray cluster, over the NCCL-like device and process
group of the tests (`tests/support/nccl_like`): kills, stops and kernel errors (a poisoned device),
with slow aborts, garbage in what they leave, and late errors on other ranks. Afterwards the weights
must equal plain torch's (float64, 1e-9), every sample must have been consumed once, and every step
must have been reported once.

    python -m benchmarks.nccl_faults --schedules 100 --seed 1
    python -m benchmarks.nccl_faults --schedules 100 --seed 1 --resume
    python -m benchmarks.nccl_faults --schedules 100 --seed 1 --local

With `--local` there is no Ray: worker processes and a vault, under a minimal controller.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.clusters import connect_to_cluster
from benchmarks.nccl_schedules import WORLD_SIZE, Schedule, draw
from rayzero.engine.data.sample_ledger import check_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import FaultDetected, JobEvent, Repaired
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import MirrorPolicy
from tests.support.nccl_like.settings import VARIABLE, NcclLike
from tests.workers import recovery_jobs
from tests.workers.local_controller import LocalController
from tests.workers.local_workers import LocalWorkers
from tests.workers.support import setup

STEPS = 16
PAUSE_S = 0.05
TIMEOUT_S = 180.0
"""For a schedule, of which a busy machine needs 40 s."""


@dataclass
class Outcome:
    """What became of a schedule; `wrong` is empty if nothing was lost."""

    number: int
    fired: list[str]
    repairs_s: list[float]
    wrong: list[str]
    seconds: float
    text: str = field(default="", compare=False)


class Events:
    """An observer that keeps what the checks need."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.repairs: list[Repaired] = []
        self.faults: list[str] = []

    def on_event(self, event: JobEvent) -> None:
        if isinstance(event, StepRecord):
            self.steps.append(event.step)
        elif isinstance(event, Repaired):
            self.repairs.append(event)
        elif isinstance(event, FaultDetected):
            self.faults.append(str(event))


def run(schedule: Schedule, folder: Path) -> Outcome:
    """Runs the job on the connected cluster, and checks what it left."""
    started, events = time.monotonic(), Events()
    name = f"nccl-{schedule.number}"
    handle = Job(
        name=name,
        entrypoint="tests.workers.nccl_like_jobs:train",
        engine=recovery_jobs.engine_config(schedule.stage),
        workers=Workers(min=1, max=WORLD_SIZE, cpus=0.5),
        args={
            "poison": [list(pair) for pair in schedule.poison],
            "nccl_like": asdict(schedule.settings),
            "pause_s": PAUSE_S,
        },
        steps=STEPS,
        seed=schedule.seed,
        checkpoint={"path": str(folder)},
        recovery={
            "max_faults": 1000,
            "fault_window_s": 1.0,
            "mirror_every": 1,
        },
        faults=list(schedule.faults),
        ledger=True,
    ).submit(observer=events)
    wrong: list[str] = []
    try:
        if handle.wait(TIMEOUT_S):
            handle.result()
        else:
            wrong.append(f"the job did not end within {TIMEOUT_S:g} s")
    except RayzeroError as error:
        wrong.append(f"the job failed: {error}")
    finally:
        handle.end()
    output = folder / name
    fired = _fired(schedule, output, wrong)
    wrong += wrong or _check(schedule, output, events)
    seconds = time.monotonic() - started
    repairs = [repair.total_s for repair in events.repairs]
    return Outcome(schedule.number, fired, repairs, wrong, seconds, "; ".join(events.faults))


def run_local(schedule: Schedule, folder: Path) -> Outcome:
    """Runs the job without Ray."""
    started = time.monotonic()
    spec = setup(
        schedule.faults,
        name="nccl",
        entrypoint="tests.workers.nccl_like_jobs:train",
        steps=STEPS,
        seed=schedule.seed,
        output_dir=str(folder),
        working_dir=os.getcwd(),
        args={"poison": [list(pair) for pair in schedule.poison], "pause_s": PAUSE_S},
        engine_config=recovery_jobs.engine_config(schedule.stage),
        mirror=MirrorPolicy(replicas=1, every_steps=1),
        ledger=True,
    )
    local = LocalWorkers(spec, WORLD_SIZE, schedule.settings)
    try:
        controller = LocalController(local)
        controller.run(TIMEOUT_S)
    finally:
        local.close()
    wrong = controller.wrong
    fired = _fired(schedule, folder, wrong)
    wrong += wrong or _check_result(schedule, folder)
    return Outcome(schedule.number, fired, controller.repairs_s, wrong, time.monotonic() - started)


def _fired(schedule: Schedule, output: Path, wrong: list[str]) -> list[str]:
    fired = [event.fault for event in FaultRecord(output).read()]
    fired += [path.name.replace("poison", "kernel_error") for path in output.glob("poison-*")]
    planned = len(schedule.faults) + len(schedule.poison)
    if len(fired) != planned:
        wrong.append(f"{len(fired)} of {planned} faults fired")
    return fired


def _check(schedule: Schedule, output: Path, events: Events) -> Iterator[str]:
    if events.steps != [*range(1, STEPS + 1)]:
        yield f"finished steps were lost, or told twice: {events.steps}"
    if redone := sum(repair.steps_redone for repair in events.repairs):
        yield f"{redone} steps were redone"
    yield from _check_result(schedule, output)


def _check_result(schedule: Schedule, output: Path) -> Iterator[str]:
    weights = torch.load(output / "weights.pt", weights_only=True)
    for name, expected in recovery_jobs.oracle(STEPS, seed=schedule.seed).items():
        if not torch.allclose(weights[name], expected, rtol=1e-9, atol=1e-12):
            yield f"{name} differs from plain torch's by {(weights[name] - expected).abs().max()}"
    order = SampleOrder(recovery_jobs.LENGTH, schedule.seed)
    yield from map(str, check_ledger(f"{output}/ledger", order, recovery_jobs.SAMPLES))


@contextmanager
def cluster() -> Iterator[None]:
    """A local cluster whose workers have the NCCL-like backend."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = NcclLike().text()  # inherited by the workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with connect_to_cluster(1, WORLD_SIZE + 1):
            yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def run_all(
    schedules: list[Schedule], record: Path, done: list[Outcome], *, local: bool
) -> list[Outcome]:
    """Runs those that are not done, and writes all outcomes after each. The files of a schedule
    that lost something stay beside the record."""
    outcomes = list(done)
    finished = {outcome.number for outcome in done}
    with nullcontext() if local else cluster():
        for schedule in schedules:
            if schedule.number in finished:
                continue
            with tempfile.TemporaryDirectory(prefix="nccl-faults-") as name:
                outcome = (run_local if local else run)(schedule, Path(name))
                if outcome.wrong:
                    shutil.copytree(
                        name, kept := Path(f"{record.with_suffix('')}-{outcome.number}")
                    )
            outcomes.append(outcome)
            verdict = "; ".join(outcome.wrong) or "nothing lost"
            print(
                f"{outcome.number:3} {outcome.seconds:5.1f} s {outcome.fired}: {verdict}",
                flush=True,
            )
            if outcome.wrong:
                print(f"    {schedule}\n    {outcome.text}\n    files: {kept}", flush=True)
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    return outcomes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nccl_faults")
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one schedule")
    parser.add_argument("--local", action="store_true", help="without Ray")
    parser.add_argument("--resume", action="store_true", help="continue an existing record")
    parser.add_argument("--json", type=Path, help="the record; default: runs/nccl-faults-SEED.json")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no files
    record = options.json or Path(f"runs/nccl-faults-{options.seed}.json")
    done: list[Outcome] = []
    if options.resume and record.exists():
        done = [Outcome(**_known(values)) for values in json.loads(record.read_text())]
        done = [outcome for outcome in done if not outcome.wrong]
    numbers = range(options.schedules) if options.only is None else [options.only]
    outcomes = run_all(
        [draw(options.seed, number) for number in numbers], record, done, local=options.local
    )
    wrong = [outcome.number for outcome in outcomes if outcome.wrong]
    fired = Counter(
        fault.partition("(")[0].partition("-")[0] for o in outcomes for fault in o.fired
    )
    repairs = sorted(seconds for outcome in outcomes for seconds in outcome.repairs_s)
    print(f"{len(outcomes)} schedules, faults {dict(fired)}, {len(repairs)} repairs", end="")
    print(
        f", median {repairs[len(repairs) // 2]:.2f} s, max {repairs[-1]:.2f} s" if repairs else ""
    )
    print(f"wrong: {wrong}" if wrong else "nothing lost, nothing believed wrongly")
    return int(bool(wrong))


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in Outcome.__dataclass_fields__ if name in values}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
