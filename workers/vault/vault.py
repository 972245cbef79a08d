"""The vault of one node, without Ray: its parts, wired."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.workers.vault.background import CheckpointFileWriter, Replicator, WriteRankFile
from rayzero.workers.vault.buffers import BufferPool, available_bytes
from rayzero.workers.vault.images import FETCH_CHUNK_BYTES, FetchRemote, MappedSlotReader
from rayzero.workers.vault.peers import Peer, inspect_process
from rayzero.workers.vault.protocol import (
    Deregister,
    FetchVersion,
    GenerationComplete,
    OpenVersion,
    Register,
    Reserve,
    VaultRequest,
)
from rayzero.workers.vault.records import RankFile, SlotInfo, SlotRef, VaultEvent
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.server import Reply, VaultServer, make_address
from rayzero.workers.vault.slots import SlotGeometry, write_fully


class Vault:
    """Serves its node from construction until `close`. Every method may be called by any thread.

    Args:
        job: the job's name; part of the socket address.
        node_id: this node, as in `SlotRef.node_id`.
        fetch: reads from vaults of other nodes; must return within a bounded time.
        available: returns the machine's free memory in bytes.
        write_file: writes one rank's file of a checkpoint.
    """

    def __init__(
        self,
        job: str,
        node_id: str,
        fetch: FetchRemote,
        available: Callable[[], int] = available_bytes,
        write_file: WriteRankFile = write_rank_file,
    ) -> None:
        self._address = make_address(job)
        self._available_bytes = available
        self._fetch = fetch
        self._registry = SlotRegistry(BufferPool(available))
        self._replicator = Replicator(self._registry, fetch)
        self._file_writer = CheckpointFileWriter(self._registry, write_file)
        self._node_id = node_id
        self._server = VaultServer(
            self._address,
            self._handle,
            lambda peer: self._registry.discard_unfinished(peer.number),
        )

    def address(self) -> str:
        """The socket address for this node's workers."""
        return self._address

    def poll(self, timeout_s: float) -> list[VaultEvent]:
        """Workers whose processes died, each reported once; waits up to `timeout_s` for one."""
        return [*self._server.poll(timeout_s)]

    def inventory(self) -> list[SlotInfo]:
        """All complete versions in this vault."""
        return self._registry.inventory()

    def unpin(self, generation: int, step: int) -> None:
        """Unpins the versions of `step` and of earlier steps."""
        self._registry.unpin(generation, step)

    def replicate(self, slots: Sequence[SlotRef]) -> int:
        """Copies versions from other nodes' vaults; returns the bytes copied. See `Replicator`."""
        return self._replicator.replicate(slots)

    def write(self, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        """Writes versions as files of the checkpoint in `folder`. See `CheckpointFileWriter`."""
        return self._file_writer.write(folder, slots)

    def read(
        self, generation: int, rank: int, step: int, offset: int, length: int
    ) -> NDArray[np.uint8]:
        """Bytes of a version's image, for another node's vault; fewer at the image's end.

        The data is verified on a read at offset 0. A reader starts with the header, so no damaged
        data leaves this node.

        Raises:
            SlotGoneError: this vault does not hold the version.
            SlotDamagedError: the data does not match its checksum.
        """
        ref = SlotRef(generation, rank, step, self._node_id)
        with self._registry.open_pinned(ref) as fd:
            image = MappedSlotReader(ref, fd)
            try:
                if offset == 0:
                    image.verify()
                end = image.header.geometry.nbytes
            finally:
                image.close()
            data = np.empty(max(0, min(length, end - offset)), np.uint8)
            os.preadv(fd, [data.data], offset)
            return data

    def inspect(self, pid: int) -> str:
        """State and Python stacks of a process on this node."""
        return inspect_process(pid)

    def kill(self, pid: int) -> bool:
        """Sends SIGKILL to a connected worker's process; False if no worker has that pid."""
        return self._server.kill(pid)

    def usage(self) -> dict[str, Any]:
        """Bytes allocated: `slots`, `replicas`, `spare`; and `available` on this machine."""
        return self._registry.usage() | {"available": self._available_bytes()}

    def close(self) -> None:
        """Stops the server and frees the memory. Idempotent."""
        self._replicator.stop()
        self._server.close()
        self._registry.close()

    def _handle(self, peer: Peer, request: VaultRequest) -> Reply:
        """Executes a worker's request. On several threads at once, but for one peer in order."""
        match request:
            case Register():
                peer.worker, peer.pid = request.worker, request.pid
                return Reply(self._node_id)
            case Reserve():
                return self._reserve(peer, request)
            case OpenVersion(generation, rank, step):
                ref = SlotRef(generation, rank, step, self._node_id)
                return Reply(fds=[self._registry.open_version(ref)])
            case FetchVersion():
                return self._fetch_version(request)
            case GenerationComplete(generation):
                self._registry.generation_complete(generation)
            case Deregister():
                peer.worker = -1
                self._registry.discard_unfinished(peer.number)
        return Reply()

    def _reserve(self, peer: Peer, request: Reserve) -> Reply:
        geometry = SlotGeometry(request.table_bytes, request.metadata_capacity, request.data_bytes)
        fds = self._registry.reserve(
            peer.number,
            request.generation,
            request.rank,
            request.world_size,
            geometry,
            request.buffers,
        )
        if peer.closed:  # it died during the allocation: `on_disconnect` ran too early for these
            self._registry.discard_unfinished(peer.number)
        return Reply(fds=fds)

    def _fetch_version(self, request: FetchVersion) -> Reply:
        ref = SlotRef(request.generation, request.rank, request.step, request.node_id)
        data = self._fetch(ref, request.offset, min(request.length, FETCH_CHUNK_BYTES))
        fd = os.memfd_create("rayzero-fetched", os.MFD_CLOEXEC)
        try:
            write_fully(fd, data, 0)
        except BaseException:
            os.close(fd)
            raise
        return Reply(fds=[fd])
