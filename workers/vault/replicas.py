"""Replicas: the copies of a node's slots in the vaults of other nodes, in both directions.

A rank's assignment names the nodes that are to have copies of its state. When the rank has written
a slot that it keeps for them, it orders the copies from its vault. Copies therefore need no
controller, and end with the generation. When all nodes have a copy, the slot says so, where the
rank reads it. The ranks' next vote shows whether that holds for all ranks' slots of a step, and
then releases the older slots: see `Mirror`.

The slot's vault asks the other nodes' vaults to copy the slot; they pull it, one chunk at a time.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from threading import BoundedSemaphore, Condition, Lock, Thread
from typing import TypeAlias

from rayzero.engine.errors import RayzeroError
from rayzero.workers.vault.images import FetchRemote, MappedSlotReader, RemoteSlotReader
from rayzero.workers.vault.records import NotReplicated, SlotRef, VaultGoneError
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.slots import PAGE_BYTES

MAX_REPLICATE_CALLS = 3
"""Most calls of `pull` in flight, of which all but one wait. Fewer than the vault's threads."""
RETRY_BACKOFF_S = (1.0, 4.0, 16.0, 60.0)
"""Wait before each further attempt to copy to a node; the last value repeats."""
TRANSFER_GRACE_S = 600.0
SLOWEST_TRANSFER_BYTES_PER_S = 10e6
"""A store or a network that is slower than this has failed."""
_MAX_FAILURES = 64
"""How many failures are kept until a controller asks for them."""

CopyTo: TypeAlias = Callable[[str, SlotRef, float], int]
"""(node, one of this vault's slots, limit in seconds) -> bytes copied: calls `Vault.replicate` on
that node. Raises the errors of that method; VaultGoneError after the limit."""


def copy_nowhere(node: str, ref: SlotRef, limit_s: float) -> int:
    """Raises VaultGoneError: the `CopyTo` of a vault that knows no other vaults."""
    raise VaultGoneError(f"no vault is known on node {node}")


def transfer_limit_s(nbytes: int) -> float:
    """Returns how long a vault may take to write or copy `nbytes`."""
    return TRANSFER_GRACE_S + nbytes / SLOWEST_TRANSFER_BYTES_PER_S


class Replicas:
    """Copies this vault's slots to other nodes, and other nodes' slots to this vault. Owns a thread
    for each node to which copies are in flight; the thread ends with them or after `close`. Safe to
    use from any thread."""

    def __init__(self, registry: SlotRegistry, fetch: FetchRemote, copy_to: CopyTo) -> None:
        self._registry = registry
        self._fetch = fetch
        self._copy_to = copy_to
        self._pull_lock = Lock()  # one chunk from another node in flight
        self._pulls = BoundedSemaphore(MAX_REPLICATE_CALLS)
        self.failures: deque[NotReplicated] = deque(maxlen=_MAX_FAILURES)
        """The newest failed attempts."""
        self._orders: dict[str, deque[SlotRef]] = {}  # by node; a node here has a thread
        self._copied: dict[SlotRef, tuple[int, int]] = {}  # nodes without a copy, bytes copied
        self._generation = 0  # the newest
        self._is_closed = False
        self._changed = Condition()  # guards the four above

    def order(self, ref: SlotRef, nodes: Sequence[str]) -> None:
        """Begins to copy one of this vault's slots to other nodes, unless a slot of a newer
        generation was ordered before. Attempts for older generations end."""
        with self._changed:
            if self._is_closed or ref.generation < self._generation:
                return
            if ref.generation > self._generation:
                self._generation = ref.generation
                self._copied.clear()
                for orders in self._orders.values():
                    orders.clear()
            self._copied[ref] = len(nodes), 0
            for node in nodes:
                if node not in self._orders:
                    self._orders[node] = deque()
                    name = "rayzero-replicas"
                    Thread(target=self._serve, args=(node,), name=name, daemon=True).start()
                self._orders[node].append(ref)
            self._changed.notify_all()

    def pull(self, slots: Sequence[SlotRef]) -> int:
        """Copies other nodes' slots to this vault: see `Vault.replicate`."""
        # A caller that timed out may call again: retries must not use up the vault's threads.
        if not self._pulls.acquire(blocking=False):
            raise VaultGoneError("earlier requests for replicas are still in flight")
        try:
            with self._pull_lock:
                return sum(self._pull(ref) for ref in slots if not self._registry.has_version(ref))
        finally:
            self._pulls.release()

    def close(self) -> None:
        """Aborts copies to this vault at their next chunk. Ends waits for a retry. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # The methods below run in the threads.

    def _serve(self, node: str) -> None:
        failed = 0  # attempts in a row
        while (ref := self._take(node)) is not None:
            try:
                limit_s = transfer_limit_s(self._registry.bytes_to_copy(ref))
                nbytes = self._copy_to(node, ref, limit_s)
            except RayzeroError as error:
                self.failures.append(NotReplicated(ref.step, error.seen))
                self._postpone(node, ref, RETRY_BACKOFF_S[min(failed, len(RETRY_BACKOFF_S) - 1)])
                failed += 1
            else:
                failed = 0
                self._add_copied(ref, nbytes)

    def _take(self, node: str) -> SlotRef | None:
        """Returns the oldest order for that node; None if there is none: the thread then ends."""
        with self._changed:
            orders = self._orders[node]
            while orders and not self._is_closed:
                ref = orders.popleft()
                if self._registry.bytes_to_copy(ref):
                    return ref
            del self._orders[node]
            return None

    def _postpone(self, node: str, ref: SlotRef, pause_s: float) -> None:
        """Puts an order back and waits before the next attempt, unless its generation is over."""
        with self._changed:
            if ref.generation == self._generation:
                self._orders[node].append(ref)
                self._changed.wait_for(
                    lambda: self._is_closed or ref.generation < self._generation, pause_s
                )

    def _add_copied(self, ref: SlotRef, nbytes: int) -> None:
        with self._changed:
            if ref not in self._copied:
                return  # its generation is over
            missing, before = self._copied.pop(ref)
            if missing > 1:
                self._copied[ref] = missing - 1, before + nbytes
                return
        self._registry.copied(ref, before + nbytes)

    def _pull(self, ref: SlotRef) -> int:
        source = RemoteSlotReader(ref, self._fetch_while_open)
        header, start = source.header, source.header.data_offset
        stop = start + header.constant_bytes
        nbytes = header.nbytes
        with self._registry.receive_replica(header) as fd:  # writes the header at its end
            with (
                mmap.mmap(fd, header.nbytes) as buffer,
                memoryview(buffer) as whole,
                whole[PAGE_BYTES:start] as front,
                whole[start:stop] as constants,
                whole[stop:] as rest,
            ):
                source.read(PAGE_BYTES, front)
                if self._registry.copy_constants(header, constants):
                    nbytes -= header.constant_bytes  # copied from another replica in this vault
                else:
                    source.read(start, constants)
                source.read(stop, rest)
            with closing(MappedSlotReader(ref, fd, source.header)) as image:
                image.index()
                image.metadata()
                image.verify()
        return nbytes

    def _fetch_while_open(self, ref: SlotRef, offset: int, length: int) -> memoryview:
        if self._is_closed:
            raise VaultGoneError("the vault is closing")
        return self._fetch(ref, offset, length)
