"""How the ranks of a group find each other, and exchange bytes.

Bootstrap is over TCP, as NCCL's: it blocks until all ranks are there, and only the end of its
sockets ends it. Data are on Unix sockets, which nobody outside can shut down, as shared memory and
NVLink. A peer that died or was stopped is not an error of an exchange, which stands until it is
aborted.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_HELLO = 16
_LOST = (BrokenPipeError, ConnectionError, OSError)


class Mesh:
    """The connections of one rank to all others. One thread calls `exchange`, any `abort`.

    Attributes:
        peer_lost: a peer's process has ended, or has left the group.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peer_lost = False
        self._aborted = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._peers: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0nccl-like-{uuid.uuid4().hex}")
        self._listener.listen(size)
        own = self._listener.getsockname()[1:].decode()
        try:
            self._connect(self._join(store, own))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):
                raise dist.DistBackendError(f"NCCL error: bootstrap failed: {error}") from error
            raise

    def _join(self, store: Any, own: str) -> list[str]:
        """Every rank's name. Rank 0 collects them, and answers when all are there."""
        if self.rank:
            port, host = struct.unpack("!2xH4s", store.get("nccl-like"))
            with socket.create_connection((socket.inet_ntoa(host), port)) as root:
                root.settimeout(None)
                root.sendall(json.dumps([self.rank, own]).encode() + b"\n")
                names: list[str] = json.loads(_line(root))
                return names
        with socket.create_server(("127.0.0.1", 0)) as server:
            host, port = server.getsockname()
            # A `sockaddr`, as in NCCL's unique id.
            place = struct.pack("!H4s", port, socket.inet_aton(host))
            store.set("nccl-like", struct.pack("=H", socket.AF_INET) + place)
            named, joined = {0: own}, []
            while len(named) < self.size:
                peer, _ = server.accept()
                joined.append(peer)
                rank, name = json.loads(_line(peer))
                named[rank] = name
            answer = json.dumps([named[rank] for rank in range(self.size)]).encode() + b"\n"
            for peer in joined:
                with peer, suppress(OSError):
                    peer.sendall(answer)
            return json.loads(answer)  # type: ignore[no-any-return]

    def _connect(self, names: list[str]) -> None:
        """Higher ranks connect to lower ones, in whose backlog the connection is at once."""
        for peer in range(self.rank):
            one = socket.socket(socket.AF_UNIX)
            with suppress(*_LOST):  # it died meanwhile: nothing will ever come from it
                one.connect("\0" + names[peer])
                one.sendall(self.rank.to_bytes(_HELLO, "little"))
            self._peers[peer] = one
        for _ in range(self.rank + 1, self.size):
            self._listener.settimeout(5.0)
            try:
                one, _address = self._listener.accept()
                self._peers[int.from_bytes(one.recv(_HELLO, socket.MSG_WAITALL), "little")] = one
            except _LOST:
                break  # the missing peer died after the bootstrap
        for one in self._peers.values():
            one.setblocking(False)

    def exchange(self, sent: Mapping[int, bytes], lengths: Mapping[int, int]) -> dict[int, bytes]:
        """Sends to and receives from peers; stands as long as one does not take part. Raises
        InterruptedError if the group was aborted, before or meanwhile."""
        out = {peer: memoryview(data) for peer, data in sent.items() if data}
        received = {peer: bytearray() for peer in lengths}
        missing = {peer for peer, length in lengths.items() if length}
        poller = select.poll()
        wake = self._wake_in.fileno()
        poller.register(wake, select.POLLIN)
        by_number: dict[int, int] = {}
        for peer in {*out, *missing} & {*self._peers}:
            by_number[self._peers[peer].fileno()] = peer
        while (out or missing) and not self._aborted:
            for number, peer in by_number.items():
                mask = (select.POLLIN if peer in missing else 0) | (
                    select.POLLOUT if peer in out else 0
                )
                if mask and number >= 0:
                    poller.register(number, mask)
                else:
                    with suppress(KeyError, ValueError):
                        poller.unregister(number)
            for number, _ in poller.poll():
                if number == wake or number not in by_number:
                    continue
                peer = by_number[number]
                try:
                    self._transfer(peer, out, missing, received, lengths)
                except _LOST:
                    self.peer_lost = True
                    by_number.pop(number)
                    poller.unregister(number)
        if self._aborted:
            raise InterruptedError("aborted")
        return {peer: bytes(data) for peer, data in received.items()}

    def _transfer(
        self,
        peer: int,
        out: dict[int, memoryview],
        missing: set[int],
        received: dict[int, bytearray],
        lengths: Mapping[int, int],
    ) -> None:
        connection = self._peers[peer]
        with suppress(BlockingIOError):
            if peer in missing:
                data = connection.recv(min(1 << 20, lengths[peer] - len(received[peer])))
                if not data:
                    raise ConnectionError("closed")
                received[peer] += data
                if len(received[peer]) == lengths[peer]:
                    missing.discard(peer)
        with suppress(BlockingIOError):
            if peer in out:
                out[peer] = out[peer][connection.send(out[peer]) :]
                if not out[peer]:
                    del out[peer]

    def look(self) -> bool:
        """Whether a peer is gone, also while nothing is exchanged."""
        for one in [*self._peers.values()]:
            with suppress(BlockingIOError, ValueError):
                try:
                    gone = not one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    gone = True
                self.peer_lost |= gone
        return self.peer_lost

    def abort(self) -> None:
        """Ends the exchange that stands, and all later ones."""
        self._aborted = True
        with suppress(OSError):
            self._wake_out.send(b"x")

    def close(self) -> None:
        """After `abort`, when no exchange runs any more."""
        for one in (*self._peers.values(), self._listener, self._wake_in, self._wake_out):
            one.close()
        self._peers.clear()


def _line(connection: socket.socket) -> str:
    """A line of JSON. Raises ValueError for anything else."""
    text = b""
    while not text.endswith(b"\n"):
        data = connection.recv(4096)
        if not data:
            raise ConnectionError("the connection was closed")
        text += data
        if not text.startswith(b"["):
            raise ValueError("the peer is none of the group's")
    return text.decode()
