"""Detects hung ranks, reports their stacks and kills them; they are then recovered as lost."""

from __future__ import annotations

from contextlib import suppress

from rayzero.orchestrator.aio import WORKER_POLL_S
from rayzero.orchestrator.control.context import JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.policies.hang import RankProgress, find_hang
from rayzero.workers.messages import Heartbeat, WorkerCalls
from rayzero.workers.vault.vault import Vault

CHECK_INTERVAL_S = 1.0
"""How often the ranks are checked."""
STACK_TIMEOUT_S = 1.0
"""How long a worker may take to dump its stacks."""
INSPECT_TIMEOUT_S = 6.0
"""How long a vault may take to inspect a process that does not respond."""


class HangDetector:
    """Checks the newest generation for as long as the job runs."""

    def __init__(self, context: JobContext, inbox: WorkerInbox, failures: FailureHandler) -> None:
        self._context = context
        self._inbox = inbox
        self._failures = failures
        self._warned_generation = 0
        """The generation of which a hang without a culprit was reported."""

    async def run(self) -> None:
        while True:
            await self._context.deps.clock.sleep(CHECK_INTERVAL_S)
            self._inbox.expire_silent()
            generation = self._context.generation
            members = sorted(generation.active)
            limit_s = self._context.plan.worker_spec.hang_timeout_s
            if generation.fenced or not members:
                continue
            if self._inbox.longest_silence_s(members) <= limit_s:
                continue
            hang = find_hang([self._rank_progress(worker) for worker in members], limit_s)
            if hang is None:
                continue
            if hang.rank is not None:
                await self._kill_culprit(generation.workers[hang.rank].index, hang.reason)
            elif self._warned_generation != generation.number:
                self._warned_generation = generation.number
                self._context.warn(hang.reason)

    def _rank_progress(self, worker: int) -> RankProgress:
        generation, info = self._context.generation, self._context.registry.info(worker)
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

    async def _kill_culprit(self, worker: int, reason: str) -> None:
        generation = self._context.generation
        stacks = await self._dump_stacks(worker)
        if generation is self._context.generation and worker in generation.active:
            self._context.warn(f"{reason}\n{stacks}".rstrip())
            self._failures.kill_hung(worker, reason)

    async def _dump_stacks(self, worker: int) -> str:
        """Its Python stacks; if it does not respond, what its node's vault sees of the process."""
        ctx, info = self._context, self._context.registry.info(worker)
        with suppress(WorkerUnavailableError):
            stacks = ctx.deps.workers.call(worker, WorkerCalls.dump_stack)
            return await ctx.worker_reply(worker, stacks, STACK_TIMEOUT_S)
        with suppress(VaultLostError):
            inspection = ctx.deps.vaults.call(info.node_id, Vault.inspect, info.pid)
            return await ctx.vault_reply(inspection, INSPECT_TIMEOUT_S)
        return "(its process could not be inspected)"
