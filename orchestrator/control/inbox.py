"""Receives the workers' messages, and delivers them in slices of time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from rayzero.orchestrator.aio import WORKER_POLL_S
from rayzero.orchestrator.control.calls import timeout_reason
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.policies.hang_limits import StepHistory
from rayzero.workers.messages import (
    Heartbeat,
    LogLine,
    StepReport,
    WorkerInfo,
)
from rayzero.workers.output import dropped_lines_text
from rayzero.workers.step_rows import (
    Heartbeats,
    NodeMessages,
    NodeRecord,
    ReceivedMessage,
    StepRows,
    combine,
    combine_beats,
)
from rayzero.workers.vault.records import ProcessStalled

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

SILENCE_GRACE_S = 10.0
"""Extra silence allowed beyond `recovery.patience_s`, so that the hang detector, which has
diagnostics, acts first. It watches members only; this limit holds for all workers."""
DISPATCH_SLICE_S = 0.0005
"""How long messages are dispatched before other tasks get a turn: a loss may be waiting."""
MAX_UNDELIVERED_CHARACTERS = 16 * 2**20
"""Limit for the undelivered log lines of all workers. The lines of a worker that prints beyond it
are dropped."""


class UndeliveredLines:
    """Bounds the log lines that were received and are not delivered yet."""

    def __init__(self, max_characters: int = MAX_UNDELIVERED_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._characters = 0

    def receive(self, worker: int, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Returns the messages. If there is no room for their log lines, a line that says so
        replaces them."""
        # The last message is a heartbeat. Usually there are no lines: the test must be cheap.
        if not messages or (len(messages) <= 2 and type(messages[0]) is not LogLine):
            return messages
        lines = [message for message in messages if type(message) is LogLine]
        count = sum(len(line.text) for line in lines)
        if lines and self._characters + count > self._max_characters:
            text = dropped_lines_text(len(lines), count, f"worker {worker}")
            left = replace(lines[0], stream="stderr", text=text)
            messages = [left, *(m for m in messages if type(m) is not LogLine)]
            count = len(text)
        self._characters += count
        return messages

    def deliver(self, line: LogLine) -> None:
        self._characters -= len(line.text)


@dataclass(eq=False)
class WorkerInbox:
    """Delivers the workers' messages, and records when each worker was last heard from.

    Two tasks: one receives, reports losses at once, and delivers one time slice of messages; the
    other delivers the rest, slice by slice. The messages of one worker are delivered in order, and
    all of them before its loss.
    """

    _loop: JobLoop
    _members: Members
    _workers: WorkerGroup
    _patience_s: float
    _dispatch: Callable[[int, ReceivedMessage], None]
    _on_lost: Callable[[int, str], None]
    _lines: UndeliveredLines = field(default_factory=UndeliveredLines)
    _last_heard_s: dict[int, float] = field(default_factory=dict)
    _heartbeats: dict[int, Heartbeats] = field(default_factory=dict)
    history: StepHistory = field(default_factory=StepHistory)
    states: dict[int, str] = field(default_factory=dict)
    """The `state` of the newest `ProcessStalled` of each worker."""
    _undelivered: dict[int, list[ReceivedMessage]] = field(default_factory=dict)
    _delivery_queue: deque[int] = field(default_factory=deque)
    """Workers with undelivered messages, in order; those of some may be delivered already."""
    _has_undelivered: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, workers: Iterable[int]) -> None:
        """Starts receiving, from these workers at first."""
        self.subscribe(workers)
        self._loop.spawn(self._receive_loop())
        self._loop.spawn(self._deliver_all())

    def subscribe(self, workers: Iterable[int]) -> None:
        """Receives from more workers."""
        new = dict.fromkeys(workers, self._loop.now_s())
        self._last_heard_s |= new
        self._workers.subscribe(new)

    def start_generation(self) -> None:
        """Forgets the heartbeats of the previous generation."""
        self._heartbeats.clear()
        self.history.start_generation()
        # Not the workers that are lost by now: nothing more is heard from them.
        watched = self._last_heard_s.keys() & self._members.registry.members
        self._last_heard_s |= dict.fromkeys(watched, self._loop.now_s())

    def deliver(self, worker: int) -> None:
        """Delivers the messages of one worker received so far."""
        for message in self._undelivered.pop(worker, ()):
            kind = type(message)
            if kind is Heartbeat:
                message = combine_beats([worker], [cast(Heartbeat, message)])
            elif kind is StepReport:
                message = combine([worker], [cast(StepReport, message)])
            elif kind is LogLine:
                self._lines.deliver(cast(LogLine, message))
            self._deliver(worker, message)

    def _deliver(self, worker: int, message: ReceivedMessage) -> None:
        """Delivers a message. Earlier messages of its workers have been delivered before."""
        if isinstance(message, StepRows):
            self._add_to_history(message)
        elif isinstance(message, Heartbeats):
            self._heartbeats |= dict.fromkeys(message.workers, message)
        elif isinstance(message, NodeMessages):
            for sender, content in zip(message.workers, message.messages, strict=True):
                self._dispatch(sender, content)
            return
        self._dispatch(worker, message)

    def _add_to_history(self, rows: StepRows) -> None:
        generation, now_s = self._members.generation, self._loop.now_s()
        if rows.generation == generation.number:
            restored_s = generation.restored
            self.history.add(rows, lambda worker: now_s - restored_s.get(worker, now_s))

    def _receive_record(self, record: NodeRecord, now_s: float) -> None:
        """Delivers a record at once, which takes less time than to queue it."""
        heard_at_s, pending = self._last_heard_s, self._undelivered
        for worker in record.workers:
            if worker in heard_at_s:
                heard_at_s[worker] = now_s
            if worker in pending:
                self.deliver(worker)
        self._deliver(record.workers[0], record)

    def on_stalled(self, event: ProcessStalled) -> None:
        """Records what the vault of a worker's node has seen: the process does not run, or runs
        again."""
        if self._members.registry.owns_process(event.worker, event.pid):
            self.states[event.worker] = event.state

    def on_progress(self, worker: int, beat: Heartbeat) -> None:
        """Records the progress of a member that was asked for it."""
        if worker in self._last_heard_s:
            self._heartbeats[worker] = combine_beats([worker], [beat])
            self._last_heard_s[worker] = self._loop.now_s()

    def last_heartbeat(self, worker: int) -> tuple[Heartbeat | None, float]:
        """Returns a worker's last heartbeat in this generation, and how long ago it was last heard
        from."""
        now_s = self._loop.now_s()
        beats = self._heartbeats.get(worker)
        beat = beats.row(beats.workers.index(worker)) if beats is not None else None
        return beat, now_s - self._last_heard_s.get(worker, now_s)

    def is_any_silent(self, workers: Iterable[int], limit_s: float) -> bool:
        """Returns whether one of the workers may have made no progress for longer than the limit.
        This is a cheap test before the hang policy's thorough one, and cheaper still if all workers
        were heard from recently, as is usual."""
        now_s, records = self._loop.now_s(), {*self._heartbeats.values()}
        longest_s = max((max(record.silent_s) for record in records), default=0.0)
        if now_s - min(self._last_heard_s.values(), default=now_s) + longest_s <= limit_s:
            return False
        known = map(self.last_heartbeat, workers)
        return any(age_s + (beat.silent_s if beat else 0.0) > limit_s for beat, age_s in known)

    def excuse_cut_off(self, workers: Iterable[WorkerInfo]) -> None:
        """Counts a worker as heard from if its node has lost its agent while the cluster's head
        does not answer. The worker continues, and no other agent can be started without the
        head."""
        if not self._members.registry.head_answers:
            agents, now_s = self._members.vault_addresses, self._loop.now_s()
            cut_off = {worker.index for worker in workers if worker.node_id not in agents}
            self._last_heard_s |= dict.fromkeys(cut_off & self._last_heard_s.keys(), now_s)

    def expire_silent(self) -> None:
        """Reports workers as lost whose processes have been silent for too long."""
        limit_s = WORKER_POLL_S + self._patience_s + SILENCE_GRACE_S
        since_s = self._loop.now_s() - limit_s
        silent = [worker for worker, at_s in self._last_heard_s.items() if at_s <= since_s]
        for worker in silent:
            self._mark_lost(worker, timeout_reason(limit_s))

    async def _receive_loop(self) -> None:
        group, heard_at_s = self._workers, self._last_heard_s
        pending = self._undelivered
        while True:
            reports = await group.receive()
            now_s = self._loop.now_s()
            for worker, messages in reports.messages:
                if messages and isinstance(first := messages[0], NodeRecord):
                    self._receive_record(first, now_s)
                    continue
                if worker in heard_at_s:
                    heard_at_s[worker] = now_s
                messages = self._lines.receive(worker, messages)
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

    def _mark_lost(self, worker: int, cause: str) -> None:
        self.deliver(worker)
        self._last_heard_s.pop(worker, None)
        self.states.pop(worker, None)
        self._on_lost(worker, cause)

    async def _deliver_all(self) -> None:
        while True:
            await self._has_undelivered.wait()
            self._has_undelivered.clear()
            while self._delivery_queue:
                self._deliver_slice()
                await asyncio.sleep(0)

    def _deliver_slice(self) -> None:
        order, now = self._delivery_queue, self._loop.now_s
        until_s = now() + DISPATCH_SLICE_S
        while order and now() < until_s:
            self.deliver(order.popleft())
