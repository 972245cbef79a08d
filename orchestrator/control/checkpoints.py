"""Asynchronous checkpoints: the vaults write a pinned step, a manifest commits it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator.aio import with_timeout
from rayzero.orchestrator.control.context import JobContext
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    CheckpointsPruned,
    Resumed,
)
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.workers.messages import Pinned
from rayzero.workers.vault.records import Restore, SlotRef
from rayzero.workers.vault.vault import Vault

ALL_STEPS = 2**62


@dataclass(frozen=True, order=True)
class PinnedStep:
    """A step that every rank of a generation has pinned.

    Args:
        slots: one per rank, by rank.
        checkpoint: whether it becomes a checkpoint.
        stopped_s: how long training was blocked for it, on the slowest rank.
        rank_bytes: the size of the largest slot, as far as it is known.
    """

    generation: int
    step: int
    slots: tuple[SlotRef, ...]
    checkpoint: bool
    stopped_s: float
    rank_bytes: int = 0


class PinnedSteps:
    """Which steps are pinned in the vaults, and up to which they may be released. Pure.

    A step that is being processed is never released. A replicated one is kept until a newer one is
    replicated: otherwise, for a while, no redundancy level would hold a complete step. One that
    only became a checkpoint is released at once, because the vaults hold newer steps anyway.
    """

    def __init__(self) -> None:
        # Keys are (generation, step); values are ranks' messages and nodes.
        self._incomplete: dict[tuple[int, int], dict[int, tuple[Pinned, str]]] = {}
        self._in_progress: set[tuple[int, int]] = set()
        self._limits: dict[int, int] = {}
        self._released: dict[int, int] = {}

    def add_rank(self, message: Pinned, node_id: str, world_size: int) -> PinnedStep | None:
        """Returns the pinned step that this message completes, if any; it is then in progress."""
        generation, step = key = (message.generation, message.step)
        self._limits.setdefault(generation, -1)
        ranks = self._incomplete.setdefault(key, {})
        ranks[message.rank] = (message, node_id)
        if len(ranks) < world_size:
            return None
        del self._incomplete[key]
        self._in_progress.add(key)
        return PinnedStep(
            generation,
            step,
            tuple(
                SlotRef(generation, rank, step, node) for rank, (_, node) in sorted(ranks.items())
            ),
            checkpoint=any(message.checkpoint for message, _ in ranks.values()),
            stopped_s=max(message.stopped_s for message, _ in ranks.values()),
            rank_bytes=max(message.nbytes for message, _ in ranks.values()),
        )

    def complete(self, pin: PinnedStep, *, hold: bool) -> None:
        """A pin is processed. `hold`: it is now complete on every redundancy level."""
        self._in_progress.discard((pin.generation, pin.step))
        limit = self._limits.get(pin.generation, -1)
        self._limits[pin.generation] = max(limit, pin.step - hold)
        if hold:
            self.release_older(pin.generation)

    def copy_failed(self, pin: PinnedStep) -> None:
        """A pin was not replicated completely: it is kept until a newer one is."""
        self._in_progress.discard((pin.generation, pin.step))

    def releasable(self) -> Iterator[tuple[int, int]]:
        """Yields (generation, step): all pins up to both may be released. Each is yielded once."""
        for generation, limit in sorted(self._limits.items()):
            busy = [step for other, step in self._in_progress if other <= generation]
            limit = min([limit, *(step - 1 for step in busy)])
            if limit > self._released.get(generation, 0):
                self._released[generation] = limit
                yield generation, limit

    def release_older(self, generation: int) -> None:
        """The pins of generations before this one are useless from now on."""
        for older in self._limits:
            if older < generation:
                self._limits[older] = ALL_STEPS
        for key in [key for key in self._incomplete if key[0] < generation]:
            del self._incomplete[key]


TRANSFER_GRACE_S = 600.0
SLOWEST_TRANSFER_BYTES_PER_S = 10e6
"""A store or a network that is slower has failed."""


def transfer_limit_s(nbytes: int) -> float:
    """How long a vault may take to write or copy that much."""
    return TRANSFER_GRACE_S + nbytes / SLOWEST_TRANSFER_BYTES_PER_S


WRITE_RETRY_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Wait before each further attempt; after the last one the checkpoint is abandoned."""


class CheckpointWriter:
    """Writes one checkpoint at a time, in order. A failing store never stops training."""

    def __init__(
        self, context: JobContext, on_committed: Callable[[int, str, Sequence[RankFile]], None]
    ) -> None:
        """
        Args:
            on_committed: called with the step, folder and files of every committed checkpoint.
        """
        self.written = 0
        self.failed = 0
        self.abandoned: dict[int, str] = {}
        """Steps given up because the store failed, with the last error."""
        self._on_committed = on_committed
        self._context = context
        self._newest: CheckpointRef | None = None
        self._write_lock = asyncio.Lock()
        self._rank_bytes = 0

    async def resolve_resume(self) -> bool:
        """Finds and announces the checkpoint that this run starts from. False if there is none.

        Raises:
            ConfigError: `checkpoint.resume` names no usable checkpoint.
        """
        self._newest = await self._context.deps.checkpoint_store.resolve_resume()
        if self._newest is not None:
            self._context.emit(Resumed(self._newest.step, self._newest.folder))
        return self._newest is not None

    async def select_newest(self, unreadable: frozenset[int]) -> CheckpointRef | None:
        """The newest complete checkpoint; the store is asked only if the known one is unreadable.

        Raises:
            JobFailedError: the unreadable one is `checkpoint.resume`.
        """
        ctx, known = self._context, self._newest
        if known is None or known.step not in unreadable:
            return known
        if ctx.progress.steps_executed == 0 and ctx.plan.spec.checkpoint.resume != "auto":
            raise JobFailedError(
                f"the checkpoint {known.folder} cannot be read",
                fix="checkpoint.resume in the job file; `rayzero ckpt verify` shows what is wrong",
            )
        ctx.warn(f"the checkpoint {known.folder} cannot be read and is skipped")
        try:
            self._newest = await ctx.deps.checkpoint_store.newest(unreadable)
        except RayzeroError as error:
            self._newest = None
            ctx.warn(f"checkpoints cannot be listed: {error.seen}")
        return self._newest

    @property
    def newest(self) -> CheckpointRef | None:
        """The newest checkpoint that this run resumed from or wrote."""
        return self._newest

    def covers(self, step: int) -> bool:
        """Whether a checkpoint of that step, or a newer one, is stored."""
        return self._newest is not None and self._newest.step >= step

    async def write(
        self, pin: PinnedStep, retry_backoff_s: Sequence[float] = WRITE_RETRY_BACKOFF_S
    ) -> None:
        """Writes a pinned step as a checkpoint, with retries while the store fails."""
        async with self._write_lock:
            self._rank_bytes = max(self._rank_bytes, pin.rank_bytes)
            for attempts, retry_in_s in enumerate((*retry_backoff_s, None), start=1):
                if self.covers(pin.step):
                    return
                try:
                    await self._write(pin)
                    return
                except (RayzeroError, VaultLostError, TimeoutError) as error:
                    # Retrying does not bring back a lost or damaged slot.
                    slot_lost = isinstance(error, VaultLostError | DataError)
                    retry_in_s = None if slot_lost else retry_in_s
                    text = self._report_failure(pin.step, error, attempts, retry_in_s)
                if retry_in_s is None:
                    if not slot_lost:
                        self.abandoned[pin.step] = text
                    return
                await self._context.deps.clock.sleep(retry_in_s)

    async def write_state(
        self, restore: Restore, retry_backoff_s: Sequence[float] = WRITE_RETRY_BACKOFF_S
    ) -> None:
        """Writes the state in these slots as a checkpoint, with retries while the store fails."""
        generation, slots = restore.slots[0].generation, restore.slots
        pin = PinnedStep(generation, restore.step, slots, True, 0.0, self._rank_bytes)
        await self.write(pin, retry_backoff_s)

    async def write_final(self, restore: Restore, limit_s: float) -> None:
        """As `write_state`: one attempt, within a time limit."""
        try:
            await with_timeout(self._context.deps.clock, limit_s, self.write_state(restore, ()))
        except TimeoutError as error:
            self._report_failure(restore.step, error, 1, None)

    async def _write(self, pin: PinnedStep) -> None:
        ctx = self._context
        store = ctx.deps.checkpoint_store
        started_s = ctx.now_s()
        folder = store.folder(pin.step)
        by_node: defaultdict[str, list[SlotRef]] = defaultdict(list)
        for slot in pin.slots:
            by_node[slot.node_id].append(slot)
        # Awaits all, so that no file of a failed attempt is still being written in the next one.
        parts = await asyncio.gather(
            *(self._write_on_node(node, folder, slots, pin) for node, slots in by_node.items()),
            return_exceptions=True,
        )
        files: list[RankFile] = []
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            files += part
        await store.commit(pin.step, pin.generation, files)
        self._on_committed(pin.step, folder, files)
        self._newest = CheckpointRef(pin.step, folder)
        self.written += 1
        nbytes, seconds = sum(file.nbytes for file in files), ctx.now_s() - started_s
        ctx.emit(Checkpointed(pin.step, folder, nbytes, seconds, pin.stopped_s))
        try:
            if removed := await store.prune():
                ctx.emit(CheckpointsPruned(removed))
        except RayzeroError as error:
            ctx.warn(f"old checkpoints cannot be removed: {error.seen}")

    async def _write_on_node(
        self, node: str, folder: str, slots: Sequence[SlotRef], pin: PinnedStep
    ) -> list[RankFile]:
        ctx = self._context
        command = ctx.deps.vaults.call(node, Vault.write, folder, slots)
        limit_s = transfer_limit_s(len(slots) * pin.rank_bytes)
        return await with_timeout(ctx.deps.clock, limit_s, command)

    def _report_failure(
        self, step: int, error: Exception, attempts: int, retry_in_s: float | None
    ) -> str:
        self.failed += 1
        text = error.seen if isinstance(error, RayzeroError) else str(error)
        if isinstance(error, TimeoutError):
            text = "the store did not finish in time"
        self._context.emit(CheckpointFailed(step, text, attempts, retry_in_s))
        return text
