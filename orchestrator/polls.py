"""What a job's Ray actors say and answer: a poll under way at each of them, commands to many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from rayzero.orchestrator.answers import Answers
from rayzero.orchestrator.bell import Bell
from rayzero.orchestrator.group import POLL_S, Heard, WorkerLostError
from rayzero.orchestrator.lines import Lines, gather_s
from rayzero.orchestrator.lost import LOST, cause
from rayzero.workers.messages import Message

Call = Callable[[int], Any]
"""Calls a worker's actor; the reference to the answer. It may raise WorkerLostError."""


class Polls:
    """Used from one event loop, until `close`: after that nobody is listened to any more.

    A worker that is found gone, by a poll or by a command, is told once, behind all that it said,
    and no longer listened to.

    Args:
        poll: has a worker wait up to so many seconds for something to say.
    """

    def __init__(self, poll: Callable[[int, float], Any]) -> None:
        self._call_poll = poll
        self._bell = Bell()
        self._lines = Lines(self._bell.ring)
        self._listening: set[int] = set()
        self._said: list[tuple[int, list[Message]]] = []
        self._lost: dict[int, str] = {}
        self._error: Exception | None = None

    def close(self) -> None:
        self._lines.close()

    def listen(self, workers: Iterable[int]) -> None:
        """Has these polled from now on."""
        for worker in workers:
            self._listening.add(worker)
            self._poll(worker)
        self._lines.gather_s = gather_s(len(self._listening))
        self._bell.ring()

    async def hear(self) -> Heard:
        """What came since the last time; waits for something to come.

        Raises:
            Exception: a worker could not be asked, though it is there: a mistake of ours.
        """
        await self._bell.until(lambda: bool(self._said or self._lost or self._error))
        if self._error is not None:
            raise self._error
        heard = Heard(self._said, tuple(self._lost.items()))
        self._said, self._lost = [], {}
        return heard

    def command(self, workers: Iterable[int], call: Call) -> Answers:
        """Calls many actors, and waits for none of them."""
        answers = Answers(workers)
        for worker in sorted(answers.missing):
            try:
                self._lines.call(call(worker), partial(self._obeyed, worker, answers))
            except WorkerLostError as lost:
                self._is_lost(worker, str(lost))
                answers.came([worker])
        return answers

    def _obeyed(self, worker: int, answers: Answers, answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, LOST):
            self._is_lost(worker, cause(error))
        elif isinstance(error, Exception):
            answers.failed(error)
            return
        answers.came([worker])

    def _poll(self, worker: int) -> None:
        try:
            self._lines.call(self._call_poll(worker, POLL_S), partial(self._spoke, worker))
        except WorkerLostError as lost:
            self._is_lost(worker, str(lost))

    def _spoke(self, worker: int, answer: Future[list[Message]]) -> None:
        error = answer.exception()
        if error is None:
            self._said.append((worker, answer.result()))
            if worker in self._listening:
                self._poll(worker)
        elif isinstance(error, LOST):
            self._is_lost(worker, cause(error))
        elif isinstance(error, Exception):
            self._error = error

    def _is_lost(self, worker: int, why: str) -> None:
        if worker in self._listening:
            self._listening.discard(worker)
            self._lost[worker] = why
            self._bell.ring()
