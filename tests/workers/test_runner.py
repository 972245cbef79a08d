from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread

import pytest

from rayzero.engine.errors import CollectiveError, EngineError
from rayzero.workers import training_thread as runners
from rayzero.workers.messages import Crashed, Finished, Stopped, WorkerMessage
from rayzero.workers.training_thread import (
    GenerationBody,
    GenerationChannel,
    Interrupted,
    TrainingThread,
)
from tests.workers.support import ASSIGN

DONE = Finished(1, 0, None, {}, 0)


class Bench:
    """A runner with its posts and a way to count how often peers were freed."""

    def __init__(self) -> None:
        self.posted: list[WorkerMessage] = []
        self.freed = 0
        self.wire = GenerationChannel(self.posted.append)
        self.runner = TrainingThread(self._free)

    def _free(self, drained: bool) -> None:
        self.freed += not drained

    def start(self, body: GenerationBody) -> None:
        self.runner.start(ASSIGN, body, self.wire)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.runner.stop()
    assert made.runner.join(5)


def test_a_body_ends_with_its_own_message(bench: Bench):
    bench.start(lambda: DONE)
    assert bench.runner.join(5)
    assert bench.posted == [DONE]
    assert bench.freed == 0


def test_an_exception_becomes_a_crash_with_its_step(bench: Bench):
    def body() -> WorkerMessage:
        bench.wire.progress.begin_step(3)
        raise ValueError("boom")

    bench.start(body)
    assert bench.runner.join(5)
    (crash,) = bench.posted
    assert isinstance(crash, Crashed)
    assert (crash.kind, crash.step, crash.error) == ("user", 3, "ValueError: boom")


def test_stop_unwinds_at_the_next_check_and_frees_the_peers(bench: Bench):
    running = Event()

    def body() -> WorkerMessage:
        running.set()
        while True:
            bench.wire.interrupt.check()

    bench.start(body)
    assert running.wait(5)
    bench.runner.stop()
    assert bench.runner.join(5)
    assert bench.posted == [Stopped(1, 0)]
    assert bench.freed == 1


def test_a_drain_leaves_the_peers_their_connections(bench: Bench):
    def body() -> WorkerMessage:
        raise Interrupted

    bench.start(body)
    assert bench.runner.join(5)
    assert bench.posted == [Stopped(1, 0)]
    assert bench.freed == 0, "a slower peer may still be taking what this rank has sent"


def test_a_collective_that_fails_while_stopping_is_a_stop(bench: Bench):
    go = Event()

    def body() -> WorkerMessage:
        go.wait(5)
        raise CollectiveError("a peer was unwound first")

    bench.start(body)
    bench.runner.stop()
    go.set()
    assert bench.runner.join(5)
    assert bench.posted == [Stopped(1, 0)]


def test_two_generations_do_not_run_at_once_but_one_after_the_other(bench: Bench):
    go = Event()

    def body() -> WorkerMessage:
        go.wait(5)
        return DONE

    bench.start(body)
    with pytest.raises(EngineError, match="still alive"):
        bench.start(lambda: DONE)
    go.set()
    assert bench.runner.join(5)
    bench.start(lambda: DONE)
    assert bench.runner.join(5)
    assert bench.posted == [DONE, DONE]


def test_a_thread_that_is_just_being_started_can_be_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """A fence of the last generation may still be at work then."""
    beginning, go = Event(), Event()

    class Slow(Thread):
        def start(self) -> None:
            beginning.set()
            assert go.wait(30)
            super().start()

    monkeypatch.setattr(runners, "Thread", Slow)
    starter = Thread(target=bench.start, args=(lambda: DONE,))
    starter.start()
    assert beginning.wait(30)
    joined: list[bool] = []
    joiner = Thread(target=lambda: joined.append(bench.runner.join(30)))
    joiner.start()
    go.set()
    for one in (starter, joiner):
        one.join(30)
    assert joined == [True]
    assert bench.posted == [DONE]


def test_the_next_generation_waits_for_a_thread_that_has_told_its_end():
    told, go = Event(), Event()
    posted: list[WorkerMessage] = []

    def post(message: WorkerMessage) -> None:
        posted.append(message)
        if len(posted) == 1:
            told.set()
            assert go.wait(30)  # the controller hears of it, and is faster than this thread

    runner = TrainingThread(lambda: None)
    runner.start(ASSIGN, lambda: DONE, GenerationChannel(post))
    assert told.wait(30)
    starter = Thread(target=runner.start, args=(ASSIGN, lambda: DONE, GenerationChannel(post)))
    starter.start()
    go.set()
    starter.join(30)
    assert runner.join(30)
    assert posted == [DONE, DONE]
