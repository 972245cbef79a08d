"""What the controller's rooms share: the job as it stands, and the ways to act on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import (
    BackgroundTasks,
    ChangeNotifier,
    Clock,
    PendingReplies,
    with_timeout,
)
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.interfaces import (
    CheckpointStore,
    VaultGroup,
    WorkerGroup,
    WorkerLostError,
)
from rayzero.orchestrator.job_events import EventBus, JobEvent
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.membership import WorkerLimits, WorkerRegistry
from rayzero.orchestrator.progress import JobProgress

COMMAND_TIMEOUT_S = 30.0
"""How long a worker may take to answer a command."""

T = TypeVar("T")


@dataclass(frozen=True)
class Dependencies:
    """The world outside the controller; tests put fakes in its place."""

    workers: WorkerGroup
    vaults: VaultGroup
    checkpoint_store: CheckpointStore
    events: EventBus
    clock: Clock


class WorkerUnavailableError(Exception):
    """A worker is gone, or does not answer; `cause` says which, or is empty."""

    def __init__(self, worker: int, cause: str) -> None:
        super().__init__(worker, cause)
        self.worker = worker
        self.cause = cause


def timeout_reason(limit_s: float) -> str:
    """Why a worker is given up that says nothing."""
    return f"its process did not answer for {limit_s:g} s"


class JobContext:
    """Used from one event loop. `job` is replaced by the controller only, `generation` by the
    passage only."""

    def __init__(
        self, plan: JobPlan, ports: Dependencies, on_error: Callable[[Exception], None]
    ) -> None:
        self.plan = plan
        self.deps = ports
        self.state = State.PENDING
        self.generation = GenerationState()
        self.registry = WorkerRegistry(
            WorkerLimits(
                plan.resources.min_workers, plan.spec.workers.most, plan.spec.workers.spares
            )
        )
        self.vault_addresses: dict[str, str] = {}
        """The addresses of the vaults that live, by node."""
        self.injected_faults: tuple[str, ...] = ()
        """Faults that were wished for while the job runs, all of them."""
        self.progress = JobProgress()
        self.tasks = BackgroundTasks(on_error)
        self._on_error = on_error
        self.changed = ChangeNotifier()
        self.events: asyncio.Queue[machine.Event] = asyncio.Queue()

    @property
    def is_running(self) -> bool:
        """Whether training goes on and nobody has asked for anything else yet."""
        return self.state is State.RUNNING and not self.generation.fenced

    @property
    def replicates(self) -> bool:
        """Whether this generation's steps are copied to other nodes' vaults."""
        return self.plan.spec.recovery.replicas > 0 and self.generation.multi_node

    def now_s(self) -> float:
        return self.deps.clock.now()

    def post_event(self, event: machine.Event) -> None:
        """Hands the machine an event."""
        self.events.put_nowait(event)

    def emit(self, event: JobEvent) -> None:
        self.deps.events.emit(event)

    async def call_worker(
        self, worker: int, command: Awaitable[T], limit_s: float = COMMAND_TIMEOUT_S
    ) -> T:
        """A worker's answer.

        Raises:
            GoneError: its process is gone, or did not answer in time.
        """
        try:
            return await with_timeout(self.deps.clock, limit_s, command)
        except TimeoutError:
            raise WorkerUnavailableError(worker, timeout_reason(limit_s)) from None
        except WorkerLostError as lost:
            raise WorkerUnavailableError(worker, str(lost)) from None

    async def await_replies(self, answers: PendingReplies) -> None:
        """Waits until a command was answered by all it went to. Who does not answer in time is
        given up, like one whose process is gone."""
        try:
            await with_timeout(self.deps.clock, COMMAND_TIMEOUT_S, answers.wait_all())
        except TimeoutError:
            for worker in sorted(answers.pending):
                self._on_error(WorkerUnavailableError(worker, timeout_reason(COMMAND_TIMEOUT_S)))

    async def wait_for(self, limit_s: float, so: Callable[[], bool]) -> bool:
        """Waits until `so()` holds; whether it came to it in time."""
        try:
            await with_timeout(self.deps.clock, limit_s, self.changed.wait_until(so))
        except TimeoutError:
            return False
        return True
