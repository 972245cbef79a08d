"""The metrics of one job: counted from its events, served over HTTP, written per step.

The endpoint lives from the construction of `Telemetry` until `close`. Its thread reads the counters
under the lock that the controller's thread takes for each event. There may be thousands of ranks,
so under the lock it only copies the columns of their table, and makes the rows later.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from time import time
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.background_writer import BackgroundWriter, WriteQueue
from rayzero.orchestrator.console import PlainConsole
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import (
    JOB_EVENTS,
    FrequentEvent,
    JobEvent,
    RolloutsCounted,
    StateEntered,
)
from rayzero.orchestrator.metrics.catalog import job_families, rank_families
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, Timestamps
from rayzero.orchestrator.metrics.snapshot import (
    history_texts,
    make_history,
    make_snapshot,
    snapshot_ranks,
    to_json,
)
from rayzero.orchestrator.metrics.trackers import open_step_files
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec_sections import MetricsSpec
from rayzero.workers.messages import RoleReport
from rayzero.workers.step_rows import Heartbeats, StepRows

if TYPE_CHECKING:
    from rayzero.orchestrator.metrics.endpoint import Endpoint

_PORT_LIMIT = 65536
SNAPSHOT_FILE = "snapshot.json"
HISTORY_FILE = "history.json"
SNAPSHOT_INTERVAL_S = 2.0
HISTORY_INTERVAL_S = 20.0


class Telemetry:
    """Counts a job's events from its construction on, and serves the metrics. The constructor opens
    files and a socket, so it is called outside the event loop, before the first event. It raises
    ConfigError if the port is taken, or a file cannot be written.

    Args:
        writer: writes the step files.
    """

    def __init__(
        self,
        plan: JobPlan,
        clock: Clock,
        writer: BackgroundWriter,
        events: EventBus,
        unix: Callable[[], float] = time,
    ) -> None:
        self._lock = Lock()
        self._per_rank = plan.spec.metrics.per_rank
        self._events = events
        self._metrics = JobMetrics(
            plan.spec, plan.stage, lambda: Timestamps(clock.now(), unix()), events.facts
        )
        self._log: deque[str] = deque(maxlen=plan.spec.metrics.log_lines)
        self._console = PlainConsole(self._log.append, shows_end=False)
        self._endpoint = self._open_endpoint(plan.spec.metrics)
        self.url = self._endpoint.url if self._endpoint is not None else None
        self.port_note = self._endpoint.port_note if self._endpoint is not None else ""
        try:
            self._step_queues = open_step_files(plan, unix(), writer)
        except ConfigError:
            self.close()
            raise
        events.subscribe(self._on_event, JOB_EVENTS)
        # Thousands of these arrive in a second, so each has a handler that reads no clock.
        frequent: dict[type[FrequentEvent], Callable[[Any], None]] = {
            StepRows: self._metrics.ranks.on_rows,
            Heartbeats: self._metrics.ranks.on_heartbeats,
            RoleReport: self._metrics.roles.on_report,
            RolloutsCounted: self._metrics.roles.on_counts,
        }
        for event_type, handler in frequent.items():
            events.subscribe(partial(self._count, handler), (event_type,))

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()

    async def await_final_scrape(self) -> None:
        """Waits, with a limit, until each regular scraper has read the final values; otherwise
        Prometheus could not alert on a failed job."""
        if self._endpoint is not None:
            await self._endpoint.await_final_scrape()

    def _on_event(self, event: JobEvent) -> None:
        with self._lock:
            self._metrics.on_event(event, self._events.facts)
            self._console.on_event(event)
        if isinstance(event, StepRecord):
            for queue in self._step_queues:
                queue.put(event)

    def _count(self, handler: Callable[[Any], None], event: FrequentEvent) -> None:
        with self._lock:
            handler(event)

    def snapshot(self) -> dict[str, Any]:
        """Returns the current state of the job as JSON-ready data. Thread-safe."""
        with self._lock:
            value = make_snapshot(self._metrics)
            ranks = self._metrics.ranks.copy()
        return {**value, "ranks": snapshot_ranks(ranks)}

    def history(self) -> dict[str, Any]:
        """Returns the job's curves, the end of its log and its config as JSON-ready data.
        Thread-safe."""
        with self._lock:
            value, log = make_history(self._metrics), list(self._log)
        return {**value, **history_texts(self._metrics.spec, log)}

    def restore_curves(self, job_folder: str, warn: Callable[[str], None]) -> None:
        """Continues the curves of an adopted run, from the file in the job's folder. Without the
        file, the curves begin now."""
        try:
            curves = json.loads(open_store(job_folder).read(HISTORY_FILE))["curves"]
            with self._lock:
                self._metrics.curves.restore(curves)
        except (StoreError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, StoreError) and error.kind == "gone":
                return
            warn(
                "the curves of the adopted run start over: "
                f"{redact_url(join_url(job_folder, HISTORY_FILE))} cannot be read: "
                f"{first_line(error)}"
            )

    def outlook(self) -> tuple[float | None, float]:
        """Returns the estimated seconds to the last step (None if unknown), and the goodput."""
        with self._lock:
            return self._metrics.remaining_s, self._metrics.time_breakdown().goodput

    def seconds(self) -> dict[str, float]:
        """Returns the wall time by cause, in seconds. It is kept in the journal, so that a process
        that adopts the run continues the accounting."""
        with self._lock:
            seconds = self._metrics.time_breakdown().seconds
        return {cause: round(spent_s, 3) for cause, spent_s in seconds.items() if spent_s}

    def collect(self) -> list[Metric]:
        """Returns the job's metrics, as a collector of `prometheus_client` does. Thread-safe."""
        with self._lock:
            job = list(job_families(self._metrics))
            if not self._per_rank:
                return job
            ranks = self._metrics.ranks.copy()
        return [*job, *rank_families(self._metrics.spec.name, ranks.view())]

    def _open_endpoint(self, config: MetricsSpec) -> Endpoint | None:
        if config.port is None:
            return None
        from rayzero.orchestrator.metrics import endpoint as server  # imports aiohttp: slow
        from rayzero.orchestrator.page import page_response

        registry = CollectorRegistry()
        registry.register(self)
        pages = {
            "/": page_response,
            "/snapshot.json": lambda: server.json_response(self.snapshot()),
            "/history.json": lambda: server.json_response(self.history()),
            "/steps.csv": lambda: server.steps_csv(self.history()),
        }
        ports = range(config.port, min(config.port + config.ports, _PORT_LIMIT))
        return server.Endpoint(config.host, ports, registry, pages)


class RunFiles:
    """Writes the files that the page shows of a run, on disk and in a store, whenever something has
    happened in the run, and at its end. `rayzero page` reads these files instead of calling the
    jobs' processes, because Ray ends its clients with their cluster.

    Args:
        writer: writes to the disk.
        store_writer: writes to the store, if `checkpoint.path` is one.
        fence: raises when another process owns the job's folder; called in the thread of
            `store_writer`.
    """

    def __init__(
        self,
        plan: JobPlan,
        telemetry: Telemetry,
        writer: BackgroundWriter,
        store_writer: BackgroundWriter,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._queues: list[WriteQueue] = []
        for name, value, every_s in (
            (SNAPSHOT_FILE, telemetry.snapshot, SNAPSHOT_INTERVAL_S),
            (HISTORY_FILE, telemetry.history, HISTORY_INTERVAL_S),
        ):
            write = partial(_replace, plan.output_dir / name, value)
            self._queues.append(writer.add_queue(f"the page's {name}", write, every_s))
            if plan.spec.checkpoint.is_url:
                store = partial(_replace_in_store, plan.job_folder, name, value, fence)
                every_s = max(every_s, plan.spec.records.interval_s)
                subject = f"the page's {name} in the store"
                self._queues.append(store_writer.add_queue(subject, store, every_s))

    def subscribe_to(self, events: EventBus) -> None:
        events.subscribe(self._on_event, (StepRecord, StateEntered, Heartbeats))

    def _on_event(self, event: JobEvent | Heartbeats) -> None:
        """Wakes the writers. Called thousands of times a second, so it only wakes a queue with
        nothing to write. At the run's end it always does: a write in progress may be too early."""
        is_end = isinstance(event, StateEntered) and event.state.is_final
        for queue in self._queues:
            if queue.is_empty or is_end:
                queue.wake()


def _replace(path: Path, value: Callable[[], dict[str, Any]], _: Sequence[None]) -> None:
    """Replaces a file with the current value. Readers see either the old file or the new one."""
    new = path.with_name(f".{path.name}")
    new.write_bytes(to_json(value()))
    os.replace(new, path)


def _replace_in_store(
    job_folder: str,
    name: str,
    value: Callable[[], dict[str, Any]],
    fence: Callable[[], None],
    _: Sequence[None],
) -> None:
    fence()
    open_store(job_folder).replace(name, to_json(value()))
