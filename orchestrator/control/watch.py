"""Listens to the workers: one poll each, for as long as its process lives."""

from __future__ import annotations

from collections.abc import Callable

from rayzero.orchestrator.control.desk import Desk
from rayzero.workers.messages import Heartbeat, Message, Report

POLL_S = 2.0
"""How long a poll waits at the worker for something to happen."""
PATIENCE_S = 10.0
"""How much longer than a hang a silent process is borne with: the vigil comes first, and says more.
This is for workers that are no members."""

Receive = Callable[[int, Message], None]


class Watch:
    """Hands on what workers say, and remembers when each was heard last and how far it was."""

    def __init__(self, desk: Desk, receive: Receive) -> None:
        self._desk = desk
        self._receive = receive
        self._heard_at_s: dict[int, float] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._proven: set[int] = set()

    def worker(self, index: int) -> None:
        """Listens to one more."""
        self._heard_at_s[index] = self._desk.now_s()
        self._desk.tasks.spawn(self._poll(index))

    def generation_begins(self) -> None:
        """What was said of the one before tells nothing about this one."""
        self._beats.clear()
        for worker in self._desk.crew.members:
            self._heard_at_s[worker] = self._desk.now_s()

    def overdue_s(self, index: int) -> float:
        """How long the answer to the poll at hand should have been there."""
        return max(0.0, self._desk.now_s() - self._heard_at_s[index] - POLL_S)

    def beat(self, index: int) -> tuple[Heartbeat | None, float]:
        """Its last heartbeat in this generation, and how long ago it answered last."""
        return self._beats.get(index), self._desk.now_s() - self._heard_at_s[index]

    def is_new(self, index: int) -> bool:
        """Whether it has not finished a step yet, in any generation."""
        return index not in self._proven

    async def _poll(self, index: int) -> None:
        """Its death ends this as a GoneError, which somebody judges."""
        desk = self._desk
        limit_s = POLL_S + desk.plan.setup.hang_timeout_s + PATIENCE_S
        while True:
            poll = desk.ports.workers.poll(index, POLL_S)
            messages = await desk.ask(index, poll, limit_s)
            self._heard_at_s[index] = desk.now_s()
            for message in messages:
                if isinstance(message, Heartbeat):
                    self._beats[index] = message
                elif isinstance(message, Report):
                    self._proven.add(index)
                self._receive(index, message)
