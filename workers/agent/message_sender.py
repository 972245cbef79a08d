"""Sends a worker's messages to the agent of its node, for as long as the process lives."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from threading import Thread

from rayzero.workers.agent.link import Frame, FrameKind, Link, peer_user, take_frame
from rayzero.workers.messages import Heartbeat, LogLine, RoleReport, StepReport, WorkerMessage

SENDER_THREAD = "rayzero-messages"
BEAT_S = 1.0
"""Longest time between two frames."""
_RETRY_S = 0.1
_MAX_FRAMES = 64
_MAX_BYTES = 4 * 2**20
"""Of frames that are sent and not acknowledged; later messages wait in the outbox, which drops log
lines and details of reports that it has no room for."""
_WAITS = (Heartbeat, LogLine, RoleReport, StepReport)


class MessageSender:
    """Owns a daemon thread, which connects again when the agent is another one.

    Args:
        address: of the agent's socket for workers.
        worker: this worker's index.
        poll: returns messages, after at most the given time, in seconds.
    """

    def __init__(
        self, address: str, worker: int, poll: Callable[[float], Sequence[WorkerMessage]]
    ) -> None:
        self._address = address
        self._worker = worker
        self._poll = poll
        self._link = Link()
        Thread(target=self._run, name=SENDER_THREAD, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._serve_connection()
            except (OSError, EOFError):  # there is no agent, or not yet
                time.sleep(_RETRY_S)
            finally:
                self._link.close()

    def _serve_connection(self) -> None:
        """Connects, and sends until the connection's end, which it raises. Messages wait in the
        outbox meanwhile: none is taken without a connection."""
        received = bytearray()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._address)
            if peer_user(connection) != os.getuid():
                raise PermissionError("another user listens at the agent's address")
            index = self._worker.to_bytes(8)
            connection.sendall(self._link.encode(FrameKind.WORKER, index))
            hello = _receive(connection, received)
            while hello is None:
                hello = _receive(connection, received)
            self._link.open(connection.sendall, hello.acknowledged)
            while True:
                is_full = self._link.kept >= _MAX_FRAMES or self._link.kept_bytes >= _MAX_BYTES
                if not is_full:
                    self._send(self._poll(BEAT_S))
                while frame := _receive(connection, received, waits=is_full):
                    self._link.accept(frame)
                    is_full = False

    def _send(self, messages: Sequence[WorkerMessage]) -> None:
        kinds = {type(message) for message in messages}
        kind = FrameKind.URGENT
        if kinds <= {Heartbeat}:
            kind = FrameKind.QUIET
        elif kinds <= {Heartbeat, StepReport}:
            kind = FrameKind.STEPS
        elif kinds <= {*_WAITS}:
            kind = FrameKind.REPORTS
        self._link.send(kind, pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))


def _receive(connection: socket.socket, received: bytearray, waits: bool = True) -> Frame | None:
    """The next frame; None if it is not complete. Raises EOFError at the connection's end."""
    if frame := take_frame(received):
        return frame
    try:
        part = connection.recv(2**16, 0 if waits else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    if not part:
        raise EOFError("the agent has ended")
    received += part
    return take_frame(received)
