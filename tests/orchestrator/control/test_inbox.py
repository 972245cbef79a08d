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
from rayzero.orchestrator.aio import WORKER_POLL_S, PendingReplies, WorkerReports
from rayzero.orchestrator.cluster.actor_calls import ActorPoller, FutureBatcher, batch_delay_s
from rayzero.orchestrator.control.context import Dependencies, JobContext
from rayzero.orchestrator.control.inbox import DISPATCH_SLICE_S, WorkerInbox
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.workers.messages import Heartbeat, StepReport, WorkerMessage
from tests.orchestrator.fake_cluster import FakeCheckpointStore
from tests.orchestrator.support import EventLog, VirtualClock, plan, settle


class SlowClock(VirtualClock):
    """Every look at it takes a while."""

    def now(self) -> float:
        self._now += DISPATCH_SLICE_S / 4
        return self._now


class Room:
    """A watch, and what it hands on."""

    def __init__(self, folder: Path, clock: VirtualClock) -> None:
        self.came: list[str] = []
        self.stream: asyncio.Queue[WorkerReports] = asyncio.Queue()
        self.clock = clock
        here: Any = self
        ports = Dependencies(here, here, FakeCheckpointStore(), EventLog(), clock)
        self.desk = JobContext(plan(folder), ports, lambda error: self.came.append(str(error)))
        self.watch = WorkerInbox(self.desk, self._receive, self._lost)

    def _receive(self, worker: int, message: WorkerMessage) -> None:
        self.came.append(f"{worker} {type(message).__name__}")

    def _lost(self, worker: int, cause: str) -> None:
        self.came.append(f"{worker} lost: {cause}")

    def subscribe(self, workers: Any) -> None:
        """Everybody is listened to."""

    async def receive(self) -> WorkerReports:
        return await self.stream.get()


BEAT = Heartbeat(0, 1, "forward", 0.0)


def run(scene: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scene

    asyncio.run(bounded())


def test_a_death_does_not_wait_behind_messages_of_other_workers(tmp_path: Path):
    async def scene() -> None:
        room = Room(tmp_path, SlowClock())
        room.watch.start(range(100))
        room.stream.put_nowait(WorkerReports([(worker, [BEAT]) for worker in range(100)]))
        while not room.came:
            await asyncio.sleep(0)
        assert len(room.came) < 10, "a slice"
        room.stream.put_nowait(WorkerReports(lost=[(99, "it was killed")]))
        await settle()
        place = room.came.index("99 lost: it was killed")
        assert place < 30
        assert room.came[place - 1] == "99 Heartbeat", "what it said came first"
        assert len(room.came) == 101
        await room.desk.tasks.cancel_all()

    run(scene())


def test_the_messages_of_one_worker_are_delivered_in_order(tmp_path: Path):
    async def scene() -> None:
        room = Room(tmp_path, SlowClock())
        room.watch.start(range(50))
        room.stream.put_nowait(WorkerReports([(worker, [BEAT]) for worker in range(50)]))
        room.stream.put_nowait(WorkerReports([(49, [StepReport(1, 0, 1)]), (49, [BEAT])]))
        await settle()
        of_it = [one for one in room.came if one.startswith("49")]
        assert of_it == ["49 Heartbeat", "49 StepReport", "49 Heartbeat"]
        assert 49 in room.watch.reported
        assert 48 not in room.watch.reported
        await room.desk.tasks.cancel_all()

    run(scene())


def test_a_silent_worker_is_reported_lost_once(tmp_path: Path):
    async def scene() -> None:
        room = Room(tmp_path, VirtualClock())
        room.watch.start(range(2))
        limit_s = WORKER_POLL_S + room.desk.plan.worker_spec.hang_timeout_s + 10
        await room.clock.advance(limit_s - 1)
        room.watch.expire_silent()
        assert room.watch.longest_silence_s([0, 1]) == limit_s - 1
        room.stream.put_nowait(WorkerReports([(1, [])]))
        await settle()
        assert room.watch.longest_silence_s([1]) == 0
        await room.clock.advance(1)
        room.watch.expire_silent()
        room.watch.expire_silent()
        assert room.came == [f"0 lost: its process did not respond for {limit_s:g} s"]
        await room.desk.tasks.cancel_all()

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


def test_polls_continue_until_a_worker_is_lost():
    async def scene() -> None:
        calls = Calls()
        polls = ActorPoller(calls)
        polls.subscribe([1, 2])
        calls.answer(1, [BEAT])
        calls.answer(2, [])
        assert sorted((await polls.receive()).messages) == [(1, [BEAT]), (2, [])]
        calls.answer(2, ActorUnschedulableError("it died"))
        calls.gone.add(1)
        calls.answer(1, [])
        lost = dict((await polls.receive()).lost)
        assert "it died" in lost[2]
        assert "dismissed" in lost[1]
        assert calls.open == {}, "nobody is asked any more"
        polls.subscribe([3])
        calls.answer(3, EngineError("a mistake"))
        with pytest.raises(EngineError):
            await polls.receive()
        polls.close()

    run(scene())


def test_messages_of_many_workers_are_batched_except_deaths():
    async def scene() -> None:
        calls, came, batches = Calls(), [], []
        lines = FutureBatcher(lambda: batches.append(len(came)))
        lines.batch_delay_s = 3600.0
        for worker in range(4):
            lines.add_call(calls(worker), lambda answer: came.append(answer.exception()))
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
        lines = FutureBatcher(lambda: None)
        lines.batch_delay_s = 0.01
        for worker in range(20):  # behind a batch, or long after it
            lines.add_call(calls(worker), came.append)
            calls.answer(worker, [BEAT])
            while len(came) <= worker and worker % 3:
                await asyncio.sleep(0.001)
        while len(came) < 20:
            await asyncio.sleep(0.001)
        lines.close()

    run(scene())


def test_the_batch_delay_is_short_for_few_workers():
    assert batch_delay_s(8) == 0.0
    assert batch_delay_s(500) < batch_delay_s(1000) == batch_delay_s(4000) <= 0.01


def test_a_command_is_answered_by_live_workers():
    async def scene() -> None:
        polled, told = Calls(), Calls()
        polls = ActorPoller(polled)
        polls.subscribe([1, 2, 3])
        told.gone.add(3)
        answers = polls.broadcast([1, 2, 3], told)
        assert answers.pending == {1, 2}
        told.answer(1, None)
        await answers.wait_any(frozenset({1}))
        assert answers.pending == {2}
        told.answer(2, ActorUnschedulableError("it died"))
        await answers.wait_all()
        assert {worker for worker, _ in (await polls.receive()).lost} == {2, 3}
        refused = polls.broadcast([1], told)
        told.answer(1, EngineError("it is still busy"))
        with pytest.raises(EngineError, match="busy"):
            await refused.wait_all()
        polls.close()

    run(scene())


def test_a_command_to_no_worker_does_not_wait():
    run(PendingReplies().wait_all())
