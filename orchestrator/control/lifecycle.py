"""Stopping a job on request, and adopting a run that lost its controller."""

from __future__ import annotations

import time

from rayzero.orchestrator import machine
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.context import JobContext
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.reconfigure import Reconfiguration
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.job_events import RunAdopted
from rayzero.orchestrator.journal.run_history import RunHistory, faults_on_clock
from rayzero.orchestrator.policies.membership import WorkerLimits
from rayzero.orchestrator.policies.recovery import newest_complete_in_vaults
from rayzero.workers.messages import WorkerCalls

UNWIND_TIMEOUT_S = 4.0
"""How long the training functions may take to unwind before their processes are killed."""


class JobShutdown:
    """Unwinds the workers; with checkpoints on, writes a last one. All of it takes at most
    `checkpoint.grace_period_s`."""

    def __init__(
        self,
        context: JobContext,
        reconfiguration: Reconfiguration,
        vaults: VaultManager,
        checkpoints: CheckpointWriter,
    ) -> None:
        self._context = context
        self._reconfiguration = reconfiguration
        self._vaults = vaults
        self._checkpoints = checkpoints

    def start(self) -> None:
        self._reconfiguration.cancel()
        self._context.tasks.spawn(self._stop())

    async def _stop(self) -> None:
        ctx, generation = self._context, self._context.generation
        checkpointing = ctx.plan.worker_spec.mirror.checkpoint_every_steps is not None
        until_s = ctx.now_s() + ctx.plan.spec.checkpoint.grace_period_s
        limit_s = UNWIND_TIMEOUT_S
        if checkpointing:
            if generation.all_restored and not generation.fenced:
                await self._finish_step()
            limit_s = min(limit_s, until_s - ctx.now_s())
        softly = not checkpointing and not generation.fenced
        self._reconfiguration.interrupt_members(softly=softly)
        await ctx.wait_for(limit_s, lambda: not generation.active)
        if checkpointing:
            newest = newest_complete_in_vaults(await self._vaults.inventory())
            if newest is not None and not self._checkpoints.covers(newest.step):
                await self._checkpoints.write_final(newest, until_s - ctx.now_s())
        ctx.post_event(machine.StopTimedOut() if generation.active else machine.TrainingStopped())

    async def _finish_step(self) -> None:
        """Waits for half of the time for the current step; no more once a rank is lost, because its
        peers would wait for it in vain."""
        ctx, generation = self._context, self._context.generation
        ctx.broadcast(generation.active, WorkerCalls.drain, generation.number)
        await ctx.wait_for(
            ctx.plan.spec.checkpoint.grace_period_s / 2,
            lambda: not generation.active or bool(generation.pending_faults),
        )


def adopt_run(
    ctx: JobContext, past: RunHistory, failures: FailureHandler, checkpoints: CheckpointWriter
) -> float:
    """Restores the counters, budgets and limits of an earlier controller's run. Called before the
    start; returns when that run began, on the controller's clock."""
    now_s, unix_s = ctx.now_s(), time.time()
    ctx.generation = GenerationState(past.generation)
    ctx.progress.steps = past.step  # steps after the checkpoint will count as redone
    checkpoints.written += past.checkpoints_written
    checkpoints.failed += past.checkpoints_failed
    failures.history += faults_on_clock(past, now_s, unix_s)
    ctx.timer.repairs += past.total_repairs
    ctx.timer.resizes += past.resizes
    ctx.timer.steps_redone += past.steps_redone
    if past.scaled_limits is not None:
        ctx.registry.limits = WorkerLimits(*past.scaled_limits, ctx.registry.limits.spares)
    ctx.emit(RunAdopted(past.step, past.generation, unix_s - past.last_at_s))
    return now_s - (unix_s - past.began_at_s)
