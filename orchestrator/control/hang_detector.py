"""Looks for ranks that no longer go on, names them, and ends them: the rest is a death's repair."""

from __future__ import annotations

from rayzero.orchestrator.aio import with_timeout
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.interfaces import VaultLostError, WorkerCalls
from rayzero.orchestrator.job_events import JobWarning
from rayzero.orchestrator.policies.hang import Hang, RankProgress, find_hang
from rayzero.workers.messages import Heartbeat
from rayzero.workers.vault.vault import Vault

CHECK_INTERVAL_S = 1.0
"""How often it is looked."""


STACK_TIMEOUT_S = 1.0
"""How long a worker may take to show its stacks."""


INSPECT_TIMEOUT_S = 6.0
"""How long a vault may take to inspect a process that does not answer."""


class HangDetector:
    """Looks at the newest generation for as long as the job runs."""

    def __init__(self, context: JobContext, inbox: WorkerInbox, failures: FailureHandler) -> None:
        self._context = context
        self._inbox = inbox
        self._failures = failures
        self._warned_generation = 0
        """The generation of which it was said that nobody is to blame."""

    async def run(self) -> None:
        while True:
            await self._context.deps.clock.sleep(CHECK_INTERVAL_S)
            self._inbox.expire_silent()
            generation = self._context.generation
            if generation.fenced or generation.all_left:
                continue
            members = sorted(generation.active)
            if (
                self._inbox.longest_silence_s(members)
                <= self._context.plan.worker_spec.hang_timeout_s
            ):
                continue
            ranks = {worker: self._rank_progress(worker) for worker in members}
            stall = find_hang(list(ranks.values()), self._context.plan.worker_spec.hang_timeout_s)
            if stall is None:
                continue
            if stall.rank is not None:
                culprit = next(one for one, seen in ranks.items() if seen.rank == stall.rank)
                await self._kill_culprit(culprit, stall)
            elif self._warned_generation != generation.number:
                self._warned_generation = generation.number
                self._context.emit(JobWarning(stall.reason))

    def _rank_progress(self, worker: int) -> RankProgress:
        generation, info = self._context.generation, self._context.registry.info(worker)
        rank = generation.rank_of(worker) or 0
        beat, age_s = self._inbox.last_heartbeat(worker)
        return RankProgress(
            node=info.node,
            pid=info.pid,
            heartbeat=beat or Heartbeat(rank, generation.step, "join", 0.0),
            age_s=age_s,
            overdue_s=self._inbox.reply_overdue_s(worker),
            is_new=self._inbox.never_reported(worker),
        )

    async def _kill_culprit(self, worker: int, stall: Hang) -> None:
        generation = self._context.generation
        stacks = await self._dump_stacks(worker)
        if generation is self._context.generation and worker in generation.active:
            self._context.emit(JobWarning(f"{stall.reason}\n{stacks}".rstrip()))
            self._failures.kill_hung(worker, stall.reason)

    async def _dump_stacks(self, worker: int) -> str:
        """What its threads do; if it does not say, what the system knows about its process."""
        ctx = self._context
        try:
            return await ctx.call_worker(
                worker, ctx.deps.workers.call(worker, WorkerCalls.dump_stack), STACK_TIMEOUT_S
            )
        except WorkerUnavailableError:
            pass
        info = ctx.registry.info(worker)
        try:
            inspected = ctx.deps.vaults.call(info.node_id, Vault.inspect, info.pid)
            return await with_timeout(ctx.deps.clock, INSPECT_TIMEOUT_S, inspected)
        except (VaultLostError, TimeoutError):
            return "(its process could not be inspected)"
