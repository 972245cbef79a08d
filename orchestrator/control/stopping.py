"""The way to an end by wish: unwind, keep what was trained, be gone in time."""

from __future__ import annotations

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.control.checkpoints import Checkpoints
from rayzero.orchestrator.control.desk import Desk
from rayzero.orchestrator.control.passage import Passage
from rayzero.orchestrator.control.vaults import Vaults
from rayzero.orchestrator.policies.recovery import newest_set

STOP_S = 4.0
"""How long the training functions may take to unwind before their processes are killed."""


class Stopping:
    """With checkpoints on, a stop ends with one more, within `checkpoint.notice_s` in all."""

    def __init__(
        self, desk: Desk, passage: Passage, vaults: Vaults, checkpoints: Checkpoints
    ) -> None:
        self._desk = desk
        self._passage = passage
        self._vaults = vaults
        self._checkpoints = checkpoints

    def begin(self) -> None:
        self._passage.end()
        keeps = self._desk.plan.setup.mirror.checkpoint_every_steps is not None
        self._desk.tasks.spawn(self._stop_and_keep() if keeps else self._stop())

    async def _stop(self) -> None:
        self._unwind(softly=not self._desk.generation.fenced)
        await self._left(STOP_S)
        self._end()

    async def _stop_and_keep(self) -> None:
        desk, generation = self._desk, self._desk.generation
        notice_s = desk.plan.spec.checkpoint.notice_s
        until_s = desk.now_s() + notice_s
        if generation.restored and not generation.fenced:
            drained = desk.ports.workers.drain(generation.still_in, generation.number)
            desk.tasks.spawn(desk.all_do(drained))
            # Half of the time for the step at hand; none of it when a rank is lost on the way,
            # because its peers would only wait for it.
            await desk.happens(notice_s / 2, lambda: generation.deserted or bool(generation.faults))
        self._unwind(softly=False)
        await self._left(min(STOP_S, until_s - desk.now_s()))
        newest = newest_set(await self._vaults.inventory())
        if newest is not None and not self._checkpoints.has(newest.step):
            await self._checkpoints.keep_last(newest.slots, until_s - desk.now_s())
        self._end()

    def _unwind(self, *, softly: bool) -> None:
        """Has everyone leave who has not left yet."""
        generation = self._desk.generation
        generation.fenced = True
        self._passage.break_off(generation.still_in, softly=softly)

    async def _left(self, limit_s: float) -> bool:
        generation = self._desk.generation
        return await self._desk.happens(limit_s, lambda: generation.deserted)

    def _end(self) -> None:
        if not self._desk.generation.deserted:
            self._desk.feed(ev.StopTimedOut())
        else:
            self._desk.feed(ev.TrainingStopped())
