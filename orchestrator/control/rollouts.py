"""The rollout buffer of a job: a part of one member's vault, opened again if that vault is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import RolloutsCounted
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.ledger import RolloutPlan
from rayzero.workers.vault.records import VaultGoneError
from rayzero.workers.vault.vault import Vault

COUNT_INTERVAL_S = 1.0
"""How often the buffer is asked for its counts if there is no news for it; also the pause after no
buffer could be opened."""


@dataclass(eq=False)
class RolloutBuffer:
    """Opens the buffer, informs it of new weights and lost workers, and ends a generation whose
    ranks read from a lost buffer: a rank cannot know what the others have read (rule `one-log`).

    Args:
        _plan: None if the job has no rollouts.
        _stages: the roles that make rollouts, each of which takes the output of the previous one.
        _patience_s: `recovery.patience_s` of the job.
    """

    _plan: RolloutPlan | None
    _stages: tuple[str, ...]
    _loop: JobLoop
    _members: Members
    _calls: Calls
    _vaults: VaultManager
    _failures: FailureHandler
    _versions: WeightVersions
    _events: EventBus
    _patience_s: float
    address: BufferAddress | None = None
    """The address of the buffer; None while there is none."""
    _lost: tuple[int, ...] = ()  # workers, since the buffer was opened

    @property
    def group(self) -> int:
        """Samples of each prompt; 0: the job has no rollouts."""
        return 0 if self._plan is None else self._plan.group

    async def had_to_open(self, members: Sequence[WorkerInfo]) -> bool:
        """Prepares the buffer for a generation with these members, by rank. Returns False at once
        if the node of the present buffer has a member: the buffer stays there. Otherwise tries to
        open an empty buffer, on the node of rank 0 if possible, and returns True: meanwhile members
        may be lost."""
        nodes = {worker.node_id for worker in members}
        there = None if self._is_lost else self.address
        if self._plan is None or (there is not None and there.node_id in nodes):
            return False
        await self._open_new(self._plan, members)
        return True

    def on_worker_lost(self, worker: int) -> None:
        """Notes that a role's worker is gone, with its tasks."""
        if self._plan is not None:
            self._lost = (*self._lost, worker)
            self._loop.changed.notify()

    def resume(self, lost: Iterable[int]) -> None:
        """Sets which of the workers that a lost controller may have started are lost."""
        self._lost = tuple(lost)

    async def close_left(self) -> None:
        """Closes the buffer that an adopted run has left, in any of its vaults, because the new
        workers may read other prompts."""
        if self._plan is not None:
            await asyncio.gather(*map(self._close, self._members.vault_addresses))

    async def run(self) -> None:
        """Keeps the buffer informed, and notices its loss, until it is cancelled at the end of the
        job. Returns at once if the job has no rollouts."""
        told: object = None

        def has_news() -> bool:
            return self.address is not None and (self._is_lost or self._news() != told)

        while self._plan is not None:
            await self._loop.wait_for(COUNT_INTERVAL_S, has_news)
            if self._is_lost:
                self._on_lost()
            elif self.address is not None:
                told = news = self._news()
                _, (generation, step), lost = news
                with suppress(VaultLostError, VaultGoneError):  # VaultManager sees the loss, too
                    counts = await self._calls.vault(
                        self.address.node_id, Vault.update_rollouts, generation, step, lost
                    )
                    self._events.emit(RolloutsCounted(counts, self._stages))

    def _news(self) -> tuple[object, tuple[int, int], tuple[int, ...]]:
        """Returns the address of the buffer, the version that it is to publish, and all lost
        workers."""
        version = self._versions.confirmed
        return self.address, (-1, 0) if version is None else version.progress, self._lost

    @property
    def _is_lost(self) -> bool:
        address, vaults = self.address, self._members.vault_addresses
        return address is not None and vaults.get(address.node_id) != address.vault

    async def _open_new(self, plan: RolloutPlan, members: Sequence[WorkerInfo]) -> None:
        """Opens a buffer on the node of rank 0 or, if that fails, on the node of another member. If
        all fail, there is no buffer, and the next attempt is a while later."""
        if self.address is not None and not self._is_lost:
            await self._close(self.address.node_id)
        self.address, self._lost = None, ()
        first: dict[str, WorkerInfo] = {}
        for worker in members:
            first.setdefault(worker.node_id, worker)
        for node, worker in first.items():
            try:
                await self._vaults.ensure_open([node])
                address = await self._calls.vault(
                    node, Vault.open_rollouts, plan, worker.ip, self._patience_s
                )
            except (VaultLostError, VaultGoneError, JobFailedError) as error:
                self._events.warn(f"no buffer of rollouts on node {worker.node}: {error}")
            else:
                self.address = address
                self._loop.changed.notify()
                return
        await self._loop.sleep(COUNT_INTERVAL_S)

    async def _close(self, node: str) -> None:
        with suppress(VaultLostError):  # with its buffer, if it had one
            await self._calls.vault(node, Vault.close_rollouts)

    def _on_lost(self) -> None:
        self.address = None
        self._loop.changed.notify()
        self._events.warn(
            "the buffer of rollouts was lost with its vault: the ranks continue with a new one, "
            "and prompts that they have not trained on are issued again"
        )
        self._failures.on_buffer_lost()
