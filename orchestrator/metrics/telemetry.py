"""Everything that listens to one job: the tally, its endpoint and its files, as one thing to own.

Lifetimes: `Telemetry` is opened before the controller begins and closed after it has ended; the
endpoint and the writer's thread live exactly as long. Whoever reads the tally, which the endpoint's
threads do, holds the lock that the controller's thread takes for every number it tells; only for
as long as a copy of the ranks takes, which may be thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Lock
from time import time
from types import TracebackType
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.job_events import EventBus, JobEvent
from rayzero.orchestrator.journal.run_history import RunHistory
from rayzero.orchestrator.metrics.catalog import job_families, rank_families, user_gauges
from rayzero.orchestrator.metrics.endpoint import Endpoint, make_json_page
from rayzero.orchestrator.metrics.job_metrics import METRIC_EVENTS, JobInfo, JobMetrics, Timestamps
from rayzero.orchestrator.metrics.snapshot import (
    dump_counters,
    make_snapshot,
    restore_metrics,
    snapshot_ranks,
)
from rayzero.orchestrator.metrics.step_files import (
    JsonLinesWriter,
    StepSink,
    StepWriter,
    TensorBoardWriter,
)
from rayzero.orchestrator.page import page_response
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.failure import FaultBudget
from rayzero.orchestrator.progress import StepRecord

_PORT_LIMIT = 65536


class Telemetry:
    """Counts a job's events, and serves the metrics.

    Args:
        clock: the controller's.
        warn: is told what goes wrong with files, in threads of their own.
        unix: Unix time.
        past: of a lost run, whose numbers go on.

    Raises:
        ConfigError: the port is taken, or a file cannot be written.
    """

    def __init__(
        self,
        plan: JobPlan,
        clock: Clock,
        warn: Callable[[str], None],
        unix: Callable[[], float] = time,
        past: RunHistory | None = None,
    ) -> None:
        self._clock = clock
        self._warn = warn
        self._unix_clock = unix
        self._lock = Lock()
        self._per_rank = plan.spec.metrics.per_rank
        self._metrics = JobMetrics(_job_info(plan), self._timestamps(), user_gauges)
        if past is not None:
            restore_metrics(self._metrics, past, self._timestamps())
        with ExitStack() as opened:
            self._step_writer = self._open_step_writer(plan, opened)
            self._endpoint = self._open_endpoint(plan, opened)
            self._exit_stack = opened.pop_all()
        self.url = self._endpoint.url if self._endpoint is not None else None

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit_stack.close()

    def flush(self) -> None:
        """Writes what is waiting for a file, and closes the files: nothing comes after it."""
        behind, self._step_writer = self._step_writer, None
        if behind is not None:
            behind.close()

    async def await_final_scrape(self) -> None:
        """Waits, for a while at most, until those who read regularly have read how it stands now: a
        Prometheus that never saw a job fail could not tell of it."""
        if self._endpoint is not None:
            await self._endpoint.await_final_scrape()

    def subscribe_to(self, events: EventBus) -> None:
        """Counts these events from now on."""
        events.subscribe(self.on_event, METRIC_EVENTS)

    def on_event(self, event: JobEvent) -> None:
        with self._lock:
            self._metrics.on_event(event, self._timestamps())
        if self._step_writer is not None and isinstance(event, StepRecord):
            self._step_writer.enqueue(event)

    def snapshot(self) -> dict[str, Any]:
        """The job as it stands; may be called from any thread."""
        with self._lock:
            value, ranks = (
                make_snapshot(self._metrics, self._timestamps()),
                self._metrics.ranks.copy(),
            )
        return {**value, "ranks": snapshot_ranks(ranks)}

    def dump_counters(self) -> dict[str, Any]:
        """What goes into the journal, for a run that adopts this one."""
        with self._lock:
            return dump_counters(self._metrics, self._timestamps())

    def families(self) -> list[Metric]:
        """Its series; may be called from any thread."""
        with self._lock:
            job = list(job_families(self._metrics, self._timestamps()))
            if not self._per_rank:
                return job
            ranks = self._metrics.ranks.copy()
        return [*job, *rank_families(self._metrics.info.name, ranks)]

    def _timestamps(self) -> Timestamps:
        return Timestamps(self._clock.now(), self._unix_clock())

    def _open_step_writer(self, plan: JobPlan, opened: ExitStack) -> StepWriter | None:
        wanted, folder = plan.spec.metrics, plan.output_dir
        sinks: list[StepSink] = []
        try:
            if wanted.jsonl:
                sinks.append(JsonLinesWriter(folder))
            if wanted.tensorboard:
                sinks.append(TensorBoardWriter(folder, self._unix_clock()))
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written into {str(folder)!r}: {error.strerror or error}",
                allowed="a folder that can be written to",
                fix="checkpoint.path, or metrics.jsonl and metrics.tensorboard in the job file",
            ) from None
        if not sinks:
            return None
        writer = StepWriter(sinks, self._warn)
        opened.callback(self.flush)
        return writer

    def _open_endpoint(self, plan: JobPlan, opened: ExitStack) -> Endpoint | None:
        wanted = plan.spec.metrics
        if wanted.port is None:
            return None
        registry = CollectorRegistry()
        registry.register(_MetricsCollector(self.families))
        pages = {"/": page_response, "/snapshot.json": make_json_page(self.snapshot)}
        ports = range(wanted.port, min(wanted.port + wanted.ports, _PORT_LIMIT))
        endpoint = Endpoint(wanted.host, ports, registry, pages)
        opened.callback(endpoint.close)
        return endpoint


class _MetricsCollector(Collector):
    def __init__(self, families: Callable[[], list[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected before somebody asks."""
        yield from ()


def _job_info(plan: JobPlan) -> JobInfo:
    spec = plan.spec
    return JobInfo(
        name=spec.name,
        target_steps=spec.steps,
        stage=plan.stage,
        min_workers=spec.workers.min,
        max_workers=spec.workers.most,
        hang_timeout_s=spec.recovery.hang_timeout_s,
        fault_budget=FaultBudget(spec.recovery.max_faults, spec.recovery.fault_window_s),
        has_replicas=spec.recovery.replicas > 0,
        has_checkpoints=spec.checkpoint.every_steps is not None,
    )
