"""Detects ranks that hang, that do not leave an ended generation, or that returned too early.

The first two are killed, with a report of their stacks, and then recovered as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

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
    abort_limit_s,
    find_early_return,
    find_hang,
    find_overstaying,
    find_stopped,
)
from rayzero.orchestrator.policies.hang_limits import LEAST_LIMIT_S, HangLimits, RankProgress
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import Heartbeat
from rayzero.workers.stacks import Stacks, group_summaries
from rayzero.workers.vault.vault import Vault

CHECK_INTERVAL_S = 0.5
"""How often the ranks are checked."""
LOOK_AGAIN_S = 2.0
"""How long after a look the ranks that are silent, but do not hang, are not asked again."""
REPORT_AFTER_S = 5.0
"""Time after which the first report says what an ending generation waits for. Each further report
comes after twice the time."""
STACK_TIMEOUT_S = 1.0
"""How long workers may take to dump their stacks."""
INSPECT_TIMEOUT_S = 1.0
"""How long a vault may take to say whether a process that does not respond exists, and then to
inspect it."""


@dataclass
class _Look:
    """The result of one look at the members, by worker.

    Args:
        stacks: stacks that a member reports, or that its node sees if the member does not answer.
        seen: workers whose node answers, and has the process.
    """

    stacks: dict[int, Stacks] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)


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
    """The generation in which a hang without a culprit was reported."""
    _next_report_s: float = REPORT_AFTER_S
    """When, after the generation began to end, the ranks that stay are reported again."""
    _next_look_s: float = 0.0
    """When ranks may be asked again."""

    @property
    def _limits(self) -> HangLimits:
        spec, generation = self._plan.spec, self._members.generation
        history = self._inbox.history
        abort_s = 0.0
        if spec.workers.gpus and generation.ending_since_s is not None:
            beats = (self._inbox.last_heartbeat(worker)[0] for worker in generation.assignments)
            first_step = 1 + (generation.restore.step if generation.restore else 0)
            abort_s = abort_limit_s(filter(None, beats), first_step)
        return HangLimits(
            spec.recovery.patience_s,
            spec.workers.start_timeout_s,
            spec.recovery.hang_timeout_s,
            history.longest_first_step_s,
            abort_s,
            history.times,
            history.factors,
        )

    async def run(self) -> None:
        while True:
            await self._loop.sleep(CHECK_INTERVAL_S)
            self._inbox.excuse_cut_off(self._members.registry.ready)
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
        if generation.finished:
            self._check_early_return(generation)
        if self._loop.now_s() < self._next_look_s or not self._may_hang(generation.active):
            return
        look = await self._look(sorted(generation.active))
        if generation is not self._members.generation or generation.ending_since_s is not None:
            return
        limits = self._limits
        ranks = self._progress(sorted(generation.active), look)
        hang = find_hang(ranks, limits)
        if any(rank.silent_s > limits.of(rank) for rank in ranks):
            self._next_look_s = self._loop.now_s() + LOOK_AGAIN_S
        if hang is None:
            return
        if hang.rank is not None:
            self._kill_culprit(generation, hang.rank, hang, look)
        elif self._warned_generation != generation.number:
            self._warned_generation = generation.number
            self._events.warn(f"{hang.reason}\n{self._summary(generation, look)}".rstrip())

    def _may_hang(self, members: Collection[int]) -> bool:
        """Returns whether the members should be asked. The test is cheap, and nearly always
        negative."""
        limits = self._limits
        if not self._is_any_silent(members, limits):
            return False
        ranks = self._progress(members, _Look(seen=set(members)))
        return find_stopped(ranks, limits) is not None or any(
            # To find out that a rank does not answer takes some time.
            rank.may_be_silent_s + (STACK_TIMEOUT_S if rank.overdue_s else 0.0) > limits.of(rank)
            for rank in ranks
        )

    def _is_any_silent(self, members: Collection[int], limits: HangLimits) -> bool:
        """Returns whether one of the members may hang, by the least of all limits."""
        least_s, states = limits.fixed_s or LEAST_LIMIT_S - STACK_TIMEOUT_S, self._inbox.states
        is_stalled = any(states.get(worker) for worker in members) if states else False
        return is_stalled or self._inbox.is_any_silent(members, least_s)

    async def _check_ending(self, generation: GenerationState, ending_s: float) -> None:
        """Looks for a member that does not leave. Members leave at their next check for a stop,
        which may be after a long call."""
        is_early = ending_s <= min(self._next_report_s, self._limits.usual[0])
        if is_early and not self._is_any_silent(generation.active, self._limits):
            return
        staying = self._progress(sorted(generation.active))
        hang = find_overstaying(staying, self._limits, ending_s)
        if hang is not None and hang.rank is not None:
            look = await self._look([generation.workers[hang.rank].index])
            self._kill_culprit(generation, hang.rank, hang, look)
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
        active = self._progress(sorted(generation.active))
        hang = find_early_return(finished, active, self._limits)
        if hang is not None and hang.rank is not None:
            self._failures.on_early_return(generation.workers[hang.rank].index, hang.reason)

    def _progress(self, workers: Iterable[int], look: _Look | None = None) -> list[RankProgress]:
        return [self._rank_progress(worker, look or _Look()) for worker in workers]

    def _rank_progress(self, worker: int, look: _Look) -> RankProgress:
        generation, info = self._members.generation, self._members.registry.info(worker)
        history, stacks = self._inbox.history, look.stacks.get(worker)
        rank = generation.assignments[worker].rank
        beat, age_s = self._inbox.last_heartbeat(worker)
        return RankProgress(
            node=info.node,
            pid=info.pid,
            heartbeat=beat or Heartbeat(rank, generation.step, "join", 0.0),
            age_s=age_s,
            overdue_s=max(0.0, age_s - WORKER_POLL_S),
            is_new=worker not in history.reported,
            is_first=worker not in history.in_generation,
            state=self._inbox.states.get(worker, ""),
            is_seen=worker in look.seen,
            reads=stacks is not None and stacks.reads,
        )

    def _kill_culprit(
        self, generation: GenerationState, rank: int, hang: Hang, look: _Look
    ) -> None:
        worker = generation.workers[rank].index
        self._inbox.deliver(worker)
        if generation is not self._members.generation or worker not in generation.active:
            return
        stacks = look.stacks.get(worker, Stacks("(its process could not be inspected)"))
        text = f"{hang.reason}\n{self._summary(generation, look)}\n{stacks.text}"
        self._events.warn(text.rstrip())
        self._inbox.history.add_alarm(self._rank_progress(worker, look))
        self._failures.kill_hung(worker, hang, stacks)

    @staticmethod
    def _summary(generation: GenerationState, look: _Look) -> str:
        """Groups the ranks by where they are."""
        ranks = generation.assignments
        return group_summaries(
            {
                ranks[worker].rank: stacks.summary
                for worker, stacks in look.stacks.items()
                if stacks.summary
            }
        )

    async def _look(self, workers: Sequence[int]) -> _Look:
        """Asks these members, all at the same time, what they do. Asks the nodes of late members
        whether their processes exist."""
        look = _Look()
        await asyncio.gather(*(self._look_at(worker, look) for worker in workers))
        return look

    async def _look_at(self, worker: int, look: _Look) -> None:
        _, age_s = self._inbox.last_heartbeat(worker)
        if age_s > WORKER_POLL_S:
            await asyncio.gather(self._ask(worker, look), self._inspect(worker, look))
        else:
            await self._ask(worker, look)
            if worker not in look.stacks:
                await self._inspect(worker, look)

    async def _ask(self, worker: int, look: _Look) -> None:
        with suppress(WorkerUnavailableError):
            dump = WorkerCalls.dump_stack
            stacks = await self._calls.worker(worker, dump, limit_s=STACK_TIMEOUT_S)
            look.stacks[worker] = stacks
            if stacks.beat is not None:
                self._inbox.on_progress(worker, stacks.beat)

    async def _inspect(self, worker: int, look: _Look) -> None:
        """Adds the stacks of a process that does not respond, as its node's vault sees them."""
        info = self._members.registry.info(worker)
        with suppress(VaultLostError):
            limit_s = INSPECT_TIMEOUT_S
            if await self._calls.vault(info.node_id, Vault.runs, info.pid, limit_s=limit_s):
                look.seen.add(worker)
            inspect = Vault.inspect
            text = await self._calls.vault(info.node_id, inspect, info.pid, limit_s=limit_s)
            summary = f"does not respond: {text.partition(chr(10))[0]}"
            look.stacks.setdefault(worker, Stacks(text, summary=summary))
