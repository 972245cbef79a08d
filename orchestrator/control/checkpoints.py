"""Asynchronous checkpoints: the vaults write a pinned step, a manifest commits it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator.checkpoint_store import CheckpointStore
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    CheckpointsPruned,
    Resumed,
)
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.pinned_steps import PinnedStep
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.vault.records import Restore, SlotRef
from rayzero.workers.vault.replicas import transfer_limit_s
from rayzero.workers.vault.vault import Vault

if TYPE_CHECKING:  # it imports Ray, without which the controller is tested
    from rayzero.orchestrator.cluster.vault_group import VaultGroup

WRITE_RETRY_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Wait before each further attempt; after the last one the checkpoint is abandoned."""


@dataclass(eq=False)
class CheckpointWriter:
    """Writes one checkpoint at a time, in order. A failing store never stops training."""

    _plan: JobPlan
    _loop: JobLoop
    _vaults: VaultGroup
    _store: CheckpointStore
    _events: EventBus
    _progress: JobProgress
    _on_committed: Callable[[int, str, Sequence[RankFile]], None]
    abandoned: dict[int, str] = field(default_factory=dict)
    """Steps given up because the store failed, with the last error."""
    newest: CheckpointRef | None = None
    """The newest checkpoint that this run resumed from or wrote."""
    resumed_from: CheckpointRef | None = None
    """The checkpoint that this run started from; it may be another job's."""
    _unreadable: CheckpointRef | None = None
    _marking: asyncio.Task[None] | None = None
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rank_bytes: int = 0
    _newest_wanted: int = 0
    """The newest step that was to be written, whether it is stored or not."""

    async def resolve_resume(self) -> bool:
        """Finds and announces the checkpoint that this run starts from. Returns False if there is
        none.

        Raises:
            ConfigError: `checkpoint.resume` names no usable checkpoint.
        """
        self.newest = await self._store.resolve_resume()
        self.resumed_from = self.newest
        if self.newest is not None:
            self._events.emit(Resumed(self.newest.step, self.newest.folder))
        return self.newest is not None

    async def find_newest(self) -> None:
        """Finds the newest complete checkpoint of a job that trains already."""
        try:
            found = await self._store.newest(frozenset())
        except RayzeroError as error:
            self._events.warn(f"checkpoints cannot be listed: {error.seen}")
            return
        if found is not None and not self.covers(found.step):
            self.newest = self.resumed_from = found

    async def select_newest(self, unreadable: Mapping[int, str]) -> CheckpointRef | None:
        """Returns the newest complete checkpoint. `unreadable` has the problem that a load
        reported, by step. Only if the known checkpoint is among them, it is marked as damaged and
        the store is asked for another one.

        Raises:
            JobFailedError: the unreadable checkpoint is `checkpoint.resume`.
        """
        known = self.newest
        if known is None or known.step not in unreadable:
            return known
        if self._progress.steps_executed == 0 and self._plan.spec.checkpoint.resume != "auto":
            raise JobFailedError(
                f"the checkpoint {known.folder} cannot be read",
                fix="checkpoint.resume in the job file; `rayzero ckpt verify` shows what is wrong",
            )
        self._events.warn(f"the checkpoint {known.folder} cannot be read and is skipped")
        self._unreadable, problem = known, unreadable[known.step]
        self._marking = self._loop.spawn(self._mark_damaged(known, problem))
        try:
            self.newest = await self._store.newest(frozenset(unreadable))
        except RayzeroError as error:
            self.newest = None
            self._events.warn(f"checkpoints cannot be listed: {error.seen}")
        return self.newest

    async def _mark_damaged(self, checkpoint: CheckpointRef, problem: str) -> None:
        """Makes later listings show the damage; reads the checkpoint's files to find it."""
        try:
            await self._store.mark_damaged(checkpoint, problem)
        except RayzeroError as error:
            self._events.warn(
                f"{checkpoint.folder} cannot be marked as damaged, and will be tried again by the "
                f"next run: {error.seen}"
            )

    async def no_state_error(self) -> JobFailedError:
        """Returns the error for a job whose checkpoints are all unreadable, with no state in
        memory: only the user may decide to start from scratch. Waits until the last checkpoint is
        marked, at most `checkpoint.grace_period_s`."""
        if self._marking is not None:
            with suppress(TimeoutError):
                limit_s = self._plan.spec.checkpoint.grace_period_s
                await self._loop.within(limit_s, asyncio.wait({self._marking}))
        folder = self._unreadable.folder if self._unreadable else self._plan.job_folder
        return JobFailedError(
            f"the checkpoint {folder} cannot be read, and no other copy of the state is left",
            allowed="a complete checkpoint, or to start from scratch with --restart",
            fix=f"see `rayzero ckpt verify {folder}`; copy its files back, or pass --restart "
            "(checkpoint.resume: scratch)",
        )

    @property
    def newest_own(self) -> CheckpointRef | None:
        """The newest checkpoint, unless that is another job's."""
        newest, store = self.newest, self._store
        is_own = newest is not None and newest.folder == store.folder(newest.step)
        return newest if is_own else None

    def forget_own(self) -> None:
        """Forgets the newest checkpoint if it was in the job's folder, from which the checkpoints
        were removed."""
        if self.newest_own is not None:
            self.newest = None

    def covers(self, step: int) -> bool:
        """Returns whether a checkpoint of that step, or of a newer one, is stored."""
        return self.newest is not None and self.newest.step >= step

    async def write(
        self, pin: PinnedStep, retry_backoff_s: Sequence[float] = WRITE_RETRY_BACKOFF_S
    ) -> None:
        """Writes a pinned step as a checkpoint. While the store fails, tries again until a newer
        step is to be written."""
        self.expect(pin.step)
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
                    retry_in_s = None if slot_lost or self._is_outdated(pin) else retry_in_s
                    text = self._report_failure(pin.step, error, attempts, retry_in_s)
                if retry_in_s is None:
                    if not slot_lost:
                        self.abandoned[pin.step] = text
                    return
                await self._loop.wait_for(retry_in_s, partial(self._is_outdated, pin))

    def expect(self, step: int) -> None:
        """Notes that a step is to be written. Writes of older steps are not tried again."""
        self._newest_wanted = max(self._newest_wanted, step)
        self._loop.changed.notify()

    def _is_outdated(self, pin: PinnedStep) -> bool:
        return self._newest_wanted > pin.step

    async def write_state(
        self, restore: Restore, retry_backoff_s: Sequence[float] = WRITE_RETRY_BACKOFF_S
    ) -> None:
        """Writes the state in these slots as a checkpoint, with retries while the store fails."""
        generation, slots = restore.slots[0].generation, restore.slots
        pin = PinnedStep(generation, restore.step, slots, 0.0, self._rank_bytes)
        await self.write(pin, retry_backoff_s)

    async def write_final(self, restore: Restore, limit_s: float) -> None:
        """Writes as `write_state` does, in one attempt and within a time limit."""
        try:
            await self._loop.within(limit_s, self.write_state(restore, ()))
        except TimeoutError as error:
            self._report_failure(restore.step, error, 1, None)

    async def _write(self, pin: PinnedStep) -> None:
        store = self._store
        started_s = self._loop.now_s()
        folder = store.folder(pin.step)
        await store.check_folder()
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
        self.newest = CheckpointRef(pin.step, folder)
        nbytes, seconds = sum(file.nbytes for file in files), self._loop.now_s() - started_s
        self._events.emit(Checkpointed(pin.step, folder, nbytes, seconds, pin.stopped_s))
        try:
            if removed := await store.prune():
                self._events.emit(CheckpointsPruned(removed))
        except RayzeroError as error:
            self._events.warn(f"old checkpoints cannot be removed: {error.seen}")

    async def _write_on_node(
        self, node: str, folder: str, slots: Sequence[SlotRef], pin: PinnedStep
    ) -> list[RankFile]:
        command = self._vaults.call(node, Vault.write, folder, slots)
        limit_s = transfer_limit_s(len(slots) * pin.rank_bytes)
        return await self._loop.within(limit_s, command)

    def _report_failure(
        self, step: int, error: Exception, attempts: int, retry_in_s: float | None
    ) -> str:
        text = error.seen if isinstance(error, RayzeroError) else str(error)
        if isinstance(error, TimeoutError):
            text = "the store did not finish in time"
        self._events.emit(CheckpointFailed(step, text, attempts, retry_in_s))
        return text
