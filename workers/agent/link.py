"""Streams of frames, delivered in order and exactly once over connections that may be cut: between
a node's workers and its agent, and between the agent and the controller.

A frame is a header (kind, number, the greatest number that the sender has received, size of the
payload) and a payload. Numbered frames are kept until the other end acknowledges them, and are sent
again over the next connection. Payloads are pickled; connections are authenticated first.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import socket
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Any, BinaryIO, NamedTuple

_HEADER = Struct(">BQQI")
_CREDENTIALS = Struct("3i")  # pid, uid, gid
_NOT_NUMBERED = 0


class FrameKind(IntEnum):
    """The kind of a frame. Each comment names the sender, and then the payload."""

    ATTACH = 1  # controller: Attach; the first frame of a connection
    HELLO = 2  # agent: Hello, if it obeys the controller; to a worker: empty
    FENCED = 3  # agent: the epoch that it obeys; the connection ends
    CALL = 4  # controller: (call, method, arguments)
    REPLY = 5  # agent: (call, error or None, result)
    EVENTS = 6  # agent: events of its node
    BEAT = 7  # all: empty; the sender lives, and has received what the header says
    MESSAGES = 8  # agent: a NodeBatch
    WORKER = 9  # worker: its index; the first frame of a connection
    QUIET = 10  # worker: messages that may wait for other workers' messages for `QUIET_DELAY_S`
    REPORTS = 11  # worker: messages that may wait for `REPORTS_DELAY_S`
    URGENT = 12  # worker: messages that must not wait
    COMMAND = 13  # controller: NodeCommand; agent: WorkerCommand
    ANSWER = 14  # worker: (controller, command, pickled: error or None, result)
    STEPS = 15  # worker: as REPORTS, but only reports of steps and heartbeats
    CHANGES = 16  # worker: as URGENT, but without classes of the user: its agent combines them


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    kind: FrameKind
    number: int
    acknowledged: int
    payload: bytes


class WorkerFrame(NamedTuple):
    """A worker's frame in a batch.

    Args:
        number: grows with each frame of that worker. A frame that is sent again keeps its number.
        payload: the worker's messages, pickled.
    """

    worker: int
    number: int
    payload: bytes


@dataclass(frozen=True)
class Attach:
    """The payload with which a controller begins a connection.

    Args:
        epoch: the epoch of the controller's claim on the job.
        controller: identifies the controller. Two controllers may have the same epoch: one that
            failed before it held the job's folder, and its successor.
    """

    epoch: int
    controller: bytes


class Obedience:
    """The rule by which an agent or a worker obeys one controller at a time. It accepts none with a
    lower epoch than it has seen, and none that another controller has superseded."""

    def __init__(self) -> None:
        self.obeyed = Attach(0, b"")
        self._superseded: set[bytes] = set()

    def accepts(self, attach: Attach) -> bool:
        return attach.epoch >= self.obeyed.epoch and attach.controller not in self._superseded

    def supersede(self, attach: Attach) -> bool:
        """Obeys an accepted controller from now on. Returns whether the controller has changed."""
        if attach == self.obeyed:
            return False
        self._superseded.add(self.obeyed.controller)
        self.obeyed = attach
        return True


class WorkerCommand(NamedTuple):
    """A call of a method in a worker's process.

    Args:
        number: grows with each command of that controller.
        in_order: whether the command runs after the earlier commands that are `in_order`; otherwise
            it may run concurrently with all others.
        call: the result of `pack_call`.
        own: further arguments, which only this worker gets.
    """

    controller: Attach
    number: int
    in_order: bool
    call: bytes
    own: tuple[Any, ...]


class NodeCommand(NamedTuple):
    """The same command to several workers of a node. `own` has the arguments of each worker, by
    index; the other fields are those of `WorkerCommand`."""

    number: int
    in_order: bool
    call: bytes
    own: Mapping[int, tuple[Any, ...]]


@dataclass(frozen=True)
class Hello:
    """The payload with which an agent begins a connection to a controller.

    Args:
        last_worker: the greatest index of the workers known to the agent; -1: none. A new worker
            must not get a known index: the agent would take its messages for repeated ones.
    """

    last_worker: int


@dataclass(frozen=True)
class AgentAddress:
    """The addresses of an agent.

    Args:
        vault: the unix socket of its vault, for the workers of its node.
        host, port: the address for the controller, which must prove that it knows `secret`.
    """

    vault: str
    host: str
    port: int
    secret: bytes = field(repr=False)


def pack_call(method: str, arguments: Sequence[Any]) -> bytes:
    """Returns a command's method and arguments, pickled and compressed. The member list of 16,384
    ranks, which goes to each node, takes 1.9 MB uncompressed, and a tenth of that or less here."""
    return zlib.compress(pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL), 1)


def unpack_call(call: bytes) -> tuple[str, Sequence[Any]]:
    """Returns the method and the arguments of a command: the inverse of `pack_call`."""
    method, arguments = pickle.loads(zlib.decompress(call))
    return method, arguments


class FrameReceiver(asyncio.Protocol):
    """Receives the frames of a connection in the event-loop callback in which their bytes arrive. A
    StreamReader would wake a task for each frame, and a controller has thousands of connections.

    Args:
        receive: called with each frame.
    """

    def __init__(self, receive: Callable[[Frame], None]) -> None:
        self._receive = receive
        self._data = bytearray()
        self.ended = asyncio.get_running_loop().create_future()
        """Done when the connection has ended."""

    def data_received(self, data: bytes) -> None:
        self._data += data
        begin, end = 0, len(self._data)
        while (start := begin + _HEADER.size) <= end:
            kind, number, acknowledged, size = _HEADER.unpack_from(self._data, begin)
            if start + size > end:
                break
            begin = start + size
            payload = bytes(self._data[start:begin])
            self._receive(Frame(_KINDS[kind], number, acknowledged, payload))
        del self._data[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Reads the next frame. Raises EOFError or OSError at the connection's end."""
    kind, number, acknowledged, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return Frame(FrameKind(kind), number, acknowledged, await reader.readexactly(size))


def wait_frame(file: BinaryIO) -> Frame:
    """Reads the next frame, blocking. Raises EOFError or OSError at the connection's end."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError("the connection has ended")
    kind, number, acknowledged, size = _HEADER.unpack(header)
    payload = file.read(size)
    if len(payload) < size:
        raise EOFError("the connection has ended")
    return Frame(FrameKind(kind), number, acknowledged, payload)


def worker_socket(job: str, run: str, node_id: str) -> str:
    """Returns the abstract unix socket on which a node's agent listens for its workers. The next
    agent of the node listens on the same one, so that the workers find it."""
    name = hashlib.sha256(f"{job}\n{run}\n{node_id}".encode()).hexdigest()[:32]
    return f"\0rayzero-agent-{name}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the pid and the user id of the process at the other end of a unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


class Link:
    """One end of a stream, which outlives its connections. Used by one thread, or under a lock.

    Args:
        relays: whether received frames are acknowledged only by `confirm`; otherwise they are
            acknowledged as they are received.
    """

    def __init__(self, relays: bool = False) -> None:
        self._relays = relays
        self._confirmed = 0  # the greatest number passed to `confirm`
        self._acknowledged = 0  # the greatest number that the other end has acknowledged
        self._kept: deque[Frame] = deque()
        self._sent = 0
        self._received = 0
        self._acknowledgement = 0  # in the header of the newest frame that was sent
        self._beat_is_due = False
        self._write: Callable[[bytes], object] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the stream has a connection."""
        return self._write is not None

    @property
    def kept(self) -> int:
        """Number of sent frames that the other end has not acknowledged."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        return sum(len(frame.payload) for frame in self._kept)

    @property
    def acknowledged(self) -> int:
        """The greatest number that the other end has acknowledged."""
        return self._acknowledged

    def send(self, kind: FrameKind, payload: bytes) -> int:
        """Sends a numbered frame now, and again over each new connection until it is acknowledged.
        Returns its number."""
        self._sent += 1
        self._kept.append(Frame(kind, self._sent, 0, payload))
        self._put(kind, self._sent, payload)
        return self._sent

    def confirm(self, number: int) -> None:
        """Acknowledges the received frames up to that number."""
        self._confirmed = number
        self.beat()

    def acknowledge(self) -> None:
        """Sends a beat that acknowledges what was received, unless a frame has done so since."""
        if self._received > self._acknowledgement:
            self.beat()

    def beat(self) -> None:
        """Sends a beat over this connection, if there is one."""
        if self._write is not None:
            self._write(self.encode(FrameKind.BEAT))

    def beat_with_next(self) -> None:
        """Sends a beat together with the next numbered frame, which costs the other end less than a
        separate beat. Sends the beat alone if no frame was sent since the previous call."""
        if self._beat_is_due:
            self.beat()
        self._beat_is_due = True

    def encode(self, kind: FrameKind, payload: bytes = b"") -> bytes:
        """Returns a frame without a number, as the first frames of a connection before `open`."""
        return self._header(kind, _NOT_NUMBERED, payload) + payload

    def open(self, write: Callable[[bytes], object], acknowledged: int) -> None:
        """Opens a connection: sends the frames after number `acknowledged` to `write`, and then all
        later frames. `write` must not wait."""
        self._forget(acknowledged)
        self._write = write
        for frame in self._kept:
            self._put(frame.kind, frame.number, frame.payload)

    def close(self) -> None:
        """Notes that the connection has ended."""
        self._write = None

    def restart(self) -> None:
        """Notes that the other end was replaced: its frames are numbered from 1 again."""
        self._received = self._acknowledgement = 0

    def drop(self, kind: FrameKind) -> None:
        """Drops the kept frames of a kind, which the other end must not get any more."""
        self._kept = deque(frame for frame in self._kept if frame.kind is not kind)

    def accept(self, frame: Frame) -> bool:
        """Notes what a received frame acknowledges. Returns whether the frame is new."""
        self._forget(frame.acknowledged)
        if frame.number == _NOT_NUMBERED:
            return True
        is_new = frame.number > self._received
        self._received = max(frame.number, self._received)
        return is_new

    def _forget(self, acknowledged: int) -> None:
        self._acknowledged = max(self._acknowledged, acknowledged)
        while self._kept and self._kept[0].number <= acknowledged:
            self._kept.popleft()

    def _put(self, kind: FrameKind, number: int, payload: bytes) -> None:
        if self._write is not None:
            beat = self.encode(FrameKind.BEAT) if self._beat_is_due else b""
            self._beat_is_due = False
            self._write(beat + self._header(kind, number, payload) + payload)

    def _header(self, kind: FrameKind, number: int, payload: bytes) -> bytes:
        self._acknowledgement = self._confirmed if self._relays else self._received
        return _HEADER.pack(kind, number, self._acknowledgement, len(payload))
