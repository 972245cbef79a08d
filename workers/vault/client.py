"""A worker's connection to the vault of its node."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from threading import Event, Lock, Thread
from time import monotonic
from typing import TypeVarTuple
from weakref import WeakValueDictionary

from rayzero.engine.errors import RayzeroError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.workers.vault import images
from rayzero.workers.vault.images import MappedSlotReader, RemoteSlotReader, SlotReader, VaultSource
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.peers import Peer
from rayzero.workers.vault.process_end import crash_report_fd
from rayzero.workers.vault.records import Restore, SlotRef, VaultGoneError
from rayzero.workers.vault.requests import (
    MAX_PACKET_BYTES,
    Descriptors,
    WorkerRequests,
    abstract_socket_name,
)
from rayzero.workers.vault.slots import SlotWriter, encode_index

_CALL_TIMEOUT_S = 30.0
_RESERVE_TIMEOUT_S = 300.0
_SLOWEST_RESERVE_BYTES_PER_S = 100e6
"""Memory is usually allocated and touched at about 1 GB/s."""
_FETCH_TIMEOUT_S = 60.0
_DEVICE_TIMEOUT_S = 10.0
"""Limit for the copies of an interrupted mirror, which are already queued on the device."""
_MAX_FDS = 64

Ts = TypeVarTuple("Ts")


class VaultClient:
    """A worker's session with its vault, until `close`. Safe to use from any thread.

    Every call may raise VaultGoneError, at the latest at its timeout. A client never reconnects: a
    new vault has a new address. Owns an idle thread, `rayzero-liveness`, which the vault watches to
    detect that this process died.

    Args:
        address: the vault's socket address.
        worker: this worker's index, which the vault reports if the process dies.
    """

    def __init__(self, address: str, worker: int) -> None:
        self.address = address
        self._request_ids = count(1)
        self._call_lock = Lock()  # one call at a time: the next reply is the call's own
        self._mappings: WeakValueDictionary[tuple[int, int], SlotMapping] = WeakValueDictionary()
        self._registered: list[SlotMapping] = []
        self._closed = Event()
        # Exits with the process, or once the session is closed.
        liveness = Thread(target=self._closed.wait, name="rayzero-liveness", daemon=True)
        liveness.start()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Unlike a timeout of Python's, this one lets `connect` wait while the backlog is full.
        limit = struct.pack("ll", int(_CALL_TIMEOUT_S), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._socket.connect(abstract_socket_name(address))
            self._socket.settimeout(_CALL_TIMEOUT_S)
            process = (os.getpid(), liveness.native_id or 0, crash_report_fd())
            self._call(_CALL_TIMEOUT_S, WorkerRequests.register, worker, *process)
        except (OSError, VaultGoneError) as error:
            with suppress(VaultGoneError):  # otherwise a slow vault takes the close for a death
                self._send(None, WorkerRequests.deregister)
            self._closed.set()
            self._socket.close()
            raise VaultGoneError(f"no vault answers at {address}: {error}") from None

    def reserve(self, generation: int, rank: int, world_size: int, index: BlockIndex) -> SlotWriter:
        """Allocates an empty buffer for a state with that index. A new one takes about 1 s per GB.

        Buffers reserved earlier by this worker that hold no complete version are released. Raises
        VaultMemoryError if the node has too little memory; EngineError if a device still writes to
        a buffer.
        """
        for mapping in self._registered:  # released buffers may become another worker's
            mapping.wait_idle(_DEVICE_TIMEOUT_S)
        [fd] = self._call(
            _RESERVE_TIMEOUT_S + index.nbytes / _SLOWEST_RESERVE_BYTES_PER_S,
            WorkerRequests.reserve,
            generation,
            rank,
            world_size,
            len(encode_index(index)),
            index.nbytes,
        )
        try:
            return SlotWriter(self._map(fd), index)
        finally:
            os.close(fd)

    def register(
        self, mapping: SlotMapping, register: Callable[[mmap.mmap], Callable[[], None]]
    ) -> None:
        """Registers a mapping with a device, and keeps it until `release_spares` or `close`."""
        if not mapping.registered:
            mapping.register(register)
            self._registered.append(mapping)

    def announce_loaded(self, generation: int, step: int) -> None:
        """Tells the vault that all ranks of this generation have loaded that step. Does not wait
        for a reply."""
        self._send(None, WorkerRequests.generation_loaded, generation, step)

    def announce_complete(self, generation: int) -> None:
        """Tells the vault that all ranks have a complete version of this generation. Does not wait
        for a reply."""
        self._send(None, WorkerRequests.generation_complete, generation)

    def replicate(self, generation: int, rank: int, step: int, nodes: Sequence[str]) -> None:
        """Orders copies of this rank's committed slot to these nodes. Does not wait for a reply."""
        self._send(None, WorkerRequests.replicate, generation, rank, step, ",".join(nodes))

    def announce_replicated(self, generation: int, step: int) -> None:
        """Tells the vault that other nodes have all ranks' slots of that step, so that replicas of
        older steps are no longer needed. Does not wait for a reply."""
        self._send(None, WorkerRequests.step_replicated, generation, step)

    def release_spares(self, used: Sequence[SlotWriter]) -> None:
        """Releases all buffers but those in `used`. Called when all ranks have reserved the buffers
        that they need."""
        used_mappings = [writer.mapping for writer in used]
        unused = [mapping for mapping in self._registered if mapping not in used_mappings]
        self._registered = [mapping for mapping in self._registered if mapping in used_mappings]
        for mapping in unused:
            mapping.close(_DEVICE_TIMEOUT_S)
        self._send(None, WorkerRequests.trim)

    def open_source(self, restore: Restore) -> VaultSource:
        """Opens the slots of `restore`; those on other nodes are read through this vault. Raises
        DataError if a slot is gone or damaged."""
        with ExitStack() as on_error:
            images: list[SlotReader] = []
            for ref in restore.slots:
                images.append(self._open_slot(ref))
                on_error.callback(images[-1].close)
            source = VaultSource(restore.step, images)
            on_error.pop_all()
            return source

    def open_weights(self, ref: SlotRef) -> int | None:
        """Returns a new descriptor of a buffer whose image has at least the weights of that
        version; the caller closes it. Returns None while the weights are being copied from another
        node: call again. Raises DataError if the version is gone or damaged; VaultMemoryError if
        this node has too little memory for the copy."""
        fds = self._call(_CALL_TIMEOUT_S, WorkerRequests.open_weights, *ref)
        return fds[0] if fds else None

    def close(self) -> None:
        """Closes the session, and ends a call in flight on another thread. Idempotent."""
        if self._closed.is_set():
            return
        while self._registered:
            self._registered.pop().close(_DEVICE_TIMEOUT_S)
        with suppress(VaultGoneError):
            self._send(None, WorkerRequests.deregister)
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._call_lock:
            self._socket.close()

    def _map(self, fd: int) -> SlotMapping:
        """Returns the buffer's mapping: the existing one, unless the buffer has grown since."""
        key = _buffer_key(fd)
        mapping = self._mappings.get(key)
        if mapping is None or not mapping.covers(fd):
            mapping = self._mappings[key] = SlotMapping(fd)
        return mapping

    def _open_slot(self, ref: SlotRef) -> SlotReader:
        fds = self._call(_CALL_TIMEOUT_S, WorkerRequests.open_version, *ref)
        if not fds:
            return RemoteSlotReader(ref, self._fetch_remote)
        try:
            mapping = self._mappings.get(_buffer_key(fds[0]))
            if mapping is not None and (not mapping.registered or not mapping.covers(fds[0])):
                mapping = None
            return MappedSlotReader(ref, fds[0], mapping=mapping)
        finally:
            os.close(fds[0])

    def _fetch_remote(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        limit_s = _FETCH_TIMEOUT_S + length * images.VERIFY_S_PER_BYTE
        [fd] = self._call(limit_s, WorkerRequests.fetch_version, *ref, offset, length)
        try:
            nbytes = os.fstat(fd).st_size
            return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) if nbytes else b"")
        finally:
            os.close(fd)

    def _call(
        self,
        timeout_s: float,
        method: Callable[[WorkerRequests, Peer, *Ts], Descriptors | None],
        *arguments: *Ts,
    ) -> Descriptors:
        deadline = monotonic() + timeout_s
        if not self._call_lock.acquire(timeout=timeout_s):
            raise VaultGoneError(f"the vault did not answer another call within {timeout_s:g} s")
        try:
            request_id = next(self._request_ids)
            self._send(request_id, method, *arguments)
            reply_id, error, fds = self._receive(deadline)
            while reply_id != request_id:  # the late reply of a call that timed out
                for fd in fds:
                    os.close(fd)
                reply_id, error, fds = self._receive(deadline)
        finally:
            self._call_lock.release()
        if error is not None:
            raise error
        return fds

    def _send(
        self,
        request_id: int | None,
        method: Callable[[WorkerRequests, Peer, *Ts], Descriptors | None],
        *arguments: *Ts,
    ) -> None:
        request = {"id": request_id, "call": method.__name__, "arguments": arguments}
        try:
            self._socket.send(json.dumps(request).encode())
        except OSError as error:
            raise VaultGoneError(f"the vault cannot be reached: {error}") from None

    def _receive(self, deadline: float) -> tuple[int, RayzeroError | None, Descriptors]:
        """Returns the next reply: the request's id, its error if any, and its descriptors."""
        self._socket.settimeout(max(0.001, deadline - monotonic()))
        try:
            packet, fds, _, _ = socket.recv_fds(
                self._socket, MAX_PACKET_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise VaultGoneError(f"the vault does not answer: {error}") from None
        if not packet:
            raise VaultGoneError("the vault closed the connection: its process is gone")
        return *pickle.loads(packet), fds


def _buffer_key(fd: int) -> tuple[int, int]:
    """Returns a buffer's key, the same for all descriptors while one or a mapping exists."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
