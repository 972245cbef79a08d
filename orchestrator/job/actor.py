"""The Ray actor of a job: a process and an event loop for its controller.

The actor is detached, so it outlives the client that submitted the job. Workers and vaults are also
detached, so that they survive the loss of the actor's node; the actor ends them. The actor
exits once the job has ended and a client has fetched the end.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.engine.redact import redact_url
from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.cluster.node_links import SILENT_S
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.control.calls import reply_limit_s
from rayzero.orchestrator.control.components import Dependencies
from rayzero.orchestrator.control.controller import Controller
from rayzero.orchestrator.errors import JobFailedError, internal_error
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job.claims import new_claim
from rayzero.orchestrator.job.command_server import ensure_command_server
from rayzero.orchestrator.job.ended_jobs import delete_ended, store_ended
from rayzero.orchestrator.job.lease import AwaitedLease, Lease, acquire_lease
from rayzero.orchestrator.job.log import LogPosition, read_log
from rayzero.orchestrator.job.past_runs import remove_summary, repeated_result
from rayzero.orchestrator.job.process import end_fenced_process, tune_gc_and_switch_interval
from rayzero.orchestrator.job.recorder import EventBuffer, JobRecorder
from rayzero.orchestrator.job.save_summary import save_summary
from rayzero.orchestrator.job.takeover import Takeover, take_over
from rayzero.orchestrator.job_events import JobWarning, MetricsServed
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.telemetry import RunFiles, Telemetry
from rayzero.orchestrator.metrics.trackers import Trackers
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.results import (
    EndedJob,
    EventPage,
    JobResult,
    JobStatus,
    final_state,
)
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.actor import RoleActor
from rayzero.workers.lifetimes import end_owned

FETCH_LINGER_S = 15.0
"""How long the process waits for its end to be fetched, if a client polled recently."""
UNWATCHED_LINGER_S = 2.0  # the same if no client polled recently
LOG_READ_LINGER_S = 5.0  # how long the process waits for the readers of its log
RECORD_TIMEOUT_S = 5.0  # limit for recording the end in the cluster, and for ending leftovers
START_WAIT_S = 10.0  # how long a command waits for a job that is starting
JOURNAL_WAIT_S = 3.0  # how long `scale` waits for the journal's disk; below the client's limit
_START_POLL_S = 0.05
_LOG_READER_IDLE_S = 1.5  # a reader that has not asked for this long has stopped
_RECENT_POLL_S = 10.0
_REPLY_FLUSH_S = 0.2  # between the last reply and the end of the process


@dataclass(frozen=True)
class JobRun:
    """The parts of a run, built once the job has started."""

    recorder: JobRecorder
    telemetry: Telemetry
    trackers: Trackers
    controller: Controller


class JobActor:
    """One job's process. Every method runs in its event loop, and none blocks it."""

    def __init__(self, plan: JobPlan, can_grow: bool) -> None:
        with suppress(OSError):  # Ray lowers the priority of actors; fault detection must not wait
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        tune_gc_and_switch_interval()
        self._plan = plan
        self._can_grow = can_grow
        self._clock = Clock()
        self._loop = asyncio.get_running_loop()
        self._events = EventBuffer()
        self._writer = BackgroundWriter(self._warn)
        self._lease: AwaitedLease | None = None
        self._vaults: VaultGroup | None = None
        self._run: JobRun | None = None  # None while the job is starting
        self._has_begun = False  # owns the job's name and folder, and can no longer be refused
        self._stop_requested = False
        self._last_poll_s = float("-inf")
        self._last_log_read_s = float("-inf")
        self._end_acknowledged = asyncio.Event()
        # Owned by this object; they end with the process.
        self._tasks = [self._loop.create_task(self._main())]

    async def fetch_events(self, run: str, since: int, timeout_s: float) -> EventPage:
        """Calls `EventBuffer.fetch_since`."""
        self._last_poll_s = self._clock.now()
        return await self._events.fetch_since(run, since, timeout_s)

    async def acknowledge_end(self) -> None:
        """Records that a client has fetched the job's end. The process waits for no other one."""
        self._end_acknowledged.set()

    async def spec(self) -> JobSpec | None:
        """Returns the spec of the running job; None once the job has ended."""
        return None if self._events.ended is not None else self._plan.spec

    async def status(self) -> JobStatus:
        if self._run is not None:
            remaining_s, goodput = self._run.telemetry.outlook()
            status = self._run.controller.status()
            remaining_s = remaining_s if status.is_running else None
            return replace(status, remaining_s=remaining_s, goodput=goodput)
        plan = self._plan
        return JobStatus(
            plan.spec.name,
            State.PENDING,
            at_s=time.time(),
            journal=plan.journal_url,
            log=str(plan.log_path),
        )

    async def snapshot(self) -> dict[str, Any]:
        """Returns `Telemetry.snapshot`; raises JobFailedError while the job is starting."""
        return self._started().telemetry.snapshot()

    async def scale(self, min_workers: int, max_workers: int, role: str = "") -> str:
        """Calls `Controller.scale`. Returns once the limits are in the journal, so that a process
        that adopts the job keeps them. Raises JobFailedError if the job is not running."""
        reply = (await self._running_controller()).scale(min_workers, max_workers, role)
        if await asyncio.to_thread(self._started().recorder.flush_journal, JOURNAL_WAIT_S):
            return reply
        return f"{reply}; not in the journal yet: if the head is lost now, repeat this command"

    async def inject(self, faults: Sequence[str]) -> str:
        """Calls `Controller.inject`; raises JobFailedError if the job is not running."""
        return await (await self._running_controller()).inject(faults)

    async def log(self, position: LogPosition) -> tuple[bytes, LogPosition]:
        """Calls `read_log`, in a thread. At the job's end the process waits for such readers."""
        self._last_log_read_s = self._clock.now()
        return await asyncio.to_thread(read_log, self._plan.log_path, position)

    async def stop(self) -> None:
        """Requests a clean end."""
        self._stop_requested = True
        if self._run is not None:
            self._run.controller.post_event(machine.StopRequested())

    def _started(self) -> JobRun:
        if self._run is None:
            raise JobFailedError(f"job {self._plan.spec.name!r} is still starting")
        return self._run

    async def _running_controller(self) -> Controller:
        """Returns the controller. Waits while the job starts: clients may call after `submit`."""
        limit_s = self._clock.now() + START_WAIT_S
        while self._run is None and self._events.ended is None and self._clock.now() < limit_s:
            await asyncio.sleep(_START_POLL_S)
        if self._events.ended is not None:
            raise JobFailedError(f"job {self._plan.spec.name!r} has just ended")
        return self._started().controller

    def _warn(self, text: str) -> None:
        """Emits a warning. Thread-safe."""
        self._loop.call_soon_threadsafe(self._events.on_event, JobWarning(redact_url(text)))

    async def _main(self) -> None:
        outcome: JobResult | RayzeroError
        try:
            outcome = await self._run_job()
        except RayzeroError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  # clients must see the end in any case
            outcome = internal_error(error)
        are_ended = await self._end_leftovers(RECORD_TIMEOUT_S)
        ended = await self._record_end(outcome)
        is_stored = await self._store_end(ended)
        if self._lease is not None:
            await asyncio.to_thread(self._lease.release)
        self._events.finish(ended)
        if self._run is not None:  # after `finish`: clients do not wait for a scrape
            await self._run.telemetry.await_final_scrape()
            self._run.telemetry.close()
        with suppress(TimeoutError):
            is_polled = self._clock.now() - self._last_poll_s < _RECENT_POLL_S
            async with asyncio.timeout(FETCH_LINGER_S if is_polled else UNWATCHED_LINGER_S):
                await self._end_acknowledged.wait()
        await self._wait_log_readers()
        await asyncio.sleep(_REPLY_FLUSH_S)
        # A head that has not answered may come back before the leftovers have ended by themselves.
        are_ended = are_ended or await self._end_leftovers(self._plan.spec.recovery.orphan_s)
        if are_ended and not is_stored:
            await self._store_end(ended)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _end_leftovers(self, limit_s: float) -> bool:
        """Ends what the controller has not ended of this run, such as a worker that an earlier
        process started. Returns False if the head does not answer: then they end themselves."""
        run = self._plan.worker_spec.run
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.to_thread(end_owned, self._plan.spec.name, run)
            return True
        return False

    def _begin_lease(self, trains: bool) -> AwaitedLease:
        """Begins to acquire the folder's lease."""
        spec = self._plan.spec

        def give_up(error: RayzeroError) -> None:
            self._loop.call_soon_threadsafe(self._give_up_folder, error)

        def acquire(is_released: Callable[[], bool]) -> Lease:
            return acquire_lease(
                self._plan.job_folder,
                new_claim(spec.name, spec.checkpoint.lease_s),
                self._warn,
                is_released if trains else self._is_stopped,  # even a stop writes, if it trains
                trains=trains,
                run=self._plan.worker_spec.run,
                on_lost=give_up,
                on_removed=lambda: self._loop.call_soon_threadsafe(self._write_folder_again),
            )

        self._lease = AwaitedLease(acquire, give_up)
        return self._lease

    def _is_stopped(self) -> bool:
        return self._stop_requested

    def _check_lease(self) -> None:
        """Raises as `AwaitedLease.check`. Called by threads that write."""
        if self._lease is not None:
            self._lease.check()

    def _give_up_folder(self, error: RayzeroError) -> None:
        """Ends the run without writing into the job's folder, which another process owns."""
        if self._run is not None:
            self._run.recorder.stop_journal()
            self._tasks.append(self._loop.create_task(self._give_up(self._run, error)))

    async def _give_up(self, run: JobRun, error: RayzeroError) -> None:
        """Ends the run. If Ray took this node for lost and has started another process of this
        actor, the vaults obey that one. Asking them then ends this process, but no worker."""
        if self._vaults is not None:
            await self._vaults.ask_all(SILENT_S)
        run.controller.post_event(machine.FaultFatal(error))

    def _write_folder_again(self) -> None:
        """Writes the job's state again, after its folder was removed and made again."""
        if self._run is not None:
            self._run.recorder.write_again()
            self._run.controller.on_folder_removed()

    async def _run_job(self) -> JobResult:
        plan = self._plan
        taken = await take_over(plan, self._begin_lease, self._warn, self._is_stopped)
        orphan_s = plan.spec.recovery.orphan_s
        vaults = self._vaults = VaultGroup(
            plan.worker_spec, taken.epoch, orphan_s, end_fenced_process
        )

        def indices_from_first() -> Iterator[int]:
            # Runs at the first `next`: `last_worker` is known once the vaults are attached.
            yield from count(max(taken.first_index, vaults.last_worker + 1))

        indices = indices_from_first()  # shared by all groups: agents know workers by their index
        clock, can_grow = self._clock, self._can_grow
        workers = WorkerGroup(plan.worker_spec, clock, can_grow, vaults, indices=indices)
        roles = {
            role.name: WorkerGroup(role.worker_spec, clock, can_grow, vaults, RoleActor, indices)
            for role in plan.roles
        }
        if taken.living is not None:  # before the vaults, which pass on the workers' messages
            for group in (workers, *roles.values()):
                taken.living.hand_over(group)
        await vaults.attach(taken.vaults)
        if taken.living is not None:
            limit_s = reply_limit_s(plan.worker_spec.patience_s)
            taken = replace(taken, living=await taken.living.ask_again(limit_s))
        past = taken.past
        if repeated := await asyncio.to_thread(repeated_result, plan, past.last):
            self._warn(repeated.note)
            return repeated
        self._has_begun = True
        with suppress(RayError):  # then commands from outside the cluster take longer, and say so
            await asyncio.to_thread(ensure_command_server)
        with suppress(RayError):  # then the record of the last run is shown for a little longer
            await asyncio.to_thread(delete_ended, plan.spec.name)
        run = self._run = await self._open_run(taken, workers, vaults, roles)
        if self._stop_requested:
            run.controller.post_event(machine.StopRequested())
        result = await run.controller.run()
        await save_summary(result, self._clock, self._plan.disk_limit_s, self._warn)
        return result

    async def _open_run(
        self,
        taken: Takeover,
        workers: WorkerGroup,
        vaults: VaultGroup,
        roles: Mapping[str, WorkerGroup],
    ) -> JobRun:
        """Builds the parts of the run. Raises as `Telemetry`."""
        plan, past = self._plan, taken.past
        warn, check_lease = self._warn, self._check_lease
        found = None if taken.living is None else taken.living.found
        if found is None:  # the summary exists if and only if the last run succeeded
            await asyncio.to_thread(remove_summary, plan)
        clock, events = Clock(), EventBus(past.lost)
        telemetry = await asyncio.to_thread(lambda: Telemetry(plan, clock, self._writer, events))
        if past.lost is not None:
            await asyncio.to_thread(telemetry.restore_curves, plan.job_folder, warn)
        # After the telemetry: entries of the journal include its wall time.
        recorder = JobRecorder(
            plan, self._events, self._writer, events, telemetry.seconds, check_lease, warn
        )
        recorder.begin(adopted=past.lost is not None)
        trackers = Trackers(plan, events.facts.began_at_s, warn)
        trackers.subscribe_to(events)
        files = RunFiles(plan, telemetry, self._writer, recorder.store_writer, check_lease)
        files.subscribe_to(events)
        if telemetry.port_note:
            warn(telemetry.port_note)
        if telemetry.url is not None:
            events.emit(MetricsServed(telemetry.url))
        if plan.output_is_temporary:
            warn(
                f"Ray removes {plan.output_dir} some time after the job, with its log and summary: "
                "checkpoint.path with a shared folder or a URL keeps them"
            )
        store = CheckpointStore(plan, warn, adopting=past.lost is not None, check_lease=check_lease)

        async def flush_journal(limit_s: float) -> bool:
            return await asyncio.to_thread(recorder.flush_journal, limit_s)

        dependencies = Dependencies(workers, vaults, store, events, clock, flush_journal, roles)
        controller = Controller(plan, dependencies, past.lost, past.last, found)
        return JobRun(recorder, telemetry, trackers, controller)

    async def _record_end(self, outcome: JobResult | RayzeroError) -> EndedJob:
        """Makes the end durable on disk and in a store before clients see it, within limits."""
        if self._run is not None:
            self._run.recorder.end(outcome)
            await asyncio.to_thread(self._run.trackers.close)
        closing_s, limit_s = self._clock.now(), self._plan.disk_limit_s
        await asyncio.to_thread(self._writer.close, limit_s)
        if self._run is not None:  # after the log file has its last line
            left_s = max(1.0, limit_s - (self._clock.now() - closing_s))
            await asyncio.to_thread(self._run.recorder.close_store, left_s)
        error = first_line(outcome) if isinstance(outcome, RayzeroError) else ""
        status = replace(await self.status(), state=final_state(outcome), error=error)
        if isinstance(outcome, JobResult):
            status = replace(status, step=outcome.steps, steps=self._plan.spec.steps)
        return EndedJob(status, outcome)

    async def _store_end(self, ended: EndedJob) -> bool:
        """Records the end in the cluster. Returns False if the head did not answer."""
        if not self._has_begun:
            return True
        if self._run is not None and not self._run.recorder.is_journal_written:
            self._events.on_event(
                JobWarning(
                    "the job's end could not be written to its journal: the next job of this name "
                    "will take it for a lost run and continue it; `rayzero stop` gives it up"
                )
            )
        try:
            async with asyncio.timeout(RECORD_TIMEOUT_S):
                await asyncio.to_thread(store_ended, ended)
        except (RuntimeError, OSError, TimeoutError, RayError) as error:
            text = f"the cluster cannot record the end of the job: {error}"
            self._events.on_event(JobWarning(text))
            return False
        return True

    async def _wait_log_readers(self) -> None:
        """Waits until no client reads the log any more, with a limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOG_READ_LINGER_S):
                while self._clock.now() - self._last_log_read_s < _LOG_READER_IDLE_S:
                    await asyncio.sleep(_REPLY_FLUSH_S)
