"""A role: a pool of independent workers without ranks, each started again alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from rayzero.orchestrator.control.calls import Calls, WorkerUnavailableError
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.role_budget import RoleBudget
from rayzero.orchestrator.control.role_worker import RoleViews, RoleWorker
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.errors import JobFailedError, WorkerLostError, WorkerStartError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import (
    ResourcesAwaited,
    RoleLimitsChanged,
    RoleWorkerEnded,
    RoleWorkerReady,
)
from rayzero.orchestrator.plan import RolePlan
from rayzero.orchestrator.policies import role_faults
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.results import RoleStatus
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    LogLine,
    RoleReport,
    WorkerInfo,
)
from rayzero.workers.roles.role_calls import RoleCalls
from rayzero.workers.roles.view import TASKS_PHASE
from rayzero.workers.stacks import Stacks
from rayzero.workers.step_rows import Heartbeats, ReceivedMessage
from rayzero.workers.vault.process_end import ProcessEnd
from rayzero.workers.worker_status import WorkerStatus

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

CHECK_INTERVAL_S = 1.0
"""How often a role's workers are counted, and those that are silent looked for."""


@dataclass(eq=False)
class RolePool:
    """Keeps the workers of one role running, for as long as the job lives.

    Args:
        _on_change: called when the nodes that the workers are on may have changed.
    """

    plan: RolePlan
    _loop: JobLoop
    _budget: RoleBudget
    _members: Members
    _calls: Calls
    _group: WorkerGroup
    _events: EventBus
    _vaults: VaultManager
    _views: RoleViews
    _on_change: Callable[[], None]
    workers: dict[int, RoleWorker] = field(default_factory=dict)
    """By index."""
    finished: set[int] = field(default_factory=set)
    """The numbers of workers whose function has returned."""
    has_least: bool = False
    """Whether its least number of workers has started."""
    _spares: list[WorkerInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        workers = self.plan.spec.workers
        past = self._events.facts.role(self.name)  # of the run that is adopted, if there is one
        self.least, self.most = past.scaled or (workers.min, workers.most)
        patience_s = self.plan.worker_spec.patience_s
        self._inbox = WorkerInbox(
            self._loop, self._members, self._group, patience_s, self._on_message, self._on_lost
        )

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def nodes(self) -> set[str]:
        infos = (*self._spares, *(worker.info for worker in self.workers.values()))
        return {info.node_id for info in infos}

    @property
    def running(self) -> int:
        """Workers whose function runs."""
        return sum(worker.has_begun for worker in self.workers.values())

    def status(self) -> RoleStatus:
        faults = dict(sorted(self._events.facts.role(self.name).faults.items()))
        return RoleStatus(self.running, self.least, self.most, len(self.finished), faults)

    async def run(self) -> None:
        """Starts the workers, and replacements. Runs until it is cancelled at the end of the job.

        Raises:
            JobFailedError: fewer than the least number could start.
        """
        self._inbox.start(())
        try:
            need = replace(self.plan.resources, min_workers=self.least, max_workers=self.least)
            first = await self._group.start_workers(need, self._on_start_failed, self._on_waiting)
        except JobFailedError as error:
            fix = error.fix.replace("workers.", f"roles.{self.name}.workers.")
            raise JobFailedError(f"role {self.name}: {error.seen}", error.allowed, fix) from None
        for worker in first:
            self._place(worker)
        await self._keep_running()

    async def resume(self, found: Sequence[WorkerStatus]) -> None:
        """Continues with the workers that have outlived a lost controller, and starts the missing
        ones. Runs until it is cancelled at the end of the job."""
        self.finished.update(self._events.facts.role(self.name).returned)
        for status in sorted(found, key=lambda status: status.info.index, reverse=True):
            self._take_over(status)
        self._inbox.start(self.workers)
        for status in found:
            for message in status.messages:
                self._on_message(status.info.index, message)
        self._end_surplus()
        self._begin_spares()
        self._on_change()
        most = self.most + self.plan.spec.workers.spares - len(self.finished)
        self._group.resume(replace(self.plan.resources, min_workers=self.least, max_workers=most))
        await self._keep_running()

    async def _keep_running(self) -> None:
        self.has_least = True
        self._loop.changed.notify()
        self._loop.spawn(self._watch())
        while True:
            try:
                self._place(await self._group.next_worker())
            except WorkerStartError as failure:
                self._on_start_failed(failure)
            except WorkerLostError as lost:
                self._events.warn(f"role {self.name}: {lost}")

    def scale(self, least: int, most: int) -> None:
        """Changes the limits. Workers beyond them, those with the highest numbers, are ended."""
        self.least, self.most = least, most
        self._events.emit(RoleLimitsChanged(self.name, least, most))
        self.grow()
        self._end_surplus()
        self._begin_spares()

    def grow(self) -> None:
        """Requests workers up to the limit, and spares."""
        self._group.resize(self.least, self.most + self.plan.spec.workers.spares)

    async def end(self, limit_s: float) -> None:
        """Tells the functions that the job ends, and waits until they have returned, or the limit
        is over."""
        for index, worker in self.workers.items():
            if worker.has_begun:
                self._loop.spawn(self._suppress_loss(self._calls.worker(index, RoleCalls.end)))
        await self._loop.wait_for(limit_s, lambda: not self.running)

    def fault_call(self, fault: FaultSpec) -> Coroutine[Any, Any, None] | None:
        """Returns the call that injects a fault into its worker; None if that worker does not run
        now."""
        for index, worker in self.workers.items():
            if worker.number == fault.worker and worker.has_begun:
                call = self._calls.worker(index, RoleCalls.inject, fault.kind)
                return self._suppress_loss(call)
        return None

    def on_process_ended(self, index: int, pid: int, end: ProcessEnd) -> None:
        """Handles the end of a process, of any role, which a vault saw."""
        if (worker := self.workers.get(index)) is not None and worker.info.pid == pid:
            self._on_lost(index, end.status, end.stack)

    def _end(self, worker: RoleWorker, *, has_returned: bool = False) -> None:
        """Ends a worker whose function has returned, or that is one too many."""
        del self.workers[worker.info.index]
        self._views.rollouts.on_worker_lost(worker.info.index)
        self._loop.changed.notify()
        self._events.emit(
            RoleWorkerEnded(self.name, worker.number, self.running, has_returned=has_returned)
        )
        self._loop.spawn(self._release(worker.info))

    def _end_surplus(self) -> None:
        for worker in sorted(self.workers.values(), key=lambda worker: worker.number)[self.most :]:
            self._end(worker)

    def _take_over(self, status: WorkerStatus) -> None:
        """Continues with a worker. Of two workers with one number, the older was being replaced."""
        info, number = status.info, status.number
        if number is None:
            self._spares.append(info)
            return
        if number in self.finished:
            self._loop.spawn(self._release(info))
            return
        if any(worker.number == number for worker in self.workers.values()):
            self._views.rollouts.on_worker_lost(info.index)
            self._loop.spawn(self._replace(info, 0.0))
            return
        worker = RoleWorker(info, number, has_begun=True)
        self.workers[info.index] = worker
        self._loop.spawn(self._views.keep(worker, self._calls, lambda: self._has(worker)))

    def _place(self, info: WorkerInfo) -> None:
        """Calls the function in a new worker's process; a worker beyond the maximum is a spare."""
        self._spares.append(info)
        self._begin_spares()
        self._on_change()

    def _begin_spares(self) -> None:
        while self._spares and len(self.workers) + len(self.finished) < self.most:
            info = self._spares.pop(0)
            taken = self.finished.union(worker.number for worker in self.workers.values())
            number = next(free for free in count() if free not in taken)
            worker = RoleWorker(info, number)
            self.workers[info.index] = worker
            self._loop.spawn(self._begin(worker))

    async def _begin(self, worker: RoleWorker) -> None:
        info = worker.info
        # A vault sees at once when a process ends.
        if not await self._vaults.open_with_retries(info.node_id, lambda: self._has(worker)):
            return
        self._inbox.subscribe([info.index])
        worker.view = self._views.of(worker)
        try:
            await self._calls.worker(info.index, RoleCalls.begin, worker.number, worker.view)
        except WorkerUnavailableError as lost:
            self._on_lost(info.index, lost.cause)
            return
        if self._has(worker):
            worker.has_begun = True
            self._events.emit(RoleWorkerReady(self.name, worker.number, info, self.running))
            self._loop.spawn(self._views.keep(worker, self._calls, lambda: self._has(worker)))

    def _has(self, worker: RoleWorker) -> bool:
        return self.workers.get(worker.info.index) is worker

    def _on_message(self, index: int, message: ReceivedMessage) -> None:
        if isinstance(message, Heartbeats):
            for sender, beat in zip(message.workers, message.messages, strict=True):
                self._on_heartbeat(sender, beat)
            return
        if (worker := self.workers.get(index)) is None:
            return  # it was lost, or ended
        match message:
            case LogLine() | RoleReport():
                self._events.emit(message)
            case Finished():
                self.finished.add(worker.number)
                self._end(worker, has_returned=True)
            case Crashed():
                cause = FaultCause(message.kind)
                if cause is FaultCause.COLLECTIVE:  # of the function's own
                    cause = FaultCause.USER_CODE
                self._on_fault(worker, cause, message.error, message.traceback)

    def _on_heartbeat(self, index: int, beat: Heartbeat) -> None:
        worker, limit_s = self.workers.get(index), self.plan.worker_spec.patience_s
        if worker is None or worker.hangs or beat.phase != TASKS_PHASE or beat.silent_s <= limit_s:
            return
        worker.hangs = True
        self._loop.spawn(self._end_hung(worker, beat.silent_s))

    async def _end_hung(self, worker: RoleWorker, silent_s: float) -> None:
        limit_s = self.plan.worker_spec.patience_s
        stacks = Stacks("")
        with suppress(WorkerUnavailableError):
            stacks = await self._calls.worker(worker.info.index, RoleCalls.dump_stack)
        place = f"; it is at {stacks.place}" if stacks.place else ""
        self._on_fault(
            worker,
            FaultCause.HANG,
            f"no sign of life from its function for {silent_s:.3g} s, of {limit_s:g} "
            f"(roles.{self.name}.recovery.hang_timeout_s): such a sign is to take, end or extend a "
            f"task, or to call ctx.check(){place}",
            stacks.text,
        )

    def _on_lost(self, index: int, detail: str, stack: str = "") -> None:
        """Handles a worker whose process ended, or does not respond and counts as lost."""
        for spare in [info for info in self._spares if info.index == index]:
            self._spares.remove(spare)
            self._loop.spawn(self._replace(spare, 0.0))
        if (worker := self.workers.get(index)) is None:
            return
        node = worker.info.node_id
        cause = FaultCause.PROCESS_LOST
        if node in self._members.registry.draining_nodes:
            cause = FaultCause.PREEMPTED
        elif node not in self._members.vault_addresses:
            cause = FaultCause.NODE_LOST
        self._on_fault(worker, cause, detail, stack)

    def _on_fault(
        self, worker: RoleWorker, cause: FaultCause, detail: str, traceback: str = ""
    ) -> None:
        info = worker.info
        if self.workers.pop(info.index, None) is None:
            return
        self._views.rollouts.on_worker_lost(info.index)
        self._loop.changed.notify()
        at_s, text = self._loop.now_s(), detail or "its process ended"
        fault = Fault(cause, info, worker.number, worker.step, text, at_s, traceback=traceback)
        delay_s = self._budget.record(fault, self.running)
        if delay_s is not None:
            self._loop.spawn(self._replace(info, delay_s))
            self._begin_spares()

    def _on_start_failed(self, failure: WorkerStartError) -> None:
        """Records a process that ended before its function was called; the group starts another
        one.

        Raises:
            JobFailedError: another process would fail, too.
        """
        at_s = self._loop.now_s()
        fault = Fault(FaultCause.PROCESS_LOST, failure.worker, 0, 0, failure.cause, at_s)
        if failure.repeats:
            text = f"role {self.name}: a worker could not start: {failure.cause}"
            raise JobFailedError(text)
        self._budget.record(fault, self.running)

    def _on_waiting(self, text: str) -> None:
        if text:
            text = f"role {self.name}: {text}"
            limit_s = self.plan.resources.timeout_s
            self._events.emit(ResourcesAwaited(text, limit_s))
        elif self._events.facts.waiting_for.startswith(f"role {self.name}:"):
            self._events.emit(ResourcesAwaited("", 0.0))

    async def _replace(self, info: WorkerInfo, delay_s: float) -> None:
        """Starts a worker in the reservation of a worker whose process is used up."""
        await self._calls.end_process(info.index, self._group.kill)
        if self.plan.spec.workers.gpus:
            limit_s = self.plan.resources.timeout_s
            await self._calls.wait_exited(info.node_id, info.pid, limit_s)
        bad = self._budget.bad_nodes((*self.nodes, info.node_id))
        avoid = sorted(bad | self._members.registry.leaving_nodes)
        with suppress(WorkerLostError):  # it was released meanwhile
            self._group.replace(info.index, delay_s, avoid)
        self._on_change()

    async def _release(self, info: WorkerInfo) -> None:
        await self._calls.end_process(info.index, self._group.release_worker)
        self._on_change()

    @staticmethod
    async def _suppress_loss(call: Awaitable[object]) -> None:
        with suppress(WorkerUnavailableError):
            await call

    async def _watch(self) -> None:
        """Reports silent processes, workers on draining nodes, and a lack of workers."""
        enough_at_s = self._loop.now_s()
        while True:
            await self._loop.sleep(CHECK_INTERVAL_S)
            now_s = self._loop.now_s()
            draining = self._members.registry.draining_nodes  # the ranks ask the cluster
            await self._group.leave_nodes(draining)
            self._inbox.excuse_cut_off(worker.info for worker in self.workers.values())
            self._inbox.expire_silent()
            for worker in tuple(self.workers.values()):
                if worker.info.node_id in draining:
                    self._on_fault(worker, FaultCause.PREEMPTED, "its node is draining")
            ready, returned = self.running, len(self.finished)
            # A function that takes tasks, and has returned, is missing: the ranks need its output.
            enough = (ready if self.plan.spec.takes else ready + returned) >= self.least
            limit_s = self.plan.resources.timeout_s
            if enough or not self._members.registry.head_answers:  # nothing can start without it
                enough_at_s = now_s
            elif now_s - enough_at_s > limit_s:
                raise role_faults.too_few_error(self.name, ready, self.least, limit_s, returned)
