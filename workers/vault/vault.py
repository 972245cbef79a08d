"""The vault of one node, without Ray. The controller calls its methods by `VaultGroup.call`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.checkpoint.store import folder_exists, split_url
from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.counts import RolloutCounts
from rayzero.workers.rollouts.ledger import RolloutPlan
from rayzero.workers.rollouts.server import RolloutServer
from rayzero.workers.vault import images
from rayzero.workers.vault.buffers import BufferPool, available_bytes
from rayzero.workers.vault.health import SLOWER, HealthCheck, HealthReport
from rayzero.workers.vault.images import FetchRemote, MappedSlotReader
from rayzero.workers.vault.peers import Peer, inspect_process
from rayzero.workers.vault.process_watch import LOOK_INTERVAL_S, ProcessWatch, read_sample
from rayzero.workers.vault.records import SlotInfo, SlotRef, VaultEvent, VaultGoneError
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.replicas import CopyTo, Replicas, copy_nowhere
from rayzero.workers.vault.requests import WorkerRequests
from rayzero.workers.vault.server import VaultServer, make_address
from rayzero.workers.vault.slots import HEADER_BYTES
from rayzero.workers.vault.weight_replicas import WeightReplicas

_HERE = "on this node: all nodes must share this folder"
_NO_RANK = -1  # the rank in reads that measure a link
_LINK_BYTES = 4 * 2**20
_LINK_READS = 5
STORE_WAIT_S = 5.0
"""How long a write waits for an earlier one; shorter than the timeout of a vault's poll."""

BeforeWrite: TypeAlias = Callable[[str, int, int], None]
"""(folder, step, rank) -> None; raises StoreError to make the write fail."""


class Vault:
    """Serves its node from construction until `close`. Every method may be called by any thread.

    Args:
        job: the job's name; part of the socket address.
        node_id: this node, as in `SlotRef.node_id`.
        fetch: reads from vaults of other nodes; must return within a bounded time.
        copy_to: makes another node's vault copy a slot of this one.
        available: returns the machine's free memory in bytes.
        before_write: called before each file of a checkpoint is written.
    """

    def __init__(
        self,
        job: str,
        node_id: str,
        fetch: FetchRemote,
        copy_to: CopyTo = copy_nowhere,
        available: Callable[[], int] = available_bytes,
        before_write: BeforeWrite = lambda folder, step, rank: None,
    ) -> None:
        self._node_id = node_id
        self._address = make_address(job)
        self._available_bytes = available
        self._fetch_remote = fetch
        self._before_write = before_write
        self._write_lock = Lock()
        self._closing = Event()
        self._rollouts: RolloutServer | None = None
        self._health = HealthCheck()
        self._watch = ProcessWatch()
        self._registry = SlotRegistry(BufferPool(available))
        # A pool of its own: it takes no spare buffer that a rank is going to need.
        self._weights = WeightReplicas(BufferPool(available), fetch)
        self._replicas = Replicas(self._registry, fetch, copy_to)
        self._server = VaultServer(
            self._address,
            WorkerRequests(node_id, self._registry, fetch, self._weights, self._replicas),
            self._on_disconnect,
        )

    def address(self) -> str:
        """Returns the socket address for this node's workers."""
        return self._address

    def poll(self, timeout_s: float) -> list[VaultEvent]:
        """Returns the workers whose processes died, each once; the workers that stalled or run
        again; and the failed attempts to copy slots. Waits up to `timeout_s` for the first."""
        until_s = monotonic() + timeout_s
        while True:
            left_s = max(0.0, until_s - monotonic())
            events: list[VaultEvent] = [*self._server.poll(min(left_s, LOOK_INTERVAL_S))]
            events += self._watch.look(self._server.processes())
            failures = self._replicas.failures
            events += [failures.popleft() for _ in range(len(failures))]
            if events or left_s <= LOOK_INTERVAL_S or self._closing.is_set():
                return events

    def kill(self, pid: int) -> bool:
        """Sends SIGKILL to a worker's process. Returns False if no worker with that pid was
        connected."""
        return self._server.kill(pid)

    def runs(self, pid: int) -> bool:
        """Returns whether a process on this node has not exited yet. A zombie has exited."""
        sample = read_sample(Path(f"/proc/{pid}"))
        return sample is not None and sample.state not in "ZX"

    def inspect(self, pid: int) -> str:
        """Returns the state and the Python stacks of a process on this node."""
        return inspect_process(pid)

    def inventory(self) -> list[SlotInfo]:
        """Returns all complete versions in this vault."""
        return self._registry.inventory()

    def usage(self) -> dict[str, int]:
        """Returns the bytes of `slots`, `replicas`, `spare`, and `available` on this machine."""
        usage = self._registry.usage() | {"available": self._available_bytes()}
        usage["replicas"] += self._weights.nbytes
        return usage

    def check_health(self, limit_s: float) -> None:
        """Begins a check of this node, in a process of its own, unless one is in progress."""
        self._health.begin(limit_s)

    def health(self) -> HealthReport | None:
        """Returns the report of the last check of this node; None while it is in progress."""
        return self._health.report()

    def slow_down(self) -> None:
        """Makes the checks of this node measure a slow node: an injected fault."""
        self._health.slower = SLOWER

    def measure_link(self, node_id: str) -> float:
        """Returns the GB/s at which this vault reads from another node's vault: the fastest of
        `_LINK_READS` reads. Raises VaultGoneError if that vault does not answer."""
        ref, fastest = SlotRef(0, _NO_RANK, 0, node_id), 0.0
        for _ in range(_LINK_READS):
            start_s = monotonic()
            nbytes = len(self._fetch_remote(ref, 0, _LINK_BYTES))
            fastest = max(fastest, 1e-9 * nbytes / (monotonic() - start_s))
        return fastest

    def unpin(self, generation: int, step: int) -> None:
        """Unpins the versions of `step` and of earlier steps that a checkpoint needed."""
        self._registry.unpin(generation, step)

    def read(
        self, generation: int, rank: int, step: int, offset: int, length: int
    ) -> NDArray[np.uint8]:
        """Returns bytes of a version's image for another node's vault: at most one chunk.

        A read at offset 0 of more than the header verifies the data first. Readers begin with such
        a read, so that no damaged data leaves this node. Raises SlotGoneError if this vault does
        not hold the version; SlotDamagedError if the data does not match its checksum.
        """
        if rank == _NO_RANK:
            return np.zeros(min(length, _LINK_BYTES), np.uint8)
        ref = SlotRef(generation, rank, step, self._node_id)
        with self._registry.open_pinned(ref) as fd:
            with closing(MappedSlotReader(ref, fd)) as image:
                if offset == 0 and length > HEADER_BYTES:
                    image.verify()
            nbytes = min(length, images.FETCH_CHUNK_BYTES, image.header.nbytes - offset)
            data = np.empty(max(0, nbytes), np.uint8)
            os.preadv(fd, [data.data], offset)
            return data

    def replicate(self, slots: Sequence[SlotRef]) -> int:
        """Copies the versions that this vault does not hold from other nodes' vaults, in chunks.
        Does not copy constants that an older replica has. Returns the bytes copied.

        Raises:
            SlotGoneError: a version no longer exists; the versions before it were copied.
            SlotDamagedError: the received bytes do not match their checksums.
            VaultMemoryError: there is too little memory.
            VaultGoneError: another vault does not answer, this vault is closing, or too many
                earlier calls have not returned.
        """
        return self._replicas.pull(slots)

    def write(self, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        """Writes a durable file of the checkpoint in `folder` for each version, one at a time.
        Returns the files. Raises StoreError if writing failed, or an earlier write has not
        finished; DataError if a version is gone or damaged."""
        # The store may hang forever: retries must not use up the vault's threads.
        if not self._write_lock.acquire(timeout=STORE_WAIT_S):
            raise StoreError("slow", folder, "earlier files are still being written")
        try:
            return [self._write_file(folder, ref) for ref in slots]
        finally:
            self._write_lock.release()

    def open_rollouts(self, plan: RolloutPlan, host: str, timeout_s: float) -> BufferAddress:
        """Opens an empty buffer of rollouts. Closes the earlier one, if there is one.

        Args:
            host: this node's address for the other nodes.
            timeout_s: see `RolloutServer`.

        Raises:
            ConfigError: no interface of this node has that address.
        """
        self.close_rollouts()
        self._rollouts = RolloutServer(plan, host, timeout_s)
        secret = os.urandom(32)
        self._rollouts.admit(secret)
        return BufferAddress(host, self._rollouts.port, secret, self._node_id, self._address)

    def update_rollouts(self, generation: int, version: int, lost: Sequence[int]) -> RolloutCounts:
        """Passes the newest version of the weights and all lost workers to the buffer of rollouts:
        see `RolloutLedger`. Returns the buffer's counts. Raises VaultGoneError if this vault has no
        buffer, or the buffer does not answer."""
        rollouts = self._rollouts
        if rollouts is None:
            raise VaultGoneError("this vault has no buffer of rollouts")
        rollouts.publish(generation, version)
        rollouts.lose(lost)
        try:
            return rollouts.counts()
        except TimeoutError:
            raise VaultGoneError("the buffer of rollouts does not answer") from None

    def close_rollouts(self) -> None:
        """Closes the buffer of rollouts, if there is one."""
        if self._rollouts is not None:
            self._rollouts.close()
            self._rollouts = None

    def close(self) -> None:
        """Stops the server, aborts copies at their next chunk, and frees the memory. Idempotent."""
        self._closing.set()
        self._replicas.close()
        self._health.close()
        self.close_rollouts()
        self._server.close()
        self._weights.close()
        self._registry.close()

    def _on_disconnect(self, peer: Peer) -> None:
        self._registry.discard_unfinished(peer, dead=True)
        self._weights.forget(peer)

    def _write_file(self, folder: str, ref: SlotRef) -> RankFile:
        self._before_write(folder, ref.step, ref.rank)
        job_folder = split_url(folder)[0]
        if not folder_exists(job_folder):  # only the holder of its lease may create it
            raise StoreError("gone", job_folder, f"the job's folder does not exist {_HERE}")
        with self._registry.open_pinned(ref) as fd, closing(MappedSlotReader(ref, fd)) as image:
            image.verify()
            return write_rank_file(
                folder,
                ref.rank,
                image.index(),
                image.metadata(),
                image.data,
                generation=ref.generation,
                world_size=image.header.world_size,
            )
