"""A worker's connection to the vault of its node."""

from __future__ import annotations

import mmap
import os
import socket
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.workers.vault.images import MappedSlotReader, RemoteSlotReader, SlotReader, VaultSource
from rayzero.workers.vault.protocol import (
    Deregister,
    FetchVersion,
    GenerationComplete,
    JsonLineDecoder,
    OpenVersion,
    Register,
    Reserve,
    VaultRequest,
    abstract_socket_name,
    decode_error,
    encode_request,
)
from rayzero.workers.vault.records import Restore, SlotRef, VaultGoneError
from rayzero.workers.vault.slots import SlotWriter, encode_table, slot_geometry

_CALL_TIMEOUT_S = 10.0
_RESERVE_TIMEOUT_S = 300.0
"""Memory is allocated and touched at about 1 GB/s."""
_FETCH_TIMEOUT_S = 60.0
_RECEIVE_BYTES = 64 * 1024
_MAX_FDS = 64


class VaultClient:
    """Connected from construction until `close`. Safe to use from any thread.

    Every call may raise VaultGoneError, at the latest at its timeout. A client never reconnects: a
    new vault has a new address. Owns an idle thread, `rayzero-liveness`, which the vault watches to
    detect that this process died.

    Args:
        address: the vault's.
        worker: this worker's index, which the vault reports if the process dies.
    """

    def __init__(self, address: str, worker: int) -> None:
        self._decoder = JsonLineDecoder()
        self._replies: deque[dict[str, Any]] = deque()
        self._fds: deque[int] = deque()
        self._request_ids = count(1)
        self._call_lock = Lock()  # one call at a time: the next reply is the call's own
        self._send_lock = Lock()  # keeps each line whole; held briefly
        self._closed = False
        self._closed_event = Event()
        # Exits with the process, or once the session is closed.
        liveness = Thread(target=self._closed_event.wait, name="rayzero-liveness", daemon=True)
        liveness.start()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_CALL_TIMEOUT_S)
        try:
            self._socket.connect(abstract_socket_name(address))
            self._node_id, _ = self._call(Register(worker, os.getpid(), liveness.native_id or 0))
        except (OSError, VaultGoneError) as error:
            self._closed_event.set()
            self._socket.close()
            raise VaultGoneError(f"no vault answers at {address}: {error}") from None

    def reserve(
        self, generation: int, rank: int, world_size: int, table: BlockIndex, buffers: int
    ) -> list[SlotWriter]:
        """Allocates empty buffers for a state with that table. Takes about 1 s per GB.

        Buffers reserved earlier by this worker that hold no complete version are released.

        Raises:
            VaultMemoryError: the node has too little memory.
        """
        table_json = encode_table(table)
        size = slot_geometry(table, table_json)
        request = Reserve(
            generation,
            rank,
            world_size,
            size.table_bytes,
            size.metadata_capacity,
            size.data_bytes,
            buffers,
        )
        _, fds = self._call(request, _RESERVE_TIMEOUT_S)
        try:
            return [SlotWriter(fd, table_json) for fd in fds]
        finally:
            _close_fds(fds)

    def announce_complete(self, generation: int) -> None:
        """All ranks have a complete version of this generation. Does not wait for a reply."""
        self._send(GenerationComplete(generation))

    def open_source(
        self, restore: Restore, local_node: str | None = None, verify: bool = True
    ) -> VaultSource:
        """Opens the slots of `restore`; those on other nodes are read through this vault.

        Args:
            local_node: the node this vault is on; None: as the vault itself reports.
            verify: compare the data's checksums, where they were computed.

        Raises:
            DataError: a slot is gone or damaged.
        """
        images: list[SlotReader] = []
        try:
            for ref in restore.slots:
                local = ref.node_id == (local_node or self._node_id)
                images.append(
                    self._open_local(ref) if local else RemoteSlotReader(ref, self._fetch_remote)
                )
            return VaultSource(restore.step, images, verify)
        except BaseException:
            for image in images:
                image.close()
            raise

    def close(self) -> None:
        """Closes the session, and ends a call in flight on another thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(VaultGoneError):
            self._send(Deregister())
        self._closed_event.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._call_lock:
            self._socket.close()
            _close_fds(self._fds)
            self._fds.clear()

    def _open_local(self, ref: SlotRef) -> MappedSlotReader:
        _, [fd] = self._call(OpenVersion(ref.generation, ref.rank, ref.step))
        try:
            return MappedSlotReader(ref, fd)
        finally:
            os.close(fd)

    def _fetch_remote(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        request = FetchVersion(ref.node_id, ref.generation, ref.rank, ref.step, offset, length)
        _, [fd] = self._call(request, _FETCH_TIMEOUT_S)
        try:
            nbytes = os.fstat(fd).st_size
            return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) if nbytes else b"")
        finally:
            os.close(fd)

    def _call(
        self, request: VaultRequest, timeout_s: float = _CALL_TIMEOUT_S
    ) -> tuple[str, list[int]]:
        """The reply's value and descriptors."""
        deadline = monotonic() + timeout_s
        if not self._call_lock.acquire(timeout=timeout_s):
            raise VaultGoneError(f"the vault did not answer another call within {timeout_s:g} s")
        try:
            request_id = next(self._request_ids)
            self._send(request, request_id)
            reply, fds = self._receive(deadline)
            while reply["id"] != request_id:  # the late reply of a call that timed out
                _close_fds(fds)
                reply, fds = self._receive(deadline)
        finally:
            self._call_lock.release()
        if "error" in reply:
            raise decode_error(reply["error"])
        return reply["value"], fds

    def _send(self, request: VaultRequest, request_id: int | None = None) -> None:
        try:
            with self._send_lock:
                self._socket.sendall(encode_request(request, request_id))
        except OSError as error:
            raise VaultGoneError(f"the vault cannot be reached: {error}") from None

    def _receive(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        """The next reply and its descriptors."""
        while not self._replies:
            self._socket.settimeout(max(0.001, deadline - monotonic()))
            try:
                received, fds, _, _ = socket.recv_fds(
                    self._socket, _RECEIVE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
                self._fds += fds
                self._replies += self._decoder.feed(received)
            except (OSError, DataError) as error:
                raise VaultGoneError(f"the vault does not answer: {error}") from None
            if not received:
                raise VaultGoneError("the vault closed the connection: its process is gone")
        reply = self._replies.popleft()
        return reply, [self._fds.popleft() for _ in range(reply["fds"])]


def _close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
