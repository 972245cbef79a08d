"""Lost and crashed workers: asks the failure policy what they mean, and acts on the decision."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import machine
from rayzero.orchestrator.aio import with_timeout
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.errors import VaultLostError, WorkerStartError
from rayzero.orchestrator.job_events import FaultDetected, FaultRecorded
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies import failure
from rayzero.orchestrator.policies.failure import LOSS_CAUSES, Fault, FaultCause
from rayzero.orchestrator.policies.hang import Hang
from rayzero.orchestrator.policies.recovery import Excluded
from rayzero.workers.messages import Crashed
from rayzero.workers.stacks import Stacks
from rayzero.workers.vault.vault import Vault

COLLECTIVE_GRACE_S = 3.0
"""How long the decision about a failed collective waits for its cause, such as a dead worker."""
KILL_TIMEOUT_S = 2.0
"""How long a recovery waits for killed processes to exit."""
_RAY_KILLED_FOR_MEMORY = "running low on memory"
"""In the report of Ray's memory monitor, which kills with SIGKILL."""
EXIT_POLL_S = 0.1
"""How often a vault is asked whether a killed process has exited."""


class FailureHandler:
    """Keeps the job's fault history, and reports to the state machine whether the job survives."""

    def __init__(self, context: JobContext) -> None:
        self.history: list[Fault] = []
        """Every fault recovered from, and every lost worker that was no member."""
        self.excluded = Excluded()
        """States from which no generation resumes again."""
        self._context = context
        self._explained: dict[int, tuple[FaultCause, dict[str, str]]] = {}
        """By worker that is about to be lost, why, and `traceback` and `place` of its fault."""
        self._recorded_dead: set[int] = set()
        """Lost workers in the history: one may be lost to two generations while they change."""
        self._fatal_reported = False
        self._pending_kills: set[asyncio.Task[None]] = set()
        spec = context.plan.spec.recovery
        self._budget = failure.FaultBudget(spec.max_faults, spec.fault_window_s)

    def kill_hung(self, worker: int, hang: Hang, stacks: Stacks) -> None:
        """Kills a member that hangs, or that does not leave an ended generation."""
        where = {"traceback": stacks.text, "place": stacks.place}
        self._explained.setdefault(worker, (FaultCause.HANG, where))
        what = f", {stacks.activity}" if stacks.activity else ""
        at = f"; it is at {stacks.place}{what}" if stacks.place else ""
        self.on_worker_lost(worker, f"{hang.reason}{at}")

    def on_device_failed(self, worker: int, crash: Crashed) -> None:
        """A worker cannot use its device any more: its process, useless now, is lost."""
        where = {"traceback": crash.traceback}
        self._explained.setdefault(worker, (FaultCause.DEVICE, where))
        self.on_worker_lost(worker, crash.error)

    def on_fenced(self, generation: GenerationState) -> None:
        """All survivors have left. A loss is often known before their reports of the last steps."""
        history = failure.corrected(self.history, generation.number, generation.step)
        if history != self.history:
            self.history[:] = history
            error = failure.repeated_loss(history, generation.number)
            if error is not None and not self._fatal_reported:
                self._fatal_reported = True
                self._context.post_event(machine.FaultFatal(error))

    async def wait_killed(self) -> None:
        """Waits up to `KILL_TIMEOUT_S` until all killed processes have exited."""
        if self._pending_kills:
            exits = asyncio.wait(set(self._pending_kills))
            with suppress(TimeoutError):
                await with_timeout(self._context.deps.clock, KILL_TIMEOUT_S, exits)

    async def wait_device_free(self, worker: int) -> None:
        """Waits until the process of a lost worker has exited, if it may have used a GPU: that
        memory is freed before the end, which takes seconds for tens of GB, and a replacement needs
        it. At most `workers.start_timeout_s`: nothing ends a process that hangs in the kernel."""
        ctx, info = self._context, self._context.registry.info(worker)
        if not ctx.plan.spec.workers.gpus:
            return
        until_s = ctx.now_s() + ctx.plan.spec.workers.start_timeout_s
        with suppress(VaultLostError):  # then its node is lost, too, or cannot be asked
            while await ctx.vault_reply(ctx.deps.vaults.call(info.node_id, Vault.runs, info.pid)):
                if ctx.now_s() > until_s:
                    ctx.warn(
                        f"the process {info.pid} on node {info.node} was killed, and still runs"
                    )
                    return
                await ctx.deps.clock.sleep(EXIT_POLL_S)

    def on_worker_lost(self, worker: int, detail: str, stack: str = "") -> None:
        """A worker's process ended, or does not respond and counts as lost.

        Args:
            detail: the cause, if it is known; empty when it may still be reported.
            stack: of a crash in native code.
        """
        ctx = self._context
        if not ctx.registry.is_alive(worker):
            self._add_detail(worker, detail)
            return
        ctx.registry.mark_lost(worker)
        self._kill(worker)  # a process that stopped responding must not come back
        cause = self._loss_cause(worker)
        _, where = self._explained.get(worker, (cause, {"traceback": stack}))
        fault = ctx.generation.on_lost(worker, cause, detail, ctx.now_s(), **where)
        if fault is not None:
            self._announce(fault)
            self.evaluate()
        elif not ctx.generation.finished and ctx.state is not State.STOPPING:
            fault = Fault(cause, ctx.registry.info(worker), None, 0, detail, ctx.now_s())
            self._record(fault)
            self._announce(fault)

    def retire(self, workers: Iterable[int]) -> None:
        """Ends processes whose training functions do not continue; new ones take their places."""
        ctx, ranks = self._context, list[int]()
        for worker in workers:
            if (member := ctx.generation.assignments.get(worker)) is not None:
                ranks.append(member.rank)
            ctx.registry.mark_lost(worker)
            ctx.generation.forget(worker)
            self._kill(worker)
        if ranks:
            text = ", ".join(map(str, sorted(ranks)))
            ctx.warn(f"the training function is called again, in new processes (ranks {text})")

    def on_newcomer_failed(self, worker: int, detail: str, traceback: str = "") -> None:
        """The function of a new worker has ended, or is late, before its generation began."""
        ctx, call = self._context, self._context.registry.calls[worker]
        fault = Fault(
            FaultCause.NEWCOMER,
            ctx.registry.info(worker),
            call.rank,
            ctx.generation.step,
            detail,
            ctx.now_s(),
            ctx.generation.number,
            traceback,
        )
        self._record(fault)
        self._announce(fault)
        self._leave_out(fault)

    def was_lost(self, worker: int) -> bool:
        """Whether its process was lost, and not ended on purpose."""
        return worker in self._recorded_dead

    def on_start_failed(self, lost: WorkerStartError) -> None:
        """A worker's process ended before the job's first generation; another one is started.

        Raises:
            JobFailedError: more than `recovery.max_faults` did within the fault window.
        """
        at_s = self._context.now_s()
        fault = Fault(FaultCause.PROCESS_LOST, lost.worker, None, 0, lost.cause, at_s)
        self._record(fault)
        self._announce(fault)
        if error := failure.start_error(self.history, self._budget):
            raise error

    def on_early_return(self, worker: int, reason: str) -> None:
        """A member's function returned although other members wait for it."""
        ctx, generation = self._context, self._context.generation
        cause, step = FaultCause.EARLY_RETURN, generation.step
        generation.add_fault(worker, cause, step, reason, ctx.now_s())
        self.on_fault()

    def evaluate(self, *, grace_over: bool = False) -> None:
        """Asks the policy about the generation's pending faults."""
        ctx, generation = self._context, self._context.generation
        if not generation.pending_faults or ctx.state is State.STOPPING or ctx.state.is_final:
            return
        decision = self._decide(generation, grace_over=grace_over)
        if isinstance(decision, Fault):
            self._start_recovery(generation, decision)
        elif decision is None:
            ctx.tasks.spawn(self._evaluate_after_grace(generation))
        else:
            # It may be evaluated again before the machine handles the event.
            if not self._fatal_reported:
                root = failure.root_cause(generation.pending_faults)
                ctx.emit(FaultRecorded(root, is_fatal=True))
            self._fatal_reported = True
            ctx.post_event(machine.FaultFatal(decision))

    def _decide(
        self, generation: GenerationState, *, grace_over: bool = False
    ) -> Fault | RayzeroError | None:
        return failure.decide(
            generation.pending_faults,
            self.history,
            self._budget,
            steps=self._context.progress.steps_executed,
            restored=generation.restore is not None,
            grace_over=grace_over,
        )

    def on_fault(self) -> None:
        """A member's fault was added to the pending ones."""
        generation, calls = self._context.generation, self._context.registry.calls
        restored_step = 0 if generation.restore is None else generation.restore.step
        called_in = {it: calls[it].generation for it in generation.assignments if it in calls}
        *others, newest = generation.pending_faults
        newest = failure.as_newcomers(newest, self.history, called_in, restored_step)
        generation.pending_faults = [*others, newest]
        self._announce(newest)
        self.evaluate()

    def _start_recovery(self, generation: GenerationState, root: Fault) -> None:
        ctx = self._context
        generation.fence(ctx.now_s())
        faults, generation.pending_faults = generation.pending_faults, []
        losses = [fault for fault in faults if fault.cause in LOSS_CAUSES]
        for fault in losses if root in losses else [*losses, root]:
            self._record(fault)
        if root.cause is FaultCause.STATE and generation.restore is not None:
            self.excluded.add(generation.restore, root.detail)
        lost = [fault for fault in faults if not ctx.registry.is_alive(fault.worker.index)]
        ctx.timer.fault_detected(
            root.cause,
            [f"rank {f.rank} on node {f.worker.node} (pid {f.worker.pid})" for f in lost],
            generation.world_size,
            min(fault.at_s for fault in faults),
        )
        if losses:
            ctx.registry.try_again()
        for fault in faults:
            if fault.cause is FaultCause.NEWCOMER:
                self._leave_out(fault)
        ctx.post_event(machine.FaultRecoverable(generation.number))

    def _leave_out(self, fault: Fault) -> None:
        """Ends a new worker whose function failed: it would fail again. The others continue."""
        ctx, worker = self._context, fault.worker.index
        if not ctx.registry.is_alive(worker):
            return
        ctx.registry.leave_out(worker)
        self._kill(worker)
        ctx.warn(
            f"the job continues without rank {fault.rank}, whose function failed before its first "
            "step; the next fault or resize tries again with a new worker\n  fix: change "
            f"what the function does before step {fault.step} of a job: a loader yields nothing in "
            "epochs that are finished, so that a mean over them has no values (`if losses:`)"
        )

    def _add_detail(self, worker: int, detail: str) -> None:
        """The cluster reports why a worker died whose loss is known already. What it knows of a
        process is less than what the kernel says, unless it killed the process itself."""
        if not detail:
            return
        better = _RAY_KILLED_FOR_MEMORY in detail
        for faults in (self._context.generation.pending_faults, self.history):
            for index, fault in enumerate(faults):
                if fault.worker.index == worker and (better or not fault.detail):
                    faults[index] = replace(fault, detail=detail)
                    self._context.warn(failure.describe_fault(faults[index]))
        self.evaluate()

    def _loss_cause(self, worker: int) -> FaultCause:
        ctx = self._context
        node_id = ctx.registry.info(worker).node_id
        if worker in self._explained:
            return self._explained[worker][0]
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
            await self._context.worker_reply(worker, self._context.deps.workers.kill(worker))

    def _record(self, fault: Fault) -> None:
        worker = fault.worker.index
        if fault.cause in LOSS_CAUSES and not self._context.registry.is_alive(worker):
            if worker in self._recorded_dead:
                return
            self._recorded_dead.add(worker)
        self.history.append(fault)
        self._context.emit(FaultRecorded(fault))

    def _announce(self, fault: Fault) -> None:
        text = failure.describe_fault(fault)
        has_frames = fault.cause in (FaultCause.PROCESS_LOST, FaultCause.NEWCOMER)
        if has_frames and fault.traceback:
            text = f"{text}\n{fault.traceback}"
        generation = self._context.generation
        is_fatal = fault in generation.pending_faults and isinstance(
            self._decide(generation), RayzeroError
        )
        event = FaultDetected(fault.cause, fault.worker, fault.rank, fault.step, text, is_fatal)
        self._context.emit(event)
