"""What the controller's rooms share: the job as it stands, and the ways to act on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.answers import Answers
from rayzero.orchestrator.archive import Archive
from rayzero.orchestrator.bell import Bell
from rayzero.orchestrator.clock import Clock
from rayzero.orchestrator.control.tasks import Tasks, within
from rayzero.orchestrator.crew import Crew
from rayzero.orchestrator.generation import Generation
from rayzero.orchestrator.group import VaultGroup, WorkerGroup, WorkerLostError
from rayzero.orchestrator.notices import Notice, Observer
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.membership import Wanted
from rayzero.orchestrator.probe import Probe, Unprobed
from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.states import JobState, State

COMMAND_S = 30.0
"""How long a worker may take to answer a command."""

T = TypeVar("T")


class Note(Protocol):
    """Writes one thing down in the job's journal; returns at once."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


def unwritten(kind: str, **fields: Any) -> None:
    """A Note of a job without a journal."""
    del kind, fields


@dataclass(frozen=True)
class Ports:
    """The world outside the controller; tests put fakes in its place."""

    workers: WorkerGroup
    vaults: VaultGroup
    archive: Archive
    observer: Observer
    clock: Clock
    probe: Probe = field(default_factory=Unprobed)
    note: Note = unwritten


class GoneError(Exception):
    """A worker is gone, or does not answer; `cause` says which, or is empty."""

    def __init__(self, worker: int, cause: str) -> None:
        super().__init__(worker, cause)
        self.worker = worker
        self.cause = cause


def silent(limit_s: float) -> str:
    """Why a worker is given up that says nothing."""
    return f"its process did not answer for {limit_s:g} s"


class Desk:
    """Used from one event loop. `job` is replaced by the controller only, `generation` by the
    passage only."""

    def __init__(self, plan: JobPlan, ports: Ports, on_error: Callable[[Exception], None]) -> None:
        self.plan = plan
        self.ports = ports
        self.job = JobState()
        self.generation = Generation()
        self.crew = Crew(Wanted(plan.need.least, plan.spec.workers.most, plan.spec.workers.spares))
        self.vaults: dict[str, str] = {}
        """The addresses of the vaults that live, by node."""
        self.injected: tuple[str, ...] = ()
        """Faults that were wished for while the job runs, all of them."""
        self.progress = JobProgress()
        self.tasks = Tasks(on_error)
        self._on_error = on_error
        self.bell = Bell()
        self.events: asyncio.Queue[ev.Event] = asyncio.Queue()

    @property
    def is_running(self) -> bool:
        """Whether training goes on and nobody has asked for anything else yet."""
        return self.job.state is State.RUNNING and not self.generation.fenced

    @property
    def sends_to_others(self) -> bool:
        """Whether this generation's steps are copied to other nodes' vaults."""
        return self.plan.spec.recovery.replicas > 0 and self.generation.spread

    def now_s(self) -> float:
        return self.ports.clock.now()

    def feed(self, event: ev.Event) -> None:
        """Hands the machine an event."""
        self.events.put_nowait(event)

    def see(self, notice: Notice) -> None:
        self.ports.observer.see(notice)

    async def ask(self, worker: int, command: Awaitable[T], limit_s: float = COMMAND_S) -> T:
        """A worker's answer.

        Raises:
            GoneError: its process is gone, or did not answer in time.
        """
        try:
            return await within(self.ports.clock, limit_s, command)
        except TimeoutError:
            raise GoneError(worker, silent(limit_s)) from None
        except WorkerLostError as lost:
            raise GoneError(worker, str(lost)) from None

    async def all_do(self, answers: Answers) -> None:
        """Waits until a command was answered by all it went to. Who does not answer in time is
        given up, like one whose process is gone."""
        try:
            await within(self.ports.clock, COMMAND_S, answers.all())
        except TimeoutError:
            for worker in sorted(answers.missing):
                self._on_error(GoneError(worker, silent(COMMAND_S)))

    async def happens(self, limit_s: float, so: Callable[[], bool]) -> bool:
        """Waits until `so()` holds; whether it came to it in time."""
        try:
            await within(self.ports.clock, limit_s, self.bell.until(so))
        except TimeoutError:
            return False
        return True
