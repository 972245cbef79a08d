"""Keeps a vault on every node of the job, and hears from them whose process died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count

from rayzero.orchestrator.control.desk import COMMAND_S, Desk
from rayzero.orchestrator.control.tasks import within
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.group import VaultLostError
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.policies.recovery import Held
from rayzero.workers.messages import FaultFired

POLL_S = 2.0
"""How long a poll waits at the vault for something to happen."""
SILENT_S = 10.0
"""A vault that does not answer a poll for so long beyond that counts as lost."""
UNUSED_S = 60.0
"""How long a vault is kept on a node without workers: a replacement may come there."""
REOPEN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""How long to wait after each failed try to open a vault; the last from then on."""


class Vaults:
    """Owns one poll a vault. Where a vault is gone, mirrors fail softly until it is back."""

    def __init__(self, desk: Desk, on_lost: Callable[[int], None]) -> None:
        self._desk = desk
        self._on_lost = on_lost
        self.renewed = False
        """Whether the generation's members know an address that is no longer right, and the right
        one is there."""
        self._used: dict[str, str] = {}
        self._unused_since_s: dict[str, float] = {}

    async def open(self, nodes: Iterable[str]) -> None:
        """Makes sure that these nodes have a vault.

        Raises:
            JobFailedError: one did not start, or died at once.
        """
        desk = self._desk
        missing = [node for node in dict.fromkeys(nodes) if node not in desk.vaults]
        if not missing:
            return
        try:
            opened = await desk.ports.vaults.open(missing)
        except VaultLostError as lost:
            raise JobFailedError(f"a vault did not start: {lost}") from None
        for node in missing:
            if node not in desk.vaults:  # somebody else may have waited for the same
                desk.vaults[node] = opened[node]
                self._compare()
                desk.tasks.spawn(self._watch(node))

    async def open_in_time(self, node: str, needed: Callable[[], bool]) -> bool:
        """Tries until that node has a vault; False once nobody needs it any more."""
        desk = self._desk
        for tries in count():
            if not needed():
                break
            try:
                await self.open([node])
            except JobFailedError as error:
                desk.see(Warned(f"no vault on node {self._name(node)}: {error.seen}"))
                await desk.ports.clock.sleep(REOPEN_S[min(tries, len(REOPEN_S) - 1)])
            else:
                return True
        return False

    async def inventory(self) -> list[Held]:
        """What all vaults hold; one that is gone, or does not say, holds nothing."""
        desk = self._desk
        asked = {
            node: asyncio.ensure_future(desk.ports.vaults.inventory(node)) for node in desk.vaults
        }
        with suppress(TimeoutError):
            answers = asyncio.gather(*asked.values(), return_exceptions=True)
            await within(desk.ports.clock, COMMAND_S, answers)
        held: list[Held] = []
        for node, asking in asked.items():
            with suppress(VaultLostError, asyncio.CancelledError):  # gone, or not in time
                held += [Held(slot, node) for slot in asking.result()]
        return held

    def used(self, nodes: Iterable[str]) -> None:
        """A generation is formed that knows the vaults of these nodes as they are now."""
        self._used = {node: self._desk.vaults.get(node, "") for node in nodes}
        self._compare()

    def step_finished(self) -> None:
        """The newest generation goes on: nothing is needed any more of nodes without workers, and
        the cluster can let them go once their vaults are closed."""
        desk, now_s = self._desk, self._desk.now_s()
        unused = desk.vaults.keys() - set(desk.crew.nodes)
        self._unused_since_s = {node: self._unused_since_s.get(node, now_s) for node in unused}
        for node, since_s in self._unused_since_s.items():
            if now_s - since_s >= UNUSED_S:
                del desk.vaults[node]
                self._compare()
                desk.tasks.spawn(desk.ports.vaults.close(node))

    def _compare(self) -> None:
        """After every change of an address: it is asked for far more often than it changes."""
        now = self._desk.vaults
        self.renewed = any(node in now and now[node] != old for node, old in self._used.items())

    async def _watch(self, node: str) -> None:
        desk = self._desk
        while True:
            try:
                command = desk.ports.vaults.poll(node, POLL_S)
                news = await within(desk.ports.clock, POLL_S + SILENT_S, command)
            except (VaultLostError, TimeoutError) as lost:
                if desk.vaults.pop(node, None) is None:
                    return  # it was closed, by wish
                self._compare()
                desk.bell.ring()
                cause = str(lost) or "it does not answer"
                desk.see(Warned(f"the vault on node {self._name(node)} was lost: {cause}"))
                await self._reopen(node)
                return
            for one in news:
                if isinstance(one, FaultFired):
                    desk.see(one)
                elif desk.crew.knows(one.worker, one.pid):
                    self._on_lost(one.worker)

    async def _reopen(self, node: str) -> None:
        """Until it is there again, or nobody lives on its node. What it held is lost: the members
        are told the new address, and fill it again, by a resize in place."""
        if await self.open_in_time(node, lambda: node in self._desk.crew.nodes):
            self._desk.bell.ring()

    def _name(self, node: str) -> str:
        return next((one.node for one in self._desk.crew.there if one.node_id == node), node)
