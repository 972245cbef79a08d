"""Listens to the workers: what they say comes in batches, and who died comes first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from rayzero.orchestrator.control.desk import Desk, silent
from rayzero.orchestrator.group import POLL_S
from rayzero.workers.messages import Heartbeat, Message, Report

PATIENCE_S = 10.0
"""How much longer than a hang a silent process is borne with: the vigil comes first, and says more.
This is for workers that are no members."""
SLICE_S = 0.001
"""For how long messages are handed on before something else gets a turn: a death may wait."""

Receive = Callable[[int, Message], None]
Lost = Callable[[int, str], None]


class Watch:
    """Hands on what workers say, and remembers when each was heard last and how far it was.

    Two tasks: one hears, tells of deaths at once, and hands on a slice of what was said; the other
    hands on what is left, a slice at a time. What a worker said before it died is handed on before
    its death.
    """

    def __init__(self, desk: Desk, receive: Receive, on_lost: Lost) -> None:
        self._desk = desk
        self._receive = receive
        self._on_lost = on_lost
        self._heard_at_s: dict[int, float] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._proven: set[int] = set()
        self._said: dict[int, list[Message]] = {}
        self._order: deque[int] = deque()
        """Of who said something; a worker may stand here whose words were handed on already."""
        self._news = asyncio.Event()

    def begin(self, workers: Iterable[int]) -> None:
        """Listens from now on, to these at first."""
        self.listen(workers)
        self._desk.tasks.spawn(self._hear())
        self._desk.tasks.spawn(self._hand_all_on())

    def listen(self, workers: Iterable[int]) -> None:
        """Listens to more of them."""
        new = dict.fromkeys(workers, self._desk.now_s())
        self._heard_at_s |= new
        self._desk.ports.workers.listen(new)

    def generation_begins(self) -> None:
        """What was said of the one before tells nothing about this one."""
        self._beats.clear()
        self._heard_at_s |= dict.fromkeys(self._desk.crew.members, self._desk.now_s())

    def hand_on(self, worker: int) -> None:
        """Hands on what a worker has said so far."""
        for message in self._said.pop(worker, ()):
            kind = type(message)
            if kind is Heartbeat:
                self._beats[worker] = cast(Heartbeat, message)
            elif kind is Report:
                self._proven.add(worker)
            self._receive(worker, message)

    def overdue_s(self, index: int) -> float:
        """For how long something should have been heard of it."""
        return max(0.0, self.beat(index)[1] - POLL_S)

    def beat(self, index: int) -> tuple[Heartbeat | None, float]:
        """Its last heartbeat in this generation, and how long ago it was heard last."""
        now_s = self._desk.now_s()
        return self._beats.get(index), now_s - self._heard_at_s.get(index, now_s)

    def is_new(self, index: int) -> bool:
        """Whether it has not finished a step yet, in any generation."""
        return index not in self._proven

    def silent_s(self, workers: Iterable[int]) -> float:
        """The longest that any of these has made no progress, as far as is known: a quick look
        before a thorough one."""
        now_s, beats, heard_at_s = self._desk.now_s(), self._beats, self._heard_at_s
        longest_s = 0.0
        for worker in workers:
            age_s = now_s - heard_at_s.get(worker, now_s)
            beat = beats.get(worker)
            here_s = (age_s if age_s > POLL_S else 0.0) + (beat.silent_s if beat else 0.0)
            longest_s = max(longest_s, here_s)
        return longest_s

    def give_up(self) -> None:
        """Takes those for lost whose processes have been silent for too long."""
        limit_s = POLL_S + self._desk.plan.setup.hang_timeout_s + PATIENCE_S
        since_s = self._desk.now_s() - limit_s
        mute = [worker for worker, at_s in self._heard_at_s.items() if at_s <= since_s]
        for worker in mute:
            self._is_lost(worker, silent(limit_s))

    async def _hear(self) -> None:
        group, heard_at_s, said = self._desk.ports.workers, self._heard_at_s, self._said
        while True:
            heard = await group.hear()
            now_s = self._desk.now_s()
            for worker, messages in heard.said:
                if worker in heard_at_s:
                    heard_at_s[worker] = now_s
                if worker in said:
                    said[worker].extend(messages)
                elif messages:
                    said[worker] = messages
                    self._order.append(worker)
            for worker, cause in heard.lost:
                self._is_lost(worker, cause)
            self._hand_some_on()
            if self._order:
                self._news.set()

    def _is_lost(self, worker: int, cause: str) -> None:
        self.hand_on(worker)
        self._heard_at_s.pop(worker, None)
        self._on_lost(worker, cause)

    async def _hand_all_on(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._order:
                self._hand_some_on()
                await asyncio.sleep(0)

    def _hand_some_on(self) -> None:
        """A slice."""
        order, now = self._order, self._desk.ports.clock.now
        until_s = now() + SLICE_S
        while order and now() < until_s:
            self.hand_on(order.popleft())
