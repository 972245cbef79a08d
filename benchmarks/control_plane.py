"""What the controller costs: simulated workers that heartbeat, take steps, and die.

The controller is the real one, in real time, in a process of its own; the workers and vaults are
rows in another process (`control_world`), behind pipes. Job metrics are on, and scraped every
10 s; the journal, the log and the feed are written as on a cluster. A death is repaired, and the
full size reached again; one that comes before a repair has finished a step belongs to that repair.
Measured are the share of a core, and the time from a death to the first order that answers it (pipe
included).

    python -m benchmarks.control_plane --workers 250,1000,4000 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from benchmarks.control_group import PaperGroup
from benchmarks.control_world import Scale, run
from benchmarks.machine import describe_machine, format_machine
from rayzero.engine.validation import validate_document
from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.control.context import Dependencies
from rayzero.orchestrator.control.controller import Controller
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job.actor import tune_gc_and_switch_interval
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job_events import EventBus, JobEvent, Repaired, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.spec import JobSpec

WARMUP_S = 3.0
SCRAPE_S = 10.0


@dataclass(frozen=True)
class Row:
    """One size.

    Args:
        core: the controller's CPU seconds a second, the pipe's decoding left out.
        decoding_core: the pipe's decoding, which on a cluster is Ray's.
        quiet_core: the same before the first fault.
        faults, repaired: deaths, and how many of them belong to a repair that came to its end.
        answer_ms: from a death to the first order, at the 50th and the 99th percentile, and most.
        repair_s: medians, from a death's notice to the next finished step, less that step.
    """

    workers: int
    seconds: float
    core: float
    decoding_core: float
    quiet_core: float
    faults: int
    repaired: int
    repairs: int
    answer_ms: tuple[float, float, float]
    repair_s: float


class _Nothing:
    """An archive without checkpoints."""

    async def resolve_resume(self) -> CheckpointRef | None:
        return None

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        return None


class _Sights:
    """What is counted of the job's notices; they are written down as the job's process does it."""

    def __init__(self) -> None:
        self.writer = BackgroundWriter(print)
        self.running = asyncio.Event()
        self.repaired = 0
        self.repaired_s: list[float] = []

    def on_event(self, notice: JobEvent) -> None:
        if isinstance(notice, StateEntered) and notice.state is State.RUNNING:
            self.running.set()
        elif isinstance(notice, Repaired):
            self.repaired += len(notice.lost)
            self.repaired_s.append(notice.total_s)


def make_job(folder: str, workers: int) -> JobPlan:
    document = {
        "name": "control-plane",
        "entrypoint": "nothing:runs",
        "workers": {"min": max(1, workers // 2), "max": workers},
        "checkpoint": {"path": folder},
        "recovery": {"max_faults": 10**6},
        "metrics": {"port": 0, "host": "127.0.0.1"},
    }
    return make_plan(validate_document(JobSpec, document, "job"), "nothing:runs")


async def measure(
    scale: Scale, seconds: float, pipes: tuple[Connection, Connection], folder: str
) -> Row:
    """One size: some quiet seconds, then those with faults."""
    group: Any = PaperGroup(*pipes)
    nothing: Any = _Nothing()
    plan, clock = make_job(folder, scale.workers), Clock()
    sights = _Sights()
    events = EventBus()
    with closing(Telemetry(plan, clock, sights.writer)) as telemetry:
        telemetry.subscribe_to(events)
        recorder = JobRecorder(plan, EventBuffer(), sights.writer, telemetry.dump_counters)
        recorder.begin(events, adopted=False)
        events.subscribe(sights.on_event)
        controller = Controller(plan, Dependencies(group, group, nothing, events, clock))
        job = asyncio.ensure_future(controller.run())
        scrapes = asyncio.ensure_future(_scrape(telemetry))
        try:
            async with asyncio.timeout(60):
                await sights.running.wait()
            await asyncio.sleep(WARMUP_S)
            quiet, _ = await _cpu_share(WARMUP_S, group)
            await group.strike(scale.fault_s)
            share, decoding = await _cpu_share(seconds, group)
            await group.strike(0.0)
            await _until(lambda: sights.repaired == group.deaths)
        finally:
            controller.post_event(machine.StopRequested())
            scrapes.cancel()
            await asyncio.gather(job, scrapes, return_exceptions=True)
            group.end()
            sights.writer.close(5.0)
    if not isinstance(error := job.exception(), JobStoppedError):
        raise RuntimeError(f"the job did not go on to the end: {error}")
    answers_s = group.answers_s * 2 or [0.0, 0.0]  # quantiles want two
    hundredths = quantiles(answers_s, n=100, method="inclusive")
    p50, p99, most = hundredths[49], hundredths[98], max(answers_s)
    return Row(
        workers=scale.workers,
        seconds=seconds,
        core=share,
        decoding_core=decoding,
        quiet_core=quiet,
        faults=group.deaths,
        repaired=sights.repaired,
        repairs=len(sights.repaired_s),
        answer_ms=(p50 * 1e3, p99 * 1e3, most * 1e3),
        repair_s=median(sights.repaired_s or [0.0]),
    )


async def _until(so: Callable[[], bool]) -> None:
    """Waits for it, a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(30):
            while not so():
                await asyncio.sleep(0.05)


async def _scrape(telemetry: Telemetry) -> None:
    """As Prometheus does, through HTTP, in the server's own thread."""
    while telemetry.url is not None:
        await asyncio.to_thread(lambda: urlopen(f"{telemetry.url}/metrics").read())
        await asyncio.sleep(SCRAPE_S)


async def _cpu_share(seconds: float, group: PaperGroup) -> tuple[float, float]:
    """Of a core: the process but for the pipe's decoding, and that."""
    wall_s, cpu_s, decoding_s = time.monotonic(), time.process_time(), group.decoder.spent_s
    await asyncio.sleep(seconds)
    wall_s, decoding_s = time.monotonic() - wall_s, group.decoder.spent_s - decoding_s
    return (time.process_time() - cpu_s - decoding_s) / wall_s, decoding_s / wall_s


def one_size(scale: Scale, seconds: float, seed: int) -> Row:
    ours, theirs = multiprocessing.Pipe()
    hears, says = multiprocessing.Pipe(duplex=False)
    world = multiprocessing.get_context("spawn").Process(
        target=run, args=(scale, theirs, says, seed), daemon=True
    )
    world.start()
    theirs.close()
    says.close()
    try:
        with TemporaryDirectory() as folder:
            return asyncio.run(measure(scale, seconds, (ours, hears), folder))
    finally:
        world.join(5.0)
        world.kill()


def show(rows: list[Row], console: Console) -> None:
    console.print(format_machine(describe_machine()))
    names = ("workers", "core", "decoding", "core, quiet", "faults", "repaired", "repairs")
    table = Table(*names, "p50 ms", "p99 ms", "most", box=None, pad_edge=False)
    for one in rows:
        times = (f"{value:.1f}" for value in one.answer_ms)
        share = f"{one.core:.1%}", f"{one.decoding_core:.1%}", f"{one.quiet_core:.1%}"
        counts = map(str, (one.faults, one.repaired, one.repairs))
        table.add_row(str(one.workers), *share, *counts, *times)
    console.print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", default="250,1000,4000", help="sizes, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="with faults, for each size")
    parser.add_argument("--fault-s", type=float, default=1.0, help="seconds between two faults")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds between two steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    options = parser.parse_args()
    tune_gc_and_switch_interval()
    rows = []
    for workers in map(int, options.workers.split(",")):
        scale = Scale(workers, step_s=options.step_s, fault_s=options.fault_s)
        rows.append(one_size(scale, options.seconds, options.seed))
    show(rows, Console())
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in rows], indent=1))


if __name__ == "__main__":
    main()
