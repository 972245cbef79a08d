"""What outlives a generation in a worker's process: the line to the vault, and the last state."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rayzero.engine.errors import DataError, EngineError, RayzeroError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.state.training import copy_to_block
from rayzero.workers.messages import Assignment, InProcessStateInfo
from rayzero.workers.vault.buffers import fits_twice
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import Restore, SlotInfo, VaultGoneError

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


class StateError(RayzeroError):
    """The state that a generation was to begin from cannot be read."""


class RetainedState:
    """One a process. The training thread uses it while it runs; the command threads in between.

    Args:
        worker: this worker's index, by which the vault knows it.
    """

    def __init__(self, worker: int) -> None:
        self.vault: VaultClient | None = None
        self._worker = worker
        self._address = ""
        self._engine: Engine | None = None
        self._assignment: Assignment | None = None
        self._old_engine_pending = False
        """Whether the engine before may still be in memory."""

    def begin_generation(self, assign: Assignment) -> None:
        """A generation begins. The engine of the one before is let go: its state is elsewhere. If
        there may be no room for both it is freed now, else by `tidy` after the next step.

        A vault that cannot be reached is done without: its notices and replicas are missing, and
        the controller sees to another.
        """
        if self._engine is not None:
            self._engine.close()  # the function may use the same model again
            two_fit = self._engine.device.type == "cpu" and fits_twice(assign.local_world_size)
            three = self._old_engine_pending  # no step was finished since the last time
            self._engine, self._old_engine_pending = None, True
            if three or not two_fit:
                self.collect_garbage()
        self._assignment = assign
        if assign.vault != self._address or self.vault is None:
            self._connect(assign.vault)

    def collect_garbage(self) -> None:
        """Frees what is left of the engine before, which is in cycles. Takes some 30 ms, once: no
        peer should be waiting for it."""
        if self._old_engine_pending:
            self._old_engine_pending = False
            gc.collect()

    def retain(self, engine: Engine) -> None:
        """The generation's engine: its memory may be asked for once the function is unwound."""
        self._engine = engine

    def in_process_state(self) -> InProcessStateInfo | None:
        """What this process's memory holds; None when that is of no step."""
        if self._engine is None or not self._engine.state.consistent:
            return None
        return InProcessStateInfo(self._engine.progress.step, self._engine.state.complete_on_rank)

    @contextmanager
    def open_source(self, restore: Restore | None) -> Iterator[StateSource | None]:
        """The state to begin from.

        Raises:
            StateError: it is damaged, incomplete, or gone.
        """
        if restore is None:
            yield None
            return
        try:
            source = self._open_restore(restore)
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
        memory, assign = self.in_process_state(), self._assignment
        if memory is None or assign is None or self._engine is None or self.vault is None:
            raise EngineError("there is no state to salvage in this process, or no vault for it")
        state = self._engine.state
        table, parts, offsets = state.describe_block(whole=state.complete_on_rank)
        world_size = 1 if state.complete_on_rank else assign.world_size
        buffers = self.vault.reserve(assign.generation, assign.rank, world_size, table, 1)
        buffers[0].begin()
        copy_to_block(parts, offsets, buffers[0].data, constants=True)
        buffers[0].commit(memory.step, state.metadata(), False, None)
        return SlotInfo(
            assign.generation, assign.rank, world_size, memory.step, table.nbytes, pinned=False
        )

    def close(self) -> None:
        """Says goodbye to the vault: the end of this process is then no death."""
        if self.vault is not None:
            self.vault.close()
            self.vault = None

    def _open_restore(self, restore: Restore) -> StateSource:
        if restore.slots:
            if self.vault is None:
                raise EngineError("the state lies in vaults, and this node's cannot be reached")
            return self.vault.open_source(restore)
        # Here, because it brings pyarrow's file systems with it, and few generations need it.
        from rayzero.engine.checkpoint.imports import open_foreign
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
