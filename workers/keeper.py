"""What outlives a generation in a worker's process: the line to the vault, and the last state."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rayzero.engine.errors import DataError, EngineError, RayzeroError
from rayzero.engine.state.source import StateSource
from rayzero.engine.state.training import copy_out
from rayzero.workers.messages import Assign, Memory, Restore, SlotInfo
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.errors import VaultGoneError
from rayzero.workers.vault.memory import has_room

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


class StateError(RayzeroError):
    """The state that a generation was to begin from cannot be read."""


class Keeper:
    """One a process. The training thread uses it while it runs; the command threads in between.

    Args:
        worker: this worker's index, by which the vault knows it.
    """

    def __init__(self, worker: int) -> None:
        self.vault: VaultClient | None = None
        self._worker = worker
        self._address = ""
        self._engine: Engine | None = None
        self._assign: Assign | None = None
        self._left = False
        """Whether the engine before may still be in memory."""

    def begin(self, assign: Assign) -> None:
        """A generation begins. The engine of the one before is let go: its state is elsewhere. If
        there may be no room for both it is freed now, else by `tidy` after the next step.

        A vault that cannot be reached is done without: its notices and replicas are missing, and
        the controller sees to another.
        """
        if self._engine is not None:
            self._engine.close()  # the function may use the same model again
            two_fit = self._engine.device.type == "cpu" and has_room(assign.local_world_size)
            three = self._left  # no step was finished since the last time
            self._engine, self._left = None, True
            if three or not two_fit:
                self.tidy()
        self._assign = assign
        if assign.vault != self._address or self.vault is None:
            self._connect(assign.vault)

    def tidy(self) -> None:
        """Frees what is left of the engine before, which is in cycles. Takes some 30 ms, once: no
        peer should be waiting for it."""
        if self._left:
            self._left = False
            gc.collect()

    def keep(self, engine: Engine) -> None:
        """The generation's engine: its memory may be asked for once the function is unwound."""
        self._engine = engine

    def memory(self) -> Memory | None:
        """What this process's memory holds; None when that is of no step."""
        if self._engine is None or not self._engine.state.consistent:
            return None
        return Memory(self._engine.progress.step, self._engine.state.whole)

    @contextmanager
    def source(self, restore: Restore | None) -> Iterator[StateSource | None]:
        """The state to begin from.

        Raises:
            StateError: it is damaged, incomplete, or gone.
        """
        if restore is None:
            yield None
            return
        try:
            source = self._open(restore)
            try:
                yield source
            finally:
                source.close()
        except (DataError, VaultGoneError, EngineError) as error:
            raise StateError(error.seen, error.allowed, error.fix) from error

    def salvage(self, vault: str) -> SlotInfo:
        """Copies the state in memory into the vault: all of it, where it is here.

        Args:
            vault: the address of this node's vault now. The one that the generation began with
                may be gone, which is then the reason to salvage.

        Raises:
            EngineError: there is none, or no vault.
            VaultGoneError: the vault is gone.
        """
        if vault != self._address:
            self._connect(vault)
        memory, assign = self.memory(), self._assign
        if memory is None or assign is None or self._engine is None or self.vault is None:
            raise EngineError("there is no state to salvage in this process, or no vault for it")
        state = self._engine.state
        table, parts, offsets = state.block(whole=state.whole)
        world_size = 1 if state.whole else assign.world_size
        buffers = self.vault.reserve(assign.generation, assign.rank, world_size, table, 1)
        buffers[0].begin()
        copy_out(parts, offsets, buffers[0].data, constants=True)
        buffers[0].commit(memory.step, state.small(), False, None)
        return SlotInfo(
            assign.generation, assign.rank, world_size, memory.step, table.nbytes, pinned=False
        )

    def close(self) -> None:
        """Says goodbye to the vault: the end of this process is then no death."""
        if self.vault is not None:
            self.vault.close()
            self.vault = None

    def _open(self, restore: Restore) -> StateSource:
        if restore.slots:
            if self.vault is None:
                raise EngineError("the state lies in vaults, and this node's cannot be reached")
            return self.vault.source(restore)
        # Here, because it brings pyarrow's file systems with it, and few generations need it.
        from rayzero.engine.checkpoint.imports.foreign import open_foreign
        from rayzero.engine.checkpoint.reader import CheckpointSource
        from rayzero.engine.checkpoint.store import is_remote

        path = restore.checkpoint
        if not (is_remote(path) or Path(path.removeprefix("file://")).exists()):
            raise DataError(f"the checkpoint {path} is gone")
        return open_foreign(path) or CheckpointSource(path)

    def _connect(self, address: str) -> None:
        self.close()
        self._address = address
        if not address:
            return
        try:
            self.vault = VaultClient(address, self._worker)
        except VaultGoneError:
            self._address = ""
