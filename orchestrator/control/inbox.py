"""Receives the workers' messages and dispatches them to the controller's components."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rayzero.orchestrator.aio import WORKER_POLL_S
from rayzero.orchestrator.control.chaos import ClusterFaultInjector
from rayzero.orchestrator.control.context import JobContext, timeout_reason
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.replication import Replication
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.policies.placement import CallState
from rayzero.orchestrator.policies.usefulness import EqualLosses
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    Joined,
    LogLine,
    Pinned,
    Prepared,
    Restored,
    StepDivided,
    StepReport,
    Stopped,
    WentBack,
    WorkerMessage,
)
from rayzero.workers.output import dropped_lines_text

SILENCE_GRACE_S = 10.0
"""Extra silence allowed beyond `hang_timeout_s`, so that the hang detector, which has diagnostics,
acts first. It watches members only; this limit holds for all workers."""
DISPATCH_SLICE_S = 0.001
"""How long messages are dispatched before other tasks get a turn: a loss may be waiting."""
MAX_UNDELIVERED_CHARACTERS = 16 * 2**20
"""Of log lines from all workers; those of a worker that prints beyond it are dropped."""


class WorkerInbox:
    """Delivers the workers' messages, and records when each worker was last heard from.

    Two tasks: one receives, reports losses at once, and delivers one time slice of messages; the
    other delivers the rest, slice by slice. The messages of one worker are delivered in order, and
    all of them before its loss.
    """

    def __init__(
        self,
        context: JobContext,
        dispatch: Callable[[int, WorkerMessage], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._context = context
        self._dispatch = dispatch
        self._on_lost = on_lost
        self._last_heard_s: dict[int, float] = {}
        self._heartbeats: dict[int, Heartbeat] = {}
        self.reported: set[int] = set()
        """Workers that have finished a step, in any generation."""
        self.longest_first_step_s = 0.0
        """Of a new process, from its loaded state to the report."""
        self._undelivered: dict[int, list[WorkerMessage]] = {}
        self._undelivered_characters = 0
        self._delivery_queue: deque[int] = deque()
        """Workers with undelivered messages, in order; those of some may be delivered already."""
        self._has_undelivered = asyncio.Event()

    def start(self, workers: Iterable[int]) -> None:
        """Starts receiving, from these workers at first."""
        self.subscribe(workers)
        self._context.tasks.spawn(self._receive_loop())
        self._context.tasks.spawn(self._deliver_all())

    def subscribe(self, workers: Iterable[int]) -> None:
        """Receives from more workers."""
        new = dict.fromkeys(workers, self._context.now_s())
        self._last_heard_s |= new
        self._context.deps.workers.subscribe(new)

    def start_generation(self) -> None:
        """Forgets the heartbeats of the generation before."""
        self._heartbeats.clear()
        members, now_s = self._context.registry.members, self._context.now_s()
        self._last_heard_s |= dict.fromkeys(members, now_s)

    def deliver(self, worker: int) -> None:
        """Delivers the messages of one worker received so far."""
        for message in self._undelivered.pop(worker, ()):
            kind = type(message)
            if kind is Heartbeat:
                self._heartbeats[worker] = cast(Heartbeat, message)
            elif kind is StepReport:
                if worker not in self.reported:
                    self._on_first_step(worker)
            elif kind is LogLine:
                self._undelivered_characters -= len(cast(LogLine, message).text)
            self._dispatch(worker, message)

    def _on_first_step(self, worker: int) -> None:
        self.reported.add(worker)
        now_s = self._context.now_s()
        step_s = now_s - self._context.generation.restored.get(worker, now_s)
        self.longest_first_step_s = max(self.longest_first_step_s, step_s)

    def last_heartbeat(self, worker: int) -> tuple[Heartbeat | None, float]:
        """Its last heartbeat in this generation, and how long ago it was last heard from."""
        now_s = self._context.now_s()
        return self._heartbeats.get(worker), now_s - self._last_heard_s.get(worker, now_s)

    def longest_silence_s(self, workers: Iterable[int]) -> float:
        """The longest that any of these may have made no progress: a cheap test before the thorough
        one of the hang policy."""
        now_s = self._context.now_s()
        beats = self._heartbeats
        heard_at_s = self._last_heard_s
        longest_s = 0.0
        for worker in workers:
            age_s, beat = now_s - heard_at_s.get(worker, now_s), beats.get(worker)
            silent_s = (age_s if age_s > WORKER_POLL_S else 0.0) + (beat.silent_s if beat else 0.0)
            longest_s = max(longest_s, silent_s)
        return longest_s

    def expire_silent(self) -> None:
        """Reports workers as lost whose processes have been silent for too long."""
        limit_s = WORKER_POLL_S + self._context.plan.worker_spec.hang_timeout_s + SILENCE_GRACE_S
        since_s = self._context.now_s() - limit_s
        silent = [worker for worker, at_s in self._last_heard_s.items() if at_s <= since_s]
        for worker in silent:
            self._mark_lost(worker, timeout_reason(limit_s))

    async def _receive_loop(self) -> None:
        group, heard_at_s = self._context.deps.workers, self._last_heard_s
        pending = self._undelivered
        while True:
            reports = await group.receive()
            now_s = self._context.now_s()
            for worker, messages in reports.messages:
                if worker in heard_at_s:
                    heard_at_s[worker] = now_s
                # The last one is a heartbeat. Usually there are no lines: the test must be cheap.
                if len(messages) > 2 or (messages and type(messages[0]) is LogLine):
                    messages = self._bound_lines(worker, messages)
                if worker in pending:
                    pending[worker].extend(messages)
                elif messages:
                    pending[worker] = messages
                    self._delivery_queue.append(worker)
            for worker, cause in reports.lost:
                self._mark_lost(worker, cause)
            self._deliver_slice()
            if self._delivery_queue:
                self._has_undelivered.set()

    def _bound_lines(self, worker: int, messages: list[WorkerMessage]) -> list[WorkerMessage]:
        """These messages, with a line in place of log lines for which there is no room."""
        lines = [message for message in messages if type(message) is LogLine]
        count = sum(len(line.text) for line in lines)
        if lines and self._undelivered_characters + count > MAX_UNDELIVERED_CHARACTERS:
            text = dropped_lines_text(len(lines), count, f"worker {worker}")
            lines = [LogLine(lines[0].rank, "stderr", text)]
            messages = [*lines, *(m for m in messages if type(m) is not LogLine)]
            count = len(text)
        self._undelivered_characters += count
        return messages

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
        order, now = self._delivery_queue, self._context.deps.clock.now
        until_s = now() + DISPATCH_SLICE_S
        while order and now() < until_s:
            self.deliver(order.popleft())


@dataclass(eq=False)
class MessageDispatcher:
    """Dispatches worker messages to the components that handle them.

    Messages may be late: from a worker that is lost by now, or about an older generation.
    """

    _context: JobContext
    _failures: FailureHandler
    _replication: Replication
    _vaults: VaultManager
    _fault_injector: ClusterFaultInjector
    _on_all_finished: Callable[[], None]
    _equal_losses: EqualLosses = field(default_factory=EqualLosses)

    def __post_init__(self) -> None:
        # A table, not a chain of tests: a large job sends thousands of these a second.
        self._handlers: dict[type[WorkerMessage], Callable[[int, Any], None]] = {
            Heartbeat: self._on_heartbeat,
            StepReport: self._on_report,
            Joined: self._on_joined,
            Restored: self._on_restored,
            Prepared: self._on_prepared,
            Finished: self._on_left,
            Stopped: self._on_left,
            Crashed: self._on_crashed,
            Pinned: self._replication.on_pinned,
            WentBack: self._on_went_back,
            StepDivided: self._on_step_divided,
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
            ctx.emit(report)
            if text := ctx.speeds.add_report(worker, report):
                ctx.warn(text)
            if text := self._equal_losses.add_report(report, ctx.generation.world_size):
                ctx.warn(text)
        record = ctx.progress.add_report(report)
        if record is not None:
            ctx.emit(record)
            self._on_step_finished(record)

    def _on_step_finished(self, record: StepRecord) -> None:
        ctx = self._context
        ctx.changed.notify()  # JobProgress
        if recovery := ctx.timer.completed(record.step_s, record.world_size):
            ctx.emit(recovery)
        self._replication.on_step_finished(record.generation)
        self._vaults.on_step_finished()
        self._fault_injector.on_step_finished(record.step)

    def _on_heartbeat(self, worker: int, beat: Heartbeat) -> None:
        ctx = self._context
        if ctx.generation.on_heartbeat(worker, beat):
            ctx.emit(beat)

    def _on_joined(self, worker: int, message: Joined) -> None:
        ctx = self._context
        if ctx.generation.on_joined(worker, message):
            ctx.timer.enter_phase("load")

    def _on_restored(self, worker: int, message: Restored) -> None:
        ctx = self._context
        if ctx.generation.on_restored(worker, message, ctx.now_s()):
            ctx.timer.enter_phase("recompute")

    def _on_went_back(self, worker: int, message: WentBack) -> None:
        """The training function continues from its own checkpoint instead of the state restored."""
        del worker
        ctx, generation = self._context, self._context.generation
        if message.generation != generation.number or generation.fenced:
            return
        generation.step = message.step + 1
        redone = ctx.rewind(message.step)
        ctx.warn(
            f"the script has loaded its own checkpoint of step {message.step}, with a client state "
            f"that tells its place: {redone} finished step{'s' * (redone != 1)} will be done again "
            "(none, if it loads only `if engine.global_steps == 0`, and skips the data of those)"
        )

    def _on_step_divided(self, worker: int, message: StepDivided) -> None:
        """Limits the next generations to numbers of ranks that divide the parts."""
        del worker
        registry, parts = self._context.registry, message.parts
        limits = replace(registry.limits, parts=parts)
        if limits == registry.limits:
            return
        registry.limits = limits
        if (most := limits.size(limits.max)) != limits.max:
            self._context.warn(
                f"a step has {parts} micro-batches, which the script's loader gives to ranks in "
                f"equal parts: of up to {limits.max} workers (workers.max) {most or 'none'} can "
                "train; gradient_accumulation_steps decides it"
            )

    def _on_prepared(self, worker: int, message: Prepared) -> None:
        del message
        if self._context.registry.is_ahead(worker):
            self._context.registry.set_state(worker, CallState.PREPARED)

    def _on_crashed(self, worker: int, message: Crashed) -> None:
        if message.kind == "device":  # of any generation: the process ends
            self._failures.on_device_failed(worker, message)
        else:
            self._on_left(worker, message)

    def _on_left(self, worker: int, message: Finished | Stopped | Crashed) -> None:
        ctx, generation = self._context, self._context.generation
        if ctx.registry.is_ahead(worker):
            if ctx.registry.is_alive(worker):  # else it was left out, or lost
                self._failures.on_newcomer_ended(worker, message)
            return
        faults_before = len(generation.pending_faults)
        if not generation.on_left(worker, message, ctx.now_s()):
            return
        if not isinstance(message, Finished) and message.stays:
            keeps_rank = message.keeps_rank
            ctx.registry.set_state(worker, CallState.WAITING, keeps_rank=keeps_rank)
        if len(generation.pending_faults) > faults_before:
            self._failures.on_fault()
        if isinstance(message, Finished):
            ctx.progress.update_peaks({"process": message.peak_rss_bytes})
            if generation.all_finished:
                self._on_all_finished()
