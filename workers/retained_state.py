"""The vault connection and the engines' state that a worker's process keeps between generations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rayzero.engine.errors import DataError, EngineError, RayzeroError
from rayzero.engine.layout.state_index import StateSource
from rayzero.workers.messages import Assignment, InProcessStateInfo
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import Restore, SlotInfo, VaultGoneError
from rayzero.workers.vault.slots import SlotWriter

if TYPE_CHECKING:
    from rayzero.engine.state.composite import CompositeState

log = logging.getLogger("rayzero.workers")


class StateError(RayzeroError):
    """The state to start a generation from cannot be read."""


class RetainedState:
    """A process's vault connection and engines' state. One per process. Used by the training thread
    while it runs, by command threads in between.

    Args:
        worker: this worker's index, which identifies it to the vault.
        device_timeout_s: how long the device may take for its queued work.
    """

    def __init__(self, worker: int, device_timeout_s: float) -> None:
        self.vault: VaultClient | None = None
        self.copies: Callable[[], Mapping[int, SlotWriter]] = dict
        """The `Mirror.copies` of the generation that the engines are cut for. These copies can be
        salvaged if the vault is lost."""
        self._worker = worker
        self._device_timeout_s = device_timeout_s
        self._state: CompositeState | None = None
        self._assignment: Assignment | None = None
        self._cut_for: Assignment | None = None  # of the engines' shards: `_assignment`, or earlier
        self.holds_state = False
        """Whether this process has engines of the previous generation which hold their part of the
        state that the present generation starts from."""

    def begin_generation(self, assignment: Assignment) -> None:
        """Starts a generation, with the engines of the previous one if there are any.

        Continues without a vault if the node's cannot be reached: death detection and replicas are
        then missing until the controller has started another vault.
        """
        self._assignment = assignment
        restore = assignment.restore
        restored = {slot.generation for slot in restore.slots} if restore is not None else set()
        if self._cut_for is None or restored != {self._cut_for.generation}:
            self.copies = dict  # the buffers of the copies may be reused by now
        if self._state is not None and self._cut_for is not None:
            left, altered = self.in_process_state(), self._state.altered
            reason = why_not_held(left, self._cut_for, restore, altered=altered)
            if reason:
                log.info("the state is read from the vaults, not from the engine: %s", reason)
            self.holds_state = not reason
        with suppress(VaultGoneError):
            self._connect(assignment.vault)

    def retain(self, state: CompositeState, copies: Callable[[], Mapping[int, SlotWriter]]) -> None:
        """Keeps the state of engines that were built or re-cut for the present generation, and its
        `Mirror.copies`, so that it can be salvaged later."""
        self._state, self.copies, self._cut_for = state, copies, self._assignment

    def in_process_state(self) -> InProcessStateInfo | None:
        """Describes the state in this process's memory, once its generation has ended; None if
        there is none. Its `step` is None if the generation ended within an update, or within a step
        of several engines.

        Waits until the device has finished its queued work, which may still write the state.
        Raises DeviceError if that takes too long.
        """
        state, cut_for = self._state, self._cut_for
        copies = tuple(sorted(self.copies()))
        if state is None or cut_for is None:
            return None
        generation, world_size = cut_for.generation, cut_for.world_size
        if not state.consistent or (step := state.step) is None:
            left = InProcessStateInfo(None, False, generation, world_size, copies)
            return left if copies else None
        state.device.synchronize(self._device_timeout_s)
        return InProcessStateInfo(step, state.complete_on_rank, generation, world_size, copies)

    @contextmanager
    def open_source(self, restore: Restore | None) -> Iterator[StateSource | None]:
        """Opens the state to start from; yields None for a fresh start.

        Raises:
            StateError: the state is damaged, incomplete, or gone.
        """
        if restore is None:
            yield None
            return
        try:
            with closing(self._open_restore(restore)) as source:
                yield source
        except (DataError, VaultGoneError, EngineError) as error:
            raise StateError(error.seen, error.allowed, error.fix) from error

    def salvage(self, vault: str, step: int) -> SlotInfo:
        """Copies the state of that step into the vault: the complete state if this rank's engines
        have it, otherwise the rank's shard, from the engines or from the mirror's copy.

        Args:
            vault: the current address of this node's vault. The one that the generation started
                with may be lost, which is a reason to salvage.

        Raises:
            EngineError: there is no such state, or no vault.
            VaultGoneError: the vault does not answer.
        """
        self._connect(vault)
        memory_state, cut_for, state = self.in_process_state(), self._cut_for, self._state
        if self.vault is None:
            raise EngineError("this node has no vault to copy the training state to")
        if memory_state is None or cut_for is None or state is None:
            raise EngineError("this process has no training state to copy to its vault")
        generation, rank, world_size = cut_for.generation, cut_for.rank, cut_for.world_size
        copy = self.copies().get(step)
        if memory_state.step == step:
            block = state.pack(whole=state.complete_on_rank)
            world_size = 1 if state.complete_on_rank else world_size
            buffer = self.vault.reserve(generation, rank, world_size, block.index)
            buffer.begin()
            block.copy_to(buffer.data)
            buffer.commit(step, state.metadata(), False, None)
        elif copy is not None:
            buffer = self.vault.reserve(generation, rank, world_size, copy.index)
            buffer.copy_version(copy)
        else:
            raise EngineError(f"this process has no state of step {step} to salvage")
        return SlotInfo(generation, rank, world_size, step, len(buffer.data), pinned=False)

    def _open_restore(self, restore: Restore) -> StateSource:
        if restore.slots:
            if self.vault is None:
                raise EngineError(
                    "the state is stored in vaults, and this node's vault cannot be reached"
                )
            return self.vault.open_source(restore)
        # Imported here: it loads pyarrow's file systems, and few generations need it.
        from rayzero.engine.checkpoint.imports import open_foreign
        from rayzero.engine.checkpoint.reader import CheckpointSource
        from rayzero.engine.checkpoint.store import is_remote

        path = restore.checkpoint
        if not (is_remote(path) or Path(path.removeprefix("file://")).exists()):
            raise DataError(f"the checkpoint {path} does not exist")
        return open_foreign(path) or CheckpointSource(path)

    def _connect(self, address: str) -> None:
        """Connects to the vault at `address`, unless connected to it already. The old session is
        closed first, so that its end is not reported as a death. Raises VaultGoneError if the vault
        does not answer."""
        if self.vault is not None:
            if self.vault.address == address:
                return
            self.vault.close()
            self.vault = None
        if address:
            self.vault = VaultClient(address, self._worker)


def why_not_held(
    left: InProcessStateInfo | None, cut_for: Assignment, restore: Restore | None, *, altered: bool
) -> str:
    """Returns why an engine does not hold its part of the state to restore; empty if it does.

    Args:
        left: the state that the engine left behind; None if that is inconsistent.
        cut_for: the generation for which that state was cut.
        altered: the training function has changed that state since the last update.
    """
    if restore is None or not restore.slots:
        return "it is read from a checkpoint"
    if left is None or left.step is None:
        return "it was left within an update, or within a step of several engines"
    if left.step != restore.step:
        return f"it is of step {left.step}, restored is {restore.step}"
    if altered:
        return "the training function has changed it since the last update"
    # The state of a step that other ranks did again may differ in rounding: the engine's generation
    # must have made the restored state, or started from it.
    generations = {cut_for.generation}
    if cut_for.restore is not None and cut_for.restore.step == restore.step:
        generations |= {slot.generation for slot in cut_for.restore.slots}
    if {slot.generation for slot in restore.slots} <= generations:
        return ""
    return f"step {left.step} is restored from another generation"
