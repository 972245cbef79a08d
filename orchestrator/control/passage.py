"""The way from one generation to the next: fence or drain, pick, settle, form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import events as ev
from rayzero.orchestrator.answers import Answers
from rayzero.orchestrator.control.desk import Desk, GoneError
from rayzero.orchestrator.control.faults import Faults
from rayzero.orchestrator.control.tasks import breath
from rayzero.orchestrator.control.vaults import Vaults
from rayzero.orchestrator.generation import Generation
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.policies import membership, placement, recovery
from rayzero.orchestrator.policies.membership import Members, Short
from rayzero.orchestrator.repairs import Repairs
from rayzero.workers.messages import Formation, Own, Restore, SlotRef, WorkerInfo

FENCE_S = 10.0
"""How long the survivors of a fault may take to unwind before they are killed."""
Newest = Callable[[frozenset[int]], Awaitable[recovery.Stored | None]]
"""The newest whole checkpoint but for some steps: at hand, or looked up."""

Leave = Callable[[Iterable[int], int], Answers]
"""Has workers leave a generation."""


@dataclass
class _Way:
    """What one way has found out so far."""

    work: asyncio.Task[None] | None = None
    restore: Restore | None = None
    step: int = 0
    members: Members = field(default_factory=lambda: Members(()))
    store: tuple[int, int] | None = None
    """(worker, port) of a store that was opened ahead."""


class Passage:
    """Owns the way under way; setting out again ends it.

    The survivors of a death wait for nothing but each other and one answer each: the places,
    the addresses and the slots are worked out here, from what is known already.
    """

    def __init__(
        self,
        desk: Desk,
        faults: Faults,
        vaults: Vaults,
        repairs: Repairs,
        newest: Newest,
    ) -> None:
        self.left_out = Members(())
        """Of the newest generation: who was left out, to be let go once it is formed."""
        self.on_forming: Callable[[Sequence[WorkerInfo]], tuple[float, ...]] = lambda _: ()
        """Told the members, by rank, when a generation is about to begin; gives their shares."""
        self._desk = desk
        self._faults = faults
        self._vaults = vaults
        self._repairs = repairs
        self._newest = newest
        self._way = _Way()
        self._telling = Answers()
        """Of the newest generation's members their places."""

    def fence(self, passage: int) -> None:
        generation = self._desk.generation
        generation.fenced = True
        self.break_off(generation.still_in)  # before anything else: it is what survivors wait for
        self._depart("fence", self._fence(passage))

    def drain(self, passage: int) -> None:
        self._depart("drain", self._drain(passage))

    def pick(self, passage: int) -> None:
        if self._way.work is None:  # the first generation of all: nobody had to be unwound
            self._way = _Way()
        self._go_on("pick", self._pick(passage))

    def settle(self, passage: int) -> None:
        self._go_on("settle", self._settle(passage))

    def form(self, generation: int, passage: int) -> None:
        self._go_on("form", self._form(generation, passage))

    def end(self) -> None:
        """Gives the way up: the job is being stopped."""
        if self._way.work is not None:
            self._way.work.cancel()

    def break_off(self, workers: frozenset[int], *, softly: bool = False) -> None:
        """Has members leave, but none before it has heard its place: it would begin after it.

        Args:
            softly: let them finish the collective they are in.
        """
        group, telling = self._desk.ports.workers, self._telling
        generation = self._desk.generation.number
        leave = group.stop if softly else group.fence
        if placed := workers - telling.missing:
            self._desk.tasks.spawn(self._desk.all_do(leave(placed, generation)))
        if placed < workers:
            late = self._break_off_later(workers - placed, telling, leave, generation)
            self._desk.tasks.spawn(late)

    async def _break_off_later(
        self, workers: frozenset[int], telling: Answers, leave: Leave, number: int
    ) -> None:
        """As each of them hears its place."""
        while workers:
            await telling.any_of(workers)
            placed = workers - telling.missing
            self._desk.tasks.spawn(self._desk.all_do(leave(placed, number)))
            workers -= placed

    def _depart(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        self.end()
        self._way = _Way()
        self._go_on(part, work)

    def _go_on(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        self._repairs.enter(part, self._desk.now_s())
        self._way.work = self._desk.tasks.spawn(work)

    async def _fence(self, passage: int) -> None:
        desk, generation = self._desk, self._desk.generation
        if not await desk.happens(FENCE_S, lambda: generation.deserted):
            for worker in generation.still_in:
                self._faults.abandon(worker, f"it did not unwind within {FENCE_S:g} s")
        await self._faults.buried()
        desk.feed(ev.Fenced(passage))

    async def _drain(self, passage: int) -> None:
        """Has no limit of its own: a step takes what it takes, and a hang is found elsewhere."""
        desk, generation = self._desk, self._desk.generation
        drained = desk.ports.workers.drain(generation.still_in, generation.number)
        desk.tasks.spawn(desk.all_do(drained))
        await desk.bell.until(lambda: generation.deserted)
        if not generation.finished:  # then the job is done, and that is told elsewhere
            desk.feed(ev.Fenced(passage))

    async def _pick(self, passage: int) -> None:
        desk, way = self._desk, self._way
        held, _ = await asyncio.gather(self._vaults.inventory(), self._open_store(way))
        stored = await self._newest(self._faults.damaged.checkpoints)
        damaged = self._faults.damaged
        picked = recovery.pick(held, self._remembered(), stored, damaged)
        if isinstance(picked, recovery.FromMemory):
            slots = await self._salvage(picked)
            if not slots:
                picked = recovery.pick(held, recovery.Remembered(), stored, damaged)
        match picked:
            case recovery.FromSlots(step, slots):
                way.restore = Restore(step, slots)
            case recovery.FromMemory(step, _):
                way.restore = Restore(step, slots)
            case recovery.FromCheckpoint(step, folder):
                way.restore = Restore(step, checkpoint=folder)
        redone = desk.progress.rewind(picked.step)
        desk.ports.note("picked", step=picked.step, steps_redone=redone)
        if isinstance(picked, recovery.FromCheckpoint | recovery.FromNothing):
            self._tell_loss(picked, redone)
        way.step = picked.step
        self._repairs.picked(picked.step, redone)
        desk.feed(ev.RecoveryStepPicked(passage, picked.step))

    async def _settle(self, passage: int) -> None:
        desk = self._desk
        limit_s = desk.plan.need.timeout_s
        choice = desk.crew.choose()
        if isinstance(choice, Short):
            least = desk.crew.wanted.least
            text = f"{choice.there} of at least {least} workers are left: waiting for more"
            desk.see(Warned(f"{text}, at most {limit_s:g} s (workers.start_timeout_s)"))
            await desk.happens(limit_s, lambda: isinstance(desk.crew.choose(), Members))
            choice = desk.crew.choose()
        if isinstance(choice, Short):
            raise membership.too_few(choice, desk.crew.wanted, limit_s)
        self._way.members = choice
        chosen = tuple(worker.index for worker in choice.chosen)
        desk.feed(ev.MembershipSettled(passage, chosen))

    async def _form(self, number: int, passage: int) -> None:
        """Gives every member its place. The store is opened by any live worker."""
        desk, way = self._desk, self._way
        members = way.members.chosen
        places = placement.ranks(members)
        await breath(len(members))
        generation = desk.generation = Generation(number, passage, places, members, way.restore)
        desk.crew.members = generation.members
        for record in desk.progress.begin(number, len(places), way.step):
            desk.see(record)
        self.left_out = way.members
        if missing := [one.index for one in members if not desk.crew.alive(one.index)]:
            for worker in missing:
                self._faults.missing(worker)
            return
        shares = self.on_forming(generation.workers)
        if way.store is None or way.store[0] not in generation.members:
            way.store = await self._store_on(places[0].worker)
        host, port = desk.crew.info(way.store[0]), way.store[1]
        self._vaults.used(worker.node_id for worker in members)
        formation = Formation(
            generation=number,
            world_size=len(places),
            store_host=host.ip,
            store_port=port,
            restore=way.restore,
            shares=shares,
            remote=desk.sends_to_others,
            faults=desk.injected,
        )
        generation.enter()
        self._telling = desk.ports.workers.assign(formation, self._own(generation))
        desk.tasks.spawn(desk.all_do(self._telling))

    def _own(self, generation: Generation) -> dict[int, Own]:
        """What each member's place has of its own, by worker."""
        vaults = self._desk.vaults
        return {
            place.worker: Own(
                place.rank, place.local_rank, place.local_world_size, vaults.get(one.node_id, "")
            )
            for place, one in zip(generation.places, generation.workers, strict=True)
        }

    async def _open_store(self, way: _Way) -> None:
        """Ahead of time, where the membership to come has its first rank as things stand."""
        choice = self._desk.crew.choose()
        if isinstance(choice, Short):
            return
        try:
            way.store = await self._store_on(placement.first(choice.chosen).index)
        except GoneError as gone:  # if it was no member, the way goes on without it
            self._faults.lost(gone.worker, gone.cause)

    async def _store_on(self, worker: int) -> tuple[int, int]:
        return worker, await self._desk.ask(worker, self._desk.ports.workers.open_store(worker))

    async def _salvage(self, picked: recovery.FromMemory) -> tuple[SlotRef, ...]:
        """Copies memories into vaults. None, if that fails, or if they turn out not to be one
        state: a generation that was fenced before it had a state still holds parts cut for an
        older one."""
        desk = self._desk
        nodes = [desk.crew.info(worker).node_id for worker in picked.workers]
        asked = [
            desk.ask(worker, desk.ports.workers.salvage(worker, desk.vaults.get(node, "")))
            for worker, node in zip(picked.workers, nodes, strict=True)
        ]
        try:
            made = await asyncio.gather(*asked)
        except RayzeroError as error:
            desk.see(Warned(f"a worker's memory could not be copied: {error.seen}"))
            return ()
        held = [recovery.Held(slot, node) for slot, node in zip(made, nodes, strict=True)]
        if len(held) == 1:
            return recovery.refs(held)
        newest = recovery.newest_set(held)
        return newest.slots if newest is not None and newest.step == picked.step else ()

    def _remembered(self) -> recovery.Remembered:
        """What can still be copied into a vault."""
        desk = self._desk
        there = desk.generation.remembered()
        by_rank = {
            rank: (worker, memory)
            for rank, (worker, memory) in (there.by_rank or {}).items()
            if desk.crew.alive(worker) and desk.crew.info(worker).node_id in desk.vaults
        }
        return recovery.Remembered(there.world_size, by_rank)

    def _tell_loss(self, picked: recovery.Pick, redone: int) -> None:
        if self._desk.generation.number == 0 or redone == 0:
            return  # the beginning of a run is told as such
        if isinstance(picked, recovery.FromCheckpoint):
            where = f"the checkpoint of step {picked.step} ({picked.folder})"
        else:
            where = "the beginning: there is no whole checkpoint"
        self._desk.see(
            Warned(
                f"no complete copy of the state is left in memory: going back to {where}; "
                f"{redone} finished step{'s' * (redone != 1)} will be done again"
            )
        )
