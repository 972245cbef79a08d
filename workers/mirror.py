"""When and how a rank copies its state into its node's vault: one generation of it.

Order. A step's mirror is done before the step is reported, and before the next vote is cast. So
whoever passes the vote of step k knows that all ranks have mirrored what they were to mirror of
step k - 1; and a rank overwrites a version only after such a vote. Hence the ranks always have a
step in common.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import ceil
from time import perf_counter

from xxhash import xxh3_64_intdigest

from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.session import StepRequests
from rayzero.engine.state.training import TrainingState
from rayzero.workers.messages import Assignment, MirrorPolicy, Pinned, WorkerMessage
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import VaultGoneError, VaultMemoryError
from rayzero.workers.vault.slots import SlotWriter

log = logging.getLogger("rayzero.workers")

MIRROR_COST_FRACTION = (
    0.05  # the share of a step that mirroring may take when the interval is chosen by itself
)
SMOOTHING_FACTOR = 0.2
HASH_BYTES_PER_S = 10e9  # from memory; three times that from a cache


class Mirror:
    """Used by the training thread only.

    Args:
        last_step: the job's last step, which gets a checkpoint too; None when nobody knows.
        vault: None when the node has none; then nothing is copied.
    """

    def __init__(
        self,
        plan: MirrorPolicy,
        assign: Assignment,
        last_step: int | None,
        vault: VaultClient | None,
        post: Callable[[WorkerMessage], None],
    ) -> None:
        self._plan = plan
        self._assignment = assign
        self._rotating_buffers = (
            2 if plan.replicas else 1
        )  # versions that take turns; pinned come on top
        self._last_step = last_step
        self._vault = vault
        self._post = post
        self._buffers: list[SlotWriter] = []
        self._table: BlockIndex | None = None
        self._filled_buffers: set[int] = set()  # buffers that have the constant part
        self.newest_step = assign.restore.step if assign.restore else 0
        """The newest step that lies in the vault, or that this generation began with."""
        self.checkpointed_step = self.newest_step
        """The newest step that was pinned for a checkpoint, or that it began with."""
        self._announced = False  # a mirror of this generation is known to be everywhere
        self._interval_steps = float(plan.every_steps or 1)
        self._cost_model = _CostModel()

    @property
    def held_bytes(self) -> int:
        """What the vault holds of this rank and generation."""
        return sum(len(one.data) for one in self._buffers)

    def step_requests(self, step: int) -> StepRequests:
        """What to ask for in the vote of `step`."""
        wanted = self._assignment.remote or self._checkpoint_due(step)
        pinned = sum(one.pinned for one in self._buffers)
        free = self._max_buffers - pinned > self._rotating_buffers
        ready = self._vault is not None and wanted and free
        return StepRequests(
            pin=ready, mirror_interval=self._plan.every_steps or self._cost_model.interval_steps
        )

    def step_done(self, step: int, agreed: StepRequests, state: TrainingState) -> None:
        """The vote of `step` was passed by all, and this rank has updated its state."""
        self._interval_steps += SMOOTHING_FACTOR * (agreed.mirror_interval - self._interval_steps)
        self._cost_model.step_finished()
        if self._vault is not None and (agreed.pin or agreed.drain or self._mirror_due(step)):
            self._write_mirror(step, agreed.pin, state)

    def _write_mirror(self, step: int, pin: bool, state: TrainingState) -> None:
        started = perf_counter()
        try:
            self._announce_complete()
            self._copy_state(step, state, pin)
        except (VaultGoneError, VaultMemoryError) as error:
            if isinstance(error, VaultMemoryError) and self._assignment.restore is None:
                raise  # a job's first mirror: the user can still choose
            log.warning("%s\n  this rank goes on without a replica", error)
            self._vault, self._buffers = None, []
            return
        self.newest_step = step
        if pin:
            checkpoint = self._checkpoint_due(step)
            self.checkpointed_step = step if checkpoint else self.checkpointed_step
            assign, stopped_s = self._assignment, perf_counter() - started
            self._post(Pinned(assign.generation, assign.rank, step, checkpoint, stopped_s))

    def _checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint should be made of `step`; late ones are made up for."""
        every = self._plan.checkpoint_every_steps
        if every is None:
            return False
        return step == self._last_step or step // every > self.checkpointed_step // every

    def _mirror_due(self, step: int) -> bool:
        """The same on all ranks: they know the same paces."""
        return self._plan.replicas > 0 and step - self.newest_step >= max(
            1, round(self._interval_steps)
        )

    def _announce_complete(self) -> None:
        """A vote was passed since the first mirror: no older generation is needed any more."""
        if self._buffers and not self._announced and self._vault is not None:
            self._vault.announce_complete(self._assignment.generation)
            self._announced = True

    def _copy_state(self, step: int, state: TrainingState, pin: bool) -> None:
        buffer = self._next_buffer(state)
        started = perf_counter()
        buffer.begin()
        state.write_block(buffer.data, constants=id(buffer) not in self._filled_buffers)
        self._filled_buffers.add(id(buffer))
        self._cost_model.mirror_finished(perf_counter() - started)
        # What leaves this node is always checked; the rest where there is time for it.
        wanted = pin or self._cost_model.can_afford_checksum(len(buffer.data), self._interval_steps)
        checksum = xxh3_64_intdigest(buffer.data) if wanted else None
        buffer.commit(step, state.metadata(), pin, checksum)

    def _next_buffer(self, state: TrainingState) -> SlotWriter:
        """The oldest version that is neither pinned nor needed; a new buffer while there are too
        few. One at a time, because the first step after a repair waits for it."""
        table = state.block_index()
        if table is not self._table:
            self._table, self._buffers = table, []
            self._filled_buffers.clear()
        free = [one for one in self._buffers if not one.pinned]
        if len(free) < self._rotating_buffers:
            return self._reserve_buffer(table)
        return min(free, key=lambda one: one.step)

    @property
    def _max_buffers(self) -> int:
        """How many buffers there may be."""
        pinnable = 2 if self._assignment.remote else self._plan.checkpoint_every_steps is not None
        return self._rotating_buffers + pinnable

    def _reserve_buffer(self, table: BlockIndex) -> SlotWriter:
        if self._vault is None:
            raise VaultGoneError("there is no vault")
        assign = self._assignment
        made = self._vault.reserve(assign.generation, assign.rank, assign.world_size, table, 1)
        self._buffers += made
        self._cost_model.skip_next()  # what was just made is not what a mirror costs
        return made[0]


class _CostModel:
    """What a mirror costs, next to a step."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._mirror_s = 0.0
        self._last_step_at_s = perf_counter()
        self._skip_next_sample = False

    @property
    def interval_steps(self) -> float:
        """Steps between two mirrors that keep their cost under `COST`."""
        if not self._mirror_s or not self._step_s:
            return 1.0
        return float(max(1, ceil(self._mirror_s / (MIRROR_COST_FRACTION * self._step_s) - 0.25)))

    def can_afford_checksum(self, nbytes: int, pace: float) -> bool:
        """Whether there is time left to read what was copied once more."""
        left_s = MIRROR_COST_FRACTION * self._step_s * pace - self._mirror_s
        return self._mirror_s > 0 and nbytes / HASH_BYTES_PER_S < left_s

    def skip_next(self) -> None:
        """The mirror at hand does not count."""
        self._skip_next_sample = True

    def step_finished(self) -> None:
        now = perf_counter()
        took_s = now - self._last_step_at_s
        if self._step_s:  # an evaluation between two steps is no step
            took_s = min(took_s, 2 * self._step_s)
        self._step_s = _smooth(self._step_s, took_s)
        self._last_step_at_s = now

    def mirror_finished(self, seconds: float) -> None:
        if not self._skip_next_sample:
            self._mirror_s = _smooth(self._mirror_s, seconds)
        self._skip_next_sample = False


def _smooth(before: float, now: float) -> float:
    return before + SMOOTHING_FACTOR * (now - before) if before else now
