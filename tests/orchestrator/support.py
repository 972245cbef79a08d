"""A virtual clock, an event log and a test harness for the controller."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import pytest

from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange
from rayzero.engine.redact import redact_document
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.aio import ChangeNotifier
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.control import loop
from rayzero.orchestrator.control.components import Dependencies
from rayzero.orchestrator.control.controller import Controller
from rayzero.orchestrator.control.elastic import JOIN_BATCH_S
from rayzero.orchestrator.facts import EventBus, JobFacts
from rayzero.orchestrator.job_events import JobEvent, JobWarning, RunBegun, StateEntered
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.journal.entries import (
    JournalUpdate,
    JournalWriter,
    facts_json,
    parse_facts,
)
from rayzero.orchestrator.journal.files import JournalFiles
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.policies.attachment import Attachment
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.messages import Assignment, CrashKind, WorkerMessage
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster, FakeWorkerGroup
from tests.orchestrator.fake_roles import FakeRoleGroup

N = TypeVar("N")

E = TypeVar("E", bound=BaseException)

_JOBS: ContextVar[list[Harness]] = ContextVar("_JOBS")
"""Of the test that runs."""

NO_FILES = BackgroundWriter(print)
"""Writes nothing, because these jobs have no step files."""


class _TimeoutFuture:
    """Expires a timeout when its result is set, like a sleeper's future."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout

    def done(self) -> bool:
        """Whether the timeout's block has ended."""
        try:
            self._timeout.reschedule(None)
        except RuntimeError:
            return True
        return False

    def set_result(self, _: None) -> None:
        with suppress(RuntimeError):  # the timeout's block has ended
            self._timeout.reschedule(asyncio.get_running_loop().time())


class VirtualClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.on_idle: Callable[[], None] = lambda: None
        """Called before the time changes, when no task can progress without that."""
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None] | _TimeoutFuture]] = []
        self._order = count()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    def timeout(self, seconds: float) -> asyncio.Timeout:
        timeout = asyncio.timeout(None)
        future = _TimeoutFuture(timeout)
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        return timeout

    async def advance(self, seconds: float) -> None:
        """Advance the time, waking sleepers in order and settling after each."""
        end = self._now + seconds
        await settle()
        self.on_idle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, future = heapq.heappop(self._sleepers)
            if future.done():
                continue  # nobody waits: an `on_idle` that sends messages would make more of these
            future.set_result(None)
            await settle()
            self.on_idle()
        self._now = end


async def settle() -> None:
    """Run all tasks that can progress without a change of time."""
    loop: Any = asyncio.get_running_loop()
    for _ in range(300):
        await asyncio.sleep(0)
        due = loop._scheduled and loop._scheduled[0]._when <= loop.time()
        if not loop._ready and not due:  # otherwise the remaining turns are most of the tests' time
            return


class CheckedNotifier(ChangeNotifier):
    """Knows its waiters' predicates, to find waiters that nobody has woken."""

    def __init__(self) -> None:
        super().__init__()
        self._predicates: dict[object, Callable[[], bool]] = {}

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        waiter = object()
        self._predicates[waiter] = predicate
        try:
            await super().wait_until(predicate)
        finally:
            del self._predicates[waiter]

    def forgotten(self) -> list[str]:
        """Waiters whose predicate holds. Call it when all tasks wait for time or for a worker."""
        return [
            inspect.getsource(predicate).strip()
            for predicate in self._predicates.values()
            if predicate()
        ]


class EventLog:
    """An observer that records all events."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []

    def on_event(self, event: JobEvent) -> None:
        self.events.append(event)

    def of(self, kind: type[N]) -> list[N]:
        return [event for event in self.events if isinstance(event, kind)]


def plan(folder: Path, **changes: Any) -> JobPlan:
    """`workers`: also (least, most)."""
    document = {
        "name": "job",
        "entrypoint": "m:f",
        "workers": {"min": 2},
        "checkpoint": {"path": str(folder)},
        "recovery": {"patience_s": 60.0},
    }
    if isinstance(limits := changes.get("workers"), tuple):
        changes["workers"] = {"min": limits[0], "max": limits[1]}
    for key, value in changes.items():
        default = document.get(key)
        document[key] = default | value if isinstance(default, dict) else value
    return make_plan(validate_document(JobSpec, document, "job"), "m:f")


def begun(job: JobPlan | dict[str, Any], run: str = "1", **changes: Any) -> RunBegun:
    """The first event of a run; `job`: its plan or its spec."""
    source = "" if isinstance(job, dict) else job.source
    spec = job if isinstance(job, dict) else redact_document(to_document(job.spec))
    return RunBegun(run, spec, "/w", False, source=source, **changes)


def write_journal(folder: str | Path, *events: JobEvent, at_s: float = 1000.0) -> JobFacts:
    """The journal of a run with these events, in a job's folder."""
    updates: list[JournalUpdate] = []
    bus = EventBus(unix=lambda: at_s)
    JournalWriter(updates.append, bus)
    for event in events:
        bus.emit(event)
    JournalFiles(str(folder)).write(updates)
    return bus.facts


def reread(facts: JobFacts) -> JobFacts:
    """The facts as another process reads them."""
    read = parse_facts(facts_json(facts))
    assert read is not None
    return read


async def is_durable(limit_s: float) -> bool:
    """A journal that needs no time."""
    del limit_s
    return True


class Harness:
    """A controller in a fake cluster (`cluster`: or its workers).

    `put`: takes what the journal is to write."""

    def __init__(
        self,
        folder: Path,
        cluster: FakeCluster | int | str = 2,
        store: FakeCheckpointStore | None = None,
        past: JobFacts | None = None,
        flush_journal: Callable[[float], Awaitable[bool]] = is_durable,
        put: Callable[[JournalUpdate], None] | None = None,
        unix: Callable[[], float] | None = None,
        found: Attachment | None = None,
        groups: dict[str, FakeRoleGroup] | None = None,
        **changes: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.cluster = cluster if isinstance(cluster, FakeCluster) else FakeCluster(cluster)
        self.cluster.clock = self.clock
        self.store = store or FakeCheckpointStore()
        self.log = EventLog()
        self.plan = plan(folder, **changes)
        group: Any = FakeWorkerGroup(self.cluster)
        unix = unix or (self.clock.now if past is None else time.time)
        self.events = EventBus(past, unix)
        self.telemetry = Telemetry(self.plan, self.clock, NO_FILES, self.events, unix)
        self.events.subscribe(self.log.on_event)
        self.journal: list[JournalUpdate] = []
        JournalWriter(put or self.journal.append, self.events, self.telemetry.seconds)
        self.events.emit(begun(self.plan, "1" if past is None else "2", adopted=past is not None))
        self.roles = groups or {
            role.name: FakeRoleGroup(100 + 50 * place) for place, role in enumerate(self.plan.roles)
        }
        ports = Dependencies(
            group,
            self.cluster.vaults,
            self.store,
            self.events,
            self.clock,
            flush_journal,
            cast(Any, self.roles),
        )
        with patch.object(loop, "ChangeNotifier", CheckedNotifier):
            self.controller = Controller(self.plan, ports, past, found=found)
        self.clock.on_idle = self.check_waiters
        self.run = asyncio.ensure_future(self.controller.run())
        _JOBS.get([]).append(self)

    async def succeeded_by(
        self, folder: Path, between: Callable[[], object] = lambda: None, **changes: Any
    ) -> Harness:
        """Lose the controller; the next one continues with the workers that live after `between`.
        Its journal is `changes["past"]`, else all that this one has seen."""
        past = changes.pop("past", None) or reread(self.events.facts)
        self.controller._release = self.controller._loop.tasks.cancel_all  # it tells nobody
        self.run.cancel()
        await settle()
        if self in _JOBS.get([]):
            _JOBS.get().remove(self)
        self.cluster.lose_controller()
        between()
        roles = [it for name, group in self.roles.items() for it in group.statuses(name)]
        found = self.cluster.find_attachment(roles)
        assert found is not None
        return Harness(
            folder, self.cluster, self.store, past, found=found, groups=self.roles, **changes
        )

    def check_waiters(self) -> None:
        """Fails if a state change did not wake a coroutine that waits for it."""
        assert self.controller._loop.changed.forgotten() == []

    async def steps(self, count: int) -> None:
        """Train that many steps."""
        for _ in range(count):
            await settle()
            assert self.cluster.step(), "a rank is missing"
        await settle()

    async def started(self) -> Harness:
        await settle()
        return self

    async def trained(self, steps: int) -> Harness:
        await self.steps(steps)
        return self

    async def kill(
        self, worker: int, *cause: str, wait_s: float = 0.0, reported: bool = True
    ) -> None:
        self.cluster.kill(worker, *cause, reported=reported)
        await self.clock.advance(wait_s)

    async def crash(
        self,
        worker: int,
        kind: CrashKind,
        *error: str,
        step: int | None = None,
        wait_s: float = 0.0,
    ) -> None:
        self.cluster.crash(worker, kind, *error, step=step)
        await self.clock.advance(wait_s)

    async def send(self, worker: int, *messages: WorkerMessage, wait_s: float = 0.0) -> None:
        self.cluster.send(worker, *messages)
        await self.clock.advance(wait_s)

    async def join(self, node: str = "a", *, wait_s: float = JOIN_BATCH_S) -> int:
        """Add a worker, and let the controller wait for others so long."""
        worker = self.cluster.join(node)
        await self.clock.advance(wait_s)
        return worker

    async def fails(self, kind: type[E], match: str | None = None) -> E:
        """The error that the job has ended with."""
        with pytest.raises(kind, match=match) as caught:
            await self.result()
        return caught.value

    async def finish(self) -> JobResult:
        """Run the last step and return the result."""
        await settle()
        assert self.cluster.step(last=True)
        await settle()
        return await self.result()

    async def result(self) -> JobResult:
        assert self.run.done(), "the controller waits for time or for a worker"
        tasks = [str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        assert tasks == []
        assert self.cluster.releases >= 1
        assert self.cluster.vaults.releases >= 1
        return await self.run

    @property
    def warnings(self) -> str:
        return "\n".join(warning.text for warning in self.log.of(JobWarning))

    @property
    def states(self) -> list[State]:
        return [event.state for event in self.log.of(StateEntered)]

    @property
    def running(self) -> list[int] | None:
        """The members, while they train."""
        return sorted(self.assignments) if self.states[-1] is State.RUNNING else None

    @property
    def ranks(self) -> dict[int, int]:
        return {worker: assign.rank for worker, assign in self.assignments.items()}

    @property
    def restored(self) -> set[int]:
        """The step that the members began with; empty at the beginning."""
        return {it.restore.step for it in self.assignments.values() if it.restore}

    @property
    def assignments(self) -> dict[int, Assignment]:
        """The assignments of the newest generation, by worker."""
        generation = max(assign.generation for _, assign in self.cluster.assigned)
        assigned = self.cluster.assigned
        return {worker: assign for worker, assign in assigned if assign.generation == generation}


TABLE = BlockIndex(
    {"weights/w": LogicalTensor("F32", (4,))}, (TensorRange("weights/w", 0, 4, 0),), 16
)


class StoreInFolder:
    """A checkpoint store in a folder, with its warnings."""

    def __init__(self, folder: Path, *, adopting: bool = False, **checkpoint: Any) -> None:
        self.warnings: list[str] = []
        settings = {"path": str(folder), **checkpoint}
        self.store = CheckpointStore(
            plan(folder, checkpoint=settings), self.warnings.append, adopting=adopting
        )

    def save(self, *steps: int) -> None:
        for step in steps:
            file = write_rank_file(
                self.store.folder(step),
                0,
                TABLE,
                {"step": step},
                memoryview(bytearray(16)),
                generation=1,
                world_size=1,
            )
            asyncio.run(self.store.commit(step, 1, [file]))

    def resume_point(self) -> CheckpointRef | None:
        return asyncio.run(self.store.resolve_resume())

    def ref(self, step: int) -> CheckpointRef:
        return CheckpointRef(step, self.store.folder(step))


@asynccontextmanager
async def finish_jobs() -> AsyncIterator[None]:
    """Jobs of a test that still run at its end must succeed with their next step."""
    started: list[Harness] = []
    token = _JOBS.set(started)
    try:
        yield
        for harness in started:
            if not harness.run.done():
                await harness.finish()
    except BaseException:
        for harness in started:  # they end in virtual time
            harness.clock.on_idle = lambda: None
            harness.run.cancel()
            await harness.clock.advance(60)
        raise
    finally:
        _JOBS.reset(token)
