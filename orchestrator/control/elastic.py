"""Workers come and go: newcomers, replacements, another size, nodes that are leaving."""

from __future__ import annotations

from contextlib import suppress

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.control.desk import Desk, GoneError
from rayzero.orchestrator.control.faults import Faults
from rayzero.orchestrator.control.passage import Passage
from rayzero.orchestrator.control.vaults import Vaults
from rayzero.orchestrator.control.watch import Watch
from rayzero.orchestrator.group import WorkerLostError
from rayzero.orchestrator.notices import Warned, WorkersUp
from rayzero.orchestrator.policies import blame
from rayzero.orchestrator.policies.membership import Members, Short, Wanted
from rayzero.orchestrator.states import State
from rayzero.workers.messages import WorkerInfo

GATHER_S = 0.5
"""How long a newcomer waits for others that come at about the same time: one resize for all."""
CALM_S = 10.0
"""How long a replacement waits at most for the first step behind a repair to be finished."""
LEAVING_S = 2.0
"""How often the cluster is asked for nodes that are about to go."""


class Elastic:
    """Wants another membership whenever the policy would choose one, and sees to the seats.

    A resize costs a step boundary and a reload, and is only wanted where every member has an
    engine: a training function without one has no state that could move.
    """

    def __init__(
        self, desk: Desk, faults: Faults, vaults: Vaults, passage: Passage, watch: Watch
    ) -> None:
        self._desk = desk
        self._faults = faults
        self._vaults = vaults
        self._passage = passage
        self._watch = watch
        self._avoided: frozenset[str] = frozenset()

    def begin(self) -> None:
        """From the first placement on."""
        for work in (self._newcomers(), self._departures(), self._look(), self._fill()):
            self._desk.tasks.spawn(work)

    def scale(self, least: int, most: int) -> None:
        """Other limits from now on."""
        desk = self._desk
        spares = desk.crew.wanted.spares
        desk.crew.wanted = Wanted(least, most, spares)
        desk.ports.workers.resize(least, most + spares)
        desk.ports.probe.limited(least, most)
        desk.bell.ring()

    def tidy_up(self) -> None:
        """A generation was formed: lets those go who were left out of it."""
        desk, left_out = self._desk, self._passage.left_out
        self._passage.left_out = Members(())
        for worker in left_out.surplus:
            if desk.crew.alive(worker.index):
                desk.crew.let_go(worker.index)
                desk.tasks.spawn(self._dismiss(worker.index))
        for worker in left_out.moved:
            if desk.crew.alive(worker.index):
                desk.crew.let_go(worker.index)
                desk.tasks.spawn(self._move(worker))
        desk.bell.ring()

    async def _newcomers(self) -> None:
        desk = self._desk
        while True:
            try:
                worker = await desk.ports.workers.next_worker()
            except WorkerLostError as lost:
                desk.see(Warned(str(lost)))
                continue
            desk.tasks.spawn(self._admit(worker))

    async def _admit(self, worker: WorkerInfo) -> None:
        """A worker is ready once its node has a vault."""
        desk = self._desk
        await self._vaults.open_in_time(worker.node_id, lambda: True)
        desk.crew.add([worker])
        self._watch.listen([worker.index])
        desk.see(WorkersUp((worker,)))
        desk.bell.ring()

    async def _departures(self) -> None:
        desk = self._desk
        while True:
            leaving = await desk.ports.workers.leaving_nodes()
            for node in sorted(leaving - desk.crew.leaving):
                for name in {one.node for one in desk.crew.there if one.node_id == node}:
                    desk.see(Warned(f"node {name} is leaving: its work moves to other nodes"))
            if leaving != desk.crew.leaving:
                desk.crew.leaving = leaving
                desk.bell.ring()
            await desk.ports.clock.sleep(LEAVING_S)

    async def _look(self) -> None:
        """Asks for a resize when there is a reason, once for each generation."""
        desk = self._desk
        while True:
            await desk.bell.until(lambda: bool(self._reason()))
            if self._grows:
                await desk.ports.clock.sleep(GATHER_S)
            generation = desk.generation
            if reason := self._reason():
                desk.feed(ev.ResizeWanted(generation.number, reason))
                await desk.bell.until(
                    lambda old=generation: (
                        desk.generation is not old  # type: ignore[misc]
                        or desk.job.state is not State.RUNNING
                    )
                )

    async def _fill(self) -> None:
        """Starts replacements, but never beside a repair that can do without them: their imports
        would compete with it."""
        desk = self._desk
        while True:
            await desk.bell.until(lambda: bool(desk.crew.vacant) and self._may_fill)
            if desk.is_running:
                await desk.happens(CALM_S, lambda: self._stepped or not desk.is_running)
            if not self._may_fill:
                continue
            await self._faults.buried()  # a seat is given to another only when it is empty
            vacant, desk.crew.vacant = desk.crew.vacant, []
            for worker in vacant:
                self._replace(worker)

    @property
    def _may_fill(self) -> bool:
        desk = self._desk
        if desk.is_running:
            return True
        waiting = (State.STARTING, State.RECOVERING, State.RESIZING)
        return desk.job.state in waiting and isinstance(desk.crew.choose(), Short)

    @property
    def _stepped(self) -> bool:
        """Whether the newest generation has finished a step."""
        restore = self._desk.generation.restore
        return self._desk.progress.steps > (restore.step if restore is not None else 0)

    @property
    def _grows(self) -> bool:
        choice = self._desk.crew.choose()
        here = self._desk.generation.world_size
        return isinstance(choice, Members) and len(choice.chosen) > here

    def _reason(self) -> str:
        """Why another membership would be better now; empty when none would."""
        desk = self._desk
        generation = desk.generation
        if not desk.is_running or not generation.restored or generation.over:
            return ""
        if self._vaults.renewed:
            return "a vault is to be filled again"
        choice = desk.crew.choose()
        if isinstance(choice, Short):
            return ""
        now, then = generation.members, choice.indices
        if now == then:
            return ""
        if any(worker.node_id in desk.crew.leaving for worker in generation.workers):
            return "a node is leaving"
        return f"from {len(now)} to {len(then)} workers"

    def _replace(self, worker: WorkerInfo) -> None:
        """A new worker in the seat of one that is gone; none where there are enough without it."""
        desk = self._desk
        wanted = desk.crew.wanted
        if len(desk.crew.there) >= wanted.most + wanted.spares:
            desk.tasks.spawn(self._dismiss(worker.index))
            return
        window_s = desk.plan.spec.recovery.fault_window_s
        record, now_s = self._faults.record, desk.now_s()
        nodes = {*desk.crew.nodes, worker.node_id}
        bad = blame.blamed(record, nodes, window_s, now_s)
        for node in sorted(bad - self._avoided):
            desk.see(Warned(self._blamed_text(node)))
        self._avoided = bad
        delay_s = blame.delay_s(record, worker.node_id, window_s, now_s)
        avoid = sorted(bad | desk.crew.leaving)
        desk.ports.workers.replace(worker.index, delay_s, avoid)

    def _blamed_text(self, node: str) -> str:
        names = [one.worker.node for one in self._faults.record if one.worker.node_id == node]
        return (
            f"node {names[0]} had {blame.BLAMED_FROM} hardware faults or more within "
            f"recovery.fault_window_s: no replacement is started there"
        )

    async def _move(self, worker: WorkerInfo) -> None:
        await self._quietly(worker.index, kill=True)
        self._replace(worker)

    async def _dismiss(self, worker: int) -> None:
        await self._quietly(worker, kill=False)

    async def _quietly(self, worker: int, *, kill: bool) -> None:
        group = self._desk.ports.workers
        with suppress(GoneError):
            await self._desk.ask(worker, group.kill(worker) if kill else group.dismiss(worker))
