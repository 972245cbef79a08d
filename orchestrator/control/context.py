"""State and services shared by the controller's components."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import (
    BackgroundTasks,
    ChangeNotifier,
    Clock,
    ObservedState,
    PendingReplies,
    with_timeout,
)
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.control.generation import GenerationNumbers, GenerationState
from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.errors import VaultLostError, WorkerLostError
from rayzero.orchestrator.facts import EventBus, JobFacts
from rayzero.orchestrator.job_events import JobEvent, JobWarning, RankEvent, Rewound
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.membership import Selected, WorkerLimits, WorkerRegistry
from rayzero.orchestrator.policies.placement import assign_ranks
from rayzero.orchestrator.policies.stragglers import SpeedTracker
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.messages import RankAssignment

if TYPE_CHECKING:  # they import Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

LEAST_COMMAND_TIMEOUT_S = 10.0
"""How long a worker or a vault may take to reply to a command in a job that must not hang for
long; a quarter of `recovery.hang_timeout_s` if that is more."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class Dependencies:
    """Everything outside the controller; tests pass fakes."""

    workers: WorkerGroup
    vaults: VaultGroup
    checkpoint_store: CheckpointStore
    events: EventBus
    clock: Clock
    flush_journal: Callable[[float], Awaitable[bool]]
    """Waits up to so many seconds until all events so far are durable in the journal; returns
    whether they are."""


class WorkerUnavailableError(Exception):
    """A worker's process ended or does not respond; `cause` has the reason, or is empty."""

    def __init__(self, worker: int, cause: str) -> None:
        super().__init__(worker, cause)
        self.worker = worker
        self.cause = cause


def timeout_reason(limit_s: float) -> str:
    """The cause recorded for a worker or a vault that does not respond."""
    return f"its process did not respond for {limit_s:g} s"


class JobContext(ObservedState):
    """Used from one event loop. Each attribute that changes has one writer: `state` the controller,
    `generation` Reconfiguration (and `Controller`, before the start), `vault_addresses`
    VaultManager, `injected_faults` ClusterFaultInjector."""

    def __init__(
        self, plan: JobPlan, deps: Dependencies, on_error: Callable[[Exception], None]
    ) -> None:
        changed = ChangeNotifier()
        super().__init__(changed.notify)
        self.changed = changed
        self.plan = plan
        self.deps = deps
        self.state = State.PENDING
        self.generation = GenerationState(on_change=changed.notify)
        workers = plan.spec.workers
        self.registry = WorkerRegistry(
            WorkerLimits(plan.resources.min_workers, workers.most, workers.spares),
            changed.notify,
        )
        self.vault_addresses: Mapping[str, str] = {}
        """The address of each live vault, by node."""
        self.injected_faults: tuple[FaultSpec, ...] = ()
        """All faults requested while the job runs."""
        self.progress = JobProgress()
        self.timer = RecoveryTimer(deps.clock.now)
        self.speeds = SpeedTracker(balance=plan.spec.recovery.balance == "auto")
        self.tasks = BackgroundTasks(on_error)
        self.numbers = GenerationNumbers(
            deps.events, deps.flush_journal, deps.clock, plan.disk_limit_s
        )
        self._on_error = on_error
        self.events: asyncio.Queue[machine.Event] = asyncio.Queue()

    @property
    def is_running(self) -> bool:
        """Whether the job is training and no fault, resize or stop is pending."""
        return self.state is State.RUNNING and not self.generation.fenced

    @property
    def replicates(self) -> bool:
        """Whether this generation's steps are replicated to other nodes' vaults."""
        return self.plan.spec.recovery.replicas > 0 and self.generation.multi_node

    @property
    def command_timeout_s(self) -> float:
        """How long a process may take to reply to a command before it counts as lost."""
        return max(LEAST_COMMAND_TIMEOUT_S, self.plan.worker_spec.hang_timeout_s / 4)

    @property
    def facts(self) -> JobFacts:
        return self.deps.events.facts

    def now_s(self) -> float:
        return self.deps.clock.now()

    def post_event(self, event: machine.Event) -> None:
        self.events.put_nowait(event)

    def assign(self, selection: Selected) -> dict[int, RankAssignment]:
        """The ranks of selected workers in the next generation, by worker, in their order."""
        nodes = [worker.node_id for worker in self.generation.workers]
        calls = self.registry.calls
        return assign_ranks(selection.members, self.vault_addresses, calls, nodes)

    def rewind(self, step: int) -> int:
        """Training continues from `step`. Returns the number of finished steps to redo."""
        redone = self.progress.rewind(step)
        self.emit(Rewound(step, redone))
        self.timer.step_selected(step, redone)
        return redone

    def warn(self, text: str) -> None:
        self.emit(JobWarning(text))

    def emit(self, event: JobEvent | RankEvent) -> None:
        self.deps.events.emit(event)

    async def worker_reply(
        self, worker: int, reply: Awaitable[T], limit_s: float | None = None
    ) -> T:
        """Awaits a worker's reply.

        Args:
            limit_s: default: `command_timeout_s`.

        Raises:
            WorkerUnavailableError: its process ended, or did not reply in time.
        """
        limit_s = self.command_timeout_s if limit_s is None else limit_s
        try:
            return await with_timeout(self.deps.clock, limit_s, reply)
        except TimeoutError:
            raise WorkerUnavailableError(worker, timeout_reason(limit_s)) from None
        except WorkerLostError as lost:
            raise WorkerUnavailableError(worker, str(lost)) from None

    async def vault_reply(self, reply: Awaitable[T], limit_s: float | None = None) -> T:
        """Awaits a vault's reply, as `worker_reply`.

        Raises:
            VaultLostError: its process or its node is gone, or it did not reply in time.
        """
        limit_s = self.command_timeout_s if limit_s is None else limit_s
        try:
            return await with_timeout(self.deps.clock, limit_s, reply)
        except TimeoutError:
            raise VaultLostError(timeout_reason(limit_s)) from None

    def broadcast(
        self, workers: Iterable[int], method: Callable[[Any, *Ts], None], *args: *Ts
    ) -> None:
        """Calls `method`, one of `WorkerCalls`, in several workers' processes."""
        self.expect_replies(self.deps.workers.broadcast(workers, method, *args))

    def expect_replies(self, replies: PendingReplies) -> None:
        """A worker that does not reply to a command in time counts as lost."""
        self.tasks.spawn(self._await_replies(replies))

    async def _await_replies(self, replies: PendingReplies) -> None:
        limit_s = self.command_timeout_s
        try:
            await with_timeout(self.deps.clock, limit_s, replies.wait_all())
        except TimeoutError:
            for worker in sorted(replies.pending):
                self._on_error(WorkerUnavailableError(worker, timeout_reason(limit_s)))

    async def wait_for(self, limit_s: float, predicate: Callable[[], bool]) -> bool:
        """Waits until the predicate holds. False if it does not within the limit."""
        try:
            await with_timeout(self.deps.clock, limit_s, self.changed.wait_until(predicate))
        except TimeoutError:
            return False
        return True
