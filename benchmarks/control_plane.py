"""CPU usage and reaction time of the controller, with simulated workers that fail.

The real controller runs in its own process in real time; workers and vaults are simulated in
another process (`control_cluster`), connected by the nodes' streams. Job metrics are scraped every
10 s, and the journal, the log and the event feed are written as usual. Every fault is repaired and
the worker is replaced; a fault before a repair has completed a step is part of that repair. The
results are the share of a CPU core, receiving included, and the time from a fault to the first
command after it.

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
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from benchmarks.control_cluster import Scale, run
from benchmarks.control_group import SimulatedGroup
from benchmarks.machine import describe_machine, format_machine
from rayzero.engine.validation import validate_document
from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.control.components import Dependencies
from rayzero.orchestrator.control.controller import Controller
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job.process import tune_gc_and_switch_interval
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job_events import JobEvent, Repaired, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.spec import JobSpec

WARMUP_S = 3.0
SCRAPE_INTERVAL_S = 10.0
END_LIMIT_S = 60.0
MOST_RANK_SERIES = 4096
"""Number of workers from which on metrics have no series for each rank, as docs/metrics.md says."""


@dataclass(frozen=True)
class Row:
    """Results for one number of workers.

    Args:
        core: CPU seconds of the controller per second.
        quiet_core: like `core`, before the first fault.
        faults, repaired: number of faults, and of those in completed repairs.
        answer_ms: from a fault to the first command: 50th and 99th percentile, and maximum.
        repair_s: median from a fault's detection to the next finished step, minus that step.
    """

    workers: int
    seconds: float
    core: float
    quiet_core: float
    faults: int
    repaired: int
    repairs: int
    answer_ms: tuple[float, float, float]
    repair_s: float


class _EmptyArchive:
    """An archive without checkpoints."""

    async def resolve_resume(self) -> CheckpointRef | None:
        return None

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        return None


class _EventCounter:
    """Counts repairs; also owns the background writer for the job's records."""

    def __init__(self) -> None:
        self.writer = BackgroundWriter(print)
        self.running = asyncio.Event()
        self.repaired = 0
        self.repair_s: list[float] = []

    def on_event(self, event: JobEvent) -> None:
        if isinstance(event, StateEntered) and event.state is State.RUNNING:
            self.running.set()
        elif isinstance(event, Repaired):
            self.repaired += len(event.lost)
            self.repair_s.append(event.total_s)


def make_job(folder: str, workers: int) -> JobPlan:
    document = {
        "name": "control-plane",
        "entrypoint": "simulated:train",
        "workers": {"min": max(1, workers // 2), "max": workers},
        "checkpoint": {"path": folder},
        "recovery": {"max_faults": 10**6},
        "health": {"enabled": False},  # the nodes are this one
        "metrics": {"port": 0, "host": "127.0.0.1", "per_rank": workers <= MOST_RANK_SERIES},
    }
    return make_plan(validate_document(JobSpec, document, "job"), "simulated:train")


async def measure(scale: Scale, seconds: float, agents: tuple[int, bytes], folder: str) -> Row:
    """Measure one size: first without faults, then with faults."""
    group: Any = SimulatedGroup(*agents, -(-scale.workers // scale.per_node))
    archive: Any = _EmptyArchive()
    plan, clock = make_job(folder, scale.workers), Clock()
    counter = _EventCounter()
    events = EventBus()
    with closing(Telemetry(plan, clock, counter.writer, events)) as telemetry:
        recorder = JobRecorder(plan, EventBuffer(), counter.writer, events, telemetry.seconds)
        recorder.begin(adopted=False)
        events.subscribe(counter.on_event)

        async def flush(limit_s: float) -> bool:
            return await asyncio.to_thread(recorder.flush_journal, limit_s)

        controller = Controller(plan, Dependencies(group, group, archive, events, clock, flush))
        job = asyncio.ensure_future(controller.run())
        scrapes = asyncio.ensure_future(_scrape(telemetry))
        try:
            await _wait_running(counter.running, job)
            await asyncio.sleep(WARMUP_S)
            quiet = await _cpu_share(WARMUP_S)
            await group.inject_faults(scale.fault_s)
            share = await _cpu_share(seconds)
            await group.inject_faults(0.0)
            await _wait_until(lambda: counter.repaired == group.num_faults)
        finally:
            controller.post_event(machine.StopRequested())
            scrapes.cancel()
            async with asyncio.timeout(END_LIMIT_S):
                await asyncio.gather(job, scrapes, return_exceptions=True)
            group.shut_down()
            counter.writer.close(5.0)
    if not isinstance(error := job.exception(), JobStoppedError):
        raise RuntimeError(f"the job ended early: {error}")
    reaction_s = group.reaction_s * 2 or [0.0, 0.0]  # quantiles need at least two values
    percentiles = quantiles(reaction_s, n=100, method="inclusive")
    p50, p99, maximum = percentiles[49], percentiles[98], max(reaction_s)
    return Row(
        workers=scale.workers,
        seconds=seconds,
        core=share,
        quiet_core=quiet,
        faults=group.num_faults,
        repaired=counter.repaired,
        repairs=len(counter.repair_s),
        answer_ms=(p50 * 1e3, p99 * 1e3, maximum * 1e3),
        repair_s=median(counter.repair_s or [0.0]),
    )


async def _wait_running(running: asyncio.Event, job: asyncio.Future[Any]) -> None:
    """Wait until the job runs, at most 60 s; raise the error of one that has ended instead."""
    entered = asyncio.ensure_future(running.wait())
    done, _ = await asyncio.wait({entered, job}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    entered.cancel()
    if job in done:
        job.result()
    if not running.is_set():
        raise TimeoutError("the workers did not run within 60 s")


async def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait for the condition, at most 30 s."""
    with suppress(TimeoutError):
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.05)


async def _scrape(telemetry: Telemetry) -> None:
    """Scrape over HTTP like Prometheus; the server has its own thread."""
    while telemetry.url is not None:
        await asyncio.to_thread(lambda: urlopen(f"{telemetry.url}/metrics").read())
        await asyncio.sleep(SCRAPE_INTERVAL_S)


async def _cpu_share(seconds: float) -> float:
    """Share of a core of the process."""
    wall_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu_s) / (time.monotonic() - wall_s)


def measure_in_processes(scale: Scale, seconds: float, seed: int) -> Row:
    parent_pipe, child_pipe = multiprocessing.Pipe()
    cluster = multiprocessing.get_context("spawn").Process(
        target=run, args=(scale, child_pipe, seed), daemon=True
    )
    cluster.start()
    child_pipe.close()
    try:
        with TemporaryDirectory() as folder:
            return asyncio.run(measure(scale, seconds, parent_pipe.recv(), folder))
    finally:
        parent_pipe.close()
        cluster.join(5.0)
        cluster.kill()


def show(rows: list[Row], console: Console) -> None:
    console.print(format_machine(describe_machine()))
    names = ("workers", "core", "core, quiet", "faults", "repaired", "repairs")
    table = Table(*names, "p50 ms", "p99 ms", "max ms", box=None, pad_edge=False)
    for row in rows:
        times = (f"{value:.1f}" for value in row.answer_ms)
        share = f"{row.core:.1%}", f"{row.quiet_core:.1%}"
        counts = map(str, (row.faults, row.repaired, row.repairs))
        table.add_row(str(row.workers), *share, *counts, *times)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workers", default="250,1000,4000", help="comma-separated numbers of workers"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration with faults, per size"
    )
    parser.add_argument("--fault-s", type=float, default=1.0, help="seconds between two faults")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds between two steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args()
    tune_gc_and_switch_interval()
    rows = []
    for workers in map(int, options.workers.split(",")):
        scale = Scale(workers, step_s=options.step_s, fault_s=options.fault_s)
        rows.append(measure_in_processes(scale, options.seconds, options.seed))
    show(rows, Console())
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
