"""Lost and slow workers -> policies.

From what was seen of workers to a judgement: who is lost, why, and what it means for the job.

Measures how fast each worker computes: tells who is steadily slow, and shares the work out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import with_timeout
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.generation import GenerationState, RecoveryTimer
from rayzero.orchestrator.job_events import FaultDetected, FaultRecorded, JobWarning
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies import failure
from rayzero.orchestrator.policies.failure import HARDWARE_CAUSES, Fault, FaultCause
from rayzero.orchestrator.policies.recovery import Excluded
from rayzero.orchestrator.policies.stragglers import SpeedTracker, balance_shares
from rayzero.workers.messages import StepReport, WorkerInfo
from rayzero.workers.vault.records import Restore

COLLECTIVE_GRACE_S = 3.0
"""How long a failed collective waits for a better explanation, such as a dead worker."""


KILL_TIMEOUT_S = 2.0
"""How long a repair waits for a kill to be carried out."""

_LOSS_CAUSES = HARDWARE_CAUSES - {FaultCause.COLLECTIVE}


class FailureHandler:
    """Keeps the job's record of faults, and tells the machine what they mean."""

    def __init__(self, context: JobContext, timer: RecoveryTimer) -> None:
        self.history: list[Fault] = []
        """Every fault that was repaired, and every worker lost that was no member."""
        self.excluded = Excluded()
        self._context = context
        self._recovery_timer = timer
        self._hung: dict[int, str] = {}
        self._recorded_dead: set[int] = set()
        """Who is in the record as gone: one may be lost to two generations while they change."""
        self._fatal_reported = False
        self._pending_kills: set[asyncio.Task[None]] = set()
        spec = context.plan.spec.recovery
        self._budget = failure.FaultBudget(spec.max_faults, spec.fault_window_s)

    def counts_by_cause(self) -> dict[str, int]:
        """How many faults there were, by cause."""
        return dict(sorted(Counter(str(one.cause) for one in self.history).items()))

    def kill_hung(self, worker: int, why: str) -> None:
        """Kills a worker that hangs; its death will be known for what it is."""
        self._hung[worker] = why
        self._kill(worker)

    async def wait_killed(self) -> None:
        """Returns once nobody who was given up can do anything more, as far as that can be had."""
        if self._pending_kills:
            dying = asyncio.wait(set(self._pending_kills))
            with suppress(TimeoutError):
                await with_timeout(self._context.deps.clock, KILL_TIMEOUT_S, dying)

    def on_worker_lost(self, worker: int, detail: str) -> None:
        """A worker's process is gone, or no longer answers and counts as gone.

        Args:
            detail: what is known about the cause; empty when that may still come.
        """
        ctx = self._context
        if not ctx.registry.is_alive(worker):
            self._add_detail(worker, detail)
            return
        ctx.registry.mark_lost(worker)
        self._kill(worker)  # what no longer answers, or seems dead, must not come back
        cause = self._loss_cause(worker)
        text = self._hung.get(worker) or detail
        fault = ctx.generation.on_lost(worker, cause, text, ctx.now_s())
        if fault is not None:
            self._announce(fault)
            self.evaluate()
        elif not ctx.generation.any_finished and ctx.state is not State.STOPPING:
            info = ctx.registry.info(worker)
            self._record(Fault(cause, info, None, 0, text, ctx.now_s()))
            self._announce(self.history[-1])
        ctx.changed.notify()

    def on_member_missing(self, worker: int) -> None:
        """A worker that was lost between its choice as a member and now."""
        ctx = self._context
        ctx.generation.on_lost(worker, self._loss_cause(worker), "", ctx.now_s())
        self.evaluate()

    def expel(self, worker: int, why: str) -> None:
        """Gives a member up that does not leave a fenced generation; part of the fault at hand."""
        ctx = self._context
        ctx.registry.mark_lost(worker)
        fault = ctx.generation.on_lost(worker, FaultCause.HANG, why, ctx.now_s())
        if fault is not None:
            ctx.generation.pending_faults.remove(fault)
            self._announce(fault)
        self._kill(worker)

    def evaluate(self, *, grace_over: bool = False) -> None:
        """Decides about the faults of the generation that are not decided yet."""
        ctx, generation = self._context, self._context.generation
        if not generation.pending_faults or ctx.state is State.STOPPING or ctx.state.is_final:
            return
        about = failure.FailureContext(
            self._budget, ctx.progress.steps_executed, generation.restore is not None
        )
        decision = failure.decide(
            generation.pending_faults, self.history, about, grace_over=grace_over
        )
        match decision:
            case failure.FailJob(error):
                if (
                    not self._fatal_reported
                ):  # it may be judged again before the machine has heard of it
                    root = failure.root_cause(generation.pending_faults)
                    ctx.emit(FaultRecorded(root, is_fatal=True))
                self._fatal_reported = True
                ctx.post_event(machine.FaultFatal(error))
            case failure.RecoverJob(root):
                self._start_recovery(generation, root)
            case failure.WaitForDetails() if not grace_over:
                ctx.tasks.spawn(self._evaluate_after_grace(generation))

    def on_crash(self) -> None:
        """A member's crash was noted in the generation."""
        self._announce(self._context.generation.pending_faults[-1])
        self.evaluate()

    def _start_recovery(self, generation: GenerationState, root: Fault) -> None:
        ctx = self._context
        generation.fence()
        faults, generation.pending_faults = generation.pending_faults, []
        counted = [one for one in faults if one.cause in _LOSS_CAUSES]
        for one in counted if root in counted else [*counted, root]:
            self._record(one)
        if root.cause is FaultCause.STATE and generation.restore is not None:
            self._exclude_restore_point(generation.restore)
        gone = [one for one in faults if not ctx.registry.is_alive(one.worker.index)]
        self._recovery_timer.fault_detected(
            root.cause,
            [_format_member(one) for one in gone],
            generation.world_size,
            min(one.at_s for one in faults),
            ctx.now_s(),
        )
        ctx.post_event(machine.FaultRecoverable(generation.number))

    def _exclude_restore_point(self, restore: Restore) -> None:
        """Its state could not be loaded: nobody begins from it again."""
        versions = {(slot.generation, slot.step) for slot in restore.slots}
        checkpoints = {restore.step} if restore.checkpoint else set()
        self.excluded = Excluded(
            self.excluded.versions | versions, self.excluded.checkpoints | checkpoints
        )

    def _add_detail(self, worker: int, detail: str) -> None:
        """The cluster says why a worker died whose death was known already."""
        if not detail:
            return
        for faults in (self._context.generation.pending_faults, self.history):
            for place, fault in enumerate(faults):
                if fault.worker.index == worker and not fault.detail:
                    faults[place] = replace(fault, detail=detail)
                    self._context.emit(JobWarning(failure.describe_fault(faults[place])))
        self.evaluate()

    def _loss_cause(self, worker: int) -> FaultCause:
        ctx = self._context
        node_id = ctx.registry.info(worker).node_id
        if worker in self._hung:
            return FaultCause.HANG
        if node_id in ctx.registry.draining_nodes:
            return FaultCause.PREEMPTED
        return FaultCause.PROCESS_LOST if node_id in ctx.vault_addresses else FaultCause.NODE_LOST

    async def _evaluate_after_grace(self, generation: GenerationState) -> None:
        await self._context.deps.clock.sleep(COLLECTIVE_GRACE_S)
        if generation is self._context.generation:
            self.evaluate(grace_over=True)

    def _kill(self, worker: int) -> None:
        killing = self._context.tasks.spawn(self._kill_worker(worker))
        self._pending_kills.add(killing)
        killing.add_done_callback(self._pending_kills.discard)

    async def _kill_worker(self, worker: int) -> None:
        with suppress(WorkerUnavailableError):
            await self._context.call_worker(worker, self._context.deps.workers.kill(worker))

    def _record(self, fault: Fault) -> None:
        worker = fault.worker.index
        if fault.cause in _LOSS_CAUSES and not self._context.registry.is_alive(worker):
            if worker in self._recorded_dead:
                return
            self._recorded_dead.add(worker)
        self.history.append(fault)
        self._context.emit(FaultRecorded(fault))

    def _announce(self, fault: Fault) -> None:
        text = failure.describe_fault(fault)
        self._context.emit(FaultDetected(fault.cause, fault.worker, fault.rank, fault.step, text))


def _format_member(fault: Fault) -> str:
    return f"rank {fault.rank} on node {fault.worker.node} (pid {fault.worker.pid})"


class StragglerMonitor:
    """With `recovery.balance: auto` the next generation's samples follow the measured speed."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._tracker = SpeedTracker()
        self._members: tuple[int, ...] = ()
        self._shares: tuple[float, ...] = ()

    def start_generation(self, workers: Sequence[WorkerInfo]) -> tuple[float, ...]:
        """A generation of these workers, by rank, is about to begin; its shares."""
        members = tuple(worker.index for worker in workers)
        current = self._shares if members == self._members else ()
        self._members, self._shares = members, ()
        if self._context.plan.spec.recovery.balance == "auto":
            self._shares = balance_shares(self._tracker.samples_per_s(members), current)
        self._tracker.start_generation(members)
        return self._shares

    def add_report(self, worker: int, report: StepReport) -> None:
        """A worker of this generation finished a step."""
        gauges = report.gauges
        if "exposed_comm_s" not in gauges or self._context.generation.rank_of(worker) is None:
            return  # there is no engine that measures
        compute_s = gauges["step_s"] - gauges["exposed_comm_s"]
        # Only ratios count, and the global batch is constant: a share stands for its samples.
        share = self._shares[report.rank] if self._shares else 1 / len(self._members)
        if change := self._tracker.add_step(worker, compute_s, share):
            self._context.emit(JobWarning(str(change)))
