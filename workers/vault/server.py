"""The vault's unix-socket server: transport, and detection of workers that die.

One thread serves all connections and waits for nothing else, so that a worker's death is detected
at once. Slow requests (memory allocation, reads from other nodes) run on a thread pool.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import selectors
import signal
import socket
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, TypeVarTuple

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.workers.vault.peers import Peer, accept_peer
from rayzero.workers.vault.process_end import read_process_end
from rayzero.workers.vault.records import ConnectionLost, VaultGoneError
from rayzero.workers.vault.requests import (
    MAX_PACKET_BYTES,
    Descriptors,
    WorkerRequests,
    abstract_socket_name,
    check_request,
)

Ts = TypeVarTuple("Ts")

_IO_THREADS = 16
"""Most threads for slow requests, started as needed. The ranks of a node reserve buffers at the
same time, and each reservation takes seconds."""
_STOP_TIMEOUT_S = 5.0
_SLOW_REQUESTS = WorkerRequests.reserve.__name__, WorkerRequests.fetch_version.__name__

_PING_INTERVAL_S = 1.0  # how often a poll that waits for the server's thread checks that it lives
_MAX_PACKETS_IN_TURN = 64
_MAX_UNREGISTERED = 64
"""Limit for connections that have not registered a worker, which workers do at once. Beyond it, the
oldest such connection is closed, so that strangers cannot use up the descriptors."""
_MAX_DISCONNECTED = 16
"""How many pidfds of disconnected workers are retained."""


def make_address(job: str) -> str:
    """Returns a new abstract socket address, which needs no folder and no cleanup."""
    name = "".join(char for char in job if char.isascii() and (char.isalnum() or char in "-_"))
    return f"@rayzero-{name[:40]}-{secrets.token_hex(8)}"


class VaultServer:
    """Serves the node's workers from construction until `close`. Any thread may call `poll` and
    `kill`. The server's thread calls `on_disconnect` for every peer that has disconnected."""

    def __init__(
        self, address: str, requests: WorkerRequests, on_disconnect: Callable[[Peer], None]
    ) -> None:
        self._requests = requests
        self._on_disconnect = on_disconnect
        self._peers: list[Peer] = []
        self._disconnected: deque[Peer] = deque()  # without deregistering: may be alive, for `kill`
        self._lock = Lock()  # guards both; no descriptor is closed while another thread uses it
        self._losses: SimpleQueue[ConnectionLost | None] = SimpleQueue()  # None: closed
        self._io_pool = ThreadPoolExecutor(_IO_THREADS, "rayzero-vault-io")
        self._stopping = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(abstract_socket_name(address))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._on_readable(self._listener, self._accept)
        self._ping = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answered = Event()
        self._on_readable(self._ping, self._answer_ping)
        self._thread = Thread(target=self._serve, name="rayzero-vault", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> list[ConnectionLost]:
        """Returns the workers that died, each once; waits up to `timeout_s` for the first. If there
        is none, it returns only when the server's thread has shown that it serves. Raises
        VaultGoneError if that thread has ended."""
        losses: list[ConnectionLost | None] = []
        with self._lock:
            if not self._stopping:
                self._answered.clear()
                os.eventfd_write(self._ping, 1)
        with suppress(Empty):
            losses.append(self._losses.get(timeout=timeout_s))
            while True:
                losses.append(self._losses.get_nowait())
        if None in losses:
            self._losses.put(None)  # other polls return at once, too
        while not (losses or self._stopping or self._answered.wait(_PING_INTERVAL_S)):
            if not self._thread.is_alive():
                raise VaultGoneError("the thread that serves the vault's workers has ended")
        return [loss for loss in losses if loss is not None]

    def kill(self, pid: int) -> bool:
        """Sends SIGKILL to a worker's process. Returns False if no worker with that pid was
        connected."""
        with self._lock:
            peers = (*self._disconnected, *self._peers)
            pidfds = {peer.pid: peer.pidfd for peer in peers if peer.worker >= 0}
            fd = pidfds.get(pid, -1)
            if fd < 0:
                return False
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True

    def processes(self) -> list[tuple[int, int]]:
        """Returns the index and pid of each worker whose process is in this pid namespace."""
        with self._lock:
            return [(peer.worker, peer.pid) for peer in self._peers if peer.thread_fd >= 0]

    def close(self) -> None:
        """Closes all connections, ends all polls and stops the thread. Idempotent.

        Slow requests in flight finish in the background; their replies are discarded.
        """
        if self._stopping:
            return
        self._stopping = True
        self._io_pool.shutdown(wait=False, cancel_futures=True)
        self._losses.put(None)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_STOP_TIMEOUT_S)
        self._listener.close()
        with self._lock:
            _close_fds(self._ping)
            while self._disconnected:
                _close_fds(self._disconnected.popleft().pidfd)

    def _run(self, peer: Peer, message: dict[str, Any]) -> None:
        """Executes a request and replies. Runs on the thread pool if the request is slow."""
        fds: Descriptors = []
        error: RayzeroError | None = None
        try:
            check_request(message.get("call"), message.get("arguments"))
            fds = getattr(self._requests, message["call"])(peer, *message["arguments"]) or []
        except RayzeroError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  # any error goes to the worker that asked
            error = DataError(f"{type(raised).__name__}: {raised}")
        try:
            self._reply(peer, message.get("id"), error, fds)
        finally:
            _close_fds(*fds)

    def _reply(
        self, peer: Peer, request_id: Any, error: RayzeroError | None, fds: Descriptors
    ) -> None:
        """Sends a reply. Never blocks: a worker has one call in flight, and replies are short."""
        with self._lock:
            if request_id is None or peer.closed:
                return
            try:
                socket.send_fds(peer.socket, [pickle.dumps((request_id, error))], fds)
            except OSError:
                with suppress(OSError):  # wakes the server's thread, which reports the loss
                    peer.socket.shutdown(socket.SHUT_RDWR)

    # The methods below run on the server's thread.

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                callback, peers = key.data
                try:
                    callback(*peers)
                except Exception:  # noqa: BLE001  # one connection must not end the others' service
                    traceback.print_exc()
                    for peer in peers:
                        self._report_loss(peer)
        for peer in list(self._peers):
            self._disconnect(peer)
        self._selector.close()

    def _on_readable(self, file: Any, callback: Callable[[*Ts], None], *peer: *Ts) -> None:
        self._selector.register(file, selectors.EVENT_READ, (callback, peer))

    def _answer_ping(self) -> None:
        os.eventfd_read(self._ping)
        self._answered.set()

    def _accept(self) -> None:
        with suppress(OSError):  # the client closed the connection meanwhile, or `close` was called
            peer = accept_peer(self._listener.accept()[0])
            if peer is None:
                return
            unregistered = [known for known in self._peers if known.worker < 0]
            if len(unregistered) >= _MAX_UNREGISTERED:
                self._disconnect(unregistered[0])
            with self._lock:
                self._peers.append(peer)
            self._on_readable(peer.socket, self._receive, peer)
            if peer.pidfd >= 0:
                # The socket alone is not enough: a child forked by the worker keeps it open.
                self._on_readable(peer.pidfd, self._on_exit, peer)

    def _receive(self, peer: Peer) -> None:
        """Handles requests that have arrived; at most `_MAX_PACKETS_IN_TURN`, so that one peer
        cannot keep the others waiting."""
        for _ in range(_MAX_PACKETS_IN_TURN):
            if peer.closed:
                return
            try:
                packet = peer.socket.recv(MAX_PACKET_BYTES)
                message = json.loads(packet) if packet else None
            except BlockingIOError:
                return
            except (OSError, ValueError, RecursionError):
                message = None
            if isinstance(message, dict) and isinstance(message.get("id"), int | None):
                self._handle(peer, message)
            else:
                self._report_loss(peer)

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        if message.get("call") in _SLOW_REQUESTS:
            with suppress(RuntimeError):  # the server is closing
                if peer.slow_requests.acquire(blocking=False):
                    running = self._io_pool.submit(self._run, peer, message)
                    running.add_done_callback(lambda _: peer.slow_requests.release())
                else:  # too many: a worker has one call in flight, and those that timed out
                    self._report_loss(peer)
            return
        watched = peer.thread_fd
        self._run(peer, message)
        if peer.thread_fd != watched:
            # Watch a thread of the worker, too. When a process dies, its threads exit first, within
            # a millisecond. Then its memory is freed, which takes tenths of a second, or seconds
            # with a GPU. Only then are its sockets closed.
            self._on_readable(peer.thread_fd, self._on_exit, peer)

    def _on_exit(self, peer: Peer) -> None:
        self._receive(peer)  # a `deregister` sent before the exit may still be unread
        self._report_loss(peer)

    def _report_loss(self, peer: Peer) -> None:
        """Reports a peer whose process died, or closed the connection without `deregister`."""
        if peer.closed:
            return
        if peer.worker >= 0:
            end = read_process_end((peer.thread_fd, peer.pidfd), peer.report_fd)
            self._losses.put(ConnectionLost(peer.worker, peer.pid, end))
        self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        for watched in (peer.socket, peer.pidfd, peer.thread_fd):
            if watched != -1:
                self._selector.unregister(watched)
        with self._lock:
            self._peers.remove(peer)
            peer.closed = True
            peer.socket.close()
            _close_fds(peer.thread_fd, peer.report_fd)
            unneeded = [peer] if peer.worker < 0 else []
            if peer.worker >= 0:
                self._disconnected.append(peer)
            if len(self._disconnected) > _MAX_DISCONNECTED:
                unneeded.append(self._disconnected.popleft())
            _close_fds(*(gone.pidfd for gone in unneeded))
        self._on_disconnect(peer)


def _close_fds(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
