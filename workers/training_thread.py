"""Runs the user function; interrupt, progress, crash report.

Owns the training thread: one at a time, one for each generation.

From an exception in the training thread to the message that tells the user about it.

The way out of the user's function when its generation is over.

One generation's line between a worker's training thread and its command threads.

The progress record of one training thread: step, phase, and when it last moved.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from types import TracebackType

from rayzero.engine.errors import CollectiveError, ConfigError, DataError, EngineError
from rayzero.workers.entrypoint import EntryPointError
from rayzero.workers.messages import (
    Assignment,
    Crashed,
    CrashKind,
    Heartbeat,
    InProcessStateInfo,
    Stopped,
    WorkerMessage,
)
from rayzero.workers.process_group import SocketTracker, is_collective_failure
from rayzero.workers.retained_state import StateError
from rayzero.workers.vault.records import VaultMemoryError

_PACKAGE_FOLDER = Path(__file__).resolve().parent


def describe_crash(error: BaseException, generation: int, rank: int, step: int) -> Crashed:
    """Describes `error`; the traceback begins at the user's first frame."""
    kind = _crash_kind(error)
    shown: BaseException | None = error if kind in ("user", "collective") else None
    if kind == "entrypoint":
        shown = error.__cause__
    text = str(error) if kind in ("config", "entrypoint", "data", "state") else _summary(error)
    return Crashed(generation, rank, kind, step, text, user_traceback(shown) if shown else "")


def user_traceback(error: BaseException) -> str:
    """The traceback of `error`, as Python prints it, from the user's first frame on."""
    told = traceback.TracebackException(
        type(error), error, _skip_framework_frames(error.__traceback__)
    )
    return "".join(told.format()).rstrip()


def _crash_kind(error: BaseException) -> CrashKind:
    if isinstance(error, EntryPointError):
        return "entrypoint"
    if isinstance(error, StateError):
        return "state"
    if isinstance(error, ConfigError | VaultMemoryError):
        return "config"
    if isinstance(error, DataError):
        return "data"
    # User code that wraps a failed collective does not change what it is.
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


def _skip_framework_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skips the frames of this package and of the import system that lead to the user's code."""
    first = frames
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        ours = not file.startswith("<") and _PACKAGE_FOLDER in Path(file).resolve().parents
        importing = file.startswith("<frozen importlib") or file.endswith("importlib/__init__.py")
        if not (ours or importing):
            return first
        first = first.tb_next
    return frames  # none of it is the user's: show what there is


class Interrupted(BaseException):
    """Unwinds the user's function. Not an Exception: `except Exception` must not swallow it."""


class StopFlag:
    """Set by the command thread, raised in the training thread at its next `check`."""

    def __init__(self) -> None:
        self._event = Event()

    def request(self) -> None:
        self._event.set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises Interrupted once an interrupt was requested."""
        if self._event.is_set():
            raise Interrupted


@dataclass(frozen=True)
class _ProgressState:
    step: int
    phase: str
    at_s: float
    collective: int = 0
    waiting: bool = False


class ProgressRecord:
    """Written by the training thread, read by the command thread.

    Each write replaces one immutable record, so a reader needs no lock to see a consistent one.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._state = _ProgressState(0, "start", clock())

    @property
    def step(self) -> int:
        """The step being worked on, counted from 1; 0 before the user's function is called."""
        return self._state.step

    def enter_phase(self, phase: str) -> None:
        self._state = replace(self._state, phase=phase, at_s=self._clock(), waiting=False)

    def begin_step(self, step: int) -> None:
        self._state = replace(self._state, step=step, at_s=self._clock(), waiting=False)

    def set_waiting(self, collective: int, entered: bool) -> None:
        """A wait for other ranks begins, or ends."""
        self._state = replace(
            self._state, collective=collective, waiting=entered, at_s=self._clock()
        )

    def heartbeat(self, rank: int) -> Heartbeat:
        beat = self._state
        silent_s = self._clock() - beat.at_s
        return Heartbeat(rank, beat.step, beat.phase, silent_s, beat.collective, beat.waiting)


@dataclass(frozen=True)
class GenerationChannel:
    """Messages, the progress record, and the ways out.

    Attributes:
        interrupt: out of the function at its next report, phase or step.
        drain: out of it at the end of a step that all ranks agree on, with the state mirrored.
        connections: the generation's, to be cut where a wait in them must end.
    """

    post: Callable[[WorkerMessage], None]
    generation: int = 0
    progress: ProgressRecord = field(default_factory=ProgressRecord)
    interrupt: StopFlag = field(default_factory=StopFlag)
    drain: StopFlag = field(default_factory=StopFlag)
    sockets: SocketTracker = field(default_factory=SocketTracker)


THREAD_EXIT_S = 10.0
"""How long a thread may take to be over once it has told how it ended."""

GenerationBody = Callable[[], WorkerMessage]
"""What a generation does, from joining its group to the message it ends with."""


class TrainingThread:
    """Runs one body at a time and makes sure that each ends with exactly one message.

    The thread is a daemon: a function that no longer reaches an interrupt point, because it hangs
    in native code, must not keep the process alive once the controller kills it.
    """

    def __init__(self, on_unwound: Callable[[bool], InProcessStateInfo | None]) -> None:
        """`on_unwound` is called in the training thread when an exception left the body, and told
        whether that was a drain, by which all ranks leave behind the same step. It says what state
        is left in memory, and frees the peers; but not in a drain, where a slower one may still be
        taking what this rank has sent."""
        self._on_unwound = on_unwound
        self._thread: Thread | None = None
        self._channel: GenerationChannel | None = None
        self._end_posted = False  # whether the thread has nothing left to do but to end
        self._start_lock = Lock()  # a thread that has not begun can be neither joined nor asked

    def start(self, assign: Assignment, body: GenerationBody, wire: GenerationChannel) -> None:
        """Runs `body` in a new training thread.

        Raises:
            EngineError: the thread of an earlier generation is still alive.
        """
        # Its end is told before it is over, and whoever hears of it may be faster.
        if not self.join(THREAD_EXIT_S if self._end_posted else 0.0):
            raise EngineError(
                f"generation {assign.generation} cannot start: the training thread of the one "
                "before is still alive"
            )
        with self._start_lock:
            self._channel, self._end_posted = wire, False
            self._thread = Thread(
                target=self._run, args=(assign, body, wire), name="rayzero-train", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Asks the body to unwind at its next report, phase or step. Returns at once."""
        if self._channel is not None:
            self._channel.interrupt.request()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; whether it came in time."""
        with self._start_lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self, assign: Assignment, body: GenerationBody, wire: GenerationChannel) -> None:
        outcome = self._run_body(assign, body, wire)
        self._end_posted = True
        wire.post(outcome)

    def _run_body(
        self, assign: Assignment, body: GenerationBody, wire: GenerationChannel
    ) -> WorkerMessage:
        try:
            return body()
        except Interrupted:
            drained = not wire.interrupt.requested
            return Stopped(assign.generation, assign.rank, self._on_unwound(drained))
        except BaseException as error:  # noqa: BLE001  # the thread's end: nothing may be lost
            memory = self._on_unwound(False)
            told = describe_crash(error, assign.generation, assign.rank, wire.progress.step)
            if told.kind == "collective" and wire.interrupt.requested:  # broken off, by wish
                return Stopped(assign.generation, assign.rank, memory)
            return replace(told, memory=memory)
