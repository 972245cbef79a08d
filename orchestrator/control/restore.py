"""Selection of the step that a generation resumes from, and preparation for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import RecoveryTimer
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.job_events import JobWarning, Rewound
from rayzero.orchestrator.policies import recovery
from rayzero.orchestrator.policies.membership import NotEnough
from rayzero.orchestrator.policies.placement import rank_zero
from rayzero.workers.messages import WorkerCalls
from rayzero.workers.vault.records import Restore, SlotRef


@dataclass(frozen=True)
class ResumePoint:
    """Where a generation resumes.

    Args:
        restore: the source of the state; None: a fresh start.
        store: (worker, port) of a rendezvous store that was opened ahead; None: none yet.
    """

    step: int
    restore: Restore | None
    store: tuple[int, int] | None


class ResumePointSelector:
    """Selects the newest step of which every part of the state exists: in vaults, in the memory of
    unwound workers, or in a checkpoint."""

    def __init__(
        self,
        context: JobContext,
        failures: FailureHandler,
        vaults: VaultManager,
        checkpoints: CheckpointWriter,
        timer: RecoveryTimer,
    ) -> None:
        self._context = context
        self._failures = failures
        self._vaults = vaults
        self._checkpoints = checkpoints
        self._timer = timer

    async def select(self) -> ResumePoint:
        """The step and its source; copies workers' memories into vaults where it needs them.

        Raises:
            JobFailedError: the configured checkpoint cannot be read.
        """
        ctx, excluded = self._context, self._failures.excluded
        held, store = await asyncio.gather(self._vaults.inventory(), self._open_store_early())
        stored = await self._checkpoints.newest(excluded.checkpoints)
        point = recovery.select_recovery_step(held, self._in_process_states(), stored, excluded)
        slots: tuple[SlotRef, ...] = ()
        if isinstance(point, recovery.FromWorkers):
            slots = await self._salvage(point)
            if not slots:
                nothing = recovery.InProcessStates()
                point = recovery.select_recovery_step(held, nothing, stored, excluded)
        redone = ctx.progress.rewind(point.step)
        ctx.emit(Rewound(point.step, redone))
        self._warn_lost_steps(point, redone)
        self._timer.step_selected(point.step, redone)
        return ResumePoint(point.step, _restore(point, slots), store)

    async def _open_store_early(self) -> tuple[int, int] | None:
        """Opens a store while the vaults respond, on the worker that is going to be rank 0 if
        nothing changes."""
        ctx = self._context
        selection = ctx.registry.select_members()
        if isinstance(selection, NotEnough):
            return None
        worker = rank_zero(selection.members).index
        try:
            return worker, await ctx.call_worker(
                worker, ctx.deps.workers.call(worker, WorkerCalls.open_store)
            )
        except WorkerUnavailableError as lost:  # if it was no member, this attempt continues
            self._failures.on_worker_lost(lost.worker, lost.cause)
            return None

    async def _salvage(self, point: recovery.FromWorkers) -> tuple[SlotRef, ...]:
        """Copies the states in workers' memories into vaults. Empty if that fails, or if they turn
        out not to be one state: a generation that was fenced before it had loaded its state still
        holds parts that were cut for an older one."""
        ctx = self._context
        nodes = [ctx.registry.info(worker).node_id for worker in point.workers]
        calls = [
            ctx.call_worker(
                worker,
                ctx.deps.workers.call(
                    worker, WorkerCalls.salvage, ctx.vault_addresses.get(node, "")
                ),
            )
            for worker, node in zip(point.workers, nodes, strict=True)
        ]
        try:
            copies = await asyncio.gather(*calls)
        except RayzeroError as error:
            ctx.emit(JobWarning(f"the state in a worker's memory cannot be copied: {error.seen}"))
            return ()
        held = [recovery.StoredSlot(slot, node) for slot, node in zip(copies, nodes, strict=True)]
        if len(held) == 1:
            return recovery.slot_refs(held)
        newest = recovery.newest_complete_in_vaults(held)
        return newest.slots if newest is not None and newest.step == point.step else ()

    def _in_process_states(self) -> recovery.InProcessStates:
        """The states in workers' memories that can still be copied into a vault."""
        ctx = self._context
        states = ctx.generation.in_process_states()
        by_rank = {
            rank: (worker, state)
            for rank, (worker, state) in (states.by_rank or {}).items()
            if ctx.registry.is_alive(worker)
            and ctx.registry.info(worker).node_id in ctx.vault_addresses
        }
        return recovery.InProcessStates(states.world_size, by_rank)

    def _warn_lost_steps(self, point: recovery.RecoveryPoint, redone: int) -> None:
        if redone == 0 or not self._context.generation.placements:
            return  # the first generation of a run loses nothing
        if isinstance(point, recovery.FromCheckpoint):
            source = f"the checkpoint of step {point.step} ({point.folder})"
        elif isinstance(point, recovery.FreshStart):
            source = "the beginning: there is no complete checkpoint"
        else:
            return
        self._context.emit(
            JobWarning(
                f"no complete copy of the state is left in memory: going back to {source}; "
                f"{redone} finished step{'s' * (redone != 1)} will be done again"
            )
        )


def _restore(point: recovery.RecoveryPoint, salvaged: tuple[SlotRef, ...]) -> Restore | None:
    match point:
        case recovery.FromVaults(step, slots):
            return Restore(step, slots)
        case recovery.FromWorkers(step, _):
            return Restore(step, salvaged)
        case recovery.FromCheckpoint(step, folder):
            return Restore(step, checkpoint=folder)
        case recovery.FreshStart():
            return None
