"""The vault's unix-socket server: transport, and detection of workers that die.

One thread serves all connections and waits for nothing but them, so that a worker's death is
detected at once. Slow requests (memory allocation, reads from other nodes) run on a thread pool;
their replies come back to the server's thread through a queue.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, NamedTuple, TypeVar

from rayzero.engine.errors import DataError
from rayzero.workers.vault.peers import Connections, Peer
from rayzero.workers.vault.protocol import (
    FetchVersion,
    Register,
    Reserve,
    VaultRequest,
    abstract_socket_name,
    decode_request,
    encode_error,
    encode_message,
)
from rayzero.workers.vault.records import ConnectionLost

_IO_THREADS = 4
_STOP_TIMEOUT_S = 5.0
_RECEIVE_BYTES = 64 * 1024
_SLOW_REQUESTS = (Reserve, FetchVersion)


class Reply(NamedTuple):
    """A request's result: a value, and descriptors to send and then close."""

    value: str = ""
    fds: list[int] = []  # noqa: RUF012  # never changed
    error: Exception | None = None

    def close_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)


class _Completed(NamedTuple):
    """A slow request's reply, on its way back to the server's thread."""

    peer: Peer
    request_id: Any
    reply: Reply


RequestHandler = Callable[[Peer, VaultRequest], Reply]


def make_address(job: str) -> str:
    """An abstract socket address: it needs no folder and no cleanup."""
    name = "".join(char for char in job if char.isascii() and (char.isalnum() or char in "-_"))
    return f"@rayzero-{name[:40]}-{secrets.token_hex(8)}"


class VaultServer:
    """Listens from construction until `close`. `poll` and `kill` may be called by any thread.

    Args:
        handler: executes a request; called by several threads at once, but for one peer in order.
        on_disconnect: called for every peer that is gone, on the server's thread.
    """

    def __init__(
        self, address: str, handler: RequestHandler, on_disconnect: Callable[[Peer], None]
    ) -> None:
        self._handler = handler
        self._on_disconnect = on_disconnect
        self._connections = Connections()
        self._losses: SimpleQueue[ConnectionLost | None] = SimpleQueue()  # None: closed
        self._completed: WakeableQueue[_Completed | None] = WakeableQueue()
        self._io_pool = ThreadPoolExecutor(_IO_THREADS, "rayzero-vault-io")
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
        """Workers that died, each reported once; waits up to `timeout_s` for one."""
        losses: list[ConnectionLost | None] = []
        with suppress(Empty):
            losses.append(self._losses.get(timeout=timeout_s))
            while True:
                losses.append(self._losses.get_nowait())
        if None in losses:
            self._losses.put(None)  # other polls return at once, too
        return [loss for loss in losses if loss is not None]

    def kill(self, pid: int) -> bool:
        """Sends SIGKILL to a connected worker's process; False if no worker has that pid."""
        return self._connections.kill(pid)

    def close(self) -> None:
        """Closes all connections, ends all polls and stops the thread. Idempotent.

        Slow requests in flight finish in the background; their replies are discarded.
        """
        if self._stopping:
            return
        self._stopping = True
        self._io_pool.shutdown(wait=False, cancel_futures=True)
        self._losses.put(None)
        self._completed.put(None)
        self._thread.join(_STOP_TIMEOUT_S)
        self._connections.clear()

    def _handle_slow(self, peer: Peer, request: VaultRequest, request_id: Any) -> None:
        """Runs on the thread pool."""
        reply = self._run_handler(peer, request)
        if not self._completed.put(_Completed(peer, request_id, reply)):
            reply.close_fds()

    def _run_handler(self, peer: Peer, request: VaultRequest) -> Reply:
        try:
            return self._handler(peer, request)
        except Exception as error:  # noqa: BLE001  # any error goes to the worker that asked
            return Reply(error=error)

    # The methods below run on the server's thread.

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                callback: Callable[[], None] = key.data
                callback()
        for peer in self._connections.list_peers():
            self._disconnect(peer)
        for completed in self._completed.close():
            if completed is not None:
                completed.reply.close_fds()
        self._selector.close()
        self._listener.close()

    def _register_callback(self, file: Any, callback: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, callback)

    def _accept(self) -> None:
        with suppress(OSError):  # the client closed the connection meanwhile
            connection, _ = self._listener.accept()
            peer = self._connections.accept(connection)
            if peer is None:
                return
            self._register_callback(peer.socket, lambda: self._receive(peer))
            if peer.pidfd >= 0:
                # The socket alone is not enough: a child forked by the worker keeps it open.
                self._register_callback(peer.pidfd, lambda: self._report_loss(peer))

    def _receive(self, peer: Peer) -> None:
        if peer.closed:
            return
        try:
            received = peer.socket.recv(_RECEIVE_BYTES)
            messages = peer.decoder.feed(received)
        except BlockingIOError:
            return
        except (OSError, DataError):
            received, messages = b"", []
        if not received:
            self._report_loss(peer)
        for message in messages:
            self._handle(peer, message)

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        request_id = message.get("id")
        try:
            request = decode_request(message)
        except DataError as error:
            self._send_reply(peer, request_id, Reply(error=error))
            return
        if isinstance(request, _SLOW_REQUESTS):
            self._io_pool.submit(self._handle_slow, peer, request, request_id)
            return
        reply = self._run_handler(peer, request)
        if isinstance(request, Register) and peer.thread_fd < 0:
            self._watch_thread(peer, request.thread)
        self._send_reply(peer, request_id, reply)

    def _watch_thread(self, peer: Peer, thread: int) -> None:
        """Watches a thread of the worker, too. When a process dies its threads exit first, within a
        millisecond; then its memory is freed, which takes tenths of a second, or seconds with a
        GPU; only then are its sockets closed."""
        self._connections.watch_thread(peer, thread)
        if peer.thread_fd >= 0:
            self._register_callback(peer.thread_fd, lambda: self._on_thread_exit(peer))

    def _on_thread_exit(self, peer: Peer) -> None:
        self._receive(peer)  # a Deregister sent before the exit may still be unread
        self._report_loss(peer)

    def _send_completed(self) -> None:
        for completed in self._completed.drain():
            if completed is not None:
                self._send_reply(*completed)

    def _send_reply(self, peer: Peer, request_id: Any, reply: Reply) -> None:
        """Never blocks: a worker has one call in flight, and replies are short."""
        result = {"error": encode_error(reply.error)} if reply.error else {"value": reply.value}
        try:
            if request_id is not None and not peer.closed:
                line = encode_message({"id": request_id, "fds": len(reply.fds)} | result)
                socket.send_fds(peer.socket, [line], reply.fds)
        except OSError:
            self._report_loss(peer)
        finally:
            reply.close_fds()

    def _report_loss(self, peer: Peer) -> None:
        """The process died, or it closed the connection without `Deregister`."""
        if peer.closed:
            return
        if peer.worker >= 0:
            self._losses.put(ConnectionLost(peer.worker, peer.pid))
        self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        self._selector.unregister(peer.socket)
        for fd in (peer.pidfd, peer.thread_fd):
            if fd >= 0:
                self._selector.unregister(fd)
        self._connections.remove(peer)
        self._on_disconnect(peer)


T = TypeVar("T")


class WakeableQueue(Generic[T]):
    """A queue that a selector's thread can wait for by `fileno`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = Lock()

    def fileno(self) -> int:
        return self._fd

    def put(self, item: T) -> bool:
        """False if the queue is closed."""
        with self._lock:
            if self._fd < 0:
                return False
            self._items.append(item)
            os.eventfd_write(self._fd, 1)
            return True

    def drain(self) -> list[T]:
        with self._lock:
            os.eventfd_read(self._fd)
            items = list(self._items)
            self._items.clear()
            return items

    def close(self) -> list[T]:
        """Rejects further items; returns the ones left."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1
            return list(self._items)
