"""Receives the messages, the losses and the answers of a group's workers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rayzero.orchestrator.aio import ChangeNotifier, PendingReplies, WorkerReports
from rayzero.orchestrator.cluster.node_links import WorkerMail
from rayzero.orchestrator.cluster.worker_commands import Call, WorkerCommands
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.workers.step_rows import NodeRecord, ReceivedMessage


class WorkerWatch:
    """Watches subscribed workers, until `close`. Used from one event loop.

    A worker whose end Ray confirms is reported once, after the messages received so far, and
    unsubscribed. Ray, which may know the cause, is asked in two cases: an agent has reported the
    end of the process; or no agent would report it, because the worker has not sent its first
    message, or the connection to its node has ended. In the second case the next message of the
    worker ends the question.

    Args:
        mail: passes on the workers' messages.
        commands: sends commands to the workers.
        node_of: returns the node of a worker.
        find_cause: waits for the end of a worker's actor, and returns its cause.
    """

    def __init__(
        self,
        mail: WorkerMail,
        commands: WorkerCommands,
        node_of: Callable[[int], str],
        find_cause: Callable[[int], Awaitable[str]],
    ) -> None:
        self._mail = mail
        self._commands = commands
        self._node_of = node_of
        self._find_cause = find_cause
        self._changed = ChangeNotifier()
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._subscribed: dict[int, str] = {}  # the node of each subscribed worker
        self._on_node: defaultdict[str, set[int]] = defaultdict(set)  # the same workers, by node
        self._messages: list[tuple[int, list[ReceivedMessage]]] = []
        self._lost: dict[int, str] = {}
        commands.watch(self._on_doubt)

    def close(self) -> None:
        self._subscribed.clear()
        self._on_node.clear()
        for asking in self._asking.values():
            asking.cancel()
        self._asking.clear()

    def subscribe(self, workers: Iterable[int]) -> None:
        """Includes the messages of these workers, from their first one, in `receive`."""
        for worker in {*workers} - self._subscribed.keys():
            try:
                node = self._subscribed[worker] = self._node_of(worker)
            except WorkerLostError as lost:
                self._subscribed[worker] = ""
                self._mark_lost(worker, str(lost))
                continue
            self._on_node[node].add(worker)
            self._mail.subscribe(worker, self._on_messages)
            if not self._mail.has_heard(worker) or self._commands.is_in_doubt(worker, node):
                self._ask(worker)
        self._changed.notify()

    async def receive(self) -> WorkerReports:
        """Returns messages and losses since the last call. Waits until there are some."""
        await self._changed.wait_until(lambda: bool(self._messages or self._lost))
        reports = WorkerReports(self._messages, tuple(self._lost.items()))
        self._messages, self._lost = [], {}
        return reports

    def broadcast(self, workers: Iterable[int], call: Call) -> PendingReplies:
        """Sends a command to many workers without waiting for their answers."""
        replies, nodes = PendingReplies(workers), {}
        for worker in sorted(replies.pending):
            try:
                nodes[worker] = self._node_of(worker)
            except WorkerLostError as lost:
                self._mark_lost(worker, str(lost))
                replies.mark_done([worker])
        self._commands.send(nodes, call, partial(self._on_answer, replies))
        return replies

    def _on_answer(
        self, replies: PendingReplies, workers: Sequence[int], error: Exception | None, _: Any
    ) -> None:
        if error is None or isinstance(error, WorkerLostError):
            replies.mark_done(workers)
        else:
            replies.mark_failed(error)

    def _on_messages(self, worker: int, messages: list[ReceivedMessage]) -> None:
        self._messages.append((worker, messages))
        if self._asking:
            first = messages[0] if messages else None
            together = first.workers if isinstance(first, NodeRecord) else (worker,)
            for heard in self._asking.keys() & together:
                # The worker's agent is connected, and will report the worker's end.
                if not self._commands.is_in_doubt(heard, self._subscribed[heard]):
                    self._asking.pop(heard).cancel()
        self._changed.notify()

    def _on_doubt(self, node: str) -> None:
        for worker in self._on_node[node]:
            if self._commands.is_in_doubt(worker, node):
                self._ask(worker)

    def _ask(self, worker: int) -> None:
        if worker not in self._asking:
            self._asking[worker] = asyncio.create_task(self._await_end(worker))

    async def _await_end(self, worker: int) -> None:
        try:
            cause = await self._find_cause(worker)
        except WorkerLostError as lost:
            cause = str(lost)
        del self._asking[worker]
        self._mark_lost(worker, cause)

    def _mark_lost(self, worker: int, cause: str) -> None:
        if (node := self._subscribed.pop(worker, None)) is not None:
            self._on_node[node].discard(worker)
            self._mail.unsubscribe(worker)
            self._lost[worker] = cause
            self._commands.end(worker, cause)
            self._changed.notify()
