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
from rayzero.engine.masking import masked
from rayzero.orchestrator import events as ev
from rayzero.orchestrator import process
from rayzero.orchestrator.clock import SystemClock
from rayzero.orchestrator.control.desk import Ports
from rayzero.orchestrator.controller import Controller
from rayzero.orchestrator.differences import document
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.head.feed import Feed
from rayzero.orchestrator.head.log import Place, log_path, read_log
from rayzero.orchestrator.head.outcome import Ended, JobStatus, News
from rayzero.orchestrator.head.papers import Papers
from rayzero.orchestrator.head.records import Record, forget, remember
from rayzero.orchestrator.journal.adoption import refusal
from rayzero.orchestrator.journal.past import Past
from rayzero.orchestrator.journal.segments import folder, read
from rayzero.orchestrator.lease.holding import Lease, take
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.seats import sweep
from rayzero.orchestrator.spec import JobSpec
from rayzero.orchestrator.states import State
from rayzero.orchestrator.stored_archive import StoredArchive
from rayzero.orchestrator.vault_group import RayVaultGroup
from rayzero.orchestrator.wishes import Wish
from rayzero.orchestrator.worker_group import RayWorkerGroup

FETCH_S = 15.0
"""How long the process waits for its end to be fetched, when somebody has followed the job."""
ALONE_S = 2.0
"""The same when nobody has lately."""
JOURNAL_S = 10.0
"""How long the end may take to be written down."""
READ_S = 5.0
"""How long it waits for those who read its log."""
_READING_S = 1.5
"""Somebody who has not asked for so long does not read it."""
RECORD_S = 5.0
"""How long the cluster may take to keep how the job ended."""
_LATELY_S = 10.0
_ANSWER_S = 0.2
"""From the last answer to the end of the process."""


class JobActor:
    """One job's process. Every method is called in its event loop, and none waits for long."""

    def __init__(self, plan: JobPlan, can_grow: bool) -> None:
        with suppress(OSError):  # Ray makes workers nice; who notices deaths should not wait
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        process.tune()
        self._plan = plan
        self._can_grow = can_grow
        self._feed = Feed()
        self._papers: Papers | None = None
        self._open = ExitStack()
        self._told: Telemetry | None = None
        self._lease: Lease | None = None
        self._stop_wanted = False
        self._loop = asyncio.get_running_loop()
        self._clock = SystemClock()
        self._controller: Controller | None = None
        self._followed_at_s: float | None = None
        self._read_at_s: float | None = None
        self._fetched = asyncio.Event()
        # Kept by this object, and ended with its process.
        self._life = self._loop.create_task(self._live())

    async def news(self, run: str, since: int, timeout_s: float) -> News:
        """As `Feed.news`."""
        self._followed_at_s = self._clock.now()
        return await self._feed.news(run, since, timeout_s)

    async def fetched(self) -> None:
        """Somebody knows the end; nobody else is waited for."""
        self._fetched.set()

    async def spec(self) -> JobSpec | None:
        """What is being run; None when it has ended."""
        return None if self._feed.ended is not None else self._plan.spec

    async def status(self) -> JobStatus:
        plan = self._plan
        journal, log = masked(folder(plan.archive)), str(log_path(plan.output_dir))
        if self._controller is None:
            return JobStatus(plan.spec.name, State.PENDING, journal=journal, log=log)
        return replace(self._controller.status(), journal=journal, log=log)

    async def snapshot(self) -> dict[str, Any]:
        """As `Telemetry.snapshot`.

        Raises:
            JobFailedError: nothing has begun yet.
        """
        if self._told is None:
            raise JobFailedError(f"job {self._plan.spec.name!r} is still starting")
        return self._told.snapshot()

    async def grant(self, wish: Wish) -> str | RayzeroError:
        """As `Controller.grant`; what it raises comes back."""
        try:
            if self._feed.ended is not None:
                raise JobFailedError(f"job {self._plan.spec.name!r} has just ended")
            if self._controller is None:
                raise JobFailedError(f"job {self._plan.spec.name!r} is still starting")
            return await self._controller.grant(wish)
        except RayzeroError as error:
            return error

    async def log(self, place: Place) -> tuple[bytes, Place]:
        """As `read_log`. Who reads it is waited for at the end."""
        self._read_at_s = self._clock.now()
        return await asyncio.to_thread(read_log, log_path(self._plan.output_dir), place)

    async def stop(self) -> None:
        """Asks for a clean end."""
        self._stop_wanted = True
        if self._controller is not None:
            self._controller.feed(ev.StopWanted())

    def _make(self, past: Past | None) -> Controller:
        plan, spec = self._plan, self._plan.spec
        papers = Papers(plan, self._feed, self._warn)
        papers.note(
            "begun",
            format=1,
            run=plan.setup.run,
            adopted=past is not None,
            spec=document(spec),
            working_dir=plan.setup.working_dir,
            by_value=isinstance(plan.setup.entrypoint, bytes),
        )
        self._papers = papers
        if plan.vanishes:
            self._warn(
                f"Ray removes {plan.output_dir} some time after the job, with its log and summary: "
                "checkpoint.path with a shared folder or a URL keeps them"
            )
        vaults = RayVaultGroup(spec.name, faults=spec.faults, output_dir=str(plan.output_dir))
        workers = RayWorkerGroup(plan.setup, self._clock, self._can_grow, vaults)
        fence = self._lease.check if self._lease is not None else lambda: None
        archive = StoredArchive(plan, self._warn, adopting=past is not None, fence=fence)
        told = self._told = self._open.enter_context(
            Telemetry(plan, papers, self._clock, self._warn, past=past)
        )
        papers.count(told.counted)
        ports = Ports(workers, vaults, archive, told, self._clock, told, papers.note)
        return Controller(plan, ports, past)

    def _warn(self, text: str) -> None:
        """May be called from any thread."""
        self._loop.call_soon_threadsafe(self._feed.see, Warned(masked(text)))

    async def _take_folder(self) -> None:
        """Raises as `lease.take`."""
        plan = self._plan
        self._lease = await asyncio.to_thread(
            take,
            plan.archive,
            plan.spec.name,
            plan.spec.checkpoint.lease_s,
            self._warn,
            lambda: self._stop_wanted,
        )
        self._lease.on_lost = self._dispossessed

    def _dispossessed(self, error: RayzeroError) -> None:
        """The folder is somebody else's. Called in another thread."""

        def leave() -> None:
            if self._papers is not None:
                self._papers.leave_journal()
            if self._controller is not None:
                self._controller.feed(ev.FaultFatal(error))

        self._loop.call_soon_threadsafe(leave)

    async def _past(self) -> Past | None:
        """The run to go on with, if the last one has not ended.

        Raises:
            ConfigError: it has not, and this is another job.
            JobStoppedError: this process was started anew just after the job's end.
        """
        plan = self._plan
        await asyncio.to_thread(sweep, plan.spec.name)
        past = await asyncio.to_thread(read, plan.archive)
        if past is None:
            return None
        if past.ended:
            if past.run == plan.setup.run:
                raise JobStoppedError(f"job {plan.spec.name!r} has ended before: {past.ended}")
            return None
        if (refused := refusal(past, plan.spec)) is not None:
            raise refused
        given = plan.spec.workers
        before = past.spec.get("workers", {})
        same = (before.get("min"), before.get("max")) == (given.min, given.most)
        return past if same else replace(past, scaled=None)

    async def _live(self) -> None:
        with self._open:
            ended = await self._run()
            if self._told is not None:
                await asyncio.to_thread(self._told.written)
            await self._write_down(ended)
            if self._lease is not None:
                await asyncio.to_thread(self._lease.release)
            self._feed.end(ended)
            if self._told is not None:  # nobody who follows waits for a scrape
                await self._told.heard()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s()):
                await self._fetched.wait()
        await self._read_out()
        await asyncio.sleep(_ANSWER_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _run(self) -> Ended:
        try:
            await self._take_folder()
            past = await self._past()
            with suppress(RayError):  # then it is told how the last one ended for a little longer
                await asyncio.to_thread(forget, self._plan.spec.name)
            self._controller = self._make(past)
            if self._stop_wanted:
                self._controller.feed(ev.StopWanted())
            return Ended(await self._controller.run())
        except RayzeroError as error:
            return Ended(error=error)
        except Exception as error:  # noqa: BLE001  # the job's end: nothing may be lost
            text = f"rayzero itself failed: {type(error).__name__}: {error}"
            return Ended(error=JobFailedError(text, fix="please report this"))

    async def _read_out(self) -> None:
        """Waits for those who read the log, for a while."""
        until_s = self._clock.now() + READ_S
        while (now_s := self._clock.now()) < until_s:
            if self._read_at_s is None or now_s - self._read_at_s > _READING_S:
                return
            await asyncio.sleep(_ANSWER_S)

    async def _write_down(self, ended: Ended) -> None:
        """The end is durable before it is told, where that can be had in time."""
        papers = self._papers
        if papers is None:
            return  # nothing was begun
        error = ended.error
        kind = "succeeded" if error is None else "failed"
        kind = "stopped" if isinstance(error, JobStoppedError) else kind
        papers.note("ended", state=kind, error="" if error is None else error.seen)
        if not await asyncio.to_thread(papers.close, JOURNAL_S):
            self._feed.see(Warned("the end of the job is not in its journal: it may be adopted"))
        status = await self.status()
        if not (status.state and status.state.is_final):
            status = replace(status, state=State.FAILED)
        try:
            async with asyncio.timeout(RECORD_S):
                await asyncio.to_thread(remember, Record(status, ended))
        except (RuntimeError, OSError, TimeoutError, RayError) as failed:
            self._feed.see(Warned(f"the cluster does not keep the end of the job: {failed}"))

    def _patience_s(self) -> float:
        at_s = self._followed_at_s
        followed = at_s is not None and self._clock.now() - at_s < _LATELY_S
        return FETCH_S if followed else ALONE_S
