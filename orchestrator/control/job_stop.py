"""The stop of a job on request: its members leave, its newest state is stored."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.orchestrator import machine
from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.reconfigure import Rendezvous
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.recovery import newest_complete_in_vaults
from rayzero.workers.calls import WorkerCalls

LEAVE_DELAY_S = 4.0
"""How long a stop waits for the members to leave before it writes the last checkpoint,
from the vaults: a step that ends meanwhile is included."""


@dataclass(eq=False)
class JobStop:
    """Ends the generation, and forms no other one."""

    _plan: JobPlan
    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    _calls: Calls
    _rendezvous: Rendezvous
    _vaults: VaultManager
    _checkpoints: CheckpointWriter

    async def run(self) -> None:
        """Lets the members leave; with checkpoints on, writes a last one. All of it takes at most
        `checkpoint.grace_period_s`."""
        generation = self._members.generation
        checkpointing = self._plan.writes_checkpoints
        until_s = self._loop.now_s() + self._plan.spec.checkpoint.grace_period_s
        alive = [
            worker for worker in generation.assignments if self._members.registry.is_alive(worker)
        ]
        self._calls.broadcast(alive, WorkerCalls.end, generation.number)
        if not generation.fenced:
            if not checkpointing:
                await self._leave_softly()
            elif generation.all_restored:
                await self._finish_step()
        self._rendezvous.interrupt()
        if checkpointing:
            delay_s = min(LEAVE_DELAY_S, (until_s - self._loop.now_s()) / 2)
            await self._loop.wait_for(delay_s, lambda: not generation.active)
            newest = newest_complete_in_vaults(await self._vaults.inventory())
            if newest is not None and newest.step and not self._checkpoints.covers(newest.step):
                await self._checkpoints.write_final(newest, until_s - self._loop.now_s())
        await self._loop.wait_for(until_s - self._loop.now_s(), lambda: not generation.active)
        self._machine.post(
            machine.StopTimedOut() if generation.active else machine.TrainingStopped()
        )

    async def _leave_softly(self) -> None:
        """Waits, for half of the time at most, until a member has left at the end of its step. The
        others would then wait for that member without result."""
        generation = self._members.generation
        members = len(generation.active)
        self._rendezvous.interrupt(softly=True)
        await self._loop.wait_for(
            self._plan.spec.checkpoint.grace_period_s / 2,
            lambda: len(generation.active) < members or not members,
        )

    async def _finish_step(self) -> None:
        """Waits for the end of the current step, for half of the time at most. Stops waiting once a
        rank is lost, because its peers would wait for it without result."""
        generation = self._members.generation
        await self._rendezvous.drain(
            self._plan.spec.checkpoint.grace_period_s / 2,
            lambda: not generation.active or bool(generation.pending_faults),
        )
