"""A job with a few random faults, and the check that nothing was lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import soak_job, soak_rollouts, soak_streams
from benchmarks.clusters import BenchmarkCluster
from benchmarks.disruptions import DisruptionRunner
from benchmarks.soak_control import SoakControl, parse_disruption
from benchmarks.soak_plan import Plan
from benchmarks.soak_submission import (
    JOB_NAME,
    STREAM_FOLDER,
    EventLogger,
    Recovery,
    Successor,
    find_order,
    run_job,
    timeout_s,
)
from benchmarks.soak_target import Target
from rayzero.engine.data.sample_ledger import Order, check_ledger, read_ledger
from rayzero.engine.data.sampling import SampleOrder
from tests.support.durable_head import DurableHead

RTOL, ATOL = 1e-9, 1e-12
TITLES = "ray::WorkerActor", "ray::VaultActor", "ray::JobActor", "ray::RoleActor"
END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """Result of an episode. `lost` lists the violated requirements; `resizes` counts those to
    another number of ranks, of the first submission."""

    plan: Plan
    seconds: float
    fired: list[str]
    recoveries: list[Recovery] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    resizes: int = 0


def run(episode: Plan, folder: Path, nodes: int, cluster: BenchmarkCluster) -> Outcome:
    """Run an episode on the Ray cluster that this process is connected to.

    Args:
        folder: an empty folder for the job's files.
        cluster: that cluster.
    """
    start_s, control = time.monotonic(), SoakControl.from_environment()
    control.clear()
    successor = Successor(episode, folder, nodes)
    output_dir = folder / JOB_NAME
    if episode.stream:
        points = soak_job.Points()
        samples = [points[number] for number in range(len(points))]
        soak_streams.write(episode.stream, folder / STREAM_FOLDER, samples)
    log = EventLogger(output_dir, control)
    target = Target(
        output_dir, control, episode.workers, threading.Event(), successor.start, cluster.head
    )
    disruptions = [text for text in episode.faults if parse_disruption(text) is not None]
    runner = DisruptionRunner(target, disruptions, episode.seed)
    runner.start()
    lost = []
    try:
        deadline_s = start_s + timeout_s(episode)
        error = run_job(
            episode,
            folder,
            log,
            cluster.replace_lost_nodes,
            deadline_s,
            successor.is_started,
            target.on_submitted,
        )
        if successor.is_started():
            error, recoveries = successor.wait(deadline_s)
            log.recoveries += recoveries
        lost = [error] if error else []
    finally:
        runner.stop()
        successor.stop()
    lost += runner.problems
    if cluster.head is not None:
        lost += _find_left(cluster.head)
    if episode.rollouts:
        lost += [
            f"{it.copied_redone} finished steps that all ranks had copied were done again after "
            f"{it.kind}"
            for it in log.recoveries
            if it.copied_redone
        ]
    unfired = soak_job.unfired_faults(list(episode.faults), str(output_dir))
    lost += [f"{fault} did not fire" for fault in unfired]
    if not error and episode.rollouts:
        lost += soak_rollouts.check(output_dir, control, episode.steps, episode.seed)
    elif not error:
        lost += _check_training(episode, folder)
    fired = [event.fault for event in soak_job.read_fired(str(output_dir))]
    return Outcome(episode, time.monotonic() - start_s, fired, log.recoveries, lost, log.resizes)


def _find_left(head: DurableHead) -> list[str]:
    """The processes of the job that outlive it."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while (left := head.processes(*TITLES)) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return [f"{title} outlives the job" for title in left]


def _check_training(episode: Plan, folder: Path) -> list[str]:
    """Compares weights with plain torch, and the ledger with the order. The samples of a stream are
    those of a plain reader."""
    order: Order = SampleOrder(soak_job.LENGTH, episode.seed)
    data: Any = soak_job.Points()
    if episode.stream:
        order = find_order(episode, folder)
        data = soak_streams.read_plainly(episode.stream, folder / STREAM_FOLDER)
    weights = torch.load(folder / JOB_NAME / "weights.pt", weights_only=True)
    batches = soak_job.batches_in_order(episode.steps, order)
    bad = {it for batch in batches for it in batch if episode.has_bad and soak_streams.is_bad(it)}
    (*_, expected) = soak_job.train_reference(batches, episode.seed, data, bad)
    problems = [
        f"weights: {name} differs from plain torch"
        for name in expected
        if not torch.allclose(weights[name], expected[name], rtol=RTOL, atol=ATOL)
    ]
    ledger = folder / JOB_NAME / "ledger"
    mismatches = check_ledger(ledger, order, soak_job.SAMPLES, episode.steps)
    problems += [f"ledger: {it}" for it in mismatches]
    if episode.stream:
        problems += soak_streams.check_order(episode.stream, data, batches)
        skipped = [it for own in read_ledger(ledger, skipped=True).values() for it in own]
        if Counter(skipped) != Counter(it for batch in batches for it in batch if it in bad):
            problems.append(f"ledger: {len(skipped)} samples were left out, not the bad ones")
    return problems
