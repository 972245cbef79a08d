"""The metrics of one job: counted from its events, served over HTTP, written per step.

Lifetimes: the endpoint lives from `Telemetry`'s construction to its end. The endpoint's threads
read the counters under the lock that the controller's thread takes for each event; they hold it
only while they copy the rows of the ranks, of which there may be thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Lock
from time import time
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.background_writer import BackgroundWriter, WriteQueue
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
    StepFiles,
    StepSink,
    TensorBoardWriter,
)
from rayzero.orchestrator.page import page_response
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.failure import FaultBudget
from rayzero.orchestrator.progress import StepRecord

_PORT_LIMIT = 65536


class Telemetry:
    """Counts a job's events, and serves the metrics.

    Opens files and a socket: constructed outside the event loop.

    Args:
        clock: the controller's.
        writer: writes the step files, and closes them when it ends.
        warn: shows a warning; called in the writer's thread.
        unix: Unix time.
        past: of an adopted run, whose counters continue.

    Raises:
        ConfigError: the port is taken, or a file cannot be written.
    """

    def __init__(
        self,
        plan: JobPlan,
        clock: Clock,
        writer: BackgroundWriter,
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
            self._endpoint = self._open_endpoint(plan, opened)
            self._step_queue = self._open_step_files(plan, writer)
            self._exit_stack = opened.pop_all()
        self.url = self._endpoint.url if self._endpoint is not None else None

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the endpoint. The step files are closed by the writer."""
        self._exit_stack.close()

    async def await_final_scrape(self) -> None:
        """Waits, with a limit, until each regular scraper has read the final values; otherwise
        Prometheus could not alert on a failed job."""
        if self._endpoint is not None:
            await self._endpoint.await_final_scrape()

    def subscribe_to(self, events: EventBus) -> None:
        """Counts these events from now on."""
        events.subscribe(self.on_event, METRIC_EVENTS)

    def on_event(self, event: JobEvent) -> None:
        with self._lock:
            self._metrics.on_event(event, self._timestamps())
        if self._step_queue is not None and isinstance(event, StepRecord):
            self._step_queue.put(event)

    def snapshot(self) -> dict[str, Any]:
        """The current state of the job as JSON-ready data. Thread-safe."""
        with self._lock:
            value = make_snapshot(self._metrics, self._timestamps())
            ranks = self._metrics.ranks.copy()
        return {**value, "ranks": snapshot_ranks(ranks)}

    def dump_counters(self) -> dict[str, Any]:
        """The counters for the journal; a run that adopts this one continues them."""
        with self._lock:
            return dump_counters(self._metrics, self._timestamps())

    def families(self) -> list[Metric]:
        """The job's Prometheus metrics. Thread-safe."""
        with self._lock:
            job = list(job_families(self._metrics, self._timestamps()))
            if not self._per_rank:
                return job
            ranks = self._metrics.ranks.copy()
        return [*job, *rank_families(self._metrics.info.name, ranks)]

    def _timestamps(self) -> Timestamps:
        return Timestamps(self._clock.now(), self._unix_clock())

    def _open_step_files(self, plan: JobPlan, writer: BackgroundWriter) -> WriteQueue | None:
        config, folder = plan.spec.metrics, plan.output_dir
        sinks: list[StepSink] = []
        try:
            if config.jsonl:
                sinks.append(JsonLinesWriter(folder))
            if config.tensorboard:
                sinks.append(TensorBoardWriter(folder, self._unix_clock()))
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written into {str(folder)!r}: {error.strerror or error}",
                allowed="a writable folder",
                fix="checkpoint.path, or metrics.jsonl and metrics.tensorboard in the job file",
            ) from None
        if not sinks:
            return None
        files = StepFiles(sinks, self._warn)
        return writer.add_queue("the metrics files", files.write, 0.0, files.close)

    def _open_endpoint(self, plan: JobPlan, opened: ExitStack) -> Endpoint | None:
        config = plan.spec.metrics
        if config.port is None:
            return None
        registry = CollectorRegistry()
        registry.register(_MetricsCollector(self.families))
        pages = {"/": page_response, "/snapshot.json": make_json_page(self.snapshot)}
        ports = range(config.port, min(config.port + config.ports, _PORT_LIMIT))
        endpoint = Endpoint(config.host, ports, registry, pages)
        opened.callback(endpoint.close)
        return endpoint


class _MetricsCollector(Collector):
    def __init__(self, families: Callable[[], list[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> Iterator[Metric]:
        """Empty, so that registration collects nothing."""
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
