"""The shell around the pure machine: feeds it events, and has its instructions carried out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rayzero.engine.config import parse_config
from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator import events as ev
from rayzero.orchestrator import instructions as do
from rayzero.orchestrator.control.adopting import take_over
from rayzero.orchestrator.control.chaos import Chaos
from rayzero.orchestrator.control.checkpoints import Checkpoints
from rayzero.orchestrator.control.desk import Desk, GoneError, Ports
from rayzero.orchestrator.control.elastic import Elastic
from rayzero.orchestrator.control.faults import Faults
from rayzero.orchestrator.control.hearing import Hearing
from rayzero.orchestrator.control.keeping import Keeping
from rayzero.orchestrator.control.passage import Passage
from rayzero.orchestrator.control.speeds import Speeds
from rayzero.orchestrator.control.stopping import Stopping
from rayzero.orchestrator.control.vaults import Vaults
from rayzero.orchestrator.control.vigil import Vigil
from rayzero.orchestrator.control.watch import Watch
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.head.outcome import JobStatus
from rayzero.orchestrator.journal.past import Past
from rayzero.orchestrator.loading import check_sizes
from rayzero.orchestrator.machine import handle
from rayzero.orchestrator.notices import StateEntered, WorkersUp
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.repairs import Repairs
from rayzero.orchestrator.result import (
    JobResult,
    Totals,
    forget_summary,
    summarize,
    summary_path,
    write_summary,
)
from rayzero.orchestrator.states import State
from rayzero.orchestrator.wishes import Inject, Scale, Wish
from rayzero.workers.messages import WorkerInfo


class Controller:
    """Runs one job, once, from one event loop.

    The rooms do the work, in background tasks: `run` does not return before all of them are
    cancelled, and the workers and vaults released.
    """

    def __init__(self, plan: JobPlan, ports: Ports, past: Past | None = None) -> None:
        """
        Args:
            past: of a lost run that is to be gone on with.
        """
        desk = self._desk = Desk(plan, ports, self._failed)
        repairs = self._repairs = Repairs()
        self._faults = Faults(desk, repairs)
        self._vaults = Vaults(desk, self._dead)
        self._checkpoints = Checkpoints(desk)
        keeping = Keeping(desk, self._checkpoints)
        self._passage = Passage(desk, self._faults, self._vaults, repairs, self._checkpoints.newest)
        speeds = self._speeds = Speeds(desk)
        self._chaos = Chaos(desk)
        self._checkpoints.on_stored = self._chaos.stored
        vaults, chaos = self._vaults, self._chaos
        hearing = Hearing(desk, self._faults, keeping, speeds, repairs, vaults, chaos)
        self._watch = Watch(desk, hearing.receive, self._faults.lost)
        self._passage.on_forming = self._forming
        self._vigil = Vigil(desk, self._watch, self._faults)
        self._elastic = Elastic(desk, self._faults, self._vaults, self._passage, self._watch)
        self._stopping = Stopping(desk, self._passage, self._vaults, self._checkpoints)
        self._error: RayzeroError | None = None
        self._summary: dict[str, Any] = {}
        self._started_at_s = desk.now_s()
        if past is not None:
            self._started_at_s = take_over(desk, past, self._faults, repairs, self._checkpoints)

    async def run(self) -> JobResult:
        """Runs the job to its end.

        Raises:
            JobFailedError, ConfigError: the job failed.
            JobStoppedError: it was stopped.
        """
        desk = self._desk
        forget_summary(desk.plan.output_dir)
        self.feed(ev.Submitted())
        try:
            while not desk.job.state.is_final:
                await self._step(await desk.events.get())
        finally:
            await self._release()
        return self._outcome()

    def feed(self, event: ev.Event) -> None:
        """Hands the machine an event. From another thread: `loop.call_soon_threadsafe(feed, e)`."""
        self._desk.feed(event)

    async def grant(self, wish: Wish) -> str:
        """Does what somebody wants of the running job; what comes of it, in words.

        Raises:
            ConfigError: it cannot be.
        """
        match wish:
            case Scale(least, most):
                return self.scale(least, most)
            case Inject(faults):
                return await self._chaos.inject(faults)

    def scale(self, least: int, most: int) -> str:
        """Other limits for the number of workers; what comes of it, in words.

        Raises:
            ConfigError: the engine config has no room for one of these numbers.
        """
        desk = self._desk
        if isinstance(engine := desk.plan.spec.engine, dict):
            check_sizes(parse_config(engine), least, most)
        self._elastic.scale(least, most)
        desk.ports.note("scaled", least=least, most=most)
        name, now = desk.plan.spec.name, self._world_size
        return f"{name}: {least} to {most} workers; now {now}"

    def status(self) -> JobStatus:
        """How the job stands."""
        desk = self._desk
        spec, now_s = desk.plan.spec, time.time()
        return JobStatus(
            name=spec.name,
            state=desk.job.state,
            step=desk.progress.steps,
            steps=spec.steps,
            generation=desk.job.generation,
            world_size=self._world_size,
            workers_min=desk.crew.wanted.least,
            workers_max=desk.crew.wanted.most,
            loss=desk.progress.last_loss,
            began_at_s=now_s - (desk.now_s() - self._started_at_s),
            at_s=now_s,
            faults=self._faults.counts(),
            repairs=self._repairs.repairs,
            checkpoint_step=self._checkpoints.newest_step,
            error="" if self._error is None else first_line(self._error),
        )

    @property
    def _world_size(self) -> int:
        return self._desk.generation.world_size

    def _forming(self, workers: Sequence[WorkerInfo]) -> tuple[float, ...]:
        """A generation of these workers, by rank, is about to begin; its shares of a step."""
        self._watch.generation_begins()
        return self._speeds.begin(workers)

    async def _step(self, event: ev.Event) -> None:
        desk = self._desk
        before = desk.job.state
        desk.job, orders = handle(desk.job, event)
        if isinstance(event, ev.FaultFatal) and desk.job.state is State.FAILED:
            self._error = self._error or event.error
        if isinstance(event, ev.ResizeWanted) and desk.job.state is State.RESIZING:
            self._repairs.wished(event.reason, self._world_size, desk.now_s())
        if desk.job.state is not before:
            desk.see(StateEntered(desk.job.state, desk.job.generation, self._world_size))
            self._note(event)
            desk.bell.ring()
        for order in orders:
            await self._carry_out(order)

    def _note(self, event: ev.Event) -> None:
        job = self._desk.job
        self._desk.ports.note(
            "moved",
            state=job.state,
            event=type(event).__name__,
            generation=job.generation,
            world_size=self._world_size,
            step=self._desk.progress.steps,
        )

    async def _carry_out(self, order: do.Instruction) -> None:
        match order:
            case do.PlaceWorkers():
                self._desk.tasks.spawn(self._place())
            case do.FenceGeneration(passage):
                self._passage.fence(passage)
            case do.DrainGeneration(passage):
                self._passage.drain(passage)
            case do.PickRecoveryStep(passage):
                self._passage.pick(passage)
            case do.SettleMembership(passage):
                self._passage.settle(passage)
            case do.FormGeneration(generation, passage):
                self._passage.form(generation, passage)
            case do.TidyUp():
                self._elastic.tidy_up()
            case do.StopTraining():
                self._stopping.begin()
            case do.ReleaseWorkers():
                await self._release()
            case do.WriteSummary():
                self._write_summary()

    async def _place(self) -> None:
        desk = self._desk
        # First: what cannot be begun needs no workers, and they look the record of faults up.
        self._chaos.begin(resumed=await self._checkpoints.begin())
        workers = await desk.ports.workers.place(desk.plan.need)
        await self._vaults.open(worker.node_id for worker in workers)
        desk.crew.add(workers)
        desk.see(WorkersUp(workers))
        self._watch.begin(worker.index for worker in workers)
        self._elastic.begin()
        desk.tasks.spawn(self._vigil.keep())
        self.feed(ev.WorkersPlaced())

    async def _release(self) -> None:
        """In this order, so that nothing is done any more with what goes."""
        await self._desk.tasks.end()
        await self._desk.ports.workers.release()
        await self._desk.ports.vaults.release()

    def _dead(self, worker: int) -> None:
        """A vault saw a worker's process end; what it said before counts."""
        self._watch.hand_on(worker)
        self._faults.lost(worker, "")

    def _failed(self, error: Exception) -> None:
        """Whatever goes wrong in a background task becomes an event, never silence."""
        if isinstance(error, GoneError):
            self._faults.lost(error.worker, error.cause)
        elif isinstance(error, RayzeroError):
            self.feed(ev.FaultFatal(error))
        else:
            self.feed(ev.FaultFatal(_internal(error)))

    def _write_summary(self) -> None:
        desk = self._desk
        totals = Totals(
            name=desk.plan.spec.name,
            world_size=self._world_size,
            stage=desk.plan.stage,
            seconds=desk.now_s() - self._started_at_s,
            returned=desk.generation.returned,
            history={
                "faults": self._faults.counts(),
                "repairs": self._repairs.repairs,
                "steps_redone": self._repairs.steps_redone,
                "checkpoints": {
                    "written": self._checkpoints.written,
                    "failed": self._checkpoints.failed,
                },
            },
        )
        self._summary = summarize(totals, desk.progress)
        write_summary(desk.plan.output_dir, self._summary)

    def _outcome(self) -> JobResult:
        desk = self._desk
        name = desk.plan.spec.name
        if desk.job.state is State.SUCCEEDED:
            return JobResult(name, self._summary, summary_path(desk.plan.output_dir))
        if self._error is not None:
            raise self._error
        raise JobStoppedError(f"job {name!r} was stopped after step {desk.progress.steps}")


def _internal(error: Exception) -> JobFailedError:
    return JobFailedError(
        f"rayzero itself failed: {type(error).__name__}: {error}", fix="please report this"
    )
