"""Lifecycle of pinned steps: checkpoint, replicate to other nodes' vaults, unpin."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.checkpoints import CheckpointWriter, transfer_limit_s
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import StepReplicated
from rayzero.orchestrator.policies.pinned_steps import PinnedStep, PinnedSteps
from rayzero.orchestrator.policies.recovery import StoredSlot, replica_targets
from rayzero.workers.messages import Pinned
from rayzero.workers.vault.records import SlotRef
from rayzero.workers.vault.vault import Vault

RETRY_BACKOFF_S = (1.0, 4.0, 16.0, 60.0)
"""Wait before each further attempt to replicate to another node; the last value repeats."""


@dataclass(eq=False)
class Replication:
    """Owns the work on pinned steps, which continues during recoveries: they do not change."""

    _replicas: int
    _loop: JobLoop
    _members: Members
    _calls: Calls
    _events: EventBus
    _checkpoints: CheckpointWriter
    _checkpoint_every: int = 0
    """`checkpoint.every_steps`; 0: there are no checkpoints."""
    _pins: PinnedSteps = field(default_factory=PinnedSteps)
    _in_progress: int = 0

    def on_pinned(self, worker: int, message: Pinned) -> None:
        """A rank pinned a step."""
        generation = self._members.generation
        if message.generation != generation.number or not self._members.registry.is_alive(worker):
            return  # of an ended generation: freed with all of its pins
        node_id = self._members.registry.info(worker).node_id
        pin = self._pins.add_rank(message, node_id, generation.world_size)
        if pin is not None:
            self._in_progress += 1
            self._loop.spawn(self._process(pin))

    def resume(self, held: Sequence[StoredSlot]) -> None:
        """Processes the newest step that a lost controller's generation has pinned on all ranks;
        older ones are released with it."""
        generation, every = self._members.generation, self._checkpoint_every
        if (pin := self._pins.resume(held, generation.number, generation.world_size)) is None:
            return
        checkpoint = bool(every) and pin.step % every == 0
        self._in_progress += 1
        self._loop.spawn(self._process(replace(pin, checkpoint=checkpoint)))

    def on_step_finished(self, generation: int) -> None:
        """A step was finished by all ranks of a generation."""
        if not self._members.replicates:
            self._pins.release_older(generation)
        self._release()

    async def wait_idle(self) -> None:
        """Returns once no pinned step is being processed."""
        await self._loop.wait_until(lambda: self._in_progress == 0)

    async def _process(self, pin: PinnedStep) -> None:
        remote = self._members.replicates
        work: list[Awaitable[bool | None]] = [self._replicate(pin)] if remote else []
        if pin.checkpoint:
            work.append(self._checkpoints.write(pin))
        results = await asyncio.gather(*work)
        self._in_progress -= 1
        if remote and not results[0]:
            self._pins.copy_failed(pin)
        else:
            self._pins.complete(pin, hold=remote)
        self._release()
        self._loop.changed.notify()

    async def _replicate(self, pin: PinnedStep) -> bool:
        """Copies each node's slots to the next nodes in the ring, with retries for as long as its
        generation lasts. True once all copies exist."""
        targets = replica_targets(pin.slots, self._replicas)
        nbytes = 0
        for tries in count():
            results = await asyncio.gather(
                *(self._replicate_to(node, slots, pin) for node, slots in targets.items())
            )
            errors = [result for result in results if isinstance(result, str)]
            nbytes += sum(result for result in results if isinstance(result, int))
            if not errors:
                self._events.emit(StepReplicated(pin.step, nbytes))
                return True
            if pin.generation != self._members.generation.number or self._members.generation.fenced:
                break
            text = f"step {pin.step} is not replicated to other nodes yet: {errors[0]}"
            self._events.warn(text)
            await self._loop.sleep(RETRY_BACKOFF_S[min(tries, len(RETRY_BACKOFF_S) - 1)])
        return False

    async def _replicate_to(self, node: str, slots: list[SlotRef], pin: PinnedStep) -> int | str:
        """The bytes copied, or why it failed."""
        try:
            limit_s = transfer_limit_s(len(slots) * pin.rank_bytes)
            return await self._calls.vault(node, Vault.replicate, slots, limit_s=limit_s)
        except VaultLostError as lost:
            return str(lost) or "a vault was lost"
        except RayzeroError as error:
            return error.seen

    def _release(self) -> None:
        for generation, step in self._pins.releasable():
            for node in self._members.vault_addresses:
                self._loop.spawn(self._unpin(node, generation, step))

    async def _unpin(self, node: str, generation: int, step: int) -> None:
        with suppress(VaultLostError):  # then there is nothing to free
            await self._calls.vault(node, Vault.unpin, generation, step)
