"""Keeps a vault running on every node of the job, and receives from the vaults which processes
ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.policies.recovery import StoredSlot, newest_complete_in_vaults
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.vault.process_end import ProcessEnd
from rayzero.workers.vault.records import NotReplicated, ProcessStalled
from rayzero.workers.vault.vault import Vault

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup

BEAT_WAIT_S = 2.0
"""Longest time between two signs of life of a vault. A vault that is silent for
`recovery.patience_s` longer counts as lost."""
CLOSE_UNUSED_AFTER_S = 60.0
"""How long a vault is kept on a node without workers: a replacement may come there."""
REOPEN_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Wait after each failed attempt to open a vault; the last value repeats."""


@dataclass(eq=False)
class VaultManager:
    """Owns one task per vault, which receives its events. While a node has no vault, mirroring
    there fails softly."""

    _loop: JobLoop
    _members: Members
    _calls: Calls
    _group: VaultGroup
    _events: EventBus
    _patience_s: float
    _on_lost: Callable[[int, ProcessEnd], None]
    on_other_process_ended: Callable[[int, int, ProcessEnd], None] = lambda *_: None
    """Called for a process that is no rank's, with its worker's index and its pid."""
    on_stalled: Callable[[ProcessStalled], None] = lambda _: None
    removed: int = 0
    """How many vaults were lost or closed."""
    used_addresses: Mapping[str, str] = field(default_factory=dict)
    """The addresses that the newest generation's members know, by node."""
    _unused_since_s: dict[str, float] = field(default_factory=dict)

    async def ensure_open(self, nodes: Iterable[str]) -> None:
        """Makes sure that these nodes have a vault.

        Raises:
            JobFailedError: a vault did not start, or was lost at once.
        """
        missing = [
            node for node in dict.fromkeys(nodes) if node not in self._members.vault_addresses
        ]
        if not missing:
            return
        try:
            opened = await self._group.open(missing)
        except VaultLostError as lost:
            raise JobFailedError(f"a vault did not start: {lost}") from None
        for node in missing:
            if node not in self._members.vault_addresses:  # a concurrent call may have opened it
                self._members.vault_addresses = {
                    **self._members.vault_addresses,
                    node: opened[node],
                }
                self._loop.spawn(self._event_loop(node))

    async def open_attached(self) -> None:
        """Opens the vaults of an earlier process of the job, except those that were lost since."""
        for node in self._group.attached:
            with suppress(JobFailedError):
                await self.ensure_open([node])

    async def open_with_retries(self, node: str, needed: Callable[[], bool]) -> bool:
        """Opens a vault on a node, with retries. Returns False once the vault is not needed any
        more."""
        for tries in count():
            if not needed():
                break
            try:
                await self.ensure_open([node])
            except JobFailedError as error:
                self._events.warn(f"no vault on node {self._node_name(node)}: {error.seen}")
                await self._loop.sleep(REOPEN_BACKOFF_S[min(tries, len(REOPEN_BACKOFF_S) - 1)])
            else:
                return True
        return False

    async def inventory(self) -> list[StoredSlot]:
        """Returns the slots of all vaults. A vault that is lost or does not reply in time counts as
        empty."""
        nodes = await asyncio.gather(*map(self._inventory, self._members.vault_addresses))
        return [stored for slots in nodes for stored in slots]

    async def _inventory(self, node: str) -> list[StoredSlot]:
        try:
            slots = await self._calls.vault(node, Vault.inventory)
        except VaultLostError:
            return []
        return [StoredSlot(slot, node) for slot in slots]

    def address_changed(self) -> bool:
        """Returns whether the generation's members use an outdated address of a vault that is up
        again."""
        current = self._members.vault_addresses
        return any(current.get(node, used) != used for node, used in self.used_addresses.items())

    def on_step_finished(self) -> None:
        """Closes vaults on nodes that have had no workers for a while, so that the autoscaler can
        remove these nodes. Called once a step."""
        now_s = self._loop.now_s()
        unused = self._members.vault_addresses.keys() - self._members.nodes
        self._unused_since_s = {node: self._unused_since_s.get(node, now_s) for node in unused}
        for node, since_s in self._unused_since_s.items():
            if now_s - since_s >= CLOSE_UNUSED_AFTER_S:
                self._unused_since_s[node] = now_s
                self._loop.spawn(self._close_unused(node))

    async def _close_unused(self, node: str) -> None:
        """Closes a vault, unless the newest step that all vaults hold needs its slots: if steps are
        long, the next mirror may be far away."""
        held = await self.inventory()
        newest = newest_complete_in_vaults(held)
        others = newest_complete_in_vaults([stored for stored in held if stored.node_id != node])
        is_needed = newest is not None and (others is None or others.step < newest.step)
        if (
            not is_needed
            and node not in self._members.nodes
            and node in self._members.vault_addresses
        ):
            self._remove(node)
            await self._group.close(node)

    async def _event_loop(self, node: str) -> None:
        limit_s = BEAT_WAIT_S + self._patience_s
        while True:
            try:
                events = await self._group.events(node, limit_s)
            except (VaultLostError, TimeoutError) as lost:
                if node not in self._members.vault_addresses:
                    return  # it was closed on purpose
                self._remove(node)
                cause = str(lost) or "its process ended"
                self._events.warn(f"the vault on node {self._node_name(node)} was lost: {cause}")
                for worker in self._members.registry.ready:  # another vault knows of no stalls yet
                    if worker.node_id == node:
                        self.on_stalled(ProcessStalled(worker.index, worker.pid, ""))
                # Its process may live: without its end, `open` would find it instead of a new one.
                await self._group.close(node)
                # Its slots are lost: a resize with the same members gives them the new address, and
                # their mirrors fill it again.
                await self.open_with_retries(node, lambda: node in self._members.nodes)
                return
            for event in events:
                if isinstance(event, FaultFired):
                    self._events.emit(event)
                elif isinstance(event, NotReplicated):
                    text = f"step {event.step} is not replicated to other nodes yet: "
                    self._events.warn(text + event.problem)
                elif isinstance(event, ProcessStalled):
                    self.on_stalled(event)
                elif self._members.registry.owns_process(event.worker, event.pid):
                    self._on_lost(event.worker, event.end)
                else:
                    self.on_other_process_ended(event.worker, event.pid, event.end)

    def _remove(self, node: str) -> None:
        addresses = self._members.vault_addresses
        self._members.vault_addresses = {
            name: addresses[name] for name in addresses if name != node
        }
        self.removed += 1

    def _node_name(self, node: str) -> str:
        return next((w.node for w in self._members.registry.ready if w.node_id == node), node)
