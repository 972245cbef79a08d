"""Owns the training thread: one at a time, one for each generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Lock, Thread

from rayzero.engine.errors import EngineError
from rayzero.workers.crash import crashed
from rayzero.workers.interrupt import Interrupted
from rayzero.workers.messages import Assign, Memory, Message, Stopped
from rayzero.workers.wire import Wire

ENDING_S = 10.0
"""How long a thread may take to be over once it has told how it ended."""

Body = Callable[[], Message]
"""What a generation does, from joining its group to the message it ends with."""


class Runner:
    """Runs one body at a time and makes sure that each ends with exactly one message.

    The thread is a daemon: a function that no longer reaches an interrupt point, because it hangs
    in native code, must not keep the process alive once the controller kills it.
    """

    def __init__(self, on_unwound: Callable[[bool], Memory | None]) -> None:
        """`on_unwound` is called in the training thread when an exception left the body, and told
        whether that was a drain, by which all ranks leave behind the same step. It says what state
        is left in memory, and frees the peers; but not in a drain, where a slower one may still be
        taking what this rank has sent."""
        self._on_unwound = on_unwound
        self._thread: Thread | None = None
        self._wire: Wire | None = None
        self._told = False  # whether the thread has nothing left to do but to end
        self._starting = Lock()  # a thread that has not begun can be neither joined nor asked

    def start(self, assign: Assign, body: Body, wire: Wire) -> None:
        """Runs `body` in a new training thread.

        Raises:
            EngineError: the thread of an earlier generation is still alive.
        """
        # Its end is told before it is over, and whoever hears of it may be faster.
        if not self.join(ENDING_S if self._told else 0.0):
            raise EngineError(
                f"generation {assign.generation} cannot start: the training thread of the one "
                "before is still alive"
            )
        with self._starting:
            self._wire, self._told = wire, False
            self._thread = Thread(
                target=self._run, args=(assign, body, wire), name="rayzero-train", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Asks the body to unwind at its next report, phase or step. Returns at once."""
        if self._wire is not None:
            self._wire.interrupt.request()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; whether it came in time."""
        with self._starting:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self, assign: Assign, body: Body, wire: Wire) -> None:
        outcome = self._outcome(assign, body, wire)
        self._told = True
        wire.post(outcome)

    def _outcome(self, assign: Assign, body: Body, wire: Wire) -> Message:
        try:
            return body()
        except Interrupted:
            drained = not wire.interrupt.requested
            return Stopped(assign.generation, assign.rank, self._on_unwound(drained))
        except BaseException as error:  # noqa: BLE001  # the thread's end: nothing may be lost
            memory = self._on_unwound(False)
            told = crashed(error, assign.generation, assign.rank, wire.progress.step)
            if told.kind == "collective" and wire.interrupt.requested:  # broken off, by wish
                return Stopped(assign.generation, assign.rank, memory)
            return replace(told, memory=memory)
