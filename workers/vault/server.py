"""Unix-socket server thread, request handlers.

The vault's door: a unix socket on which the node's workers ask for memory, and are watched.

One thread serves all connections and never waits for anything but them, so a worker's death is seen
at once. What takes long (memory, other nodes) is done by a few threads of its own, and the replies
come back through a queue.

What a worker may ask of its vault, one function a request.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any, TypeAlias

from rayzero.engine.errors import DataError
from rayzero.workers.vault.images import FETCH_CHUNK_BYTES, FetchRemote
from rayzero.workers.vault.peers import Connections, Peer
from rayzero.workers.vault.protocol import (
    LossQueue,
    WakeableQueue,
    abstract_socket_name,
    encode_error,
    encode_message,
)
from rayzero.workers.vault.records import ConnectionLost, SlotRef
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.slots import SlotGeometry, write_fully

Request: TypeAlias = dict[str, Any]


Reply: TypeAlias = tuple[dict[str, Any], list[int]]
"""What an answer says, and descriptors to send along and close."""


class RequestHandlers:
    """Answers requests. Safe to use from any thread, if a peer's own come one after another."""

    def __init__(self, node_id: str, shelf: SlotRegistry, fetch: FetchRemote) -> None:
        self._node_id = node_id
        self._registry = shelf
        self._fetch_remote = fetch
        self._handlers: Mapping[str, Callable[[Peer, Request], Reply]] = {
            "hello": self._register,
            "reserve": self._reserve,
            "open": self._open,
            "fetch": self._fetch_from_peer,
            "complete": self._complete,
            "goodbye": self._deregister,
        }

    def is_slow(self, request: Request) -> bool:
        """Whether the answer takes long enough to keep others waiting."""
        return request.get("op") in ("reserve", "fetch")

    def handle(self, peer: Peer, request: Request) -> Reply:
        """Does what is asked; what goes wrong is in the answer."""
        try:
            operation = self._handlers.get(request.get("op", ""))
            if operation is None:
                raise DataError(f"a vault knows no request {request.get('op')!r}")
            return operation(peer, request)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the worker's to hear
            return {"error": encode_error(error)}, []

    def _register(self, peer: Peer, request: Request) -> Reply:
        peer.worker, peer.pid = int(request["worker"]), int(request["pid"])
        return {"node_id": self._node_id}, []

    def _deregister(self, peer: Peer, request: Request) -> Reply:
        peer.worker = -1
        self._registry.discard_unfinished(peer.number)
        return {}, []

    def _reserve(self, peer: Peer, request: Request) -> Reply:
        fds = self._registry.reserve(
            peer.number,
            int(request["generation"]),
            int(request["rank"]),
            int(request["world_size"]),
            SlotGeometry(*map(int, request["geometry"])),
            int(request["buffers"]),
        )
        if peer.closed:  # it died while the memory was made: nobody else would let go of it
            self._registry.discard_unfinished(peer.number)
        return {}, fds

    def _open(self, peer: Peer, request: Request) -> Reply:
        return {}, [self._registry.open_version(_slot_ref(request, self._node_id))]

    def _fetch_from_peer(self, peer: Peer, request: Request) -> Reply:
        length = min(int(request["length"]), FETCH_CHUNK_BYTES)
        found = self._fetch_remote(
            _slot_ref(request, str(request["node_id"])), int(request["offset"]), length
        )
        fd = os.memfd_create("rayzero-fetched", os.MFD_CLOEXEC)
        try:
            write_fully(fd, found, 0)
        except BaseException:
            os.close(fd)
            raise
        return {"length": len(found)}, [fd]

    def _complete(self, peer: Peer, request: Request) -> Reply:
        self._registry.generation_complete(int(request["generation"]))
        return {}, []


def _slot_ref(request: Request, node_id: str) -> SlotRef:
    return SlotRef(int(request["generation"]), int(request["rank"]), int(request["step"]), node_id)


_IO_THREADS = 4


_STOP_TIMEOUT_S = 5.0


_RECEIVE_BYTES = 64 * 1024

_CompletedRequest: TypeAlias = tuple[Peer, Request, Reply]


def make_address(job: str) -> str:
    """An abstract socket's address: it needs no folder, and nobody has to remove it."""
    plain = "".join(one for one in job if one.isascii() and (one.isalnum() or one in "-_"))
    return f"@rayzero-{plain[:40]}-{secrets.token_hex(8)}"


class VaultServer:
    """Listens from its making until `close`. `poll` and `kill` may be called by any thread.

    Args:
        requests: what answers; on several threads at once.
        gone: told every peer that is gone, on the server's thread.
    """

    def __init__(
        self, address: str, requests: RequestHandlers, gone: Callable[[Peer], None]
    ) -> None:
        self._requests = requests
        self._on_disconnect = gone
        self._connections = Connections()
        self._loss_queue = LossQueue()
        self._completed: WakeableQueue[_CompletedRequest | None] = WakeableQueue()
        self._io_pool = ThreadPoolExecutor(_IO_THREADS, "rayzero-vault-slow")
        self._stopping = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(abstract_socket_name(address))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._register_callback(self._listener, self._accept)
        self._register_callback(self._completed, self._send_completed)
        self._thread = Thread(target=self._serve, name="rayzero-vault", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> list[ConnectionLost]:
        """Workers that are gone, each once; waits up to `timeout_s` for one."""
        return self._loss_queue.poll(timeout_s)

    def kill(self, pid: int) -> bool:
        """Ends a connected worker's process at once; False when none has that pid."""
        return self._connections.kill(pid)

    def close(self) -> None:
        """Ends all connections, all waits and the thread. Safe to repeat.

        Slow work that is under way ends by itself, and is not heard any more.
        """
        if self._stopping:
            return
        self._stopping = True
        self._io_pool.shutdown(wait=False, cancel_futures=True)
        self._loss_queue.close()
        self._completed.put(None)
        self._thread.join(_STOP_TIMEOUT_S)
        self._connections.clear()

    def _handle_slow(self, peer: Peer, request: Request) -> None:
        """On a slow thread."""
        reply = self._requests.handle(peer, request)
        if not self._completed.put((peer, request, reply)):
            _close_fds(reply)

    # What follows runs on the server's thread.

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                callback: Callable[[], None] = key.data
                callback()
        for peer in self._connections.list_peers():
            self._disconnect(peer)
        for item in self._completed.close():
            if item is not None:
                _close_fds(item[2])
        self._selector.close()
        self._listener.close()

    def _register_callback(self, what: Any, callback: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, callback)

    def _accept(self) -> None:
        with suppress(OSError):  # it went away again
            connection, _ = self._listener.accept()
            peer = self._connections.accept(connection)
            if peer is None:
                return
            self._register_callback(peer.socket, lambda: self._receive(peer))
            if peer.pidfd >= 0:
                # A child that a worker forked has its socket too and keeps it open.
                self._register_callback(peer.pidfd, lambda: self._report_loss(peer))

    def _receive(self, peer: Peer) -> None:
        if peer.closed:
            return
        try:
            received = peer.socket.recv(_RECEIVE_BYTES)
            requests = peer.decoder.feed(received)
        except BlockingIOError:
            return
        except (OSError, DataError):
            received, requests = b"", []
        if not received:
            self._report_loss(peer)
        for request in requests:
            self._handle(peer, request)

    def _handle(self, peer: Peer, request: Request) -> None:
        if self._requests.is_slow(request):
            self._io_pool.submit(self._handle_slow, peer, request)
            return
        reply = self._requests.handle(peer, request)
        if request.get("op") == "hello" and peer.thread_fd < 0:
            self._watch_thread(peer, request)
        self._send_reply(peer, request, reply)

    def _watch_thread(self, peer: Peer, request: Request) -> None:
        """Watches a thread of a worker, too. When a process dies its threads go first, in a
        millisecond; then its memory is taken apart, which takes tenths of a second, or seconds with
        a GPU; only then its sockets are closed."""
        thread = request.get("thread")
        if isinstance(thread, int):
            self._connections.watch_thread(peer, thread)
        if peer.thread_fd >= 0:
            self._register_callback(peer.thread_fd, lambda: self._on_thread_exit(peer))

    def _on_thread_exit(self, peer: Peer) -> None:
        self._receive(peer)  # the goodbye that it ended with may be waiting there
        self._report_loss(peer)

    def _send_completed(self) -> None:
        for item in self._completed.drain():
            if item is not None:
                self._send_reply(*item)

    def _send_reply(self, peer: Peer, request: Request, reply: Reply) -> None:
        answer, fds = reply
        try:
            if "id" in request and not peer.closed:
                line = encode_message({"id": request["id"], "fds": len(fds)} | answer)
                # Never waits: a worker has one call under way, and answers are short.
                socket.send_fds(peer.socket, [line], fds)
        except OSError:
            self._report_loss(peer)
        finally:
            _close_fds(reply)

    def _report_loss(self, peer: Peer) -> None:
        """Its process is gone, or as good as gone: it hung up without a goodbye."""
        if peer.closed:
            return
        if peer.worker >= 0:
            self._loss_queue.post(ConnectionLost(peer.worker, peer.pid))
        self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        self._selector.unregister(peer.socket)
        for fd in (peer.pidfd, peer.thread_fd):
            if fd >= 0:
                self._selector.unregister(fd)
        self._connections.remove(peer)
        self._on_disconnect(peer)


def _close_fds(reply: Reply) -> None:
    for fd in reply[1]:
        os.close(fd)
