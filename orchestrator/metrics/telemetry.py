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
from rayzero.orchestrator.clock import Clock
from rayzero.orchestrator.journal.past import Past
from rayzero.orchestrator.metrics.carrying import carry_on, counted
from rayzero.orchestrator.metrics.endpoint import Endpoint, json_page
from rayzero.orchestrator.metrics.exporter import job_families, rank_families
from rayzero.orchestrator.metrics.files import JsonLines, TensorBoard
from rayzero.orchestrator.metrics.snapshot import rank_rows, snapshot
from rayzero.orchestrator.metrics.step_writer import Sink, StepWriter
from rayzero.orchestrator.metrics.tally import Facts, Now, Tally
from rayzero.orchestrator.notices import Notice, Observer, Serving
from rayzero.orchestrator.page.assembly import served
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.failure import Budget, Fault
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.messages import Heartbeat, Report

_PORTS = 65536


class Telemetry:
    """The observer and the probe of a job's controller. `observer` is told everything, too.

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
        observer: Observer,
        clock: Clock,
        warn: Callable[[str], None],
        unix: Callable[[], float] = time,
        past: Past | None = None,
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._warn = warn
        self._unix = unix
        self._lock = Lock()
        self._per_rank = plan.spec.metrics.per_rank
        self._tally = Tally(_facts(plan), self._now())
        if past is not None:
            carry_on(self._tally, past, self._now())
        with ExitStack() as opened:
            self._behind = self._write_behind(plan, opened)
            self._endpoint = self._serve(plan, opened)
            self._open = opened.pop_all()
        self.url = self._endpoint.url if self._endpoint is not None else None
        if self.url is not None:
            observer.see(Serving(self.url))

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def written(self) -> None:
        """Writes what is waiting for a file, and closes the files: nothing comes after it."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.close()

    async def heard(self) -> None:
        """Waits, for a while at most, until those who read regularly have read how it stands now: a
        Prometheus that never saw a job fail could not tell of it."""
        if self._endpoint is not None:
            await self._endpoint.heard()

    def see(self, notice: Notice) -> None:
        with self._lock:
            self._tally.see(notice, self._now())
        if self._behind is not None and isinstance(notice, StepRecord):
            self._behind.put(notice)
        self._observer.see(notice)

    def reported(self, report: Report) -> None:
        with self._lock:
            self._tally.reported(report)

    def beat(self, heartbeat: Heartbeat, node: str) -> None:
        with self._lock:
            self._tally.beat(heartbeat, node)

    def judged(self, fault: Fault) -> None:
        with self._lock:
            self._tally.judged(fault)

    def limited(self, least: int, most: int) -> None:
        with self._lock:
            self._tally.limited(least, most)

    def sends(self, so: bool) -> None:
        with self._lock:
            self._tally.sends(so, self._now())

    def copied(self, step: int, nbytes: int) -> None:
        with self._lock:
            self._tally.copied(step, nbytes, self._now())

    def snapshot(self) -> dict[str, Any]:
        """The job as it stands; may be called from any thread."""
        with self._lock:
            value, ranks = snapshot(self._tally, self._now()), self._tally.ranks.copied()
        return {**value, "ranks": rank_rows(ranks)}

    def counted(self) -> dict[str, Any]:
        """What goes into the journal, for a run that adopts this one."""
        with self._lock:
            return counted(self._tally, self._now())

    def families(self) -> list[Metric]:
        """Its series; may be called from any thread."""
        with self._lock:
            job = list(job_families(self._tally, self._now()))
            if not self._per_rank:
                return job
            ranks = self._tally.ranks.copied()
        return [*job, *rank_families(self._tally.facts.name, ranks)]

    def _now(self) -> Now:
        return Now(self._clock.now(), self._unix())

    def _write_behind(self, plan: JobPlan, opened: ExitStack) -> StepWriter | None:
        wanted, folder = plan.spec.metrics, plan.output_dir
        sinks: list[Sink] = []
        try:
            if wanted.jsonl:
                sinks.append(JsonLines(folder))
            if wanted.tensorboard:
                sinks.append(TensorBoard(folder, self._unix()))
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written into {str(folder)!r}: {error.strerror or error}",
                allowed="a folder that can be written to",
                fix="checkpoint.path, or metrics.jsonl and metrics.tensorboard in the job file",
            ) from None
        if not sinks:
            return None
        writer = StepWriter(sinks, self._warn)
        opened.callback(self.written)
        return writer

    def _serve(self, plan: JobPlan, opened: ExitStack) -> Endpoint | None:
        wanted = plan.spec.metrics
        if wanted.port is None:
            return None
        registry = CollectorRegistry()
        registry.register(_Collected(self.families))
        pages = {"/": served, "/snapshot.json": json_page(self.snapshot)}
        ports = range(wanted.port, min(wanted.port + wanted.ports, _PORTS))
        endpoint = Endpoint(wanted.host, ports, registry, pages)
        opened.callback(endpoint.close)
        return endpoint


class _Collected(Collector):
    def __init__(self, families: Callable[[], list[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> Iterator[Metric]:
        """Nothing is collected before somebody asks."""
        yield from ()


def _facts(plan: JobPlan) -> Facts:
    spec = plan.spec
    return Facts(
        name=spec.name,
        steps=spec.steps,
        stage=plan.stage,
        least=spec.workers.min,
        most=spec.workers.most,
        hang_timeout_s=spec.recovery.hang_timeout_s,
        budget=Budget(spec.recovery.max_faults, spec.recovery.fault_window_s),
        replicas=spec.recovery.replicas > 0,
        checkpoints=spec.checkpoint.every_steps is not None,
    )
