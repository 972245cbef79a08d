"""Vault and its Ray actor.

The vault of one node, without Ray: its parts, wired.

The Ray actor around a vault: a thin shell. Imports no torch, so that it starts fast.

Made with `num_cpus=0` on its node and `max_concurrency=COMMAND_THREADS`; then told of the others by
`meet`, again whenever one of them is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.engine.errors import RayzeroError
from rayzero.workers.chaos import node as node_faults
from rayzero.workers.chaos.spec import parse_fault
from rayzero.workers.vault.background import (
    CheckpointFileWriter,
    FaultInjectingStore,
    Replicator,
    WriteRankFile,
)
from rayzero.workers.vault.buffers import BufferPool, available_bytes
from rayzero.workers.vault.images import FetchRemote, MappedSlotReader
from rayzero.workers.vault.peers import inspect_process
from rayzero.workers.vault.records import (
    ConnectionLost,
    RankFile,
    SlotInfo,
    SlotRef,
    VaultEvent,
    VaultGoneError,
)
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.server import RequestHandlers, VaultServer, make_address


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
        fetch: FetchRemote,
        available: Callable[[], int] = available_bytes,
        write_file: WriteRankFile = write_rank_file,
    ) -> None:
        self.address = make_address(job)
        self._available_bytes = available
        self._registry = SlotRegistry(BufferPool(available))
        self._replicator = Replicator(self._registry, fetch)
        self._file_writer = CheckpointFileWriter(self._registry, write_file)
        self._node_id = node_id
        self._server = VaultServer(
            self.address,
            RequestHandlers(node_id, self._registry, fetch),
            lambda peer: self._registry.discard_unfinished(peer.number),
        )

    def poll(self, timeout_s: float) -> list[ConnectionLost]:
        """Workers whose processes are gone, each once; waits up to `timeout_s` for one."""
        return self._server.poll(timeout_s)

    def inventory(self) -> list[SlotInfo]:
        """Every whole version that is here."""
        return self._registry.inventory()

    def unpin(self, generation: int, step: int) -> None:
        """Frees what was pinned at that step or before."""
        self._registry.unpin(generation, step)

    def replicate(self, slots: Sequence[SlotRef]) -> int:
        """Copies versions of other nodes' vaults; the bytes copied. See `Replicator`."""
        return self._replicator.replicate(slots)

    def write(self, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        """Writes versions as files of the checkpoint in `folder`. See `CheckpointFileWriter`."""
        return self._file_writer.write(folder, slots)

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
        with self._registry.open_pinned(ref) as fd:
            image = MappedSlotReader(ref, fd)
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
        return inspect_process(pid)

    def kill(self, pid: int) -> bool:
        """Ends a connected worker's process at once (SIGKILL); False when none has that pid."""
        return self._server.kill(pid)

    def usage(self) -> dict[str, Any]:
        """Bytes held: `slots`, `replicas`, `spare`; and `available` on this machine."""
        return self._registry.usage() | {"available": self._available_bytes()}

    def close(self) -> None:
        """Ends the server and gives the memory back. Safe to repeat."""
        self._replicator.stop()
        self._server.close()
        self._registry.close()


VAULT_COMMAND_THREADS = 8
"""The long poll, a checkpoint, a copy and a stack dump hold one each; the others answer at once."""

_FETCH_TIMEOUT_S = 30.0


class VaultActor:
    """One node's vault.

    Args:
        job: the job's name.
        node_id: the node that this actor is on.
        faults: of the job; those of the store happen here.
        output_dir: where those are recorded that happened.
    """

    def __init__(
        self, job: str, node_id: str, faults: Sequence[str] = (), output_dir: str = ""
    ) -> None:
        with suppress(OSError):  # Ray makes workers nice; who notices deaths should not wait
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._peers: Mapping[str, Any] = {}
        self._store = FaultInjectingStore(faults, output_dir)
        self._vault = Vault(job, node_id, self._fetch_remote, write_file=self._store.write)

    def address(self) -> str:
        """Where workers of this node connect; answers as soon as the vault serves."""
        return self._vault.address

    def set_peers(self, peers: Mapping[str, Any]) -> None:
        """Handles of the other nodes' vaults, in place of those it knew."""
        self._peers = dict(peers)

    def poll(self, timeout_s: float) -> list[VaultEvent]:
        return [*self._vault.poll(timeout_s), *self._store.pop_fired()]

    def inventory(self) -> list[SlotInfo]:
        return self._vault.inventory()

    def unpin(self, generation: int, step: int) -> None:
        self._vault.unpin(generation, step)

    def replicate(self, slots: Sequence[SlotRef]) -> int:
        return self._vault.replicate(slots)

    def write(self, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        return self._vault.write(folder, slots)

    def read(
        self, generation: int, rank: int, step: int, offset: int, length: int
    ) -> NDArray[np.uint8]:
        """For other nodes' vaults: bytes of an image, through Ray's object store."""
        return self._vault.read(generation, rank, step, offset, length)

    def inspect(self, pid: int) -> str:
        return self._vault.inspect(pid)

    def kill(self, pid: int) -> bool:
        return self._vault.kill(pid)

    def inject(self, faults: Sequence[str]) -> None:
        """Further faults: all of the job's from now on."""
        self._store.set_faults(faults)

    def why_not_injectable(self, fault: str, is_here: bool, controller_network: str) -> str:
        return node_faults.why_impossible(parse_fault(fault), is_here, controller_network)

    def inject_node_fault(self, fault: str) -> None:
        node_faults.inject_node_fault(parse_fault(fault))

    def usage(self) -> dict[str, Any]:
        return self._vault.usage()

    def _fetch_remote(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        """Called by the vault's own threads."""
        peer = self._peers.get(ref.node_id)
        if peer is None:
            raise VaultGoneError(f"no vault is known on node {ref.node_id}")
        answer = peer.read.remote(ref.generation, ref.rank, ref.step, offset, length)
        try:
            found: NDArray[np.uint8] = ray.get(answer, timeout=_FETCH_TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, RayzeroError):
                raise error.cause from None
            raise VaultGoneError(f"the vault on node {ref.node_id} failed: {error}") from None
        except GetTimeoutError:
            raise VaultGoneError(
                f"the vault on node {ref.node_id} did not answer within {_FETCH_TIMEOUT_S:g} s"
            ) from None
        except RayError as error:
            raise VaultGoneError(f"the vault on node {ref.node_id} is gone: {error}") from None
        return found.data
