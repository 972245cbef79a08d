"""What becomes of pinned steps: a checkpoint, copies in other nodes' vaults, and an end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.control.checkpoints import Checkpoints
from rayzero.orchestrator.control.desk import COMMAND_S, Desk
from rayzero.orchestrator.control.tasks import within
from rayzero.orchestrator.group import VaultLostError
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.pins import Pin, Pins
from rayzero.orchestrator.policies.ring import copies
from rayzero.workers.messages import Pinned, SlotRef

COPY_S = 600.0
"""How long a vault may take to copy what it is to hold for another node."""
AGAIN_S = (1.0, 4.0, 16.0, 60.0)
"""How long to wait before each further try to copy to another node; the last from then on."""


class Keeping:
    """Owns the work on pinned steps. It goes on through repairs: a pinned step stays as it is."""

    def __init__(self, desk: Desk, checkpoints: Checkpoints) -> None:
        self._desk = desk
        self._checkpoints = checkpoints
        self._pins = Pins()
        self._busy = 0

    def take(self, worker: int, message: Pinned) -> None:
        """A rank pinned a step."""
        desk = self._desk
        generation = desk.generation
        if message.generation != generation.number or not desk.crew.alive(worker):
            return  # of a generation that is over: freed with all of its pins
        node_id = desk.crew.info(worker).node_id
        pin = self._pins.add(message, node_id, generation.world_size)
        if pin is not None:
            self._busy += 1
            desk.tasks.spawn(self._keep(pin))

    def step_finished(self, generation: int) -> None:
        """A step was finished by all ranks of a generation."""
        remote = self._desk.sends_to_others
        self._desk.ports.probe.sends(remote)
        self._pins.begun(generation, remote=remote)
        self._free()

    async def settled(self) -> None:
        """Returns once nothing is in work."""
        await self._desk.bell.until(lambda: self._busy == 0)

    async def _keep(self, pin: Pin) -> None:
        remote = self._desk.sends_to_others
        copying = [self._copy(pin)] if remote else []
        storing = [self._checkpoints.keep(pin)] if pin.checkpoint else []
        copied, *_ = await asyncio.gather(*copying, *storing) if copying or storing else (True,)
        self._busy -= 1
        if remote and not copied:
            self._pins.failed(pin)
        else:
            self._pins.done(pin, hold=remote)
        self._free()
        self._desk.bell.ring()

    async def _copy(self, pin: Pin) -> bool:
        """Sends each node's slots to the next ones in the ring, for as long as its generation
        lasts; whether all are there."""
        desk = self._desk
        wanted = copies(pin.slots, desk.plan.spec.recovery.replicas)
        nbytes = 0
        for tries in count():
            done = await asyncio.gather(*(self._copy_to(node, s) for node, s in wanted.items()))
            failed = [one for one in done if isinstance(one, str)]
            nbytes += sum(one for one in done if isinstance(one, int))
            if not failed:
                desk.ports.probe.copied(pin.step, nbytes)
                return True
            if pin.generation != desk.generation.number or desk.generation.fenced:
                break
            desk.see(Warned(f"step {pin.step} is not on other nodes yet: {failed[0]}"))
            await desk.ports.clock.sleep(AGAIN_S[min(tries, len(AGAIN_S) - 1)])
        return False

    async def _copy_to(self, node: str, slots: list[SlotRef]) -> int | str:
        """The bytes that were copied; else why it did not work."""
        desk = self._desk
        try:
            return await within(desk.ports.clock, COPY_S, desk.ports.vaults.replicate(node, slots))
        except TimeoutError:
            return f"they took longer than {COPY_S:g} s"
        except VaultLostError as lost:
            return str(lost) or "a vault is gone"
        except RayzeroError as error:
            return error.seen

    def _free(self) -> None:
        for generation, step in self._pins.freeable():
            for node in self._desk.vaults:
                self._desk.tasks.spawn(self._unpin(node, generation, step))

    async def _unpin(self, node: str, generation: int, step: int) -> None:
        desk = self._desk
        with suppress(VaultLostError, TimeoutError):  # then there is nothing left to free
            await within(
                desk.ports.clock, COMMAND_S, desk.ports.vaults.unpin(node, generation, step)
            )
