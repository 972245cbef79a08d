"""Keeps a vault running on every node of the job, and polls the vaults for lost processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count

from rayzero.orchestrator.aio import with_timeout
from rayzero.orchestrator.control.context import COMMAND_TIMEOUT_S, JobContext
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.interfaces import VaultLostError
from rayzero.orchestrator.job_events import JobWarning
from rayzero.orchestrator.policies.recovery import StoredSlot
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.vault.vault import Vault

VAULT_POLL_S = 2.0
"""How long a poll waits at the vault for an event."""
POLL_GRACE_S = 10.0
"""A vault whose poll takes this much longer counts as lost."""
CLOSE_UNUSED_AFTER_S = 60.0
"""How long a vault is kept on a node without workers: a replacement may come there."""
REOPEN_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Wait after each failed attempt to open a vault; the last value repeats."""


class VaultManager:
    """Owns one poll task per vault. While a node has no vault, mirroring there fails softly."""

    def __init__(self, context: JobContext, on_lost: Callable[[int], None]) -> None:
        self._context = context
        self._on_lost = on_lost
        self.address_changed = False
        """Whether the generation's members use an outdated address of a vault that is up again."""
        self._known_addresses: dict[str, str] = {}
        self._unused_since_s: dict[str, float] = {}

    async def ensure_open(self, nodes: Iterable[str]) -> None:
        """Makes sure that these nodes have a vault.

        Raises:
            JobFailedError: one did not start, or was lost at once.
        """
        ctx = self._context
        missing = [node for node in dict.fromkeys(nodes) if node not in ctx.vault_addresses]
        if not missing:
            return
        try:
            opened = await ctx.deps.vaults.open(missing)
        except VaultLostError as lost:
            raise JobFailedError(f"a vault did not start: {lost}") from None
        for node in missing:
            if node not in ctx.vault_addresses:  # a concurrent call may have opened it
                ctx.vault_addresses[node] = opened[node]
                self._refresh_changed()
                ctx.tasks.spawn(self._poll_loop(node))

    async def open_with_retries(self, node: str, needed: Callable[[], bool]) -> bool:
        """Retries until that node has a vault. False once it is no longer needed."""
        ctx = self._context
        for tries in count():
            if not needed():
                break
            try:
                await self.ensure_open([node])
            except JobFailedError as error:
                ctx.emit(JobWarning(f"no vault on node {self._node_name(node)}: {error.seen}"))
                await ctx.deps.clock.sleep(REOPEN_BACKOFF_S[min(tries, len(REOPEN_BACKOFF_S) - 1)])
            else:
                return True
        return False

    async def inventory(self) -> list[StoredSlot]:
        """The slots of all vaults; one that is lost or does not reply in time counts as empty."""
        ctx = self._context
        calls = {
            node: asyncio.ensure_future(ctx.deps.vaults.call(node, Vault.inventory))
            for node in ctx.vault_addresses
        }
        with suppress(TimeoutError):
            replies = asyncio.gather(*calls.values(), return_exceptions=True)
            await with_timeout(ctx.deps.clock, COMMAND_TIMEOUT_S, replies)
        held: list[StoredSlot] = []
        for node, call in calls.items():
            with suppress(VaultLostError, asyncio.CancelledError):  # lost, or not in time
                held += [StoredSlot(slot, node) for slot in call.result()]
        return held

    def generation_uses(self, nodes: Iterable[str]) -> None:
        """A generation is formed that uses the current vaults of these nodes."""
        self._known_addresses = {
            node: self._context.vault_addresses.get(node, "") for node in nodes
        }
        self._refresh_changed()

    def on_step_finished(self) -> None:
        """The newest generation progresses: after a while, closes vaults on nodes without
        workers, so that the autoscaler can remove these nodes."""
        ctx, now_s = self._context, self._context.now_s()
        unused = ctx.vault_addresses.keys() - set(ctx.registry.nodes)
        self._unused_since_s = {node: self._unused_since_s.get(node, now_s) for node in unused}
        for node, since_s in self._unused_since_s.items():
            if now_s - since_s >= CLOSE_UNUSED_AFTER_S:
                del ctx.vault_addresses[node]
                self._refresh_changed()
                ctx.tasks.spawn(ctx.deps.vaults.close(node))

    def _refresh_changed(self) -> None:
        """Called after every change of an address: it is read far more often than it changes."""
        current = self._context.vault_addresses
        self.address_changed = any(
            node in current and current[node] != old for node, old in self._known_addresses.items()
        )

    async def _poll_loop(self, node: str) -> None:
        ctx = self._context
        while True:
            try:
                command = ctx.deps.vaults.call(node, Vault.poll, VAULT_POLL_S)
                events = await with_timeout(ctx.deps.clock, VAULT_POLL_S + POLL_GRACE_S, command)
            except (VaultLostError, TimeoutError) as lost:
                if ctx.vault_addresses.pop(node, None) is None:
                    return  # it was closed on purpose
                self._refresh_changed()
                ctx.changed.notify()
                cause = str(lost) or "it does not respond"
                ctx.emit(JobWarning(f"the vault on node {self._node_name(node)} was lost: {cause}"))
                await self._reopen(node)
                return
            for event in events:
                if isinstance(event, FaultFired):
                    ctx.emit(event)
                elif ctx.registry.owns_process(event.worker, event.pid):
                    self._on_lost(event.worker)

    async def _reopen(self, node: str) -> None:
        """Retries until it is up again, or its node has no workers. Its slots are lost: a resize
        with the same members gives them the new address, and their mirrors fill it again."""
        if await self.open_with_retries(node, lambda: node in self._context.registry.nodes):
            self._context.changed.notify()

    def _node_name(self, node: str) -> str:
        return next((w.node for w in self._context.registry.ready if w.node_id == node), node)
