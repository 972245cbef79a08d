from __future__ import annotations

import gc
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, get_ident

import pytest
import torch
import torch.distributed as dist

import rayzero
from rayzero.engine.errors import CollectiveError, ConfigError, DataError, EngineError
from rayzero.workers import training_thread as module
from rayzero.workers.crash import describe_crash
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    LogLine,
    Stopped,
    WorkerMessage,
)
from rayzero.workers.training_thread import (
    GenerationChannel,
    ProgressRecord,
    TrainingThread,
)
from tests.workers.support import ASSIGN, GivenUp

DONE = Finished(1, 0, None, {}, 0)


class ThreadHarness:
    """A training thread, its posted messages, and how often it released its peers."""

    def __init__(self, on_left: Callable[[bool], None] | None = None) -> None:
        self.posted: list[WorkerMessage] = []
        self.released = 0
        self.thread = TrainingThread(on_left or self._release)
        self.channel = GenerationChannel(self._post, 1, 0, self.thread.give_up)
        self._ended = Event()

    def _release(self, drained: bool) -> None:
        self.released += not drained

    def _post(self, message: WorkerMessage) -> None:
        self.posted.append(message)
        if not isinstance(message, LogLine):
            self._ended.set()

    def start(self, body: Callable[[], WorkerMessage]) -> None:
        self.thread.start(self.channel, body)

    def run(self, body: Callable[[], WorkerMessage]) -> None:
        self.start(body)
        self.await_end()

    def await_end(self) -> None:
        assert self._ended.wait(5)
        assert self.channel.left.is_set()


@pytest.fixture
def harness() -> ThreadHarness:
    return ThreadHarness()


def test_exception_becomes_crash_with_its_step(harness: ThreadHarness):
    def body() -> WorkerMessage:
        harness.channel.progress.begin_step(3)
        raise ValueError("boom")

    harness.run(body)
    (crash,) = harness.posted
    assert isinstance(crash, Crashed)
    assert (crash.kind, crash.step, crash.error) == ("user", 3, "ValueError: boom")


def test_interrupted_function_is_given_up_at_its_next_check(harness: ThreadHarness):
    running, after = Event(), list[str]()

    def body() -> WorkerMessage:
        running.set()
        try:
            while True:
                harness.channel.interrupt.check()
        finally:
            after.append("told")

    harness.start(body)
    assert running.wait(5)
    harness.channel.interrupt.set()
    harness.await_end()
    assert harness.posted == [Stopped(1, 0)]
    assert harness.released == 1
    assert after == []


def test_drain_keeps_connections_to_peers(harness: ThreadHarness):
    harness.channel.drained = True
    harness.run(harness.channel.leave)
    assert harness.posted == [Stopped(1, 0)]
    assert harness.released == 0, "a slower peer may still be receiving from this rank"


def test_function_that_outlives_its_generation_sees_a_failed_collective(harness: ThreadHarness):
    harness.channel.reforming = True
    harness.channel.interrupt.check()
    harness.channel.interrupt.set()
    with pytest.raises(CollectiveError, match="was ended"):
        harness.channel.interrupt.check()


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> str:
        raise ValueError("no pickle")


class RuntimeUnprintableError(UnprintableError, RuntimeError):
    pass


@pytest.mark.parametrize("error", [UnprintableError(), RuntimeUnprintableError()])
def test_exception_that_cannot_be_printed_is_reported(harness: ThreadHarness, error: Exception):
    def body() -> WorkerMessage:
        raise error

    harness.run(body)
    (crash,) = harness.posted
    assert isinstance(crash, Crashed)
    assert crash.kind == "user"
    assert type(error).__name__ in crash.error
    pickle.dumps(crash)


@pytest.mark.parametrize("error", [RuntimeError("the pool of buffers is closed"), GivenUp("!")])
def test_function_ends_although_its_generation_cannot_be_released(error: BaseException):
    def fail(_: bool) -> None:
        raise error

    harness = ThreadHarness(fail)
    harness.channel.interrupt.set()
    harness.run(lambda: harness.channel.interrupt.check() or DONE)
    line, end = harness.posted
    assert isinstance(line, LogLine)
    assert str(error) in line.text
    assert end == Stopped(1, 0)


@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize("while_running", [True, False])
def test_broken_device_is_reported_as_such(interrupted: bool, while_running: bool):
    """Whoever meets it: the function, also while it is stopped, or the health check after it."""

    def fail(_: bool = False) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    harness = ThreadHarness((lambda _: None) if while_running else fail)

    def body() -> WorkerMessage:
        if interrupted:
            harness.channel.interrupt.set()
        if while_running:
            fail()
        raise ValueError("a copy of the device's memory is not what it should be")

    harness.run(body)
    end = harness.posted[-1]
    assert isinstance(end, Crashed)
    assert (end.kind, end.memory) == ("device", None)
    assert "uncorrectable ECC" in end.error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Default process group has not been initialized"),
        RuntimeError("Tried to access a communicator that was aborted"),
        KeyError("the batch of an aborted broadcast"),
        CollectiveError("a peer has left first"),
    ],
)
def test_whatever_an_aborted_group_raises_is_stop(harness: ThreadHarness, error: Exception):
    def body() -> WorkerMessage:
        harness.channel.interrupt.set()  # as a fence does before it aborts
        raise error

    harness.run(body)
    assert harness.posted == [Stopped(1, 0)]
    assert harness.released == 1


def test_error_that_the_group_reports_is_a_failed_collective(harness: ThreadHarness):
    """Not a stop: nobody asked for one."""
    harness.channel.interrupt.fail("the process group reports COMM_ERROR")
    harness.run(lambda: harness.channel.interrupt.check() or DONE)
    (end,) = harness.posted
    assert isinstance(end, Crashed)
    assert (end.kind, end.error) == ("collective", "the process group reports COMM_ERROR")


def test_process_calls_one_function(harness: ThreadHarness):
    harness.run(lambda: DONE)
    with pytest.raises(EngineError, match="has been called in this process"):
        harness.start(lambda: DONE)
    assert (harness.posted, harness.released) == ([DONE], 0)


GLOO = "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44712."


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001
        return raised


def wrapped(error: Exception) -> Exception:
    other = ValueError("training failed")
    other.__context__ = error
    return other


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("wrong"), "config"),
        (DataError("empty"), "data"),
        (EngineError("misused"), "user"),
        (CollectiveError("peer"), "collective"),
        (RuntimeError(GLOO), "collective"),
        (wrapped(RuntimeError(GLOO)), "collective"),
        (dist.DistNetworkError("timed out"), "collective"),
        (RuntimeError("shapes differ"), "user"),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (torch.AcceleratorError("CUDA error: invalid configuration argument"), "user"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "user"),
        (KeyError("x"), "user"),
        (SystemExit(3), "user"),
    ],
)
def test_exceptions_are_classified(error: Exception, kind: str):
    message = describe_crash(caught(error), generation=2, rank=1, step=7)
    assert (message.generation, message.rank, message.step) == (2, 1, 7)
    assert message.kind == kind
    if kind in ("config", "data"):
        assert (message.error, message.traceback) == (str(error), "")
    else:
        assert "raise error" in message.traceback
    if isinstance(error, SystemExit):
        assert message.error == "the training function called sys.exit(3)"


def test_write_to_parameter_that_is_not_gathered_names_what_gathers_it():
    weight = torch.zeros(()).expand(2, 2)
    with pytest.raises(RuntimeError) as raised:
        weight.clamp_(min=0)
    assert "zero.GatheredParameters" in describe_crash(raised.value, 1, 0, 1).error


CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def step_alone() -> None:
    rayzero.initialize(model=torch.nn.Linear(2, 1), config=CONFIG)[0].step()


def forward_of_another_width() -> None:
    rayzero.initialize(model=torch.nn.Linear(2, 1), config=CONFIG)[0](torch.zeros(1, 3))


def handle_with_another_error() -> None:
    try:
        step_alone()
    except EngineError as error:
        raise KeyError("x") from error


@pytest.mark.parametrize(
    ("function", "last_line", "last_word"),
    [
        (step_alone, "initialize(", "[0].step()"),  # the text is in `error`
        (forward_of_another_width, "F.linear(", "cannot be multiplied (1x3 and 2x1)"),
        (handle_with_another_error, 'raise KeyError("x") from error', "KeyError: 'x'"),
    ],
)
def test_traceback_has_no_frames_of_the_engine(
    function: Callable[[], None], last_line: str, last_word: str
):
    with pytest.raises((EngineError, RuntimeError, KeyError)) as raised:
        function()
    message = describe_crash(raised.value, 1, 0, 1)
    package = f"{Path(rayzero.__file__).parent}{os.sep}"
    assert package in "".join(traceback.format_tb(raised.tb)) or raised.value.__cause__
    assert package not in message.traceback
    assert f"in {function.__name__}" in message.traceback
    assert last_line in message.traceback
    assert message.traceback.endswith(last_word)


@pytest.mark.parametrize("enabled", [True, False])
def test_frames_are_read_without_garbage_collection(monkeypatch: pytest.MonkeyPatch, enabled: bool):
    """A collection inside `sys._current_frames` deadlocks the process before Python 3.11.9."""
    read = sys._current_frames
    during: list[bool] = []
    monkeypatch.setattr(sys, "_current_frames", lambda: during.append(gc.isenabled()) or read())
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        frames = module.current_frames()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert during == [False]
    assert get_ident() in frames


def test_heartbeat_has_step_phase_and_silent_time():
    now_s = 100.0
    progress = ProgressRecord(rank=1, clock=lambda: now_s)
    progress.begin_step(4)
    progress.enter_phase("backward")
    now_s = 102.5
    assert progress.heartbeat() == Heartbeat(1, 4, "backward", 2.5)
    progress.begin_step(5)
    assert progress.heartbeat() == Heartbeat(1, 5, "backward", 0.0)
    actor, critic = object(), object()  # engines, each of which numbers its own collectives
    for engine, number, expected in ((actor, 7, 7), (critic, 2, 9), (actor, 6, 8), (None, 1, 10)):
        progress.set_waiting(number, True, engine)
        assert progress.heartbeat()[-2:] == (expected, True)


@pytest.mark.parametrize("module", ["torch.distributed.distributed_c10d", "examples.user"])
def test_collective_of_the_function_itself_is_a_wait(harness: ThreadHarness, module: str):
    """So the rank that hangs is not mistaken for those that wait for it in torch.distributed."""
    release, function = Lock(), {"__name__": module}
    exec("def wait(entered, release): entered(); release.acquire()", function)
    entered = SimpleQueue()
    release.acquire()

    def body() -> Finished:
        harness.channel.progress.enter_phase("forward")
        function["wait"](lambda: entered.put(None), release)
        return DONE

    harness.start(body)
    entered.get(timeout=5)
    try:
        deadline_s = time.monotonic() + 5  # until the thread has left `entered`
        waiting = module.startswith("torch.")
        while (beat := harness.thread.heartbeat(harness.channel)).waiting != waiting:
            assert time.monotonic() < deadline_s, beat
        assert beat.phase == "forward"
        assert not harness.channel.progress.heartbeat().waiting
    finally:
        release.release()


def test_parked_function_continues_in_the_next_generation(harness: ThreadHarness):
    following = GenerationChannel(harness._post, 2, 0, harness.thread.give_up)
    continued: SimpleQueue[GenerationChannel] = SimpleQueue()

    def body() -> Finished:
        assert not harness.thread.resume(ASSIGN, following), "it does not wait yet"
        _, channel = harness.thread.park(drained=False, keeps_rank=True)
        continued.put(channel)
        return DONE

    harness.run(body)
    assert harness.posted == [Stopped(1, 0, stays=True, keeps_rank=True)]
    assert harness.thread.resume(ASSIGN, following)
    assert continued.get(timeout=5) is following
    assert following.left.wait(5)
    assert not harness.thread.resume(ASSIGN, harness.channel), "it waits no more"
    assert following.reforming
