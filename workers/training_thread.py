"""The training thread: runs the training function, through the generations that it outlives.

Also the objects that it shares with the command threads: stop flags and the progress record.

Rule of ordering: `training-thread` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread
from time import monotonic
from typing import NoReturn

from rayzero.engine.errors import CollectiveError, EngineError
from rayzero.workers.crash import describe_crash, has_device_failed, summarize
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import (
    Assignment,
    Crashed,
    Heartbeat,
    InProcessStateInfo,
    LogLine,
    Prepared,
    RankMessage,
    Stopped,
    WorkerMessage,
)
from rayzero.workers.stacks import TRAINING_THREAD, current_frames

_WAITS_FOR_RANKS = (
    "torch.distributed.",
    "rayzero.engine.comm.elastic_group",
    "rayzero.workers.process_group",
    "rayzero.workers.rendezvous_store",
)


class StopFlag(Event):
    """Set by a command thread when the generation is ended, and before its collectives are aborted.

    Attributes:
        group_error: why the process group failed, if the flag was set for that.
    """

    def __init__(self, leave: Callable[[], NoReturn]) -> None:
        """
        Args:
            leave: called by `check` once the flag is set.
        """
        super().__init__()
        self.group_error = ""
        self._leave = leave

    def fail(self, error: str) -> None:
        """Sets the flag because the process group failed: the generation ends with that error."""
        self.group_error = error
        self.set()

    def check(self) -> None:
        """Leaves the generation if it was ended: see `GenerationChannel.leave`."""
        if self.is_set():
            self._leave()


class ProgressRecord:
    """Step, phase, and time of the last progress. Written by the training thread, read by command
    threads.

    Each write replaces one immutable pair, so readers need no lock.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._state = Heartbeat(rank, step=0, phase="start", silent_s=0.0), clock()
        self._newest: dict[object, int] = {}  # the number of each engine's newest collective

    @property
    def step(self) -> int:
        """The current step, counted from 1; 0 before the training function is called."""
        return self._state[0].step

    @property
    def phase(self) -> str:
        return self._state[0].phase

    def enter_phase(self, phase: str) -> None:
        self._state = self._state[0]._replace(phase=phase, waiting=False), self._clock()

    def renew(self) -> None:
        """Records a sign of life within a phase."""
        self._state = self._state[0], self._clock()

    def begin_step(self, step: int) -> None:
        self._state = self._state[0]._replace(step=step, waiting=False), self._clock()

    def set_waiting(self, collective: int, waiting: bool, engine: object = None) -> None:
        """Records that a wait for other ranks in a collective starts or ends. Each engine numbers
        its own collectives; their sum is the number of those of all engines."""
        newest = self._newest.get(engine, 0)
        self._newest[engine] = max(newest, collective)
        number = collective + sum(self._newest.values()) - self._newest[engine]
        heartbeat = self._state[0]._replace(collective=number, waiting=waiting)
        self._state = heartbeat, self._clock()

    def heartbeat(self) -> Heartbeat:
        heartbeat, at_s = self._state
        return heartbeat._replace(silent_s=self._clock() - at_s)


class GenerationChannel:
    """The state that the training thread and the command threads share for one generation.

    Attributes:
        interrupt: makes the training thread leave the generation at its next report, phase or step.
        drain: makes it leave after a step that all ranks agree on and have mirrored.
        drained: whether all ranks have mirrored that step: no further step begins.
        new_shares: shares that divide the samples of later steps once all ranks agree; or empty.
        divides: whether all ranks have agreed to divide where the next step begins.
        fenced: whether waits for peers are being aborted until the training thread has left.
        reforming: whether the function outlives the generation: it waits for the next one where no
            step is running.
        ending: the job is stopped: no generation follows.
        left: set when the training thread has left the generation.
        sockets: the process group's connections; shutting them down aborts a wait for peers.
    """

    def __init__(
        self,
        post: Callable[[WorkerMessage], None],
        generation: int,
        rank: int,
        give_up: Callable[[], NoReturn],
    ) -> None:
        """
        Args:
            give_up: leaves the generation, and does not return.
        """
        self.post = post
        self.generation = generation
        self.rank = rank
        self.progress = ProgressRecord(rank)
        self.interrupt = StopFlag(self.leave)
        self.drain = Event()
        self.sockets = SocketTracker()
        self.drained = False
        self.new_shares: tuple[float, ...] = ()
        self.divides = False
        self.fenced = False
        self.reforming = False
        self.ending = False
        self.left = Event()
        self._give_up = give_up

    def leave(self) -> NoReturn:
        """Leaves the generation. Raises CollectiveError, as for a lost peer, in a function that
        outlives it; SystemExit if the job is stopped. Never returns to any other function, whose
        process is replaced."""
        if self.ending:
            raise SystemExit("the job was stopped")
        if self.reforming:
            raise CollectiveError("the generation was ended")
        self._give_up()


class TrainingThread:
    """Runs the training function, once. Each generation ends with exactly one message: when the
    function has ended, when it waits for the next generation (`park`), or when it is given up.

    The thread is a daemon: a function that is given up, or hangs in native code, must not keep the
    process alive when the controller kills it.
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
        self._channel: GenerationChannel | None = None  # of the present generation
        self._next: SimpleQueue[tuple[Assignment, GenerationChannel]] = SimpleQueue()
        self._parked = Event()
        self._is_ahead = False  # the function was called, but its generation has not begun
        self._end: WorkerMessage | None = None
        self._end_lock = Lock()  # of `_end`: the next generation may begin at the same time

    def start(
        self, channel: GenerationChannel, body: Callable[[], WorkerMessage], *, ahead: bool = False
    ) -> None:
        """Runs `body`, from joining the group to the end message, in the training thread.

        Args:
            ahead: the function is called ahead of its generation, which `resume` begins.

        Raises:
            EngineError: a training function was called in this process before.
        """
        if self._thread is not None:
            raise EngineError(
                f"generation {channel.generation} cannot start: a training function has been "
                "called in this process"
            )
        self._channel, self._is_ahead = channel, ahead
        if ahead:
            self._parked.set()
        self._thread = Thread(
            target=self._run, args=(channel, body), name=TRAINING_THREAD, daemon=True
        )
        self._thread.start()

    def park(self, *, drained: bool, keeps_rank: bool) -> tuple[Assignment, GenerationChannel]:
        """Leaves the generation as at the function's end, posts the message of its end, and returns
        the next generation. Called on the training thread. Raises the error that made the device,
        and so this process, unusable."""
        channel = self._present_channel
        memory, error = self._release(channel, drained=drained)
        if error is not None:
            raise error
        message = self._left_message(channel, memory)
        self._parked.set()
        channel.left.set()
        channel.post(replace(message, stays=True, keeps_rank=keeps_rank))
        return self._await_next()

    def await_begin(self) -> tuple[Assignment, GenerationChannel]:
        """Waits until the generation begins ahead of which the function was called; returns that
        generation. Called on the training thread."""
        channel = self._present_channel
        channel.left.set()
        channel.post(Prepared(channel.generation, channel.rank))
        return self._await_next()

    def _await_next(self) -> tuple[Assignment, GenerationChannel]:
        following = self._next.get()
        _, self._channel = following
        return following

    def resume(self, assignment: Assignment, channel: GenerationChannel) -> bool:
        """Lets a function that waits for the next generation continue in it; also one that was
        called ahead of it and has not come to its wait. Returns False for any other."""
        if not self._parked.is_set():
            return False
        self._parked.clear()
        channel.reforming, self._is_ahead = not self._is_ahead, False
        with self._end_lock:
            if self._end is None:
                self._next.put((assignment, channel))
                return True
        self._post_end(channel, self._end)
        return True

    def give_up(self) -> NoReturn:
        """Leaves the generation as at the function's end, posts the message of its end, and waits
        for the end of the process. Called on the training thread. No exception is raised in the
        function, which could catch it and continue in a generation that has ended."""
        channel = self._present_channel
        drained = channel.drained and not channel.interrupt.is_set()
        memory, error = self._release(channel, drained=drained)
        message: WorkerMessage = self._left_message(channel, memory)
        if error is not None and has_device_failed(error):
            message = _crashed(channel, error)
        channel.left.set()
        channel.post(message)
        current_thread().name = "rayzero-given-up"  # stack dumps do not take it for training
        while True:
            Event().wait()

    @property
    def _present_channel(self) -> GenerationChannel:
        if self._channel is None:
            raise RuntimeError("the training thread is in no generation")
        return self._channel

    def heartbeat(self, channel: GenerationChannel) -> Heartbeat:
        """Returns the thread's progress. Inside torch.distributed the thread counts as waiting for
        other ranks: the engine does not announce the training function's own collectives."""
        beat = channel.progress.heartbeat()
        ident = self._thread.ident if self._thread is not None else None
        if beat.waiting or ident is None:
            return beat
        frame = current_frames().get(ident)
        module = str(frame.f_globals.get("__name__", "")) if frame else ""
        return beat._replace(waiting=module.startswith(_WAITS_FOR_RANKS))

    def _run(self, channel: GenerationChannel, body: Callable[[], WorkerMessage]) -> None:
        try:
            message = body()
        except BaseException as error:  # noqa: BLE001  # the thread's last frame: report everything
            message = self._describe_error(self._present_channel, error)
        with self._end_lock:
            self._end = message
            if not self._next.empty():  # the function was called ahead, and ended before its wait
                _, self._channel = self._next.get()
        self._post_end(self._present_channel, message)

    @staticmethod
    def _post_end(channel: GenerationChannel, message: WorkerMessage) -> None:
        channel.left.set()
        if isinstance(message, RankMessage):
            message = replace(message, generation=channel.generation)
        channel.post(message)

    def _describe_error(self, channel: GenerationChannel, raised: BaseException) -> WorkerMessage:
        stop = channel.interrupt
        drained = channel.drained and not stop.is_set()
        memory, release_error = self._release(channel, drained=drained)
        for error in (raised, release_error):
            if error is not None and has_device_failed(error):
                return _crashed(channel, error)
        # After a request to stop, every exception counts as the stop: an aborted collective, and
        # what follows from its result, raises many types.
        if stop.is_set() or channel.ending:
            return self._left_message(channel, memory)
        return replace(_crashed(channel, raised), memory=memory)

    def _left_message(
        self, channel: GenerationChannel, memory: InProcessStateInfo | None
    ) -> Crashed | Stopped:
        """Returns the message for a generation ended from outside, or by its process group."""
        generation, rank = channel.generation, channel.rank
        if error := channel.interrupt.group_error:
            step = channel.progress.step
            return Crashed(generation, rank, "collective", step, error, "", memory=memory)
        return Stopped(generation, rank, memory=memory)

    def _release(
        self, channel: GenerationChannel, *, drained: bool
    ) -> tuple[InProcessStateInfo | None, BaseException | None]:
        """Releases the generation; returns the state left in memory. If that fails, returns no
        state, and the error."""
        try:
            return self._on_left(drained), None
        except BaseException as error:  # noqa: BLE001  # the end message must be posted
            text = f"the generation could not be released, its state is lost: {summarize(error)}"
            channel.post(LogLine(channel.rank, "stderr", text))
            return None, error


def _crashed(channel: GenerationChannel, error: BaseException) -> Crashed:
    return describe_crash(error, channel.generation, channel.rank, channel.progress.step)
