"""Sends commands to workers over the streams of their nodes. A node gets one frame for all of its
workers, and its agent passes the command on to them."""

from __future__ import annotations

import asyncio
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.aio import resolve
from rayzero.orchestrator.cluster.node_links import NodeLink
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.workers.agent.link import Attach, NodeCommand, pack_call
from rayzero.workers.vault.records import ConnectionLost, VaultEvent

_ENDED = "its process has ended"

OnAnswer: TypeAlias = Callable[[Sequence[int], Exception | None, Any], None]
"""Called with workers, and the error or the result that they have all answered."""


class Call(NamedTuple):
    """A method of `WorkerCalls`.

    Args:
        in_order: the call runs after earlier calls with `in_order`; otherwise concurrently with
            all others.
        own: additional arguments of each worker, by worker.
    """

    method: str
    arguments: tuple[Any, ...]
    in_order: bool
    own: Mapping[int, tuple[Any, ...]] = {}


@dataclass(eq=False)
class _Command:
    """A command that some workers have not answered yet.

    Args:
        nodes: the nodes of these workers, by worker.
        call: the pickled method and arguments.
    """

    nodes: dict[int, str]
    in_order: bool
    call: bytes
    own: Mapping[int, tuple[Any, ...]]
    on_answer: OnAnswer


class WorkerCommands:
    """Sends commands to workers, each of which runs a command only once, even if an agent or a
    connection is lost. A command that is not answered is sent again over the node's next stream,
    and a worker runs no command number twice. Used from one event loop.

    Args:
        attach: identifies this controller. Answers to another controller are dropped.
        link_of: returns the stream of a node, or None. In the latter case `send_again` is called
            once there is a stream.
    """

    def __init__(self, attach: Attach, link_of: Callable[[str], NodeLink | None]) -> None:
        self._attach = attach
        self._link_of = link_of
        self._numbers = count(1)
        self._unanswered: dict[int, _Command] = {}
        self._lost: set[int] = set()
        self._ended: set[int] = set()  # the lost workers whose processes have exited
        self._watchers: list[Callable[[str], None]] = []

    def send(self, nodes: Mapping[int, str], call: Call, on_answer: OnAnswer) -> int:
        """Sends a command to workers, which are given with their nodes. Returns its number."""
        number = next(self._numbers)
        if lost := self._lost.intersection(nodes):
            on_answer([*lost], WorkerLostError(_ENDED), None)
        nodes = {worker: node for worker, node in nodes.items() if worker not in self._lost}
        packed = pack_call(call.method, call.arguments)
        command = _Command(nodes, call.in_order, packed, call.own, on_answer)
        if nodes:
            self._unanswered[number] = command
        by_node: defaultdict[str, list[int]] = defaultdict(list)
        for worker, node in nodes.items():
            by_node[node].append(worker)
        for node, workers in by_node.items():
            self._put(node, number, command, workers)
        return number

    async def call(self, worker: int, node: str, call: Call) -> Any:
        """Returns the result of a call in one worker. Raises what the call raises, and
        WorkerLostError."""
        answer = asyncio.get_running_loop().create_future()
        number = self.send({worker: node}, call, lambda _, *reply: resolve(answer, *reply))
        try:
            return await answer
        finally:
            self._forget(number, [worker])

    def watch(self, on_doubt: Callable[[str], None]) -> None:
        """Calls `on_doubt` with a node when `is_in_doubt` may have become true there."""
        self._watchers.append(on_doubt)

    def is_in_doubt(self, worker: int, node: str) -> bool:
        """Returns whether the worker's process has ended, or no agent would report its end."""
        link = self._link_of(node)
        return worker in self._ended or link is None or not link.is_connected

    def on_news(self, node: str, events: Sequence[VaultEvent]) -> None:
        """Handles events that an agent has seen on its node. An empty list means that the
        connection to the agent has ended."""
        lost = [event for event in events if isinstance(event, ConnectionLost)]
        for event in lost:
            self.end(event.worker, _ENDED)
        ended = {event.worker for event in lost if event.has_ended}
        self._ended |= ended
        if ended or not events:
            for on_doubt in self._watchers:
                on_doubt(node)

    def send_again(self, node: str) -> None:
        """Sends unanswered commands again to the workers of a node, which has a new agent."""
        for number, command in self._unanswered.items():
            workers = [worker for worker, home in command.nodes.items() if home == node]
            if workers:
                self._put(node, number, command, workers)

    def on_answer(self, workers: Sequence[int], payload: bytes) -> None:
        controller, number, reply = pickle.loads(payload)
        if controller != self._attach.controller:
            return
        try:
            error, result = pickle.loads(reply)
        except Exception as raised:  # noqa: BLE001  # of a class that this process cannot import
            error, result = RayzeroError(f"an answer cannot be read: {raised}"), None
        self._answer(number, workers, error, result)

    def end(self, worker: int, cause: str) -> None:
        """Answers all commands to a worker with WorkerLostError, because its process has ended."""
        self._lost.add(worker)
        for number in tuple(self._unanswered):
            self._answer(number, [worker], WorkerLostError(cause), None)

    def _answer(
        self, number: int, workers: Sequence[int], error: Exception | None, result: Any
    ) -> None:
        command = self._unanswered.get(number)
        new = self._forget(number, workers)
        if command is not None and new:  # otherwise answered before, or the caller has given up
            command.on_answer(new, error, result)

    def _forget(self, number: int, workers: Sequence[int]) -> list[int]:
        """Marks the command as answered by these workers. Returns the workers among them that had
        not answered yet."""
        command = self._unanswered.get(number)
        if command is None:
            return []
        new = [worker for worker in workers if command.nodes.pop(worker, None) is not None]
        if not command.nodes:
            del self._unanswered[number]
        return new

    def _put(self, node: str, number: int, command: _Command, workers: list[int]) -> None:
        link = self._link_of(node)
        if link is not None:
            own = {worker: command.own.get(worker, ()) for worker in workers}
            link.command(NodeCommand(number, command.in_order, command.call, own))
