"""Metrics that a step report has without user code: the engine's, and what a rank uses of its CPU
and GPU between two steps. The cost of a report."""

from __future__ import annotations

import os
from time import monotonic, thread_time
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.deepspeed.entry import initialize
from rayzero.engine.engine import Engine
from rayzero.engine.session import NO_REQUESTS, use_session
from rayzero.workers.messages import MirrorPolicy, StepReport, WorkerMessage
from rayzero.workers.mirror import Mirror
from rayzero.workers.session import JobSession
from rayzero.workers.step_report import (
    GPU_INTERVAL_S,
    MetricsMerger,
    UsageMeter,
    worker_metrics,
)
from rayzero.workers.training_thread import StopFlag
from tests.workers import recovery_jobs
from tests.workers.support import ASSIGN, give_up, session

MAX_COST_S = 0.001
"""Minimum CPU time of the training thread over several reports: 0.2 ms on an idle machine."""


def trained(model: nn.Module, steps: int) -> tuple[Engine, JobSession, list[StepReport]]:
    job_session, _, posted = session(engine_config=recovery_jobs.engine_config(1))
    with use_session(job_session):
        engine, *_ = initialize(model=model)
    for _ in range(steps):
        step(engine)
    return engine, job_session, reports(posted)


def step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(engine.settings.batches.micro_batch, 4)).sum())
    engine.step()


def reports(posted: list[WorkerMessage]) -> list[StepReport]:
    return [message for message in posted if isinstance(message, StepReport)]


def test_report_has_engines_metrics():
    _, _, step_reports = trained(nn.Linear(4, 4), 2)
    gauges = step_reports[-1].gauges
    for name in ("loss", "lr", "grad_norm", "loss_scale", "step_s", "exposed_comm_s", "skipped"):
        assert name in gauges
    phases = ("data", "forward", "backward", "reduce", "update", "publish", "mirror", "other")
    assert {f"phases/{phase}" for phase in phases} <= set(gauges)
    assert gauges["bytes/model_weights"] >= 20 * 4
    assert gauges["step_samples"] > 0


def test_counts_of_streams_are_summed_over_engines_and_steps() -> None:
    """Also over two steps of one engine in a step of the job; they are counters of its report."""
    merger = MetricsMerger()
    for _ in range(2):
        merger.add("", {"step_s": 1.0, "streams/a/b/samples": 4.0})
        merger.add("critic", {"step_s": 1.0, "streams/web/samples": 2.0})
        merger.add("critic", {"step_s": 1.0, "streams/web/samples": 2.0, "streams/web/bytes": 9.0})
        merged = merger.take(1, 3.0)
    job_session, _, _ = session()
    job_session.reporter.add(merged)
    counters = job_session.reporter.build(1).counters
    assert counters == {
        "streams/a/b/samples": 4.0,
        "streams/web/samples": 4.0,
        "streams/web/bytes": 9.0,
    }


def test_skipped_step_is_counted_once():
    job_session, _, posted = session()
    job_session.reporter.start_at(0, 3)  # as loaded from a checkpoint
    for step, count in enumerate((3, 4, 4), 1):
        job_session.on_step_end({"step": step, "skipped_steps": count}, NO_REQUESTS)
    assert [report.gauges["skipped"] for report in reports(posted)] == [0, 1, 0]


def test_mirrors_time_belongs_to_next_step():
    def ignore(_: object) -> None:
        """Nothing is posted, and no stop is caught."""

    mirror = Mirror(MirrorPolicy(), ASSIGN, None, None, ignore, StopFlag(give_up))
    assert mirror.gauges() == {}  # without a vault

    def times(step: int, other_s: float) -> list[float]:
        gauges = worker_metrics({"step": step, "phases/other": other_s}, mirror)
        return [gauges[name] for name in ("phases/mirror", "phases/other", "checkpoint_s")]

    assert times(1, 1.0) == [0, 1, 0]
    mirror.stopped_s, mirror.checkpointed_step = 0.25, 1
    assert times(2, 1.0) == [0.25, 0.75, 0.25]
    assert times(3, 0.125) == [0.125, 0, 0]


@pytest.mark.alone
def test_report_is_cheap():
    """Of a model with 400 parameters, which have 1,200 tensors of state."""
    layers: list[Any] = [nn.Linear(4, 4) for _ in range(200)]
    engine, job_session, _ = trained(nn.Sequential(*layers), 4)
    meter, took_s = engine._step.meter, []
    for _ in range(20):
        before = thread_time()
        job_session.on_step_end(
            meter._collect(meter._cached_bytes()).to_flat_dict() | {"step": 1e6}, NO_REQUESTS
        )
        took_s.append(thread_time() - before)
        job_session.reporter.last_step = 0
    assert min(took_s) < MAX_COST_S


def test_cpu_cores_are_those_of_the_step() -> None:
    """The oracle is the kernel's count of this process's ticks."""
    meter = UsageMeter()
    started_s, before = monotonic(), sum(os.times()[:2])
    meter.restart()
    while monotonic() - started_s < 0.3:
        pass
    cores = meter.end_step()["cpu_cores"]
    used = (sum(os.times()[:2]) - before) / (monotonic() - started_s)
    assert cores == pytest.approx(used, abs=0.15)  # a tick is 10 ms


def test_driver_is_asked_once_a_second() -> None:
    now_s, asked = 100.0, 0

    def read() -> float:
        nonlocal asked
        asked += 1
        return asked / 10

    meter = UsageMeter(lambda: now_s, lambda: 2 * now_s, read)
    shares = []
    for _ in range(8):
        now_s += GPU_INTERVAL_S / 4
        shares.append(meter.end_step())
    assert [gauges["gpu_utilization"] for gauges in shares] == [0.1] * 4 + [0.2] * 4
    assert {gauges["cpu_cores"] for gauges in shares} == {2.0}


def test_unknown_use_is_not_reported() -> None:
    meter = UsageMeter(lambda: 1.0, lambda: 1.0, lambda: None)
    assert meter.end_step() == {}
