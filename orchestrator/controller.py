"""The shell around the pure machine: polls the workers, feeds events, carries out instructions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import events as ev
from rayzero.orchestrator import instructions as do
from rayzero.orchestrator.clock import Clock
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.generation import Generation
from rayzero.orchestrator.group import WorkerGroup, WorkerLostError
from rayzero.orchestrator.machine import handle
from rayzero.orchestrator.notices import Observer, StateEntered, Warned, WorkersUp
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies import failure, placement
from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.result import (
    JobResult,
    Totals,
    forget_summary,
    summarize,
    summary_path,
    write_summary,
)
from rayzero.orchestrator.spec import not_in_this_version
from rayzero.orchestrator.states import JobState, State
from rayzero.workers.messages import Assign, Finished, LogLine, Message, Report, WorkerInfo

POLL_S = 2.0
"""How long a poll waits at the worker for something to happen."""
GRACE_S = 3.0
"""How long a failed collective waits for a better explanation, such as a dead worker."""
STOP_S = 4.0
"""How long the training functions may take to unwind before their processes are killed."""
COMMAND_S = 30.0
"""How long a worker may take to answer a command."""

T = TypeVar("T")


class Controller:
    """Runs one job, once. Everything but `stop` is used from one event loop.

    It owns its background tasks (one poll a worker, and the instructions under way): `run` does
    not return before all of them are cancelled and the workers released.
    """

    def __init__(self, plan: JobPlan, group: WorkerGroup, observer: Observer, clock: Clock) -> None:
        self._plan = plan
        self._group = group
        self._observer = observer
        self._clock = clock
        self._job = JobState()
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: tuple[WorkerInfo, ...] = ()
        self._generation = Generation(0, (), ())
        self._progress = JobProgress()
        self._error: RayzeroError | None = None
        self._summary: dict[str, Any] = {}
        self._started_at_s = clock.now()

    async def run(self) -> JobResult:
        """Runs the job to its end.

        Raises:
            JobFailedError, ConfigError: the job failed.
            JobStoppedError: it was stopped.
        """
        for text in not_in_this_version(self._plan.spec):
            self._observer.see(Warned(text))
        forget_summary(self._plan.output_dir)
        self.feed(ev.Submitted())
        try:
            while not self._job.state.is_final:
                await self._step(await self._events.get())
        finally:
            await self._end_tasks()
            await self._group.release()
        return self._outcome()

    def feed(self, event: ev.Event) -> None:
        """Hands the machine an event. From another thread: `loop.call_soon_threadsafe(feed, e)`."""
        self._events.put_nowait(event)

    async def _step(self, event: ev.Event) -> None:
        before = self._job.state
        self._job, orders = handle(self._job, event)
        if isinstance(event, ev.FaultFatal) and self._job.state is State.FAILED:
            self._error = self._error or event.error
        if self._job.state is not before:
            world_size = self._generation.world_size
            self._observer.see(StateEntered(self._job.state, self._job.generation, world_size))
        for order in orders:
            await self._carry_out(order)

    async def _carry_out(self, order: do.Instruction) -> None:
        match order:
            case do.PlaceWorkers():
                self._spawn(self._place())
            case do.FormGeneration(generation):
                self._spawn(self._form(generation))
            case do.StopTraining():
                self._spawn(self._stop_training())
            case do.ReleaseWorkers():
                await self._end_tasks()
                await self._group.release()
            case do.WriteSummary():
                self._write_summary()
            case _:
                # The failure policy ends a job at its first fault and nothing asks for a resize,
                # so the machine cannot come here in this version.
                raise NotImplementedError(f"{type(order).__name__} is not in this version")

    async def _place(self) -> None:
        self._workers = await self._group.place(self._plan.need)
        self._generation = Generation(0, (), self._workers)
        self._observer.see(WorkersUp(self._workers))
        for worker in self._workers:
            self._spawn(self._watch(worker.index))
        self.feed(ev.WorkersPlaced())

    async def _form(self, number: int) -> None:
        """Gives every worker its place. The store is opened by any live worker: here, rank 0's."""
        places = placement.ranks(self._workers)
        self._generation = Generation(number, places, self._workers)
        self._progress.begin(number, len(places))
        host = next(w for w in self._workers if w.index == places[0].worker)
        port = await self._within(COMMAND_S, self._group.open_store(host.index), host.index)
        for place in places:
            assign = Assign(
                generation=number,
                rank=place.rank,
                world_size=len(places),
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                store_host=host.ip,
                store_port=port,
            )
            command = self._group.assign(place.worker, assign)
            await self._within(COMMAND_S, command, place.worker)

    async def _stop_training(self) -> None:
        """TrainingStopped comes from the workers' own messages; here is only the time limit."""
        for worker in self._workers:
            self._spawn(self._within(STOP_S, self._group.stop(worker.index), worker.index))
        await self._clock.sleep(STOP_S)
        self.feed(ev.StopTimedOut())

    async def _watch(self, worker: int) -> None:
        """Polls one worker for as long as it lives."""
        silence_s = POLL_S + self._plan.setup.hang_timeout_s
        while True:
            for message in await self._within(silence_s, self._group.poll(worker, POLL_S), worker):
                self._receive(worker, message)

    def _receive(self, worker: int, message: Message) -> None:
        if isinstance(message, LogLine):
            self._observer.see(message)
        elif isinstance(message, Report):
            if record := self._progress.add(message):
                self._observer.see(record)
        else:
            if isinstance(message, Finished):
                self._progress.count(message.counters)
                self._progress.peak({"process": message.peak_rss_bytes})
            known = len(self._generation.faults)
            for event in self._generation.take(worker, message):
                self.feed(event)
            if len(self._generation.faults) > known:
                self._judge(grace_over=False)

    def _lost(self, worker: int, cause: str) -> None:
        self._generation.lost(worker, cause)
        self._judge(grace_over=False)

    def _judge(self, grace_over: bool) -> None:
        decision = failure.decide(self._generation.faults, grace_over)
        if isinstance(decision, failure.Fail):
            self.feed(ev.FaultFatal(decision.error))
        elif len(self._generation.faults) == 1:
            self._spawn(self._judge_later())

    async def _judge_later(self) -> None:
        await self._clock.sleep(GRACE_S)
        self._judge(grace_over=True)

    async def _within(self, limit_s: float, command: Awaitable[T], worker: int) -> T:
        """The answer of a worker; one that does not answer in time counts as lost."""
        answer = asyncio.ensure_future(command)
        timer = asyncio.ensure_future(self._clock.sleep(limit_s))
        try:
            await asyncio.wait((answer, timer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _GoneError(worker, f"its process did not answer for {limit_s:g} s")
            return answer.result()
        except WorkerLostError as lost:
            raise _GoneError(worker, str(lost)) from None
        finally:
            timer.cancel()
            answer.cancel()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> None:
        """Whatever goes wrong in a background task becomes an event, never silence."""
        try:
            await work
        except _GoneError as lost:
            self._lost(lost.worker, lost.cause)
        except RayzeroError as error:
            self.feed(ev.FaultFatal(error))
        except Exception as error:  # noqa: BLE001
            self.feed(ev.FaultFatal(_internal(error)))

    async def _end_tasks(self) -> None:
        mine = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _write_summary(self) -> None:
        totals = Totals(
            name=self._plan.spec.name,
            world_size=self._generation.world_size,
            stage=self._plan.stage,
            seconds=self._clock.now() - self._started_at_s,
            returned=self._generation.returned,
        )
        self._summary = summarize(totals, self._progress)
        write_summary(self._plan.output_dir, self._summary)

    def _outcome(self) -> JobResult:
        name = self._plan.spec.name
        if self._job.state is State.SUCCEEDED:
            return JobResult(name, self._summary, summary_path(self._plan.output_dir))
        if self._error is not None:
            raise self._error
        raise JobStoppedError(f"job {name!r} was stopped after step {self._progress.steps}")


class _GoneError(Exception):
    """A worker is gone, or does not answer; `cause` says which."""

    def __init__(self, worker: int, cause: str) -> None:
        super().__init__(worker, cause)
        self.worker = worker
        self.cause = cause


def _internal(error: Exception) -> JobFailedError:
    return JobFailedError(
        f"rayzero itself failed: {type(error).__name__}: {error}", fix="please report this"
    )
