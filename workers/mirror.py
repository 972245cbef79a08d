"""Decides when a rank's training state is copied into its node's vault, and into which slot.

Order: a step's mirror is complete before the step is reported and before the next vote, which
takes its requests from here (`step_requests`). A rank that has passed the vote of step k therefore
knows that all ranks have finished the mirror of step k - 1, if one was due; and it overwrites a
version only after such a vote. Hence all ranks always have one step in common. `state_copy`
says how that holds where copies run concurrently with training. The first vote of a generation
shows that all ranks have loaded the step that the generation starts from. From then on the slot of
an older step is overwritten first.

A vote decides which steps are kept for other nodes, so all ranks keep the same ones. When a vote
shows that other nodes have all ranks' slots of the newest kept step, the kept step before it is
released. So other nodes always have one step of all ranks.

Rule of ordering: `pinned-stays` (docs/engine.md).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter

from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.session import StepRequests
from rayzero.engine.state.composite import CompositeState
from rayzero.workers.messages import (
    Assignment,
    Mirrored,
    MirrorPolicy,
    Pinned,
    WorkerMessage,
)
from rayzero.workers.state_copy import SlotWrite, StateCopier, smooth
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import VaultGoneError, VaultMemoryError
from rayzero.workers.vault.slots import SlotWriter

log = logging.getLogger("rayzero.workers")


class Mirror:
    """Mirrors one rank's state during one generation. Used by the training thread only.

    Args:
        last_step: the job's last step, which also gets a checkpoint; None: unknown.
        vault: None if the node has no vault; then nothing is copied.
        interrupt: a copy made after this was set is neither committed nor reported if an abort may
            have changed the copied state.
    """

    def __init__(
        self,
        policy: MirrorPolicy,
        assignment: Assignment,
        last_step: int | None,
        vault: VaultClient | None,
        post: Callable[[WorkerMessage], None],
        interrupt: StopFlag,
    ) -> None:
        self._policy = policy
        self._assignment = assignment
        # Unpinned versions, written alternately; pinned ones come in addition.
        self._rotating_buffers = 2 if policy.replicas else 1
        self._last_step = last_step
        self._vault = vault
        self._copier = StateCopier(interrupt, post)
        self._buffers: list[SlotWriter] = []
        self.newest_step = assignment.restore.step if assignment.restore else 0
        """The newest step in the vault, or the one that this generation started from."""
        self.checkpointed_step = self.newest_step
        """The newest step pinned for a checkpoint, or the one that this generation started from."""
        self._replicated: tuple[int, int] | None = None
        """The newest step of which other nodes have all slots, and the bytes copied for it."""
        self.stopped_s = 0.0
        """How long training was paused after the last step."""
        self.lacks_version = policy.version_every_steps is not None and not (
            assignment.restore and assignment.restore.slots
        )
        """Whether roles find no weights of the state that the generation starts from: see
        `begin`."""
        self._announced = 0  # mirrors announced to the vault, up to 3; see `_announce`
        # Whether the step before was mirrored: see `CopyCost.step_finished`.
        self._last_mirror: bool | None = False
        self._interval_steps = self._limit(policy.every_steps or 1)

    @property
    def interval_steps(self) -> int:
        """The largest number of steps from one mirror to the next."""
        return 1 + math.ceil(self._interval_steps)

    def go_back(self, step: int) -> None:
        """Called when the function has loaded a state older than the generation's first one."""
        self.newest_step = step
        self.lacks_version = self._policy.version_every_steps is not None

    def gauges(self) -> dict[str, float]:
        """Returns the newest step in the vault, and this rank's bytes there in this generation;
        the same of the steps on other nodes, if there are any. Empty without a vault."""
        held = float(sum(len(buffer.data) for buffer in self._buffers))
        if self._vault is None or not held:
            return {}
        gauges = {"replica_step": float(self.newest_step), "replica_bytes": held}
        if self._replicated is not None:
            step, nbytes = self._replicated
            gauges |= {"replicated_step": float(step), "replicated_bytes": float(nbytes)}
        return gauges

    def copies(self) -> dict[int, SlotWriter]:
        """Returns the complete copies, by step. They can be read even if the vault is lost. Any
        thread may call this once the generation has ended."""
        return {buffer.step: buffer for buffer in self._buffers if buffer.step >= 0}

    def step_requests(self, step: int) -> StepRequests:
        """Returns this rank's requests for the vote of `step`, once the step before is settled."""
        self.settle()
        pin_due = bool(self._assignment.replica_nodes) or self._checkpoint_due(step)
        kept = self._kept_buffers()
        copied_bytes = kept[-1].copied_bytes if kept else 0
        # A pin may need the buffers that this vote releases if all ranks have `copied`. A rank that
        # has not `copied` asks for no such pin, so all ranks keep the same steps.
        released = kept[:-1] if copied_bytes else []
        pinned = sum(
            buffer.awaits_checkpoint if buffer in released else buffer.pinned
            for buffer in self._buffers
        )
        has_free_buffer = self._max_buffers - pinned > self._rotating_buffers
        return StepRequests(
            copied=copied_bytes > 0,
            copied_bytes=copied_bytes,
            pin=self._vault is not None and pin_due and has_free_buffer,
            mirror_interval=self._limit(
                self._policy.every_steps or self._copier.cost.interval_steps
            ),
        )

    def _limit(self, interval_steps: float) -> float:
        """Shortens an interval so that roles that read weights get versions often enough."""
        return min(float(interval_steps), self._policy.version_every_steps or math.inf)

    def begin(self, state: CompositeState) -> None:
        """Mirrors the state before the job's first step, so that a rank lost in that step can be
        replaced. If roles read weights, called also before the first step of a generation that
        starts from no slots: until the next mirror, roles would find no weights or older ones."""
        self.lacks_version = False
        step = state.step
        if self._vault is not None and self._policy.replicas > 0 and step is not None:
            self._write_mirror(self._vault, step, False, state)
            if self._buffers and self._policy.version_every_steps is not None:
                generation, rank = self._assignment.generation, self._assignment.rank
                self._copier.post(Mirrored(generation, rank, step))

    def step_done(self, step: int, agreed: StepRequests, state: CompositeState) -> None:
        """Mirrors the state if due. All ranks passed the vote; this one has updated its state."""
        started = perf_counter()
        copier = self._copier
        copier.begin(state.device)
        self._interval_steps = smooth(self._interval_steps, agreed.mirror_interval)
        copier.cost.step_finished(self._last_mirror)
        self._last_mirror = False
        if agreed.copied:
            self._let_go(agreed.copied_bytes)
        if self._vault is not None and (agreed.pin or agreed.drain or self._mirror_due(step)):
            self._write_mirror(self._vault, step, agreed.pin, state)
        else:
            copier.confirm(state)
        self.stopped_s = perf_counter() - started

    def finish(self, step: int, state: CompositeState) -> None:
        """Mirrors the last step for its checkpoint, if it is not mirrored yet: the vote of the step
        did not know that it was the last. Returns when the step is settled."""
        checkpoints = self._policy.checkpoint_every_steps is not None
        if self._vault is not None and checkpoints and step > self.newest_step:
            self.settle()
            self._write_mirror(self._vault, step, False, state)
        self.settle()

    def post(self, message: WorkerMessage) -> None:
        """Posts the report of the last step, once its mirror is complete."""
        self._copier.post(message)

    def settle(self) -> None:
        """Returns when the last step is mirrored and reported. Raises the error that prevented
        this, or what the interrupt raises."""
        self._copier.settle()

    def close(self) -> None:
        """Called at the end of the generation, however it ended. Raises nothing."""
        self._copier.close()

    def _write_mirror(
        self, vault: VaultClient, step: int, pin: bool, state: CompositeState
    ) -> None:
        started = perf_counter()
        copier = self._copier
        copier.begin(state.device)
        try:
            self._announce(vault, voted=step > self.newest_step)
            is_new = self._copy_state(vault, step, state, pin)
        except (VaultGoneError, VaultMemoryError) as error:
            if isinstance(error, VaultMemoryError) and self._assignment.restore is None:
                raise  # the job's first mirror: fail early, while the config can be changed
            log.warning("%s\n  this rank continues without a replica", error)
            self._vault = None
            copier.confirm(state)
            return
        stopped_s = perf_counter() - started
        self._last_mirror = None if is_new else True
        if not is_new:
            copier.cost.mirror_finished(stopped_s)
        self.newest_step = step  # for the step's report, posted once the mirror is complete
        if pin and self._checkpoint_due(step):
            self.checkpointed_step = step
            generation, rank = self._assignment.generation, self._assignment.rank
            nbytes = max(len(buffer.data) for buffer in self._buffers)
            copier.post(Pinned(generation, rank, step, stopped_s, nbytes))

    def _announce(self, vault: VaultClient, *, voted: bool) -> None:
        """Tells the vault, before each of the first three mirrors, what the last vote has shown.
        `voted`: the generation has had a vote."""
        generation, restore = self._assignment.generation, self._assignment.restore
        if self._announced == 0 and restore is not None and voted:
            vault.announce_loaded(generation, restore.step)
        elif self._announced == 1:  # all ranks have a mirror: no older generation is needed
            vault.announce_complete(generation)
            if not self._assignment.replica_nodes:
                vault.announce_replicated(generation, 0)
        elif self._announced == 2:
            vault.release_spares(self._buffers)
        self._announced += 1

    def _checkpoint_due(self, step: int) -> bool:
        """Returns whether `step` should become a checkpoint; a missed one is due at the next
        step."""
        every = self._policy.checkpoint_every_steps
        if every is None:
            return False
        return step == self._last_step or step // every > self.checkpointed_step // every

    def _mirror_due(self, step: int) -> bool:
        """Returns whether to mirror `step`: the same on all ranks, which agreed on the interval."""
        return self._policy.replicas > 0 and step - self.newest_step >= max(
            1, round(self._interval_steps)
        )

    def _copy_state(self, vault: VaultClient, step: int, state: CompositeState, pin: bool) -> bool:
        """Copies the state into a slot; returns whether the slot is new."""
        block, assignment = state.pack(), self._assignment
        buffer = self._oldest_unpinned(block.index)
        is_new = buffer is None
        if buffer is None:  # one slot a step: the first step after a recovery waits for it
            buffer = vault.reserve(
                assignment.generation, assignment.rank, assignment.world_size, block.index
            )
            self._copier.register(vault, buffer)
            self._buffers.append(buffer)
        constants = buffer.constants_version != state.constants_version
        buffer.constants_version = state.constants_version
        metadata = state.capture_metadata()
        keep = pin and bool(assignment.replica_nodes)
        order = partial(self._order_copies, vault, step) if keep else _nothing
        for_checkpoint = pin and self._checkpoint_due(step)
        write = SlotWrite(buffer, block, constants, step, metadata, for_checkpoint, keep, order)
        self._copier.write(write, state)
        return is_new

    def _order_copies(self, vault: VaultClient, step: int) -> None:
        assignment = self._assignment
        with suppress(VaultGoneError):  # the next reservation notices
            nodes = assignment.replica_nodes
            vault.replicate(assignment.generation, assignment.rank, step, nodes)

    def _kept_buffers(self) -> list[SlotWriter]:
        """Returns the buffers of the steps that are kept for other nodes, oldest first."""
        kept = [buffer for buffer in self._buffers if buffer.is_kept]
        return sorted(kept, key=lambda buffer: buffer.step)

    def _let_go(self, nbytes: int) -> None:
        """Releases older kept steps: by a vote, other nodes have the newest one of all ranks."""
        *older, newest = self._kept_buffers()
        if self._replicated is not None and newest.step == self._replicated[0]:
            return
        self._replicated = newest.step, nbytes
        for buffer in older:
            buffer.let_go()
        if self._vault is not None:
            with suppress(VaultGoneError):
                self._vault.announce_replicated(self._assignment.generation, newest.step)

    def _oldest_unpinned(self, index: BlockIndex) -> SlotWriter | None:
        """Returns the buffer of the oldest unpinned version; None while there are too few. Gives up
        a buffer whose state had another index: the next reservation replaces it."""
        unpinned = [buffer for buffer in self._buffers if not buffer.pinned]
        if len(unpinned) < self._rotating_buffers:
            return None
        oldest = min(unpinned, key=lambda buffer: buffer.step)
        if oldest.index == index:
            return oldest
        oldest.begin()
        self._buffers.remove(oldest)
        self._announced = min(self._announced, 2)  # spares are released again
        return None

    @property
    def _max_buffers(self) -> int:
        checkpoints = self._policy.checkpoint_every_steps is not None
        pinnable = 2 if self._assignment.replica_nodes else int(checkpoints)
        return self._rotating_buffers + pinnable


def _nothing() -> None:
    pass
