"""Steps that the ranks have pinned for checkpoints: written, then unpinned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.policies.pinned_steps import ALL_STEPS, PinnedStep, PinnedSteps
from rayzero.orchestrator.policies.recovery import StoredSlot
from rayzero.workers.messages import Pinned
from rayzero.workers.vault.vault import Vault


@dataclass(eq=False)
class CheckpointPins:
    """Owns the work on pinned steps. It continues during recoveries, because pinned slots do not
    change."""

    _loop: JobLoop
    _members: Members
    _calls: Calls
    _checkpoints: CheckpointWriter
    _pins: PinnedSteps = field(default_factory=PinnedSteps)

    def on_pinned(self, worker: int, message: Pinned) -> None:
        """Records that a rank pinned a step. A step that all ranks have pinned is written."""
        generation = self._members.generation
        if message.generation != generation.number or not self._members.registry.is_alive(worker):
            return  # its generation has ended, and all of its pins are freed
        node_id = self._members.registry.info(worker).node_id
        self._begin(self._pins.add_rank(message, node_id, generation.world_size))

    def resume(self, held: Sequence[StoredSlot]) -> None:
        """Writes the newest step that all ranks of a lost controller's generation have pinned.
        Older pins are released with it."""
        generation = self._members.generation
        pin, passed = self._pins.resume(held, generation.number, generation.world_size)
        self._begin(pin)
        if passed:
            self._release(generation.number, passed)

    def on_step_finished(self, generation: int) -> None:
        """Releases the pins of earlier generations. Called when all ranks of a generation have
        finished a step."""
        if self._pins.release_older(generation):
            self._release(generation - 1, ALL_STEPS)

    async def wait_idle(self) -> None:
        """Returns once no pinned step is being written."""
        await self._loop.wait_until(lambda: not self._pins.writing)

    def _begin(self, pin: PinnedStep | None) -> None:
        if pin is not None:
            self._loop.spawn(self._process(pin))

    async def _process(self, pin: PinnedStep) -> None:
        await self._checkpoints.write(pin)
        self._release(*self._pins.complete(pin))
        self._loop.changed.notify()

    def _release(self, generation: int, step: int) -> None:
        for node in self._members.vault_addresses:
            self._loop.spawn(self._unpin(node, generation, step))

    async def _unpin(self, node: str, generation: int, step: int) -> None:
        with suppress(VaultLostError):  # then there is nothing to free
            await self._calls.vault(node, Vault.unpin, generation, step)
