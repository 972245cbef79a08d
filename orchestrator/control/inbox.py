"""Worker messages: receive, order, dispatch.

Listens to the workers: what they say comes in batches, and who died comes first.

From a worker's message to those whom it concerns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from rayzero.orchestrator import machine
from rayzero.orchestrator.control.chaos import ClusterFaultInjector
from rayzero.orchestrator.control.context import JobContext, timeout_reason
from rayzero.orchestrator.control.failures import FailureHandler, StragglerMonitor
from rayzero.orchestrator.control.generation import RecoveryTimer
from rayzero.orchestrator.control.replication import Replication
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.interfaces import WORKER_POLL_S
from rayzero.orchestrator.job_events import HeartbeatReceived, StepReported
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    Joined,
    LogLine,
    Pinned,
    Restored,
    StepReport,
    Stopped,
    WorkerMessage,
)

SILENCE_GRACE_S = 10.0
"""How much longer than a hang a silent process is borne with: the vigil comes first, and says more.
This is for workers that are no members."""


DISPATCH_SLICE_S = 0.001
"""For how long messages are handed on before something else gets a turn: a death may wait."""

MessageHandler = Callable[[int, WorkerMessage], None]


LossHandler = Callable[[int, str], None]


class WorkerInbox:
    """Hands on what workers say, and remembers when each was heard last and how far it was.

    Two tasks: one hears, tells of deaths at once, and hands on a slice of what was said; the other
    hands on what is left, a slice at a time. What a worker said before it died is handed on before
    its death.
    """

    def __init__(self, context: JobContext, receive: MessageHandler, on_lost: LossHandler) -> None:
        self._context = context
        self._dispatch = receive
        self._on_lost = on_lost
        self._last_heard_s: dict[int, float] = {}
        self._heartbeats: dict[int, Heartbeat] = {}
        self._reported: set[int] = set()
        self._undelivered: dict[int, list[WorkerMessage]] = {}
        self._delivery_queue: deque[int] = deque()
        """Of who said something; a worker may stand here whose words were handed on already."""
        self._has_undelivered = asyncio.Event()

    def start(self, workers: Iterable[int]) -> None:
        """Listens from now on, to these at first."""
        self.subscribe(workers)
        self._context.tasks.spawn(self._receive_loop())
        self._context.tasks.spawn(self._deliver_all())

    def subscribe(self, workers: Iterable[int]) -> None:
        """Listens to more of them."""
        new = dict.fromkeys(workers, self._context.now_s())
        self._last_heard_s |= new
        self._context.deps.workers.subscribe(new)

    def start_generation(self) -> None:
        """What was said of the one before tells nothing about this one."""
        self._heartbeats.clear()
        self._last_heard_s |= dict.fromkeys(self._context.registry.members, self._context.now_s())

    def deliver(self, worker: int) -> None:
        """Hands on what a worker has said so far."""
        for message in self._undelivered.pop(worker, ()):
            kind = type(message)
            if kind is Heartbeat:
                self._heartbeats[worker] = cast(Heartbeat, message)
            elif kind is StepReport:
                self._reported.add(worker)
            self._dispatch(worker, message)

    def reply_overdue_s(self, index: int) -> float:
        """For how long something should have been heard of it."""
        return max(0.0, self.last_heartbeat(index)[1] - WORKER_POLL_S)

    def last_heartbeat(self, index: int) -> tuple[Heartbeat | None, float]:
        """Its last heartbeat in this generation, and how long ago it was heard last."""
        now_s = self._context.now_s()
        return self._heartbeats.get(index), now_s - self._last_heard_s.get(index, now_s)

    def never_reported(self, index: int) -> bool:
        """Whether it has not finished a step yet, in any generation."""
        return index not in self._reported

    def longest_silence_s(self, workers: Iterable[int]) -> float:
        """The longest that any of these has made no progress, as far as is known: a quick look
        before a thorough one."""
        now_s, beats, heard_at_s = self._context.now_s(), self._heartbeats, self._last_heard_s
        longest_s = 0.0
        for worker in workers:
            age_s = now_s - heard_at_s.get(worker, now_s)
            beat = beats.get(worker)
            here_s = (age_s if age_s > WORKER_POLL_S else 0.0) + (beat.silent_s if beat else 0.0)
            longest_s = max(longest_s, here_s)
        return longest_s

    def expire_silent(self) -> None:
        """Takes those for lost whose processes have been silent for too long."""
        limit_s = WORKER_POLL_S + self._context.plan.worker_spec.hang_timeout_s + SILENCE_GRACE_S
        since_s = self._context.now_s() - limit_s
        mute = [worker for worker, at_s in self._last_heard_s.items() if at_s <= since_s]
        for worker in mute:
            self._mark_lost(worker, timeout_reason(limit_s))

    async def _receive_loop(self) -> None:
        group, heard_at_s, said = self._context.deps.workers, self._last_heard_s, self._undelivered
        while True:
            heard = await group.receive()
            now_s = self._context.now_s()
            for worker, messages in heard.messages:
                if worker in heard_at_s:
                    heard_at_s[worker] = now_s
                if worker in said:
                    said[worker].extend(messages)
                elif messages:
                    said[worker] = messages
                    self._delivery_queue.append(worker)
            for worker, cause in heard.lost:
                self._mark_lost(worker, cause)
            self._deliver_slice()
            if self._delivery_queue:
                self._has_undelivered.set()

    def _mark_lost(self, worker: int, cause: str) -> None:
        self.deliver(worker)
        self._last_heard_s.pop(worker, None)
        self._on_lost(worker, cause)

    async def _deliver_all(self) -> None:
        while True:
            await self._has_undelivered.wait()
            self._has_undelivered.clear()
            while self._delivery_queue:
                self._deliver_slice()
                await asyncio.sleep(0)

    def _deliver_slice(self) -> None:
        """A slice."""
        order, now = self._delivery_queue, self._context.deps.clock.now
        until_s = now() + DISPATCH_SLICE_S
        while order and now() < until_s:
            self.deliver(order.popleft())


class MessageDispatcher:
    """Messages may be late: of a worker that is lost by now, or of an older generation.

    The bell is rung for the last of many only: thousands of rings would wake those who wait
    thousands of times, and they wait for all.
    """

    def __init__(
        self,
        context: JobContext,
        failures: FailureHandler,
        keeping: Replication,
        speeds: StragglerMonitor,
        timer: RecoveryTimer,
        vaults: VaultManager,
        chaos: ClusterFaultInjector,
    ) -> None:
        self._context = context
        self._fault_injector = chaos
        self._failures = failures
        self._replication = keeping
        self._stragglers = speeds
        self._recovery_timer = timer
        self._vaults = vaults
        # A table, not a chain of tests: a large job says thousands of these a second.
        self._handlers: dict[type[WorkerMessage], Callable[[int, Any], None]] = {
            Heartbeat: self._on_heartbeat,
            StepReport: self._on_report,
            Joined: self._on_joined,
            Restored: self._on_restored,
            Finished: self._on_left,
            Stopped: self._on_left,
            Crashed: self._on_left,
            Pinned: keeping.on_pinned,
            LogLine: self._forward,
            FaultFired: self._forward,
        }

    def dispatch(self, worker: int, message: WorkerMessage) -> None:
        self._handlers[type(message)](worker, message)

    def _forward(self, worker: int, message: LogLine | FaultFired) -> None:
        del worker
        self._context.emit(message)

    def _on_report(self, worker: int, report: StepReport) -> None:
        ctx = self._context
        if report.generation == ctx.generation.number:
            ctx.generation.advance_to(report.step + 1)
            ctx.emit(StepReported(report))
            self._stragglers.add_report(worker, report)
        record = ctx.progress.add_report(report)
        if record is not None:
            ctx.emit(record)
            self._on_step_finished(record)

    def _on_step_finished(self, record: StepRecord) -> None:
        ctx = self._context
        ctx.changed.notify()
        passed = self._recovery_timer.completed(record.step_s, record.world_size, ctx.now_s())
        if passed is not None:
            ctx.emit(passed)
        self._replication.on_step_finished(record.generation)
        self._vaults.on_step_finished()
        self._fault_injector.on_step_finished(record.step)

    def _on_heartbeat(self, worker: int, beat: Heartbeat) -> None:
        ctx = self._context
        if ctx.generation.on_heartbeat(worker, beat):
            ctx.emit(HeartbeatReceived(beat, ctx.registry.info(worker).node))

    def _on_joined(self, worker: int, message: Joined) -> None:
        ctx = self._context
        if ctx.generation.on_joined(worker, message):
            self._recovery_timer.enter_phase("load", ctx.now_s())
            ctx.changed.notify()

    def _on_restored(self, worker: int, message: Restored) -> None:
        if self._context.generation.on_restored(worker, message):
            self._recovery_timer.enter_phase("recompute", self._context.now_s())
            self._context.changed.notify()

    def _on_left(self, worker: int, message: Finished | Stopped | Crashed) -> None:
        ctx, generation = self._context, self._context.generation
        known = len(generation.pending_faults)
        if not generation.on_left(worker, message, ctx.now_s()):
            return
        if generation.all_left or not isinstance(message, Stopped):
            ctx.changed.notify()
        if len(generation.pending_faults) > known:
            self._failures.on_crash()
        if isinstance(message, Finished):
            ctx.progress.add_counters(message.counters)
            ctx.progress.update_peaks({"process": message.peak_rss_bytes})
            if generation.all_finished:
                ctx.tasks.spawn(self._complete_job())

    async def _complete_job(self) -> None:
        """The job has succeeded once what was pinned on the way is stored."""
        generation = self._context.generation
        await self._replication.wait_idle()
        self._context.post_event(machine.AllFinished(generation.number))
