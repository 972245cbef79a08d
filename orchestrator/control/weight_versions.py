"""The newest version of the trainer's weights that roles can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.policies.recovery import StoredSlot, newest_complete_in_vaults
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.messages import Mirrored
from rayzero.workers.vault.records import SlotRef
from rayzero.workers.weights.directory import WeightDirectory


@dataclass(eq=False)
class WeightVersions:
    """Follows which step every rank has mirrored, through repairs, resizes and adoptions. The state
    that a generation starts from is a version, too, wherever its slots are by then.

    Args:
        _on_change: called after each new version, and after the slots of a version have moved.
        _is_read: whether any role reads versions. Otherwise none is noted, because that costs time
            for each rank in each step.
    """

    _members: Members
    _on_change: Callable[[], None] = lambda: None
    _is_read: bool = True
    newest: WeightDirectory | None = None
    """The newest version; None before the first."""
    _begun: dict[int, int] = field(default_factory=dict)  # by rank, of the generation

    def start_generation(self, generation: GenerationState) -> None:
        """Publishes the state that a generation starts from. That may be older than the newest
        version, which is then lost, and made again. If the state is a checkpoint, the ranks report
        when they have mirrored it."""
        self._begun = {}
        if generation.restore is not None and generation.restore.slots:
            self._publish(generation.restore.slots)

    def resume(self, held: Sequence[StoredSlot]) -> None:
        """Finds the version of a lost controller's generation: the newest step that its ranks have
        mirrored, or the one that it has begun with."""
        generation = self._members.generation
        begun, number = generation.restore, generation.number
        own = [stored for stored in held if stored.slot.generation == number]
        if begun is not None and not begun.checkpoint:
            older = (stored for stored in held if stored.slot.generation < number)
            own += [stored for stored in older if stored.slot.step == begun.step]
        if self._is_read and (newest := newest_complete_in_vaults(own)) is not None:
            self._publish(newest.slots)

    def on_mirrored(self, worker: int, message: Mirrored) -> None:
        """Records that a rank has mirrored the state that the job or its generation begins with."""
        generation = self._members.generation
        if message.generation != generation.number or worker not in generation.assignments:
            return
        self._begun[message.rank] = message.step
        is_last = len(self._begun) == generation.world_size
        if is_last and all(step == message.step for step in self._begun.values()):
            self._publish(self._slots(message.step))

    def on_step_finished(self, record: StepRecord) -> None:
        """Publishes the newest step that all ranks have mirrored. Called when they have finished a
        step."""
        step = record.mirrored_step
        if (
            self._is_read
            and step is not None
            and record.generation == self._members.generation.number
        ):
            self._publish(self._slots(step))

    def _slots(self, step: int) -> list[SlotRef]:
        """Returns the slots of a step that the members have mirrored to their nodes' vaults."""
        generation = self._members.generation
        return [
            SlotRef(generation.number, rank, step, worker.node_id)
            for rank, worker in enumerate(generation.workers)
        ]

    @property
    def confirmed(self) -> WeightDirectory | None:
        """The newest version, if the present generation has mirrored it, or has begun with it. The
        job then does not go back to a step before it while that generation lives."""
        newest = self.newest
        is_own = newest is not None and newest.confirmed_in == self._members.generation.number
        return newest if is_own else None

    def _publish(self, slots: Sequence[SlotRef]) -> None:
        directory = WeightDirectory(tuple(slots), self._members.generation.number)
        if directory != self.newest:
            self.newest = directory
            self._on_change()
