"""Selection of the state that a generation resumes from."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import Rewound
from rayzero.orchestrator.policies.recovery import (
    Excluded,
    FromWorkers,
    StoredSlot,
    newest_complete_in_vaults,
    newest_stored,
    select_recovery_step,
    slot_refs,
)
from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.top.format import count_of
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.vault.records import Restore


@dataclass(eq=False)
class RestoreSelector:
    """Selects the newest step of which every part of the state exists: in vaults, in the memory of
    workers that have left their generation, or in a checkpoint."""

    _members: Members
    _calls: Calls
    _events: EventBus
    _progress: JobProgress
    _timer: RecoveryTimer
    _patience_s: float
    _failures: FailureHandler
    _vaults: VaultManager
    _checkpoints: CheckpointWriter

    async def select(self) -> Restore | None:
        """Returns the state to resume from; None for a fresh start. Copies workers' memories into
        vaults if the state needs them.

        Raises:
            JobFailedError: the configured checkpoint cannot be read, or none of the existing ones.
        """
        excluded = self._failures.excluded
        held = await self._vaults.inventory()
        stored = await self._checkpoints.select_newest(excluded.checkpoints)
        states = self._members.generation.in_process_states()
        finished = self._progress.steps
        source = select_recovery_step(held, states, stored, excluded, finished)
        if isinstance(source, FromWorkers):
            with suppress(JobFailedError):  # a vault may be lost with the generation's buffer
                await self._vaults.ensure_open(self._nodes(source))
            vaults = self._members.vault_addresses
            in_process = {  # what can be copied into a vault
                worker: state
                for worker, state in states.items()
                if self._members.registry.info(worker).node_id in vaults
            }
            source = select_recovery_step(held, in_process, stored, excluded, finished)
        if isinstance(source, FromWorkers):
            source = await self._salvage(source) or newest_stored(held, stored, excluded)
        if source is None and excluded.checkpoints:
            raise await self._checkpoints.no_state_error()
        step = source.step if source is not None else 0
        self._warn_lost_steps(source, self.rewind(step))
        return source

    def rewind(self, step: int) -> int:
        """Makes training continue from `step`. Returns the number of finished steps to redo."""
        redone = self._progress.rewind(step)
        self._events.emit(Rewound(step, redone))
        self._timer.step_selected(step, redone)
        return redone

    async def find(self, step: int) -> Restore | None:
        """Returns the state of that step, or of a newer one, in memory. Does not change the job's
        step."""
        held = await self._vaults.inventory()
        newest = newest_complete_in_vaults(held)
        if newest is not None and newest.step >= step:
            return newest
        states = self._members.generation.in_process_states()
        source = select_recovery_step((), states, None, Excluded(), self._progress.steps)
        if not isinstance(source, FromWorkers) or source.step < step:
            return None
        return await self._salvage(source)

    async def _salvage(self, source: FromWorkers) -> Restore | None:
        """Copies the states in workers' memories into vaults. Returns None if that fails."""
        nodes = self._nodes(source)
        addresses, limit_s = self._members.vault_addresses, self._patience_s
        # A large state takes long to copy. It may take as long as a rank may be without progress.
        salvages = [
            self._calls.worker(
                worker, WorkerCalls.salvage, addresses.get(node, ""), source.step, limit_s=limit_s
            )
            for worker, node in zip(source.workers, nodes, strict=True)
        ]
        try:
            copies = await asyncio.gather(*salvages)
        except RayzeroError as error:
            self._events.warn(f"the state in a worker's memory cannot be copied: {error.seen}")
            return None
        held = [StoredSlot(slot, node) for slot, node in zip(copies, nodes, strict=True)]
        held.sort(key=lambda stored: stored.slot.rank)  # the order in which the state was cut
        restore = Restore(source.step, slot_refs(held))
        self._failures.excluded.copied_again(restore)
        return restore

    def _nodes(self, source: FromWorkers) -> list[str]:
        return [self._members.registry.info(worker).node_id for worker in source.workers]

    def _warn_lost_steps(self, source: Restore | None, redone: int) -> None:
        if redone == 0:
            return
        if source is None:
            text = "the beginning: there is no complete checkpoint"
        elif source.checkpoint:
            text = f"the checkpoint of step {source.step} ({source.checkpoint})"
        else:
            return
        self._events.warn(
            f"no complete copy of the state is left in memory: going back to {text}; "
            f"{count_of(redone, 'finished step')} will be done again"
        )
