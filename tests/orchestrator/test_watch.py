"""What many workers say is handed on in slices, deaths first, and silence is noticed."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from ray.exceptions import ActorUnschedulableError

from rayzero.engine.errors import EngineError
from rayzero.orchestrator.answers import Answers
from rayzero.orchestrator.control.desk import Desk, Ports
from rayzero.orchestrator.control.watch import SLICE_S, Watch
from rayzero.orchestrator.group import POLL_S, Heard, WorkerLostError
from rayzero.orchestrator.lines import Lines, gather_s
from rayzero.orchestrator.polls import Polls
from rayzero.workers.messages import Heartbeat, Message, Report
from tests.orchestrator.support import Notebook, VirtualClock, plan, settle
from tests.orchestrator.world import Shelf


class SlowClock(VirtualClock):
    """Every look at it takes a while."""

    def now(self) -> float:
        self._now += SLICE_S / 4
        return self._now


class Room:
    """A watch, and what it hands on."""

    def __init__(self, folder: Path, clock: VirtualClock) -> None:
        self.came: list[str] = []
        self.stream: asyncio.Queue[Heard] = asyncio.Queue()
        self.clock = clock
        here: Any = self
        ports = Ports(here, here, Shelf(), Notebook(), clock)
        self.desk = Desk(plan(folder), ports, lambda error: self.came.append(str(error)))
        self.watch = Watch(self.desk, self._receive, self._lost)

    def _receive(self, worker: int, message: Message) -> None:
        self.came.append(f"{worker} {type(message).__name__}")

    def _lost(self, worker: int, cause: str) -> None:
        self.came.append(f"{worker} lost: {cause}")

    def listen(self, workers: Any) -> None:
        """Everybody is listened to."""

    async def hear(self) -> Heard:
        return await self.stream.get()


BEAT = Heartbeat(0, 1, "forward", 0.0)


def run(scene: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scene

    asyncio.run(bounded())


def test_a_death_does_not_wait_behind_what_others_said(tmp_path: Path):
    async def scene() -> None:
        room = Room(tmp_path, SlowClock())
        room.watch.begin(range(100))
        room.stream.put_nowait(Heard([(worker, [BEAT]) for worker in range(100)]))
        while not room.came:
            await asyncio.sleep(0)
        assert len(room.came) < 10, "a slice"
        room.stream.put_nowait(Heard(lost=[(99, "it was killed")]))
        await settle()
        place = room.came.index("99 lost: it was killed")
        assert place < 30
        assert room.came[place - 1] == "99 Heartbeat", "what it said came first"
        assert len(room.came) == 101
        await room.desk.tasks.end()

    run(scene())


def test_what_one_worker_says_comes_in_order(tmp_path: Path):
    async def scene() -> None:
        room = Room(tmp_path, SlowClock())
        room.watch.begin(range(50))
        room.stream.put_nowait(Heard([(worker, [BEAT]) for worker in range(50)]))
        room.stream.put_nowait(Heard([(49, [Report(1, 0, 1)]), (49, [BEAT])]))
        await settle()
        of_it = [one for one in room.came if one.startswith("49")]
        assert of_it == ["49 Heartbeat", "49 Report", "49 Heartbeat"]
        assert not room.watch.is_new(49)
        assert room.watch.is_new(48)
        await room.desk.tasks.end()

    run(scene())


def test_who_says_nothing_for_too_long_is_given_up_once(tmp_path: Path):
    async def scene() -> None:
        room = Room(tmp_path, VirtualClock())
        room.watch.begin(range(2))
        limit_s = POLL_S + room.desk.plan.setup.hang_timeout_s + 10
        await room.clock.turn(limit_s - 1)
        room.watch.give_up()
        assert room.watch.silent_s([0, 1]) == limit_s - 1
        room.stream.put_nowait(Heard([(1, [])]))
        await settle()
        assert room.watch.silent_s([1]) == 0
        await room.clock.turn(1)
        room.watch.give_up()
        room.watch.give_up()
        assert room.came == [f"0 lost: its process did not answer for {limit_s:g} s"]
        await room.desk.tasks.end()

    run(scene())


class Calls:
    """Actor calls that a test answers, from another thread as Ray does."""

    def __init__(self) -> None:
        self.open: dict[int, Future[Any]] = {}
        self.gone: set[int] = set()

    def __call__(self, worker: int, limit_s: float = 0.0) -> Any:
        if worker in self.gone:
            raise WorkerLostError("it was dismissed or replaced")
        future: Future[Any] = Future()
        self.open[worker] = future
        reference: Any = type("Reference", (), {"future": lambda _: future})()
        return reference

    def answer(self, worker: int, answer: Any) -> None:
        future = self.open.pop(worker)
        tell = future.set_exception if isinstance(answer, Exception) else future.set_result
        thread = Thread(target=tell, args=(answer,))
        thread.start()
        thread.join()


def test_polls_go_on_until_a_worker_is_lost():
    async def scene() -> None:
        calls = Calls()
        polls = Polls(calls)
        polls.listen([1, 2])
        calls.answer(1, [BEAT])
        calls.answer(2, [])
        assert sorted((await polls.hear()).said) == [(1, [BEAT]), (2, [])]
        calls.answer(2, ActorUnschedulableError("it died"))
        calls.gone.add(1)
        calls.answer(1, [])
        lost = dict((await polls.hear()).lost)
        assert "it died" in lost[2]
        assert "dismissed" in lost[1]
        assert calls.open == {}, "nobody is asked any more"
        polls.listen([3])
        calls.answer(3, EngineError("a mistake"))
        with pytest.raises(EngineError):
            await polls.hear()
        polls.close()

    run(scene())


def test_what_many_say_is_gathered_but_for_a_death():
    async def scene() -> None:
        calls, came, batches = Calls(), [], []
        lines = Lines(lambda: batches.append(len(came)))
        lines.gather_s = 3600.0
        for worker in range(4):
            lines.call(calls(worker), lambda answer: came.append(answer.exception()))
        calls.answer(0, [BEAT])
        await settle()
        assert batches == [1], "nobody spoke for a while: it is heard at once"
        calls.answer(1, [BEAT])
        calls.answer(2, [BEAT])
        await settle()
        assert batches == [1], "these are gathered"
        calls.answer(3, ActorUnschedulableError("it died"))
        await settle()
        assert batches == [1, 4], "a death waits for nobody"
        assert came[:3] == [None] * 3
        lines.close()

    run(scene())


def test_nothing_that_is_gathered_is_forgotten():
    async def scene() -> None:
        calls, came = Calls(), []
        lines = Lines(lambda: None)
        lines.gather_s = 0.01
        for worker in range(20):  # behind a batch, or long after it
            lines.call(calls(worker), came.append)
            calls.answer(worker, [BEAT])
            while len(came) <= worker and worker % 3:
                await asyncio.sleep(0.001)
        while len(came) < 20:
            await asyncio.sleep(0.001)
        lines.close()

    run(scene())


def test_what_is_gathered_is_little_where_few_speak():
    assert gather_s(8) == 0.0
    assert gather_s(500) < gather_s(1000) == gather_s(4000) <= 0.01


def test_a_command_is_answered_by_those_who_live():
    async def scene() -> None:
        polled, told = Calls(), Calls()
        polls = Polls(polled)
        polls.listen([1, 2, 3])
        told.gone.add(3)
        answers = polls.command([1, 2, 3], told)
        assert answers.missing == {1, 2}
        told.answer(1, None)
        await answers.any_of(frozenset({1}))
        assert answers.missing == {2}
        told.answer(2, ActorUnschedulableError("it died"))
        await answers.all()
        assert {worker for worker, _ in (await polls.hear()).lost} == {2, 3}
        refused = polls.command([1], told)
        told.answer(1, EngineError("it is still busy"))
        with pytest.raises(EngineError, match="busy"):
            await refused.all()
        polls.close()

    run(scene())


def test_nobody_to_answer_is_no_wait():
    run(Answers().all())
