"""The vault of one node, without Ray: its parts, wired."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.workers.messages import ConnectionLost, RankFile, SlotInfo, SlotRef
from rayzero.workers.vault.files import Files, WriteFile
from rayzero.workers.vault.images import Fetch, MappedImage
from rayzero.workers.vault.memory import available_bytes
from rayzero.workers.vault.pool import Pool
from rayzero.workers.vault.processes import inspect
from rayzero.workers.vault.replicas import Replicator
from rayzero.workers.vault.requests import Requests
from rayzero.workers.vault.server import VaultServer, new_address
from rayzero.workers.vault.shelf import Shelf


class Vault:
    """Serves its node from its making until `close`. Every method may be called by any thread.

    Args:
        job: the job's name, for the address.
        node_id: this node, as `SlotRef.node_id` names it.
        fetch: reads from vaults of other nodes; must come back in limited time.
        available: how many bytes of memory the machine can still give.
        write_file: writes one rank's file of a checkpoint.
    """

    def __init__(
        self,
        job: str,
        node_id: str,
        fetch: Fetch,
        available: Callable[[], int] = available_bytes,
        write_file: WriteFile = write_rank_file,
    ) -> None:
        self.address = new_address(job)
        self._available = available
        self._shelf = Shelf(Pool(available))
        self._replicator = Replicator(self._shelf, fetch)
        self._files = Files(self._shelf, write_file)
        self._node_id = node_id
        self._server = VaultServer(
            self.address,
            Requests(node_id, self._shelf, fetch),
            lambda peer: self._shelf.abandon(peer.number),
        )

    def poll(self, timeout_s: float) -> list[ConnectionLost]:
        """Workers whose processes are gone, each once; waits up to `timeout_s` for one."""
        return self._server.poll(timeout_s)

    def inventory(self) -> list[SlotInfo]:
        """Every whole version that is here."""
        return self._shelf.inventory()

    def unpin(self, generation: int, step: int) -> None:
        """Frees what was pinned at that step or before."""
        self._shelf.unpin(generation, step)

    def replicate(self, slots: Sequence[SlotRef]) -> int:
        """Copies versions of other nodes' vaults; the bytes copied. See `Replicator`."""
        return self._replicator.replicate(slots)

    def write(self, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        """Writes versions as files of the checkpoint in `folder`. See `Files`."""
        return self._files.write(folder, slots)

    def read(
        self, generation: int, rank: int, step: int, offset: int, length: int
    ) -> NDArray[np.uint8]:
        """Bytes of a version's image, for another node's vault; fewer where it ends.

        Who reads an image begins with its header: then its data is verified first, so nothing
        damaged leaves this node.

        Raises:
            SlotGoneError, SlotDamagedError: the version is not here, or not what was written.
        """
        ref = SlotRef(generation, rank, step, self._node_id)
        with self._shelf.reading(ref) as fd:
            image = MappedImage(ref, fd)
            try:
                if offset == 0:
                    image.verify()
                end = image.header.geometry.nbytes
            finally:
                image.close()
            found = np.empty(max(0, min(length, end - offset)), np.uint8)
            os.preadv(fd, [found.data], offset)
            return found

    def inspect(self, pid: int) -> str:
        """What the system says about a process of this node."""
        return inspect(pid)

    def kill(self, pid: int) -> bool:
        """Ends a connected worker's process at once (SIGKILL); False when none has that pid."""
        return self._server.kill(pid)

    def usage(self) -> dict[str, Any]:
        """Bytes held: `slots`, `replicas`, `spare`; and `available` on this machine."""
        return self._shelf.usage() | {"available": self._available()}

    def close(self) -> None:
        """Ends the server and gives the memory back. Safe to repeat."""
        self._replicator.stop()
        self._server.close()
        self._shelf.close()
