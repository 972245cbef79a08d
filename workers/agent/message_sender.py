"""A worker's stream to the agent of its node: sends messages and answers, and receives commands."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Condition, Thread
from typing import Any

from rayzero.workers.agent.commands import CommandRunner
from rayzero.workers.agent.link import FrameKind, Link, peer_of, wait_frame
from rayzero.workers.messages import (
    Heartbeat,
    Joined,
    LogLine,
    Mirrored,
    Pinned,
    Prepared,
    Restored,
    RoleReport,
    StepReport,
    Stopped,
    WorkerMessage,
)

SENDER_THREAD = "rayzero-messages"
BEAT_S = 1.0
"""Longest time between two frames."""
_RETRY_S = 0.1
_MAX_FRAMES = 64
_MAX_BYTES = 4 * 2**20
"""Limit for frames that are sent and not acknowledged. Beyond it, messages wait in the outbox,
which drops log lines and details of reports for which it has no room."""
_CHANGES = {Heartbeat, StepReport, Joined, Prepared, Restored, Mirrored, Pinned, Stopped}
_KINDS: dict[FrameKind, set[type[WorkerMessage]]] = {
    FrameKind.QUIET: {Heartbeat},
    FrameKind.STEPS: {Heartbeat, StepReport},
    FrameKind.REPORTS: {Heartbeat, StepReport, LogLine, RoleReport},
    FrameKind.CHANGES: _CHANGES,
}
"""The messages that a frame of each kind may have. Other frames are URGENT."""


class MessageSender:
    """A worker's end of the stream, as long as its process lives. Owns two daemon threads: one
    sends messages; the other connects to the agent, and to the agent's successors, and receives.

    Args:
        address: the agent's socket for workers.
        worker: this worker's index.
        poll: returns messages, after at most the given time, in seconds.
        commands: the object whose methods the controller's commands call.
    """

    def __init__(
        self,
        address: str,
        worker: int,
        poll: Callable[[float], Sequence[WorkerMessage]],
        commands: Any = None,
    ) -> None:
        self._address = address
        self._worker = worker
        self._poll = poll
        self._changed = Condition()  # guards the link
        self._link = Link()
        self._runner = CommandRunner(commands, partial(self._send, FrameKind.ANSWER))
        Thread(target=self._receive, name="rayzero-commands", daemon=True).start()
        Thread(target=self._send_messages, name=SENDER_THREAD, daemon=True).start()

    def wait_connected(self, limit_s: float) -> bool:
        """Waits until the stream has a connection: from then on the agent sees the end of this
        process. Returns False at the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: self._link.is_open, limit_s)

    def _send_messages(self) -> None:
        """Sends messages. They wait in the outbox while there is no connection, or too many frames
        are not acknowledged."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_room)
            messages = self._poll(BEAT_S)
            types = set(map(type, messages))
            kinds = (kind for kind, allowed in _KINDS.items() if types <= allowed)
            kind = next(kinds, FrameKind.URGENT)
            self._send(kind, pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))

    def _has_room(self) -> bool:
        link = self._link
        return link.is_open and link.kept < _MAX_FRAMES and link.kept_bytes < _MAX_BYTES

    def _send(self, kind: FrameKind, payload: bytes) -> None:
        with self._changed:
            self._link.send(kind, payload)

    def _receive(self) -> None:
        while True:
            try:
                self._serve_connection()
            except (OSError, EOFError):  # the agent is gone, or does not listen yet
                time.sleep(_RETRY_S)
            finally:
                with self._changed:
                    self._link.close()

    def _serve_connection(self) -> None:
        """Connects, and receives until the connection ends. Raises OSError or EOFError then."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._address)
            if peer_of(connection)[1] != os.getuid():
                raise PermissionError("another user listens at the agent's address")
            self._link.restart()  # a new agent may send commands again: the runner skips those
            first = self._link.encode(FrameKind.WORKER, self._worker.to_bytes(8))
            connection.sendall(first)
            with connection.makefile("rb") as received:
                hello = wait_frame(received)
                with self._changed:
                    self._link.open(partial(_write, connection), hello.acknowledged)
                    self._changed.notify_all()
                while True:
                    frame = wait_frame(received)
                    with self._changed:
                        is_new = self._link.accept(frame)
                        self._changed.notify_all()
                    if is_new and frame.kind is FrameKind.COMMAND:
                        self._runner.begin(pickle.loads(frame.payload))


def _write(connection: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # the receiving thread sees the end; the link keeps the frame
        connection.sendall(frame)
