"""The training thread: runs the training function of one generation at a time.

Also what it shares with the command threads: stop flags, the progress record, and the message that
describes a crash.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from types import FrameType, TracebackType
from typing import NoReturn

from rayzero.engine.errors import CollectiveError, ConfigError, DataError, EngineError
from rayzero.workers.entrypoint import EntryPointError
from rayzero.workers.messages import (
    Crashed,
    CrashKind,
    Heartbeat,
    InProcessStateInfo,
    LogLine,
    StopCaught,
    Stopped,
    WorkerMessage,
)
from rayzero.workers.process_group import SocketTracker, is_collective_failure
from rayzero.workers.retained_state import StateError
from rayzero.workers.vault.records import VaultMemoryError

THREAD_EXIT_S = 10.0
"""The time for a thread to exit after it has posted its end message."""

_PACKAGE_FOLDER = Path(__file__).resolve().parent


class Interrupted(BaseException):
    """Unwinds the training function. Not an Exception, so that `except Exception` does not catch
    it."""


class StopFlag(Event):
    """Set by a command thread; raised in the training thread at its next `check`, and at every one
    after that: a function that catches it does not continue."""

    def __init__(self, on_caught: Callable[[str], None]) -> None:
        """
        Args:
            on_caught: called when it is raised a second time, with the place in the user's code.
        """
        super().__init__()
        self.times_raised = 0
        self._on_caught = on_caught

    def check(self) -> None:
        """Raises Interrupted if a stop was requested."""
        if self.is_set() or self.times_raised:
            self.leave()

    def leave(self) -> NoReturn:
        """Raises Interrupted, as every check does from now on."""
        self.times_raised += 1
        if self.times_raised == 2:
            self._on_caught(_user_place(sys._getframe(1)))
        raise Interrupted


class ProgressRecord:
    """Step, phase, and time of the last progress. Written by the training thread, read by command
    threads.

    Each write replaces one immutable pair, so readers need no lock.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._state = Heartbeat(rank, step=0, phase="start", silent_s=0.0), clock()

    @property
    def step(self) -> int:
        """The current step, counted from 1; 0 before the training function is called."""
        return self._state[0].step

    def enter_phase(self, phase: str) -> None:
        self._state = replace(self._state[0], phase=phase, waiting=False), self._clock()

    def begin_step(self, step: int) -> None:
        self._state = replace(self._state[0], step=step, waiting=False), self._clock()

    def set_waiting(self, collective: int, waiting: bool) -> None:
        """A wait for other ranks starts or ends."""
        heartbeat = replace(self._state[0], collective=collective, waiting=waiting)
        self._state = heartbeat, self._clock()

    def heartbeat(self) -> Heartbeat:
        heartbeat, at_s = self._state
        return replace(heartbeat, silent_s=self._clock() - at_s)


class GenerationChannel:
    """What the training thread and the command threads share for one generation.

    Attributes:
        interrupt: unwinds the training function at its next report, phase or step.
        drain: unwinds it after a step that all ranks agree on and have mirrored.
        fenced: whether waits for peers are being aborted until the training thread has left.
        sockets: the process group's connections; shutting them down aborts a wait for peers.
    """

    def __init__(self, post: Callable[[WorkerMessage], None], generation: int, rank: int) -> None:
        self.post = post
        self.generation = generation
        self.rank = rank
        self.progress = ProgressRecord(rank)
        self.interrupt = StopFlag(lambda place: post(StopCaught(generation, rank, place)))
        self.drain = Event()
        self.sockets = SocketTracker()
        self.fenced = False


class TrainingThread:
    """Runs one generation at a time; each ends with exactly one message.

    The thread is a daemon: a function that hangs in native code and never reaches a stop check must
    not keep the process alive when the controller kills it.
    """

    def __init__(self, on_unwound: Callable[[bool], InProcessStateInfo | None]) -> None:
        """
        Args:
            on_unwound: called on the training thread after an exception, with True for a drain. It
                returns the state left in memory, and releases the peers; except after a drain,
                where a slower peer may still be receiving what this rank sent.
        """
        self._on_unwound = on_unwound
        self._thread: Thread | None = None
        self._end_posted = False  # the thread has nothing left to do but exit
        self._start_lock = Lock()  # `join` must not see a thread that is not started yet

    def start(self, channel: GenerationChannel, body: Callable[[], WorkerMessage]) -> None:
        """Runs `body`, from joining the group to the end message, in a new training thread.

        Raises:
            EngineError: the thread of an earlier generation is still alive.
        """
        # The end message is posted before the thread exits, so the next `start` may arrive while it
        # is still finishing.
        if not self.join(THREAD_EXIT_S if self._end_posted else 0.0):
            raise EngineError(
                f"generation {channel.generation} cannot start: the training thread of the "
                "previous generation is still running"
            )
        with self._start_lock:
            self._end_posted = False
            self._thread = Thread(
                target=self._run, args=(channel, body), name="rayzero-train", daemon=True
            )
            self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to exit; False on a timeout."""
        with self._start_lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self, channel: GenerationChannel, body: Callable[[], WorkerMessage]) -> None:
        message = self._run_body(channel, body)
        self._end_posted = True
        channel.post(message)

    def _run_body(
        self, channel: GenerationChannel, body: Callable[[], WorkerMessage]
    ) -> WorkerMessage:
        stop = channel.interrupt
        try:
            message = body()
        except BaseException as raised:  # noqa: BLE001  # the thread's last frame: report everything
            if not stop.times_raised:
                return self._describe_end(channel, raised)
        if stop.times_raised:  # however the function left after that: it may have caught it
            memory = self._unwind(channel, drained=not stop.is_set())
            return Stopped(channel.generation, channel.rank, memory)
        return message

    def _describe_end(self, channel: GenerationChannel, error: BaseException) -> WorkerMessage:
        """The message for an exception of the function, or of a collective."""
        generation, rank = channel.generation, channel.rank
        memory = self._unwind(channel, drained=False)
        crash = describe_crash(error, generation, rank, channel.progress.step)
        if crash.kind == "collective" and channel.interrupt.is_set():  # aborted on request
            return Stopped(generation, rank, memory)
        return replace(crash, memory=memory)

    def _unwind(self, channel: GenerationChannel, *, drained: bool) -> InProcessStateInfo | None:
        """The state left in memory; none if releasing the generation failed."""
        try:
            return self._on_unwound(drained)
        except Exception as error:  # noqa: BLE001  # the end message must be posted
            text = f"the generation could not be released, its state is lost: {_summary(error)}"
            channel.post(LogLine(channel.rank, "stderr", text))
            return None


def describe_crash(error: BaseException, generation: int, rank: int, step: int) -> Crashed:
    """The message for an exception; its traceback starts at the user's first frame."""
    try:
        return _describe_crash(error, generation, rank, step)
    except Exception as failure:  # noqa: BLE001  # a user's exception can fail in any way
        text = f"{type(error).__name__}, which cannot be described: {type(failure).__name__}"
        return Crashed(generation, rank, "user", step, text, "")


def _describe_crash(error: BaseException, generation: int, rank: int, step: int) -> Crashed:
    kind = _crash_kind(error)
    text = str(error) if kind in ("config", "entrypoint", "data", "state") else _summary(error)
    cause: BaseException | None = error if kind in ("user", "collective") else None
    if kind == "entrypoint":
        cause = error.__cause__
    return Crashed(generation, rank, kind, step, text, user_traceback(cause) if cause else "")


def user_traceback(error: BaseException) -> str:
    """The formatted traceback of `error`, starting at the user's first frame."""
    frames = _skip_framework_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _crash_kind(error: BaseException) -> CrashKind:
    if isinstance(error, EntryPointError):
        return "entrypoint"
    if isinstance(error, StateError):
        return "state"
    if isinstance(error, ConfigError | VaultMemoryError):
        return "config"
    if isinstance(error, DataError):
        return "data"
    # A failed collective counts as one, even if user code wrapped its exception.
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, CollectiveError) or is_collective_failure(chain):
            return "collective"
        chain = chain.__cause__ or chain.__context__
    return "user"


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the training function called sys.exit({error.code!r})"
    return "".join(traceback.format_exception_only(error)).strip()


def _user_place(frame: FrameType | None) -> str:
    """Where the user's code called the engine: the innermost frame that is not in a framework."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("rayzero", "torch"):
            code = frame.f_code
            return f"{code.co_name} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return "the framework"


def _skip_framework_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skips the leading frames of this package and of the import system."""
    first = frames
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        ours = not file.startswith("<") and _PACKAGE_FOLDER in Path(file).resolve().parents
        importing = file.startswith("<frozen importlib") or file.endswith("importlib/__init__.py")
        if not (ours or importing):
            return first
        first = first.tb_next
    return frames  # no user frame: show all
