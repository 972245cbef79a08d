"""Detects ranks that hang, that do not leave an ended generation, or that returned too early.

The first two are killed, with a report of their stacks, and then recovered as lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from rayzero.orchestrator.aio import WORKER_POLL_S
from rayzero.orchestrator.control.calls import Calls, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.hang import (
    Hang,
    HangLimits,
    RankProgress,
    abort_limit_s,
    find_early_return,
    find_hang,
    find_overstaying,
)
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import Heartbeat
from rayzero.workers.stacks import Stacks
from rayzero.workers.vault.vault import Vault

CHECK_INTERVAL_S = 1.0
"""How often the ranks are checked."""
REPORT_AFTER_S = 5.0
"""After how long the first report says what an ending generation waits for; each further one comes
after twice the time."""
STACK_TIMEOUT_S = 1.0
"""How long a worker may take to dump its stacks."""
INSPECT_TIMEOUT_S = 6.0
"""How long a vault may take to inspect a process that does not respond."""


@dataclass(eq=False)
class HangDetector:
    """Checks the newest generation for as long as the job runs."""

    _plan: JobPlan
    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    _calls: Calls
    _events: EventBus
    _inbox: WorkerInbox
    _failures: FailureHandler
    _warned_generation: int = 0
    """The generation of which a hang without a culprit was reported."""
    _next_report_s: float = REPORT_AFTER_S
    """When, after the generation began to end, the ranks that stay are reported again."""

    @property
    def _limits(self) -> HangLimits:
        spec, generation = self._plan.spec, self._members.generation
        abort_s = 0.0
        if spec.workers.gpus:
            beats = (self._inbox.last_heartbeat(worker)[0] for worker in generation.assignments)
            first_step = 1 + (generation.restore.step if generation.restore else 0)
            abort_s = abort_limit_s(filter(None, beats), first_step)
        return HangLimits(
            spec.recovery.hang_timeout_s,
            spec.workers.start_timeout_s,
            self._inbox.longest_first_step_s,
            abort_s,
        )

    async def run(self) -> None:
        while True:
            await self._loop.sleep(CHECK_INTERVAL_S)
            self._inbox.expire_silent()
            generation = self._members.generation
            if not generation.active:
                continue
            if generation.ending_since_s is None:
                await self._check_running(generation)
            else:
                ending_s = self._loop.now_s() - generation.ending_since_s
                await self._check_ending(generation, ending_s)

    async def _check_running(self, generation: GenerationState) -> None:
        self._next_report_s = REPORT_AFTER_S
        members = sorted(generation.active)
        if generation.finished:
            self._check_early_return(generation)
        if self._inbox.longest_silence_s(members) <= self._limits.running_s:
            return
        hang = find_hang(self._progress(members), self._limits)
        if hang is None:
            return
        if hang.rank is not None:
            await self._kill_culprit(generation, hang.rank, hang)
        elif self._warned_generation != generation.number:
            self._warned_generation = generation.number
            self._events.warn(hang.reason)

    async def _check_ending(self, generation: GenerationState, ending_s: float) -> None:
        """Members leave at their next check for a stop, which may be after a long call."""
        staying = self._progress(sorted(generation.active))
        hang = find_overstaying(staying, self._limits, ending_s)
        if hang is not None and hang.rank is not None:
            await self._kill_culprit(generation, hang.rank, hang)
        elif ending_s > self._next_report_s:
            self._next_report_s *= 2
            first = staying[0]
            others = f", and {len(staying) - 1} more" if len(staying) > 1 else ""
            limit = f"it is killed after {self._limits.describe(first)}"
            if self._machine.state is State.STOPPING:
                grace_s = self._plan.spec.checkpoint.grace_period_s
                limit = f"the stop takes at most {grace_s:g} s, checkpoint.grace_period_s"
            self._events.warn(
                f"waiting since {ending_s:.0f} s for {first} to leave: {first.activity}{others} "
                f"({limit})"
            )

    def _check_early_return(self, generation: GenerationState) -> None:
        finished = self._progress(sorted(generation.finished))
        hang = find_early_return(finished, self._progress(sorted(generation.active)))
        if hang is not None and hang.rank is not None:
            self._failures.on_early_return(generation.workers[hang.rank].index, hang.reason)

    def _progress(self, workers: Iterable[int]) -> list[RankProgress]:
        return [self._rank_progress(worker) for worker in workers]

    def _rank_progress(self, worker: int) -> RankProgress:
        generation, info = self._members.generation, self._members.registry.info(worker)
        rank = generation.assignments[worker].rank
        beat, age_s = self._inbox.last_heartbeat(worker)
        return RankProgress(
            node=info.node,
            pid=info.pid,
            heartbeat=beat or Heartbeat(rank, generation.step, "join", 0.0),
            age_s=age_s,
            overdue_s=max(0.0, age_s - WORKER_POLL_S),
            is_new=worker not in self._inbox.reported,
        )

    async def _kill_culprit(self, generation: GenerationState, rank: int, hang: Hang) -> None:
        worker = generation.workers[rank].index
        stacks = await self._dump_stacks(worker)
        self._inbox.deliver(worker)
        if generation is self._members.generation and worker in generation.active:
            self._events.warn(f"{hang.reason}\n{stacks.text}".rstrip())
            self._failures.kill_hung(worker, hang, stacks)

    async def _dump_stacks(self, worker: int) -> Stacks:
        """Its Python stacks; if it does not respond, what its node's vault sees of the process."""
        info = self._members.registry.info(worker)
        with suppress(WorkerUnavailableError):
            dump = WorkerCalls.dump_stack
            return await self._calls.worker(worker, dump, limit_s=STACK_TIMEOUT_S)
        with suppress(VaultLostError):
            inspection = self._calls.vault(
                info.node_id, Vault.inspect, info.pid, limit_s=INSPECT_TIMEOUT_S
            )
            return Stacks(await inspection)
        return Stacks("(its process could not be inspected)")
