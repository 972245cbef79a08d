"""Has the job's nodes checked, and says which of them are avoided, and why.

A vault begins to check its node when it starts, while the first worker there imports; nobody waits
for a node of which nothing bad is known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import NodeChecked
from rayzero.orchestrator.policies import health
from rayzero.orchestrator.spec_sections import HealthSpec
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.vault.health import HealthReport, clock_offset_s
from rayzero.workers.vault.records import VaultGoneError
from rayzero.workers.vault.vault import Vault

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup

HEALTH_POLL_S = 0.25
"""How often a vault is asked whether the check of its node has ended."""


@dataclass(eq=False)
class NodeHealth:
    """Keeps the newest report of each node. The only writer of `unhealthy_nodes` of the registry,
    by which a failed node's workers are used only if there are no others."""

    _spec: HealthSpec
    _loop: JobLoop
    _members: Members
    _calls: Calls
    _vaults: VaultGroup
    _events: EventBus
    _names: dict[str, str] = field(default_factory=dict)
    _reports: dict[str, HealthReport] = field(default_factory=dict)
    _links: dict[tuple[str, str], float] = field(default_factory=dict)
    """Measured GB/s, by (node that reads, node that is read)."""
    _failures: dict[str, str] = field(default_factory=dict)
    """The descriptions of failed checks, by node."""
    _links_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def start(self) -> None:
        """Has every vault check its node. Called before the first vault starts."""
        if self._spec.enabled:
            self._vaults.health_limit_s = self._spec.limit_s

    async def look_at(self, workers: Sequence[WorkerInfo]) -> None:
        """Judges the nodes of workers that are about to join, by the reports that have come. Other
        nodes are judged when their reports come. Waits only if a node seems slow, for a second
        check."""
        if not self._spec.enabled:
            return
        names = {worker.node_id: worker.node for worker in workers}
        new = [node for node in names if node not in self._reports]
        self._names |= names
        if not new:
            return
        await asyncio.gather(*(self._fetch(node, 0.0) for node in new))
        await self._judge(new)
        self._loop.spawn(self._look_later(new))

    async def check_again(self, worker: WorkerInfo) -> None:
        """Checks a node after repeated faults, before it is used again."""
        node = worker.node_id
        if self._spec.enabled:
            self._names[node] = worker.node
            if await self._recheck(node):
                await self._judge([node])

    async def _look_later(self, nodes: Sequence[str]) -> None:
        """Does the work that the start does not wait for: checks that take longer, and the
        network."""
        late = [node for node in nodes if node not in self._reports]
        await asyncio.gather(*(self._fetch(node, 2 * self._spec.limit_s) for node in late))
        for node in late:
            if node in self._reports and (why := self._reports[node].incomplete):
                self._events.warn(
                    f"the health check of node {self._names[node]} is not complete: {why}\n"
                    "  fix: raise health.limit_s if it only takes longer"
                )
        await self._measure_links()
        await self._judge(self._reports)

    async def _fetch(self, node: str, limit_s: float) -> bool:
        """Asks for the report of a node until it is there. Returns False if it is not within the
        limit."""
        until_s = self._loop.now_s() + limit_s
        with suppress(VaultLostError, VaultGoneError):  # its next vault checks the node again
            while True:
                sent_s = time.time()
                report = await self._calls.vault(node, Vault.health)
                if report is not None:
                    offset_s = clock_offset_s(report.unix_s, sent_s, time.time())
                    figures = {**report.figures, "clock": offset_s}
                    self._reports[node] = replace(report, figures=figures)
                    return True
                if self._loop.now_s() >= until_s:
                    break
                await self._loop.sleep(HEALTH_POLL_S)
        return False

    async def _recheck(self, node: str) -> bool:
        """Has a node checked once more. Returns whether its report came in time."""
        with suppress(VaultLostError, VaultGoneError):
            await self._calls.vault(node, Vault.check_health, self._spec.limit_s)
            return await self._fetch(node, self._spec.limit_s)
        return False

    async def _judge(self, suspects: Iterable[str]) -> None:
        """Sets which nodes are avoided, and emits what has changed. Suspects that seem slow are
        measured a second time before."""
        failed = health.judge(self._with_links(), self._spec.slow_factor)
        slow = [
            node
            for node in suspects
            if node not in self._failures
            and any(check.is_relative for check in failed.get(node, ()))
        ]
        if slow:
            await asyncio.gather(*map(self._measure_again, slow))
            failed = health.judge(self._with_links(), self._spec.slow_factor)
        self._members.registry.unhealthy_nodes = frozenset(failed)
        texts = {node: health.describe(checks) for node, checks in failed.items()}
        for node in {**texts, **self._failures}:
            if (node in texts) != (node in self._failures):
                self._events.emit(NodeChecked(node, self._names[node], texts.get(node, "")))
        self._failures = texts

    async def _measure_again(self, node: str) -> None:
        before = self._reports[node]
        if await self._recheck(node):
            self._reports[node] = health.best_of(before, self._reports[node])
        await self._measure_links(node)

    async def _measure_links(self, again: str = "") -> None:
        """Measures the links of the ring of nodes, one after another: links that are not measured
        yet, and again all links of the node `again`."""
        nodes = sorted(self._reports.keys() & self._members.vault_addresses.keys())
        if len(nodes) < health.LEAST_NODES:
            return
        ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        async with self._links_lock:
            for pair in ring:
                if pair in self._links and again not in pair:
                    continue
                with suppress(VaultLostError, VaultGoneError):
                    speed = await self._calls.vault(pair[0], Vault.measure_link, pair[1])
                    self._links[pair] = max(speed, self._links.get(pair, 0.0))
            self._links = {pair: self._links[pair] for pair in ring if pair in self._links}

    def _with_links(self) -> dict[str, HealthReport]:
        """Returns the reports, with the speed of the faster one of each node's links: a slow link
        is a node's fault only if both are slow."""
        fastest: dict[str, float] = {}
        for pair, speed in self._links.items():
            for node in pair:
                fastest[node] = max(speed, fastest.get(node, 0.0))
        return {
            node: replace(report, figures={**report.figures, "network": fastest[node]})
            if node in fastest
            else report
            for node, report in self._reports.items()
        }
