"""Lost and crashed workers: asks the failure policy what they mean, and acts on the decision."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import machine
from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.errors import WorkerStartError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import FaultDetected, FaultRecorded
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies import failure
from rayzero.orchestrator.policies.failure import LOSS_CAUSES, Fault, FaultCause
from rayzero.orchestrator.policies.hang import Hang
from rayzero.orchestrator.policies.recovery import Excluded
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.messages import Crashed
from rayzero.workers.stacks import Stacks

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.worker_group import WorkerGroup

COLLECTIVE_GRACE_S = 3.0
"""How long the decision about a failed collective waits for its cause, such as a dead worker."""
KILL_TIMEOUT_S = 2.0
"""How long a recovery waits for killed processes to exit."""
_RAY_KILLED_FOR_MEMORY = "running low on memory"
"""Part of the report of Ray's memory monitor, which kills with SIGKILL."""


@dataclass(eq=False)
class Kills:
    """Ends the processes of lost workers."""

    _loop: JobLoop
    _calls: Calls
    _workers: WorkerGroup
    _pending: set[asyncio.Task[None]] = field(default_factory=set)

    def begin(self, worker: int) -> None:
        killing = self._loop.spawn(self._calls.end_process(worker, self._workers.kill))
        self._pending.add(killing)
        killing.add_done_callback(self._pending.discard)

    async def wait(self) -> None:
        """Waits up to `KILL_TIMEOUT_S` until all killed processes have exited."""
        if self._pending:
            exits = asyncio.wait(set(self._pending))
            with suppress(TimeoutError):
                await self._loop.within(KILL_TIMEOUT_S, exits)


@dataclass(eq=False)
class FailureHandler:
    """Keeps the job's fault history, and reports to the state machine whether the job survives.

    A judgement reads the whole history, and thousands of workers may be lost at once. So the first
    fault in a turn of the event loop is judged at once, and the others of this turn together in the
    next.
    """

    _budget: failure.FaultBudget
    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    kills: Kills
    _events: EventBus
    _progress: JobProgress
    _timer: RecoveryTimer
    history: list[Fault] = field(default_factory=list)
    """Every fault recovered from, and every lost worker that was no member."""
    excluded: Excluded = field(default_factory=Excluded)
    """States from which no generation resumes again."""
    _explained: dict[int, tuple[FaultCause, dict[str, str]]] = field(default_factory=dict)
    """For workers that are about to be lost: the cause, and the `traceback` and `place` of the
    fault."""
    _recorded_dead: set[int] = field(default_factory=set)
    """Lost workers in the history. A worker may be lost to two generations while they change."""
    _recorded_at: dict[int, int] = field(default_factory=dict)
    """The index of each worker's newest fault in the history."""
    _fatal_reported: bool = False
    _unjudged: list[Fault] = field(default_factory=list)
    """Faults of members that are not announced yet."""
    _judges_soon: bool = False

    def kill_hung(self, worker: int, hang: Hang, stacks: Stacks) -> None:
        """Kills a member that hangs, or that does not leave an ended generation."""
        where = {"traceback": stacks.text, "place": stacks.place}
        self._explained.setdefault(worker, (FaultCause.HANG, where))
        activity = f", {stacks.activity}" if stacks.activity else ""
        place = f"; it is at {stacks.place}{activity}" if stacks.place else ""
        self.on_worker_lost(worker, f"{hang.reason}{place}")

    def on_device_failed(self, worker: int, crash: Crashed) -> None:
        """Handles a worker that cannot use its device any more. Its process is useless, and counts
        as lost."""
        where = {"traceback": crash.traceback}
        self._explained.setdefault(worker, (FaultCause.DEVICE, where))
        self.on_worker_lost(worker, crash.error)

    def on_fenced(self, generation: GenerationState) -> None:
        """Corrects the steps of the generation's losses, once all survivors have left: a loss is
        often known before the survivors' reports of the last steps. Fails the job if a loss then
        repeats earlier ones."""
        history = failure.corrected(self.history, generation.number, generation.step)
        if history != self.history:
            self.history[:] = history
            error = failure.repeated_loss(history, generation.number)
            if error is not None and not self._fatal_reported:
                self._fatal_reported = True
                self._machine.post(machine.FaultFatal(error))

    def on_worker_lost(self, worker: int, detail: str, stack: str = "") -> None:
        """Handles a worker whose process ended, or does not respond and counts as lost.

        Args:
            detail: the cause, if it is known; empty when it may still be reported.
            stack: the stack of a crash in native code.
        """
        if not self._members.registry.is_alive(worker):
            self._add_detail(worker, detail)
            return
        self._members.registry.mark_lost(worker)
        self.kills.begin(worker)  # a process that stopped responding must not come back
        cause = self._loss_cause(worker)
        _, where = self._explained.get(worker, (cause, {"traceback": stack}))
        fault = self._members.generation.on_lost(worker, cause, detail, self._loop.now_s(), **where)
        if fault is not None:
            self._judge(fault)
        elif not self._members.generation.finished and self._machine.state is not State.STOPPING:
            fault = Fault(
                cause, self._members.registry.info(worker), None, 0, detail, self._loop.now_s()
            )
            self._record(fault)
            self._announce(fault)

    def retire(self, workers: Iterable[int], why: str) -> None:
        """Ends processes whose training functions do not continue; new ones take their places.

        Args:
            why: why the functions do not continue, for the user.
        """
        ranks, ended = list[int](), list(workers)
        self._members.registry.mark_lost(*ended)
        for worker in ended:
            if (member := self._members.generation.assignments.get(worker)) is not None:
                ranks.append(member.rank)
            self._members.generation.forget(worker)
            self.kills.begin(worker)
        if ranks:
            text = ", ".join(map(str, sorted(ranks)))
            self._events.warn(
                f"the training function is called again, in new processes (ranks {text}): {why}"
            )

    def on_newcomer_failed(self, worker: int, detail: str, traceback: str = "") -> None:
        """Handles a new worker whose function has ended, or is late, before its generation
        began."""
        call = self._members.registry.calls[worker]
        fault = Fault(
            FaultCause.NEWCOMER,
            self._members.registry.info(worker),
            call.rank,
            self._members.generation.step,
            detail,
            self._loop.now_s(),
            self._members.generation.number,
            traceback,
        )
        self._record(fault)
        self._announce(fault)
        self._leave_out(fault)

    def was_lost(self, worker: int) -> bool:
        """Returns whether a worker was lost, and not ended on purpose."""
        return worker in self._recorded_dead

    def on_start_failed(self, lost: WorkerStartError) -> None:
        """Records a process that ended before the job's first generation; another one is started.

        Raises:
            JobFailedError: more than `recovery.max_faults` processes ended within the fault window.
        """
        at_s = self._loop.now_s()
        fault = Fault(FaultCause.PROCESS_LOST, lost.worker, None, 0, lost.cause, at_s)
        self._record(fault)
        self._announce(fault)
        if error := failure.start_error(self.history, self._budget):
            raise error

    def on_early_return(self, worker: int, reason: str) -> None:
        """Handles a member whose function returned although other members wait for it."""
        generation = self._members.generation
        cause, step = FaultCause.EARLY_RETURN, generation.step
        generation.add_fault(worker, cause, step, reason, self._loop.now_s())
        self.on_fault()

    def on_buffer_lost(self) -> None:
        """Replaces the generation, because its ranks' rollout buffer is lost: the next one reads
        from another buffer. No worker is at fault."""
        generation = self._members.generation
        is_over = self._machine.state is State.STOPPING or self._machine.state.is_final
        if is_over or generation.fenced or generation.finished or not generation.active:
            return
        self.renew("rollouts")

    def renew(self, cause: str) -> None:
        """Replaces the generation by another one, without a fault of a worker."""
        generation, now_s = self._members.generation, self._loop.now_s()
        generation.fence(now_s)
        self._timer.fault_detected(cause, (), generation.world_size, now_s)
        self._machine.post(machine.FaultRecoverable(generation.number))

    def _judge(self, fault: Fault) -> None:
        """Judges the first fault in a turn of the event loop at once, and others in the next
        turn."""
        self._unjudged.append(fault)
        if not self._judges_soon:
            self._judges_soon = True
            self._loop.spawn(self._judge_rest())
            self.evaluate()

    async def _judge_rest(self) -> None:
        self._judges_soon = False
        if self._unjudged:
            self.evaluate()

    def evaluate(self, *, grace_over: bool = False) -> None:
        """Asks the policy about the generation's pending faults."""
        generation = self._members.generation
        self._announce_unjudged(generation)
        if (
            not generation.pending_faults
            or self._machine.state is State.STOPPING
            or self._machine.state.is_final
        ):
            return
        decision = self._decide(generation, grace_over=grace_over)
        if isinstance(decision, Fault):
            self._start_recovery(generation, decision)
        elif decision is None:
            self._loop.spawn(self._evaluate_after_grace(generation))
        else:
            # It may be evaluated again before the machine handles the event.
            if not self._fatal_reported:
                root = failure.root_cause(generation.pending_faults)
                self._events.emit(FaultRecorded(root, is_fatal=True))
            self._fatal_reported = True
            self._machine.post(machine.FaultFatal(decision))

    def _decide(
        self, generation: GenerationState, *, grace_over: bool = False
    ) -> Fault | RayzeroError | None:
        return failure.decide(
            generation.pending_faults,
            self.history,
            self._budget,
            steps=self._progress.steps_executed,
            restored_step=None if generation.restore is None else generation.restore.step,
            grace_over=grace_over,
        )

    def on_fault(self) -> None:
        """Judges the newest pending fault of a member."""
        self._judge(self._members.generation.pending_faults[-1])

    def _announce_unjudged(self, generation: GenerationState) -> None:
        faults, self._unjudged = self._unjudged, []
        if not faults:
            return
        calls, restore = self._members.registry.calls, generation.restore
        called_in = {w: calls[w].generation for w in generation.assignments if w in calls}
        # Another generation has begun since these faults.
        late = [fault for fault in faults if fault.generation != generation.number]
        for fault in late:
            self._record(fault)
        pending = generation.pending_faults
        first = len(pending) - (len(faults) - len(late))
        new = [
            failure.as_newcomers(fault, self.history, called_in, restore.step if restore else 0)
            for fault in pending[first:]
        ]
        generation.pending_faults = [*pending[:first], *new]
        is_fatal = bool(new) and isinstance(self._decide(generation), RayzeroError)
        for fault in late:
            self._announce(fault)
        for fault in new:
            self._announce(fault, is_fatal=is_fatal)

    def _start_recovery(self, generation: GenerationState, root: Fault) -> None:
        generation.fence(self._loop.now_s())
        faults, generation.pending_faults = generation.pending_faults, []
        losses = [fault for fault in faults if fault.cause in LOSS_CAUSES]
        for fault in losses if root in losses else [*losses, root]:
            self._record(fault)
        if root.cause is FaultCause.STATE and generation.restore is not None:
            self.excluded.add(generation.restore, root.detail)
        lost = [
            fault for fault in faults if not self._members.registry.is_alive(fault.worker.index)
        ]
        self._timer.fault_detected(
            root.cause,
            [f"rank {f.rank} on node {f.worker.node} (pid {f.worker.pid})" for f in lost],
            generation.world_size,
            min(fault.at_s for fault in faults),
        )
        if losses:
            self._members.registry.try_again()
        for fault in faults:
            if fault.cause is FaultCause.NEWCOMER:
                self._leave_out(fault)
        self._machine.post(machine.FaultRecoverable(generation.number))

    def _leave_out(self, fault: Fault) -> None:
        """Ends a new worker whose function failed, because it would fail again. The others
        continue."""
        worker = fault.worker.index
        if not self._members.registry.is_alive(worker):
            return
        self._members.registry.leave_out(worker)
        self._members.generation.forget(worker)
        self.kills.begin(worker)
        self._events.warn(
            f"the job continues without rank {fault.rank}, whose function failed before its first "
            "step; the next fault or resize tries again with a new worker\n  fix: change "
            f"what the function does before step {fault.step} of a job: a loader yields nothing in "
            "epochs that are finished, so that a mean over them has no values (`if losses:`)"
        )

    def _add_detail(self, worker: int, detail: str) -> None:
        """Adds the cluster's report about a worker whose loss is known already. A known detail
        comes from the kernel, which knows more than Ray, unless Ray itself killed the process."""
        if not detail:
            return
        better = _RAY_KILLED_FOR_MEMORY in detail
        pending = self._members.generation.pending_faults
        places = [
            (pending, index) for index, fault in enumerate(pending) if fault.worker.index == worker
        ]
        if worker in self._recorded_at:
            places.append((self.history, self._recorded_at[worker]))
        for faults, index in places:
            if better or not faults[index].detail:
                faults[index] = replace(faults[index], detail=detail)
                self._events.warn(failure.describe_fault(faults[index]))
        if places:
            self.evaluate()

    def _loss_cause(self, worker: int) -> FaultCause:
        node_id = self._members.registry.info(worker).node_id
        if worker in self._explained:
            return self._explained[worker][0]
        if node_id in self._members.registry.draining_nodes:
            return FaultCause.PREEMPTED
        return (
            FaultCause.PROCESS_LOST
            if node_id in self._members.vault_addresses
            else FaultCause.NODE_LOST
        )

    async def _evaluate_after_grace(self, generation: GenerationState) -> None:
        await self._loop.sleep(COLLECTIVE_GRACE_S)
        if generation is self._members.generation:
            self.evaluate(grace_over=True)

    def _record(self, fault: Fault) -> None:
        worker = fault.worker.index
        if fault.cause in LOSS_CAUSES and not self._members.registry.is_alive(worker):
            if worker in self._recorded_dead:
                return
            self._recorded_dead.add(worker)
        self._recorded_at[worker] = len(self.history)
        self.history.append(fault)
        self._events.emit(FaultRecorded(fault))

    def _announce(self, fault: Fault, *, is_fatal: bool = False) -> None:
        text = failure.describe_fault(fault)
        has_frames = fault.cause in (FaultCause.PROCESS_LOST, FaultCause.NEWCOMER)
        if has_frames and fault.traceback:
            text = f"{text}\n{fault.traceback}"
        event = FaultDetected(fault.cause, fault.worker, fault.rank, fault.step, text, is_fatal)
        self._events.emit(event)
