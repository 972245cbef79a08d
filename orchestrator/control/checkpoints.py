"""Checkpoints behind training: the vaults write a pinned step, a manifest makes it exist."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator.control.desk import Desk
from rayzero.orchestrator.control.tasks import within
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.group import VaultLostError
from rayzero.orchestrator.notices import Checkpointed, CheckpointFailed, Resumed, Warned
from rayzero.orchestrator.pins import Pin
from rayzero.orchestrator.policies.recovery import Stored
from rayzero.workers.messages import RankFile, SlotRef

RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""How long to wait before each further try; after the last the checkpoint is given up."""
WRITE_S = 600.0
"""How long a vault may take for its files."""


class Checkpoints:
    """Writes one checkpoint at a time, in order. A store that fails never stops training."""

    def __init__(self, desk: Desk) -> None:
        self.written = 0
        self.failed = 0
        self.on_stored: Callable[[int, str, Sequence[RankFile]], None] = lambda *_: None
        """Told the step, folder and files of every checkpoint as soon as it exists."""
        self._desk = desk
        self._stored: Stored | None = None
        self._writing = asyncio.Lock()

    async def begin(self) -> bool:
        """Finds what this run begins from, and tells it; whether there is anything.

        Raises:
            ConfigError: `checkpoint.resume` cannot be done.
        """
        self._stored = await self._desk.ports.archive.begin()
        if self._stored is not None:
            self._desk.see(Resumed(self._stored.step, self._stored.folder))
        return self._stored is not None

    async def newest(self, damaged: frozenset[int]) -> Stored | None:
        """The newest whole checkpoint: at hand, unless that one turned out to be damaged.

        Raises:
            JobFailedError: it is the one that the job was told to begin from.
        """
        desk, broken = self._desk, self._stored
        if broken is None or broken.step not in damaged:
            return broken
        if desk.progress.done == 0 and desk.plan.spec.checkpoint.resume != "auto":
            raise JobFailedError(
                f"the checkpoint {broken.folder} cannot be read",
                fix="checkpoint.resume in the job file; `rayzero ckpt verify` says what is wrong",
            )
        desk.see(Warned(f"the checkpoint {broken.folder} cannot be read: it is left out"))
        try:
            self._stored = await desk.ports.archive.newest(damaged)
        except RayzeroError as error:
            self._stored = None
            desk.see(Warned(f"checkpoints cannot be listed: {error.seen}"))
        return self._stored

    @property
    def newest_step(self) -> int | None:
        """Of the newest checkpoint that is known of."""
        return None if self._stored is None else self._stored.step

    def has(self, step: int) -> bool:
        """Whether a checkpoint of that step, or a newer one, is stored."""
        return self._stored is not None and self._stored.step >= step

    async def keep(self, pin: Pin) -> None:
        """Makes a checkpoint of a pinned step, and tries again while a store does not take it."""
        async with self._writing:
            for tries, again_in_s in enumerate((*RETRY_S, None), start=1):
                if self.has(pin.step):
                    return
                try:
                    await self._write(pin)
                    return
                except (RayzeroError, VaultLostError, TimeoutError) as error:
                    # A version that is gone, or damaged, does not come back.
                    for_good = isinstance(error, VaultLostError | DataError)
                    again_in_s = None if for_good else again_in_s
                    self._tell_failure(pin.step, error, tries, again_in_s)
                if again_in_s is None:
                    return
                await self._desk.ports.clock.sleep(again_in_s)

    async def keep_last(self, slots: Sequence[SlotRef], limit_s: float) -> None:
        """One try at a checkpoint of these slots, within a limit."""
        step = slots[0].step
        pin = Pin(slots[0].generation, step, tuple(slots), checkpoint=True, stopped_s=0.0)
        try:
            await within(self._desk.ports.clock, limit_s, self._write_after_others(pin))
        except (RayzeroError, VaultLostError, TimeoutError) as error:
            self._tell_failure(step, error, 1, None)

    async def _write_after_others(self, pin: Pin) -> None:
        async with self._writing:
            if not self.has(pin.step):
                await self._write(pin)

    async def _write(self, pin: Pin) -> None:
        desk = self._desk
        archive = desk.ports.archive
        begun_s = desk.now_s()
        folder = archive.folder(pin.step)
        by_node: defaultdict[str, list[SlotRef]] = defaultdict(list)
        for slot in pin.slots:
            by_node[slot.node_id].append(slot)
        # All are waited for, so that no file of a failed try is still being written in the next.
        parts = await asyncio.gather(
            *(self._write_part(node, folder, slots) for node, slots in by_node.items()),
            return_exceptions=True,
        )
        files: list[RankFile] = []
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            files += part
        await archive.commit(pin.step, pin.generation, files)
        self.on_stored(pin.step, folder, files)
        self._stored = Stored(pin.step, folder)
        self.written += 1
        nbytes = sum(file.nbytes for file in files)
        seconds = desk.now_s() - begun_s
        desk.see(Checkpointed(pin.step, folder, nbytes, seconds, pin.stopped_s))
        try:
            await archive.prune()
        except RayzeroError as error:
            desk.see(Warned(f"old checkpoints cannot be removed: {error.seen}"))

    async def _write_part(self, node: str, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        desk = self._desk
        command = desk.ports.vaults.write(node, folder, slots)
        return await within(desk.ports.clock, WRITE_S, command)

    def _tell_failure(
        self, step: int, error: Exception, tries: int, again_in_s: float | None
    ) -> None:
        self.failed += 1
        text = error.seen if isinstance(error, RayzeroError) else str(error)
        if isinstance(error, TimeoutError):
            text = "the store did not take it in time"
        self._desk.see(CheckpointFailed(step, text, tries, again_in_s))
