"""The vault's door: a unix socket on which the node's workers ask for memory, and are watched.

One thread serves all connections and never waits for anything but them, so a worker's death is seen
at once. What takes long (memory, other nodes) is done by a few threads of its own, and the replies
come back through a queue.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any, TypeAlias

from rayzero.engine.errors import DataError
from rayzero.workers.messages import ConnectionLost
from rayzero.workers.vault.peers import Peer, Peers
from rayzero.workers.vault.queues import Inbox, Losses
from rayzero.workers.vault.requests import Reply, Request, Requests
from rayzero.workers.vault.wire import encode, socket_name

_SLOW_THREADS = 4
_STOP_S = 5.0
_RECEIVE_BYTES = 64 * 1024

_Answered: TypeAlias = tuple[Peer, Request, Reply]


def new_address(job: str) -> str:
    """An abstract socket's address: it needs no folder, and nobody has to remove it."""
    plain = "".join(one for one in job if one.isascii() and (one.isalnum() or one in "-_"))
    return f"@rayzero-{plain[:40]}-{secrets.token_hex(8)}"


class VaultServer:
    """Listens from its making until `close`. `poll` and `kill` may be called by any thread.

    Args:
        requests: what answers; on several threads at once.
        gone: told every peer that is gone, on the server's thread.
    """

    def __init__(self, address: str, requests: Requests, gone: Callable[[Peer], None]) -> None:
        self._requests = requests
        self._gone = gone
        self._peers = Peers()
        self._losses = Losses()
        self._answered: Inbox[_Answered | None] = Inbox()
        self._slow = ThreadPoolExecutor(_SLOW_THREADS, "rayzero-vault-slow")
        self._stopping = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(socket_name(address))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._watch(self._listener, self._accept)
        self._watch(self._answered, self._deliver)
        self._thread = Thread(target=self._serve, name="rayzero-vault", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> list[ConnectionLost]:
        """Workers that are gone, each once; waits up to `timeout_s` for one."""
        return self._losses.take(timeout_s)

    def kill(self, pid: int) -> bool:
        """Ends a connected worker's process at once; False when none has that pid."""
        return self._peers.kill(pid)

    def close(self) -> None:
        """Ends all connections, all waits and the thread. Safe to repeat.

        Slow work that is under way ends by itself, and is not heard any more.
        """
        if self._stopping:
            return
        self._stopping = True
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._losses.close()
        self._answered.put(None)
        self._thread.join(_STOP_S)
        self._peers.forget()

    def _work(self, peer: Peer, request: Request) -> None:
        """On a slow thread."""
        reply = self._requests.answer(peer, request)
        if not self._answered.put((peer, request, reply)):
            _close_all(reply)

    # What follows runs on the server's thread.

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                callback: Callable[[], None] = key.data
                callback()
        for peer in self._peers.all():
            self._part(peer)
        for item in self._answered.close():
            if item is not None:
                _close_all(item[2])
        self._selector.close()
        self._listener.close()

    def _watch(self, what: Any, callback: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, callback)

    def _accept(self) -> None:
        with suppress(OSError):  # it went away again
            connection, _ = self._listener.accept()
            peer = self._peers.admit(connection)
            if peer is None:
                return
            self._watch(peer.socket, lambda: self._receive(peer))
            if peer.pidfd >= 0:
                # A child that a worker forked has its socket too and keeps it open.
                self._watch(peer.pidfd, lambda: self._lose(peer))

    def _receive(self, peer: Peer) -> None:
        if peer.closed:
            return
        try:
            received = peer.socket.recv(_RECEIVE_BYTES)
            requests = peer.lines.feed(received)
        except BlockingIOError:
            return
        except (OSError, DataError):
            received, requests = b"", []
        if not received:
            self._lose(peer)
        for request in requests:
            self._handle(peer, request)

    def _handle(self, peer: Peer, request: Request) -> None:
        if self._requests.is_slow(request):
            self._slow.submit(self._work, peer, request)
            return
        reply = self._requests.answer(peer, request)
        if request.get("op") == "hello" and peer.thread_fd < 0:
            self._attend(peer, request)
        self._send(peer, request, reply)

    def _attend(self, peer: Peer, request: Request) -> None:
        """Watches a thread of a worker, too. When a process dies its threads go first, in a
        millisecond; then its memory is taken apart, which takes tenths of a second, or seconds with
        a GPU; only then its sockets are closed."""
        thread = request.get("thread")
        if isinstance(thread, int):
            self._peers.attend(peer, thread)
        if peer.thread_fd >= 0:
            self._watch(peer.thread_fd, lambda: self._thread_gone(peer))

    def _thread_gone(self, peer: Peer) -> None:
        self._receive(peer)  # the goodbye that it ended with may be waiting there
        self._lose(peer)

    def _deliver(self) -> None:
        for item in self._answered.take():
            if item is not None:
                self._send(*item)

    def _send(self, peer: Peer, request: Request, reply: Reply) -> None:
        answer, fds = reply
        try:
            if "id" in request and not peer.closed:
                line = encode({"id": request["id"], "fds": len(fds)} | answer)
                # Never waits: a worker has one call under way, and answers are short.
                socket.send_fds(peer.socket, [line], fds)
        except OSError:
            self._lose(peer)
        finally:
            _close_all(reply)

    def _lose(self, peer: Peer) -> None:
        """Its process is gone, or as good as gone: it hung up without a goodbye."""
        if peer.closed:
            return
        if peer.worker >= 0:
            self._losses.post(ConnectionLost(peer.worker, peer.pid))
        self._part(peer)

    def _part(self, peer: Peer) -> None:
        self._selector.unregister(peer.socket)
        for fd in (peer.pidfd, peer.thread_fd):
            if fd >= 0:
                self._selector.unregister(fd)
        self._peers.remove(peer)
        self._gone(peer)


def _close_all(reply: Reply) -> None:
    for fd in reply[1]:
        os.close(fd)
