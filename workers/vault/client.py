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
    JsonLineDecoder,
    abstract_socket_name,
    decode_error,
    encode_message,
)
from rayzero.workers.vault.records import Restore, SlotRef, VaultGoneError
from rayzero.workers.vault.slots import SlotWriter, encode_table, slot_geometry

_CALL_TIMEOUT_S = 10.0
_RESERVE_TIMEOUT_S = 300.0
"""Memory is touched at about 1 GB/s."""
_FETCH_TIMEOUT_S = 60.0
_RECEIVE_BYTES = 64 * 1024
_MAX_FDS = 64


class VaultClient:
    """Connected from its making until `close`. Safe to use from any thread.

    Every call may raise VaultGoneError, at the latest when its time is over. It does not come back
    to life: a new vault has a new address. Owns a thread that does nothing, `rayzero-sentry`, by
    which the vault sees this process die.

    Args:
        address: the vault's.
        worker: this worker's index; if the process dies, the vault reports that one.
    """

    def __init__(self, address: str, worker: int) -> None:
        self._decoder = JsonLineDecoder()
        self._replies: deque[dict[str, Any]] = deque()
        self._fds: deque[int] = deque()
        self._request_ids = count(1)
        self._call_lock = Lock()  # one call at a time: what is received is its answer
        self._send_lock = Lock()  # a line is not cut by another; held for moments
        self._closed = False
        self._closed_event = Event()
        # The vault watches it: it ends with the process, or after a goodbye.
        sentry = Thread(target=self._closed_event.wait, name="rayzero-sentry", daemon=True)
        sentry.start()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_CALL_TIMEOUT_S)
        try:
            self._socket.connect(abstract_socket_name(address))
            answer, _ = self._call("hello", worker=worker, pid=os.getpid(), thread=sentry.native_id)
        except (OSError, VaultGoneError) as error:
            self._closed_event.set()
            self._socket.close()
            raise VaultGoneError(f"no vault answers at {address}: {error}") from None
        self._node_id = str(answer["node_id"])

    def reserve(
        self, generation: int, rank: int, world_size: int, table: BlockIndex, buffers: int
    ) -> list[SlotWriter]:
        """So many new empty buffers for a state with that table. Takes about 1 s a GB.

        Buffers that this worker reserved before and that hold no whole version are given up.

        Raises:
            VaultMemoryError: the node has too little memory.
        """
        table_json = encode_table(table)
        geometry = slot_geometry(table, table_json)
        _, fds = self._call(
            "reserve",
            _RESERVE_TIMEOUT_S,
            generation=generation,
            rank=rank,
            world_size=world_size,
            geometry=[geometry.table_bytes, geometry.room_bytes, geometry.data_bytes],
            buffers=buffers,
        )
        try:
            return [SlotWriter(fd, table_json) for fd in fds]
        finally:
            _close_fds(fds)

    def announce_complete(self, generation: int, step: int) -> None:
        """All ranks of the generation have a version of that step. Waits for nothing."""
        self._send({"op": "complete", "generation": generation, "step": step})

    def open_source(
        self, restore: Restore, local_node: str | None = None, verify: bool = True
    ) -> VaultSource:
        """What the slots of `restore` hold; those on other nodes come through this vault.

        Args:
            local_node: the node this vault is on; None: as the vault itself says.
            verify: whether checksums of data are compared, where they were taken.

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
            for one in images:
                one.close()
            raise

    def close(self) -> None:
        """Says goodbye, and ends a call that another thread may be waiting in. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        with suppress(VaultGoneError):
            self._send({"op": "goodbye"})
        self._closed_event.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._call_lock:
            self._socket.close()
            _close_fds(self._fds)
            self._fds.clear()

    def _open_local(self, ref: SlotRef) -> MappedSlotReader:
        _, [fd] = self._call("open", generation=ref.generation, rank=ref.rank, step=ref.step)
        try:
            return MappedSlotReader(ref, fd)
        finally:
            os.close(fd)

    def _fetch_remote(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        answer, [fd] = self._call(
            "fetch",
            _FETCH_TIMEOUT_S,
            node_id=ref.node_id,
            generation=ref.generation,
            rank=ref.rank,
            step=ref.step,
            offset=offset,
            length=length,
        )
        try:
            if not answer["length"]:
                return memoryview(b"")
            return memoryview(mmap.mmap(fd, answer["length"], prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def _call(
        self, operation: str, timeout_s: float = _CALL_TIMEOUT_S, **arguments: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """The answer, and the descriptors that came with it."""
        until = monotonic() + timeout_s
        if not self._call_lock.acquire(timeout=timeout_s):
            raise VaultGoneError(f"the vault did not answer another call within {timeout_s:g} s")
        try:
            number = next(self._request_ids)
            self._send({"op": operation, "id": number} | arguments)
            answer, fds = self._receive(until)
            while answer["id"] != number:  # a call gave up before its answer came
                _close_fds(fds)
                answer, fds = self._receive(until)
        finally:
            self._call_lock.release()
        if "error" in answer:
            raise decode_error(answer["error"])
        return answer, fds

    def _send(self, request: dict[str, Any]) -> None:
        try:
            with self._send_lock:
                self._socket.sendall(encode_message(request))
        except OSError as error:
            raise VaultGoneError(f"the vault does not take a request: {error}") from None

    def _receive(self, until: float) -> tuple[dict[str, Any], list[int]]:
        """The next answer."""
        while not self._replies:
            self._socket.settimeout(max(0.001, until - monotonic()))
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
        answer = self._replies.popleft()
        return answer, [self._fds.popleft() for _ in range(answer["fds"])]


def _close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
