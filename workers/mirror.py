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

from rayzero.engine.session import Wishes
from rayzero.engine.state.table import Table
from rayzero.engine.state.training import TrainingState
from rayzero.workers.messages import Assign, Message, MirrorPlan, Pinned
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.errors import VaultGoneError, VaultMemoryError
from rayzero.workers.vault.slots import SlotBuffer

log = logging.getLogger("rayzero.workers")

COST = 0.05  # the share of a step that mirroring may take when the interval is chosen by itself
SMOOTH = 0.2
HASH_BYTES_PER_S = 10e9  # from memory; three times that from a cache


class Mirror:
    """Used by the training thread only.

    Args:
        last_step: the job's last step, which gets a checkpoint too; None when nobody knows.
        vault: None when the node has none; then nothing is copied.
    """

    def __init__(
        self,
        plan: MirrorPlan,
        assign: Assign,
        last_step: int | None,
        vault: VaultClient | None,
        post: Callable[[Message], None],
    ) -> None:
        self._plan = plan
        self._assign = assign
        self._rotating = 2 if plan.replicas else 1  # versions that take turns; pinned come on top
        self._last_step = last_step
        self._vault = vault
        self._post = post
        self._buffers: list[SlotBuffer] = []
        self._table: Table | None = None
        self._filled: set[int] = set()  # buffers that have the constant part
        self.newest = assign.restore.step if assign.restore else 0
        """The newest step that lies in the vault, or that this generation began with."""
        self.checkpointed = self.newest
        """The newest step that was pinned for a checkpoint, or that it began with."""
        self._complete = False  # a mirror of this generation is known to be everywhere
        self._pace = float(plan.every_steps or 1)
        self._costs = _Costs()

    @property
    def held_bytes(self) -> int:
        """What the vault holds of this rank and generation."""
        return sum(len(one.data) for one in self._buffers)

    def wishes(self, step: int) -> Wishes:
        """What to ask for in the vote of `step`."""
        wanted = self._assign.remote or self._due(step)
        pinned = sum(one.pinned for one in self._buffers)
        free = self._room - pinned > self._rotating
        ready = self._vault is not None and wanted and free
        return Wishes(pin=ready, pace=self._plan.every_steps or self._costs.pace)

    def step_done(self, step: int, agreed: Wishes, state: TrainingState) -> None:
        """The vote of `step` was passed by all, and this rank has updated its state."""
        self._pace += SMOOTH * (agreed.pace - self._pace)
        self._costs.step_ended()
        if self._vault is not None and (agreed.pin or agreed.drain or self._has_turn(step)):
            self._mirror(step, agreed.pin, state)

    def _mirror(self, step: int, pin: bool, state: TrainingState) -> None:
        started = perf_counter()
        try:
            self._tell_complete()
            self._copy(step, state, pin)
        except (VaultGoneError, VaultMemoryError) as error:
            if isinstance(error, VaultMemoryError) and self._assign.restore is None:
                raise  # a job's first mirror: the user can still choose
            log.warning("%s\n  this rank goes on without a replica", error)
            self._vault, self._buffers = None, []
            return
        self.newest = step
        if pin:
            checkpoint = self._due(step)
            self.checkpointed = step if checkpoint else self.checkpointed
            assign, stopped_s = self._assign, perf_counter() - started
            self._post(Pinned(assign.generation, assign.rank, step, checkpoint, stopped_s))

    def _due(self, step: int) -> bool:
        """Whether a checkpoint should be made of `step`; late ones are made up for."""
        every = self._plan.checkpoint_every_steps
        if every is None:
            return False
        return step == self._last_step or step // every > self.checkpointed // every

    def _has_turn(self, step: int) -> bool:
        """The same on all ranks: they know the same paces."""
        return self._plan.replicas > 0 and step - self.newest >= max(1, round(self._pace))

    def _tell_complete(self) -> None:
        """A vote was passed since the first mirror: no older generation is needed any more."""
        if self._buffers and not self._complete and self._vault is not None:
            self._vault.complete(self._assign.generation, self.newest)
            self._complete = True

    def _copy(self, step: int, state: TrainingState, pin: bool) -> None:
        buffer = self._next_buffer(state)
        started = perf_counter()
        buffer.begin()
        state.write(buffer.data, constants=id(buffer) not in self._filled)
        self._filled.add(id(buffer))
        self._costs.mirrored(perf_counter() - started)
        # What leaves this node is always checked; the rest where there is time for it.
        wanted = pin or self._costs.afford_checksum(len(buffer.data), self._pace)
        checksum = xxh3_64_intdigest(buffer.data) if wanted else None
        buffer.commit(step, state.small(), pin, checksum)

    def _next_buffer(self, state: TrainingState) -> SlotBuffer:
        """The oldest version that is neither pinned nor needed; a new buffer while there are too
        few. One at a time, because the first step after a repair waits for it."""
        table = state.table()
        if table is not self._table:
            self._table, self._buffers = table, []
            self._filled.clear()
        free = [one for one in self._buffers if not one.pinned]
        if len(free) < self._rotating:
            return self._reserve(table)
        return min(free, key=lambda one: one.step)

    @property
    def _room(self) -> int:
        """How many buffers there may be."""
        pinnable = 2 if self._assign.remote else self._plan.checkpoint_every_steps is not None
        return self._rotating + pinnable

    def _reserve(self, table: Table) -> SlotBuffer:
        if self._vault is None:
            raise VaultGoneError("there is no vault")
        assign = self._assign
        made = self._vault.reserve(assign.generation, assign.rank, assign.world_size, table, 1)
        self._buffers += made
        self._costs.skip()  # what was just made is not what a mirror costs
        return made[0]


class _Costs:
    """What a mirror costs, next to a step."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._mirror_s = 0.0
        self._since_s = perf_counter()
        self._skip = False

    @property
    def pace(self) -> float:
        """Steps between two mirrors that keep their cost under `COST`."""
        if not self._mirror_s or not self._step_s:
            return 1.0
        return float(max(1, ceil(self._mirror_s / (COST * self._step_s) - 0.25)))

    def afford_checksum(self, nbytes: int, pace: float) -> bool:
        """Whether there is time left to read what was copied once more."""
        left_s = COST * self._step_s * pace - self._mirror_s
        return self._mirror_s > 0 and nbytes / HASH_BYTES_PER_S < left_s

    def skip(self) -> None:
        """The mirror at hand does not count."""
        self._skip = True

    def step_ended(self) -> None:
        now = perf_counter()
        took_s = now - self._since_s
        if self._step_s:  # an evaluation between two steps is no step
            took_s = min(took_s, 2 * self._step_s)
        self._step_s = _smoothed(self._step_s, took_s)
        self._since_s = now

    def mirrored(self, seconds: float) -> None:
        if not self._skip:
            self._mirror_s = _smoothed(self._mirror_s, seconds)
        self._skip = False


def _smoothed(before: float, now: float) -> float:
    return before + SMOOTH * (now - before) if before else now
