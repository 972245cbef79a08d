"""Outages of a cluster's head: what a job loses while the head is away, and once it is back.

    python -m benchmarks.head_outages --away 3,30,200 --times 10 --seed 1 --json outages.json
    python -m benchmarks.head_outages --store redis --away 30 --times 10 --controller-node

A job of three workers on two raylets trains; at random moments all processes of the head are killed
(SIGKILL, its GCS and the job's own process among them), and it is started again after so many
seconds. During every other outage a worker is killed, too. The steps are those that the training
functions write down after `engine.step()`, the order of samples is that of the ledger. With
`--controller-node` the job's process has a third node to itself, where it is not killed: a repair
does not wait for the head. The exit code is 1 if a finished step was done again, a rank ended that
was not killed, two controllers had streams to agents, or anything outlives the job.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
from torch.nn.functional import mse_loss

from benchmarks.clusters import connect_to_durable_cluster
from benchmarks.episode import END_TIMEOUT_S, TITLES
from benchmarks.machine import describe_machine, format_machine
from benchmarks.outage_marks import (
    Mark,
    Outage,
    finished_steps,
    format_outage,
    format_table,
    judge,
    read_marks,
    redone_steps,
)
from benchmarks.soak_job import LENGTH, SAMPLES, Points, engine_config, make_model
from rayzero.engine.data.sample_ledger import check_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.spec import Workers
from rayzero.workers.context import Context
from rayzero.workers.lifetimes import find_owned
from tests.support.durable_head import DurableHead

JOB, WORKERS, NODES, CPUS = "outages", 3, 2, 2
STORES = "rocksdb", "redis"
STEPS = 1_000_000
"""The job is stopped."""
BETWEEN_S = (2.0, 12.0)
"""From a step after a re-attachment to the next outage: a replacement may be starting."""
TIMEOUT_S = 240.0
"""For a head and a controller to start, on a busy machine."""
POLL_S = 0.5
GCS_POLL_S = 0.05
WATCH_S = 0.5
"""Pause between two looks at the streams of the controllers."""


def train(ctx: Context) -> None:
    """The job's training function. `args.pause_s` is the pause of each step."""
    engine, _, loader, _ = ctx.initialize(model=make_model(ctx.seed), training_data=Points())
    with (ctx.output_dir / f"marks-{os.getpid()}.txt").open("a", buffering=1) as marks:
        for x, y in loader.until(ctx.steps):
            before = engine.progress.step
            engine.backward(mse_loss(engine(x), y))
            engine.step()
            if engine.progress.step > before:  # else it was given up, as when the job is stopped
                mark = Mark(
                    time.time(), ctx.generation, engine.progress.step, ctx.rank, ctx.world_size,
                    os.getpid(),
                )  # fmt: skip
                marks.write(json.dumps([*asdict(mark).values()]) + "\n")
                time.sleep(ctx.args["pause_s"])


class StreamWatch:
    """Looks at which processes of the job hold connections to its agents.

    Attributes:
        most: processes that had some at once.
        looks: with such a process.
    """

    def __init__(self, head: DurableHead) -> None:
        self.most = 0
        self.looks = 0
        self._head = head

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Owns a thread that looks now and then."""
        stopped = Event()
        thread = Thread(target=self._watch, args=[stopped], name="streams", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _watch(self, stopped: Event) -> None:
        while not stopped.wait(WATCH_S):
            ports = {
                it.laddr.port
                for agent in self._head.processes("ray::VaultActor")
                for it in _connections(agent, psutil.CONN_LISTEN)
            }
            obeyed = [
                pid
                for pid in self._head.processes("ray::JobActor")
                if any(
                    it.raddr and it.raddr.port in ports
                    for it in _connections(pid, psutil.CONN_ESTABLISHED)
                )
            ]
            self.looks += bool(obeyed)
            self.most = max(self.most, len(obeyed))


def _connections(pid: int, status: str) -> list[Any]:
    with suppress(psutil.Error):
        return [it for it in psutil.Process(pid).net_connections("tcp") if it.status == status]
    return []


class Course:
    """A job on a cluster whose head is lost again and again."""

    def __init__(self, head: DurableHead, handle: JobHandle, folder: Path, seed: int) -> None:
        self.streams = StreamWatch(head)
        self._head = head
        self._handle = handle
        self._folder = folder
        self._rng = random.Random(seed)

    def lose_head(self, away_s: float, kills_worker: bool) -> Outage:
        """One outage, to the next finished step of the repaired job."""
        outage = Outage(away_s)
        self._wait_for_step()
        time.sleep(self._rng.uniform(*BETWEEN_S))
        ranks, controllers = self._ranks(), self._head.processes("ray::JobActor")
        outage.lost_s = time.time()
        self._head.lose_head()
        outlives = self._head.has_controller_node
        if not outlives:
            self._wait(lambda: not controllers & self._head.processes("ray::JobActor"), "the end")
        if kills_worker:
            time.sleep(self._rng.uniform(0.1, 0.9) * away_s)
            killed = self._rng.choice(self._ranks())
            os.kill(killed, signal.SIGKILL)
            outage.worker_s = time.time()
            ranks.remove(killed)
        time.sleep(max(0.0, outage.lost_s + away_s - time.time()))
        started = Event()
        gcs = Thread(target=self._watch_gcs, args=[outage, started], name="gcs", daemon=True)
        gcs.start()
        with self.streams.watching():
            self._head.start_head()
            started.set()
            gcs.join(TIMEOUT_S)
            if outlives:
                self._wait(lambda: len(self._ranks()) == WORKERS, "the replacement")
            else:
                self._await_reattachment(outage)
            self._wait_for_step()
        outage.ended = len({*ranks} - self._head.processes("ray::WorkerActor"))
        if outlives:
            outage.ended += len(controllers - self._head.processes("ray::JobActor"))
        return outage

    def _await_reattachment(self, outage: Outage) -> None:
        self._wait(lambda: self._reattached_s() > outage.lost_s, "a re-attachment")
        outage.reattached_s = self._reattached_s()
        processes = map(psutil.Process, self._head.processes("ray::JobActor"))
        new = max(processes, key=psutil.Process.create_time)
        outage.process_s = new.create_time()
        outage.cpu_s = sum(new.cpu_times()[:2])

    def _wait_for_step(self) -> None:
        """Until two more steps are finished."""
        begin_s = time.time()
        self._wait(
            lambda: sum(at_s > begin_s for at_s, _, _ in self.finished()) > 1, "a finished step"
        )

    def finished(self) -> list[tuple[float, int, int]]:
        return finished_steps(read_marks(self._folder))

    def _ranks(self) -> list[int]:
        """The processes of the newest generation that has done a step."""
        marks = read_marks(self._folder)
        newest = max(it.generation for it in marks)
        return sorted({it.pid for it in marks if it.generation == newest})

    def _reattached_s(self) -> float:
        lines = (self._folder / "events.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines if '"reattached"' in line]
        return max((entry["at_s"] for entry in entries), default=0.0)

    def _watch_gcs(self, outage: Outage, started: Event) -> None:
        """Until the head has started: an attempt may fail in Ray, and the next one has another
        GCS."""
        host, _, port = self._head.address.rpartition(":")
        while not (started.is_set() and outage.gcs_s):
            try:
                socket.create_connection((host, int(port)), TIMEOUT_S).close()
                outage.gcs_s = outage.gcs_s or time.time()
            except OSError:
                outage.gcs_s = 0.0
            started.wait(GCS_POLL_S)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            if self._handle.wait(POLL_S):
                self._handle.result()
                raise RuntimeError(f"the job has ended before {what}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{what} did not come within {TIMEOUT_S:g} s")


def make_job(folder: Path, seed: int, pause_s: float) -> Job:
    """Its only copies of the state are in memory."""
    return Job(
        JOB,
        "benchmarks.head_outages:train",
        engine=engine_config(2, SAMPLES // 4, {}),
        workers=Workers(min=1, max=WORKERS),
        args={"pause_s": pause_s},
        steps=STEPS,
        seed=seed,
        checkpoint={"path": str(folder), "every_steps": STEPS},
        recovery={"mirror_every": 1, "max_faults": 1000, "fault_window_s": 1.0},
        ledger=True,
    )


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Outage], list[str]]:
    """The outages, and what was not as it must be."""
    outages: list[Outage] = []
    own, problems = folder / JOB, []
    cluster = connect_to_durable_cluster(CPUS, NODES, options.store, options.controller_node)
    with cluster as head:
        handle = make_job(folder, options.seed, options.pause_s).submit()
        course = Course(head, handle, own, options.seed)
        try:
            for away_s in options.away:
                for number in range(options.times):
                    outages.append(course.lose_head(away_s, number % 2 == 1))
                    judge(outages, read_marks(own), time.time())
                    print(format_outage(outages[-1]), flush=True)
        except RuntimeError as error:
            problems.append(str(error))
        ended_s = time.time()
        handle.end()
        problems += find_left(head)
    marks = read_marks(own)
    judge(outages, marks, ended_s)
    problems += [f"step {step} was done again" for _, step in redone_steps(marks)]
    if len(outages) < len(options.away) * options.times:
        problems.append(f"only {len(outages)} outages")
    if (ended := sum(it.ended for it in outages)) > 0:
        problems.append(f"{ended} processes ended that were not killed")
    streams = course.streams
    if streams.most != 1 or streams.looks < len(outages):
        problems.append(f"{streams.most} controllers were obeyed in {streams.looks} looks")
    steps = max((step for _, step, _ in finished_steps(marks)), default=0)
    order = SampleOrder(LENGTH, options.seed)
    problems += [f"ledger: {it}" for it in check_ledger(own / "ledger", order, SAMPLES, steps)]
    return outages, problems


def find_left(head: DurableHead) -> list[str]:
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while (left := head.processes(*TITLES)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    owned = [str(it) for it in find_owned()]
    return [f"process {pid} outlives the job" for pid in left] + [f"{it} is left" for it in owned]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head_outages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--store", choices=STORES, default=STORES[0], help="of the head's state")
    text = "seconds, separated by commas"
    parser.add_argument("--away", default="3,30,200", metavar="LIST", help=text)
    parser.add_argument("--times", type=int, default=10, metavar="N", help="outages of each length")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, and of the job")
    text = "seconds that each step waits (default: %(default)s)"
    parser.add_argument("--pause-s", type=float, default=0.2, metavar="S", help=text)
    text = "a node for the job's process, which so outlives the head"
    parser.add_argument("--controller-node", action="store_true", help=text)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    options.away = [float(text) for text in options.away.split(",")]
    if options.store == "redis" and shutil.which("redis-server") is None:
        parser.error("install redis-server, or choose --store rocksdb: it is not on PATH")
    return options


def main(arguments: list[str]) -> int:
    options, machine = parse_arguments(arguments), describe_machine()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers
    folder = Path(tempfile.mkdtemp(prefix="outages-"))
    outages, problems = run(options, folder)
    machine["load_after"] = round(os.getloadavg()[0], 1)
    print(format_machine(machine), f"load at the end {machine['load_after']}", sep=", ")
    if outages:
        print(f"\n{options.store}\n\n{format_table(outages)}")
    print(*(problems or ["nothing lost, nothing left"]), sep="\n")
    if options.json:
        report = machine | {"store": options.store, "seed": options.seed, "problems": problems}
        report["controller_node"] = options.controller_node
        report["outages"] = [asdict(it) for it in outages]
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if problems:
        print(f"files: {folder}")
    else:
        shutil.rmtree(folder)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
