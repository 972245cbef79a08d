"""The Ray actor around a job's controller: a thin shell, in a process and an event loop of its own.

It is detached, so that it outlives who submitted the job; the workers and the vaults belong to it,
and go with it. It ends itself when the job has ended and its end was fetched.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from rayzero.engine.errors import RayzeroError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import SystemClock
from rayzero.orchestrator.checkpoint_store import FileCheckpointStore
from rayzero.orchestrator.cluster.actor_pool import remove_stale_reservations
from rayzero.orchestrator.cluster.vault_group import RayVaultGroup
from rayzero.orchestrator.cluster.worker_group import RayWorkerGroup
from rayzero.orchestrator.control.context import Dependencies
from rayzero.orchestrator.control.controller import Controller
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.interfaces import JobCommand
from rayzero.orchestrator.job import process
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord, delete_ended, store_ended
from rayzero.orchestrator.job.lease_holder import Lease, acquire_lease
from rayzero.orchestrator.job.log import LogPosition, log_path, read_log
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job_events import EventBus, JobWarning, MetricsServed
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.journal.run_history import RunHistory, why_not_adoptable
from rayzero.orchestrator.journal.writer import journal_folder, read_journal
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.results import EventPage, JobEnd, JobStatus
from rayzero.orchestrator.spec import JobSpec

FETCH_LINGER_S = 15.0
"""How long the process waits for its end to be fetched, when somebody has followed the job."""


UNWATCHED_LINGER_S = 2.0
"""The same when nobody has lately."""


JOURNAL_TIMEOUT_S = 10.0
"""How long the end may take to be written down."""


LOG_READ_LINGER_S = 5.0
"""How long it waits for those who read its log."""


_LOG_READER_IDLE_S = 1.5
"""Somebody who has not asked for so long does not read it."""


RECORD_TIMEOUT_S = 5.0
"""How long the cluster may take to keep how the job ended."""


_RECENT_POLL_S = 10.0


_REPLY_FLUSH_S = 0.2
"""From the last answer to the end of the process."""


class JobActor:
    """One job's process. Every method is called in its event loop, and none waits for long."""

    def __init__(self, plan: JobPlan, can_grow: bool) -> None:
        with suppress(OSError):  # Ray makes workers nice; who notices deaths should not wait
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        process.tune_gc_and_switch_interval()
        self._plan = plan
        self._can_grow = can_grow
        self._events = EventBuffer()
        self._recorder: JobRecorder | None = None
        self._exit_stack = ExitStack()
        self._telemetry: Telemetry | None = None
        self._lease: Lease | None = None
        self._stop_requested = False
        self._loop = asyncio.get_running_loop()
        self._clock = SystemClock()
        self._controller: Controller | None = None
        self._last_poll_s: float | None = None
        self._last_log_read_s: float | None = None
        self._end_acknowledged = asyncio.Event()
        # Kept by this object, and ended with its process.
        self._main_task = self._loop.create_task(self._main())

    async def fetch_events(self, run: str, since: int, timeout_s: float) -> EventPage:
        """As `EventBuffer.news`."""
        self._last_poll_s = self._clock.now()
        return await self._events.fetch_since(run, since, timeout_s)

    async def acknowledge_end(self) -> None:
        """Somebody knows the end; nobody else is waited for."""
        self._end_acknowledged.set()

    async def spec(self) -> JobSpec | None:
        """What is being run; None when it has ended."""
        return None if self._events.ended is not None else self._plan.spec

    async def status(self) -> JobStatus:
        plan = self._plan
        journal, log = redact_url(journal_folder(plan.job_folder)), str(log_path(plan.output_dir))
        if self._controller is None:
            return JobStatus(plan.spec.name, State.PENDING, journal=journal, log=log)
        return replace(self._controller.status(), journal=journal, log=log)

    async def snapshot(self) -> dict[str, Any]:
        """As `Telemetry.snapshot`.

        Raises:
            JobFailedError: nothing has begun yet.
        """
        if self._telemetry is None:
            raise JobFailedError(f"job {self._plan.spec.name!r} is still starting")
        return self._telemetry.snapshot()

    async def execute(self, wish: JobCommand) -> str | RayzeroError:
        """As `Controller.grant`; what it raises comes back."""
        try:
            if self._events.ended is not None:
                raise JobFailedError(f"job {self._plan.spec.name!r} has just ended")
            if self._controller is None:
                raise JobFailedError(f"job {self._plan.spec.name!r} is still starting")
            return await self._controller.execute(wish)
        except RayzeroError as error:
            return error

    async def log(self, place: LogPosition) -> tuple[bytes, LogPosition]:
        """As `read_log`. Who reads it is waited for at the end."""
        self._last_log_read_s = self._clock.now()
        return await asyncio.to_thread(read_log, log_path(self._plan.output_dir), place)

    async def stop(self) -> None:
        """Asks for a clean end."""
        self._stop_requested = True
        if self._controller is not None:
            self._controller.post_event(machine.StopRequested())

    def _build_controller(self, past: RunHistory | None) -> Controller:
        plan, spec = self._plan, self._plan.spec
        papers = JobRecorder(plan, self._events, self._warn)
        papers.append_journal(
            "begun",
            format=1,
            run=plan.worker_spec.run,
            adopted=past is not None,
            spec=to_document(spec),
            working_dir=plan.worker_spec.working_dir,
            by_value=isinstance(plan.worker_spec.entrypoint, bytes),
        )
        self._recorder = papers
        if plan.output_is_temporary:
            self._warn(
                f"Ray removes {plan.output_dir} some time after the job, with its log and summary: "
                "checkpoint.path with a shared folder or a URL keeps them"
            )
        vaults = RayVaultGroup(spec.name, faults=spec.faults, output_dir=str(plan.output_dir))
        workers = RayWorkerGroup(plan.worker_spec, self._clock, self._can_grow, vaults)
        fence = self._lease.check if self._lease is not None else lambda: None
        archive = FileCheckpointStore(plan, self._warn, adopting=past is not None, fence=fence)
        told = self._telemetry = self._exit_stack.enter_context(
            Telemetry(plan, self._clock, self._warn, past=past)
        )
        papers.set_counter_source(told.dump_counters)
        events = EventBus()
        told.subscribe_to(events)
        papers.subscribe_to(events)
        if told.url is not None:
            events.emit(MetricsServed(told.url))
        return Controller(plan, Dependencies(workers, vaults, archive, events, self._clock), past)

    def _warn(self, text: str) -> None:
        """May be called from any thread."""
        self._loop.call_soon_threadsafe(self._events.on_event, JobWarning(redact_url(text)))

    async def _acquire_lease(self) -> None:
        """Raises as `lease.take`."""
        plan = self._plan
        self._lease = await asyncio.to_thread(
            acquire_lease,
            plan.job_folder,
            plan.spec.name,
            plan.spec.checkpoint.lease_s,
            self._warn,
            lambda: self._stop_requested,
        )
        self._lease.on_lost = self._on_lease_lost

    def _on_lease_lost(self, error: RayzeroError) -> None:
        """The folder is somebody else's. Called in another thread."""

        def leave() -> None:
            if self._recorder is not None:
                self._recorder.stop_journal()
            if self._controller is not None:
                self._controller.post_event(machine.FaultFatal(error))

        self._loop.call_soon_threadsafe(leave)

    async def _load_adoptable_run(self) -> RunHistory | None:
        """The run to go on with, if the last one has not ended.

        Raises:
            ConfigError: it has not, and this is another job.
            JobStoppedError: this process was started anew just after the job's end.
        """
        plan = self._plan
        await asyncio.to_thread(remove_stale_reservations, plan.spec.name)
        past = await asyncio.to_thread(read_journal, plan.job_folder)
        if past is None:
            return None
        if past.end_state:
            if past.run == plan.worker_spec.run:
                raise JobStoppedError(f"job {plan.spec.name!r} has ended before: {past.end_state}")
            return None
        if (refused := why_not_adoptable(past, plan.spec)) is not None:
            raise refused
        given = plan.spec.workers
        before = past.spec.get("workers", {})
        same = (before.get("min"), before.get("max")) == (given.min, given.most)
        return past if same else replace(past, scaled_limits=None)

    async def _main(self) -> None:
        with self._exit_stack:
            ended = await self._run_controller()
            if self._telemetry is not None:
                await asyncio.to_thread(self._telemetry.flush)
            await self._record_end(ended)
            if self._lease is not None:
                await asyncio.to_thread(self._lease.release)
            self._events.finish(ended)
            if self._telemetry is not None:  # nobody who follows waits for a scrape
                await self._telemetry.await_final_scrape()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s()):
                await self._end_acknowledged.wait()
        await self._wait_log_readers()
        await asyncio.sleep(_REPLY_FLUSH_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _run_controller(self) -> JobEnd:
        try:
            await self._acquire_lease()
            past = await self._load_adoptable_run()
            with suppress(RayError):  # then it is told how the last one ended for a little longer
                await asyncio.to_thread(delete_ended, self._plan.spec.name)
            self._controller = self._build_controller(past)
            if self._stop_requested:
                self._controller.post_event(machine.StopRequested())
            return JobEnd(await self._controller.run())
        except RayzeroError as error:
            return JobEnd(error=error)
        except Exception as error:  # noqa: BLE001  # the job's end: nothing may be lost
            text = f"rayzero itself failed: {type(error).__name__}: {error}"
            return JobEnd(error=JobFailedError(text, fix="please report this"))

    async def _wait_log_readers(self) -> None:
        """Waits for those who read the log, for a while."""
        until_s = self._clock.now() + LOG_READ_LINGER_S
        while (now_s := self._clock.now()) < until_s:
            if self._last_log_read_s is None or now_s - self._last_log_read_s > _LOG_READER_IDLE_S:
                return
            await asyncio.sleep(_REPLY_FLUSH_S)

    async def _record_end(self, ended: JobEnd) -> None:
        """The end is durable before it is told, where that can be had in time."""
        papers = self._recorder
        if papers is None:
            return  # nothing was begun
        error = ended.error
        kind = "succeeded" if error is None else "failed"
        kind = "stopped" if isinstance(error, JobStoppedError) else kind
        papers.append_journal("ended", state=kind, error="" if error is None else error.seen)
        if not await asyncio.to_thread(papers.close, JOURNAL_TIMEOUT_S):
            self._events.on_event(
                JobWarning("the end of the job is not in its journal: it may be adopted")
            )
        status = await self.status()
        if not (status.state and status.state.is_final):
            status = replace(status, state=State.FAILED)
        try:
            async with asyncio.timeout(RECORD_TIMEOUT_S):
                await asyncio.to_thread(store_ended, EndedJobRecord(status, ended))
        except (RuntimeError, OSError, TimeoutError, RayError) as failed:
            self._events.on_event(
                JobWarning(f"the cluster does not keep the end of the job: {failed}")
            )

    def _linger_s(self) -> float:
        at_s = self._last_poll_s
        followed = at_s is not None and self._clock.now() - at_s < _RECENT_POLL_S
        return FETCH_LINGER_S if followed else UNWATCHED_LINGER_S
