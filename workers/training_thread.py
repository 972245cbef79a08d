"""The training thread: runs the training function of one generation at a time.

Also what it shares with the command threads: stop flags and the progress record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from types import FrameType
from typing import NoReturn

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.errors import EngineError
from rayzero.workers.crash import describe_crash, has_device_failed, summarize
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import (
    Assignment,
    Crashed,
    Heartbeat,
    InProcessStateInfo,
    LogLine,
    StopCaught,
    Stopped,
    WorkerMessage,
)
from rayzero.workers.stacks import TRAINING_THREAD, current_frames

_WAITS_FOR_RANKS = (
    "torch.distributed.",
    "rayzero.engine.comm.elastic_group",
    "rayzero.engine.comm.joining_group",
)
THREAD_EXIT_S = 10.0
"""The time for a thread to exit after it has posted its end message."""


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
        self.group_error = ""
        """Why the process group failed, if it was set for that."""
        self._on_caught = on_caught

    def fail(self, error: str) -> None:
        """Sets it because the process group failed: the generation ends with that error."""
        self.group_error = error
        self.set()

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
        interrupt: makes the training thread leave the generation at its next report, phase or step.
        drain: the same, before the step after one that all ranks agree on and have mirrored.
        drained: whether they have: no further step begins.
        fenced: whether waits for peers are being aborted until the training thread has left.
        reforming: whether the function outlives the generation: `interrupt` does not unwind it, but
            it waits for the next generation where no step is under way.
        ending: no generation follows, so that the function is unwound.
        left: set when the training thread has left the generation.
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
        self.drained = False
        self.fenced = False
        self.reforming = False
        self.ending = False
        self.left = Event()

    def check_wait(self) -> None:
        """In a wait for the process group, which is still joining. Raises Interrupted if the
        generation was ended; DistError, as a lost peer does, to a function that outlives it."""
        if self.reforming and self.interrupt.is_set():
            raise dist.DistError("the generation was ended while its process group formed")
        self.interrupt.check()


class TrainingThread:
    """Runs the training function. Each generation ends with exactly one message: when the function
    has ended, or when it waits for the next generation (`park`).

    The thread is a daemon: a function that hangs in native code and never reaches a stop check must
    not keep the process alive when the controller kills it.
    """

    def __init__(self, on_left: Callable[[bool], InProcessStateInfo | None]) -> None:
        """
        Args:
            on_left: called on the training thread when it has left a generation, with True for a
                drain. It returns the state left in memory, and releases the peers; except after a
                drain, where a slower peer may still be receiving what this rank sent.
        """
        self._on_left = on_left
        self._thread: Thread | None = None
        self._end_posted = False  # the thread has nothing left to do but exit
        self._channel: GenerationChannel | None = None  # of the generation that it is in
        self._next: SimpleQueue[tuple[Assignment, GenerationChannel] | None] = SimpleQueue()
        self._parked = False
        self._parking = Lock()  # `resume` and `dismiss` come from several threads
        self._start_lock = Lock()  # `join` must not see a thread that is not started yet

    def start(self, channel: GenerationChannel, body: Callable[[], WorkerMessage]) -> None:
        """Runs `body`, from joining the group to the end message, in a new training thread.

        Raises:
            EngineError: the thread of an earlier generation is still alive.
        """
        # The end message is posted before the thread exits, so the next `start` may arrive while it
        # is still finishing.
        self.dismiss()
        if not self.join(THREAD_EXIT_S if self._end_posted else 0.0):
            raise EngineError(
                f"generation {channel.generation} cannot start: the training thread of the "
                "previous generation is still running"
            )
        with self._start_lock:
            self._end_posted = False
            self._channel = channel
            self._thread = Thread(
                target=self._run, args=(channel, body), name=TRAINING_THREAD, daemon=True
            )
            self._thread.start()

    def park(self, *, drained: bool, keeps_rank: bool) -> tuple[Assignment, GenerationChannel]:
        """On the training thread: leaves the generation as at the function's end, posts the message
        of that, and returns the next generation. Raises Interrupted if the function is not to
        continue in it; or what made the device, and so this process, useless."""
        channel = self._channel
        if channel is None:
            raise RuntimeError("the training thread is in no generation")
        memory, error = self._release(channel, drained=drained)
        if error is not None:
            raise error
        left = self._left_message(channel, memory)
        message = replace(left, stays=True, keeps_rank=keeps_rank)
        with self._parking:
            self._parked = True
        channel.left.set()
        channel.post(message)
        if channel.ending:  # set before the thread was parked: nobody has dismissed it
            self.dismiss()
        following = self._next.get()
        if following is None:
            channel.interrupt.leave()
        _, self._channel = following
        return following

    def resume(self, assignment: Assignment, channel: GenerationChannel) -> bool:
        """Lets the function continue in the next generation, if it waits for that."""
        if not self._unpark():
            return False
        channel.reforming = True
        self._next.put((assignment, channel))
        return True

    def dismiss(self) -> None:
        """A function that waits for the next generation is unwound: there is none, or another call
        of it begins."""
        if self._unpark():
            self._end_posted = True
            self._next.put(None)

    def _unpark(self) -> bool:
        """Whether the function waits for the next generation; it is told of that once."""
        with self._parking:
            was_parked, self._parked = self._parked, False
        return was_parked

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to exit; False on a timeout."""
        with self._start_lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def heartbeat(self, channel: GenerationChannel) -> Heartbeat:
        """The thread's progress. Inside torch.distributed it waits for other ranks, also in a
        collective of the training function's own, which the engine does not announce."""
        beat = channel.progress.heartbeat()
        ident = self._thread.ident if self._thread is not None else None
        if beat.waiting or ident is None:
            return beat
        frame = current_frames().get(ident)
        module = str(frame.f_globals.get("__name__", "")) if frame else ""
        return replace(beat, waiting=module.startswith(_WAITS_FOR_RANKS))

    def _run(self, channel: GenerationChannel, body: Callable[[], WorkerMessage]) -> None:
        message = self._run_body(channel, body)
        self._end_posted = True
        channel = self._channel or channel
        if not channel.left.is_set():  # else the message was posted when the function was parked
            channel.left.set()
            channel.post(message)

    def _run_body(
        self, channel: GenerationChannel, body: Callable[[], WorkerMessage]
    ) -> WorkerMessage:
        raised: BaseException | None = None
        try:
            message = body()
            if not (self._channel or channel).interrupt.times_raised:
                return message
        except BaseException as error:  # noqa: BLE001  # the thread's last frame: report everything
            raised = error
        return self._describe_end(self._channel or channel, raised)

    def _describe_end(
        self, channel: GenerationChannel, raised: BaseException | None
    ) -> WorkerMessage:
        """The message for a function that did not return, or only because it caught the stop."""
        generation, rank, step = channel.generation, channel.rank, channel.progress.step
        stop = channel.interrupt
        drained = bool(stop.times_raised) and not stop.is_set()
        memory, release_error = self._release(channel, drained=drained)
        for error in (raised, release_error):
            if error is not None and has_device_failed(error):
                return describe_crash(error, generation, rank, step)
        # While a stop is wanted every exception counts as one: a collective that is aborted, and
        # what follows from its result, raises many types.
        if stop.group_error or raised is None or stop.times_raised or stop.is_set():
            return self._left_message(channel, memory)
        return replace(describe_crash(raised, generation, rank, step), memory=memory)

    def _left_message(
        self, channel: GenerationChannel, memory: InProcessStateInfo | None
    ) -> Crashed | Stopped:
        """The message for a generation that was ended from outside, or by its process group."""
        generation, rank, step = channel.generation, channel.rank, channel.progress.step
        if error := channel.interrupt.group_error:
            return Crashed(generation, rank, "collective", step, error, "", memory)
        return Stopped(generation, rank, memory)

    def _release(
        self, channel: GenerationChannel, *, drained: bool
    ) -> tuple[InProcessStateInfo | None, BaseException | None]:
        """The state left in memory; none, and the error, if releasing the generation failed."""
        try:
            return self._on_left(drained), None
        except BaseException as error:  # noqa: BLE001  # the end message must be posted
            text = f"the generation could not be released, its state is lost: {summarize(error)}"
            channel.post(LogLine(channel.rank, "stderr", text))
            return None, error


def check_between_blocks(model: nn.Module, check: Callable[[], None]) -> list[RemovableHandle]:
    """Calls `check`, which raises, before each block of a forward. A backward checks at each
    reduction."""

    def before_block(*_: object) -> None:
        check()

    return [
        block.register_forward_pre_hook(before_block)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for block in module
    ]


def _user_place(frame: FrameType | None) -> str:
    """Where the user's code called the engine: the innermost frame that is not in a framework."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("rayzero", "torch"):
            code = frame.f_code
            return f"{code.co_name} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return "the framework"
