"""Looks for ranks that no longer go on, names them, and ends them: the rest is a death's repair."""

from __future__ import annotations

from rayzero.orchestrator.control.desk import Desk, GoneError
from rayzero.orchestrator.control.faults import Faults
from rayzero.orchestrator.control.tasks import within
from rayzero.orchestrator.control.watch import Watch
from rayzero.orchestrator.group import VaultLostError
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.policies.stall import Stall, Watched, find_stall
from rayzero.workers.messages import Heartbeat

LOOK_S = 1.0
"""How often it is looked."""
STACK_S = 1.0
"""How long a worker may take to show its stacks."""
INSPECT_S = 6.0
"""How long a vault may take to inspect a process that does not answer."""


class Vigil:
    """Looks at the newest generation for as long as the job runs."""

    def __init__(self, desk: Desk, watch: Watch, faults: Faults) -> None:
        self._desk = desk
        self._watch = watch
        self._faults = faults
        self._told = 0
        """The generation of which it was said that nobody is to blame."""

    async def keep(self) -> None:
        while True:
            await self._desk.ports.clock.sleep(LOOK_S)
            self._watch.give_up()
            generation = self._desk.generation
            if generation.fenced or generation.deserted:
                continue
            members = sorted(generation.still_in)
            if self._watch.silent_s(members) <= self._desk.plan.setup.hang_timeout_s:
                continue
            ranks = {worker: self._watched(worker) for worker in members}
            stall = find_stall(list(ranks.values()), self._desk.plan.setup.hang_timeout_s)
            if stall is None:
                continue
            if stall.rank is not None:
                culprit = next(one for one, seen in ranks.items() if seen.rank == stall.rank)
                await self._end(culprit, stall)
            elif self._told != generation.number:
                self._told = generation.number
                self._desk.see(Warned(stall.why))

    def _watched(self, worker: int) -> Watched:
        generation, info = self._desk.generation, self._desk.crew.info(worker)
        rank = generation.rank_of(worker) or 0
        beat, age_s = self._watch.beat(worker)
        return Watched(
            node=info.node,
            pid=info.pid,
            heartbeat=beat or Heartbeat(rank, generation.step, "join", 0.0),
            age_s=age_s,
            overdue_s=self._watch.overdue_s(worker),
            new=self._watch.is_new(worker),
        )

    async def _end(self, worker: int, stall: Stall) -> None:
        generation = self._desk.generation
        stacks = await self._stacks(worker)
        if generation is self._desk.generation and worker in generation.still_in:
            self._desk.see(Warned(f"{stall.why}\n{stacks}".rstrip()))
            self._faults.condemn(worker, stall.why)

    async def _stacks(self, worker: int) -> str:
        """What its threads do; if it does not say, what the system knows about its process."""
        desk = self._desk
        try:
            return await desk.ask(worker, desk.ports.workers.dump_stack(worker), STACK_S)
        except GoneError:
            pass
        info = desk.crew.info(worker)
        try:
            inspected = desk.ports.vaults.inspect(info.node_id, info.pid)
            return await within(desk.ports.clock, INSPECT_S, inspected)
        except (VaultLostError, TimeoutError):
            return "(its process could not be inspected)"
