"""Copies a rank's training state into its node's vault, at an interval that bounds the cost.

Order: a step's mirror is complete before the step is reported and before the next vote. A rank that
has passed the vote of step k therefore knows that all ranks have finished the mirror of step k - 1,
if one was due; and it overwrites a version only after such a vote. Hence all ranks always have one
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

MIRROR_COST_FRACTION = 0.05
"""The fraction of training time for mirroring, if the interval is chosen automatically."""
SMOOTHING_FACTOR = 0.2


class Mirror:
    """Mirrors one rank for one generation. Used by the training thread only.

    Args:
        last_step: the job's last step, which gets a checkpoint, too; None: unknown.
        vault: None if the node has none; then nothing is copied.
    """

    def __init__(
        self,
        policy: MirrorPolicy,
        assignment: Assignment,
        last_step: int | None,
        vault: VaultClient | None,
        post: Callable[[WorkerMessage], None],
    ) -> None:
        self._policy = policy
        self._assignment = assignment
        # Unpinned versions, written alternately; pinned ones come in addition.
        self._rotating_buffers = 2 if policy.replicas else 1
        self._last_step = last_step
        self._vault = vault
        self._post = post
        self._buffers: list[SlotWriter] = []
        self._table: BlockIndex | None = None
        self.newest_step = assignment.restore.step if assignment.restore else 0
        """The newest step in the vault, or the one that this generation started from."""
        self.checkpointed_step = self.newest_step
        """The newest step pinned for a checkpoint, or the one that this generation started from."""
        self.stopped_s = 0.0
        """How long training was paused after the last step."""
        self._announced = False  # the vault knows that all ranks have a mirror of this generation
        self._interval_steps = float(policy.every_steps or 1)
        self._cost_model = _CostModel()

    def gauges(self) -> dict[str, float]:
        """The newest step in the vault, and the bytes there of this rank and generation; empty
        without a vault."""
        held = float(sum(len(buffer.data) for buffer in self._buffers))
        return {"replica_step": float(self.newest_step), "replica_bytes": held} if held else {}

    def step_requests(self, step: int) -> StepRequests:
        """This rank's requests for the vote of `step`."""
        pin_due = self._assignment.remote or self._checkpoint_due(step)
        pinned = sum(buffer.pinned for buffer in self._buffers)
        has_free_buffer = self._max_buffers - pinned > self._rotating_buffers
        return StepRequests(
            pin=self._vault is not None and pin_due and has_free_buffer,
            mirror_interval=self._policy.every_steps or self._cost_model.interval_steps,
        )

    def step_done(self, step: int, agreed: StepRequests, state: TrainingState) -> None:
        """Mirrors the state if due. All ranks passed the vote; this one has updated its state."""
        started = perf_counter()
        self._interval_steps += SMOOTHING_FACTOR * (agreed.mirror_interval - self._interval_steps)
        self._cost_model.step_finished()
        if self._vault is not None and (agreed.pin or agreed.drain or self._mirror_due(step)):
            self._write_mirror(self._vault, step, agreed.pin, state)
        self.stopped_s = perf_counter() - started

    def _write_mirror(self, vault: VaultClient, step: int, pin: bool, state: TrainingState) -> None:
        started = perf_counter()
        try:
            if self._buffers and not self._announced:
                # After the first vote behind a mirror no older generation is needed.
                vault.announce_complete(self._assignment.generation)
                self._announced = True
            self._copy_state(vault, step, state, pin)
        except (VaultGoneError, VaultMemoryError) as error:
            if isinstance(error, VaultMemoryError) and self._assignment.restore is None:
                raise  # the job's first mirror: fail early, while the config can be changed
            log.warning("%s\n  this rank continues without a replica", error)
            self._vault, self._buffers = None, []
            return
        self.newest_step = step
        if pin:
            checkpoint = self._checkpoint_due(step)
            self.checkpointed_step = step if checkpoint else self.checkpointed_step
            generation, rank = self._assignment.generation, self._assignment.rank
            nbytes = max(len(buffer.data) for buffer in self._buffers)
            stopped_s = perf_counter() - started
            self._post(Pinned(generation, rank, step, checkpoint, stopped_s, nbytes))

    def _checkpoint_due(self, step: int) -> bool:
        """Whether `step` should become a checkpoint; a missed one is due at the next step."""
        every = self._policy.checkpoint_every_steps
        if every is None:
            return False
        return step == self._last_step or step // every > self.checkpointed_step // every

    def _mirror_due(self, step: int) -> bool:
        """The same on all ranks: they agreed on the interval."""
        return self._policy.replicas > 0 and step - self.newest_step >= max(
            1, round(self._interval_steps)
        )

    def _copy_state(self, vault: VaultClient, step: int, state: TrainingState, pin: bool) -> None:
        block, assignment = state.pack(), self._assignment
        buffer = self._oldest_unpinned(block.index)
        is_new = buffer is None
        if buffer is None:  # one at a time: the first step after a recovery waits for it
            buffer = vault.reserve(
                assignment.generation, assignment.rank, assignment.world_size, block.index
            )
            self._buffers.append(buffer)
        started = perf_counter()
        buffer.begin()
        block.copy_to(buffer.data, constants=is_new)
        checksum = xxh3_64_intdigest(buffer.data)
        if not is_new:  # the first write into new memory is slower
            self._cost_model.mirror_finished(perf_counter() - started)
        buffer.commit(step, state.metadata(), pin, checksum)

    def _oldest_unpinned(self, table: BlockIndex) -> SlotWriter | None:
        """The buffer of the oldest unpinned version; None while there are too few."""
        if table is not self._table:
            self._table, self._buffers = table, []
        unpinned = [buffer for buffer in self._buffers if not buffer.pinned]
        if len(unpinned) < self._rotating_buffers:
            return None
        return min(unpinned, key=lambda buffer: buffer.step)

    @property
    def _max_buffers(self) -> int:
        pinnable = 2 if self._assignment.remote else self._policy.checkpoint_every_steps is not None
        return self._rotating_buffers + pinnable


class _CostModel:
    """Smoothed durations of a step and of a mirror, with its checksum."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._mirror_s = 0.0
        self._last_step_at_s = perf_counter()

    @property
    def interval_steps(self) -> float:
        """Steps between two mirrors that keep their cost within `MIRROR_COST_FRACTION`."""
        if not self._mirror_s or not self._step_s:
            return 1.0
        return float(max(1, ceil(self._mirror_s / (MIRROR_COST_FRACTION * self._step_s) - 0.25)))

    def step_finished(self) -> None:
        now = perf_counter()
        took_s = now - self._last_step_at_s
        if self._step_s:  # an evaluation between two steps does not count
            took_s = min(took_s, 2 * self._step_s)
        self._step_s = _smooth(self._step_s, took_s)
        self._last_step_at_s = now

    def mirror_finished(self, seconds: float) -> None:
        self._mirror_s = _smooth(self._mirror_s, seconds)


def _smooth(before: float, now: float) -> float:
    return before + SMOOTHING_FACTOR * (now - before) if before else now
