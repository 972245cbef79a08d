"""Copies a step's state into a slot, commits it, and posts what depends on it.

This is the way of devices on which every operation has run when it returns; `beside_copy` is that
of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from rayzero.engine.state.ranges import StateBlock
from rayzero.engine.state.training import TrainingState
from rayzero.workers.messages import WorkerMessage
from rayzero.workers.mirror_cost import CopyCost
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.slots import SlotWriter, checksum_of


@dataclass(frozen=True)
class SlotWrite:
    """One mirror. `constants`: the slot does not have those of the state yet; `metadata` encodes
    that of `step`; `began_s`: when the mirror began, by `perf_counter`."""

    slot: SlotWriter
    block: StateBlock
    constants: bool
    step: int
    metadata: Callable[[], bytes]
    pin: bool
    began_s: float


class StateCopier:
    """Copies in the training thread, on a device where every operation has run when it returns.

    Args:
        interrupt: set before collectives are aborted.
        send: posts a message; any thread may call it.
    """

    def __init__(self, interrupt: StopFlag, send: Callable[[WorkerMessage], None]) -> None:
        self.cost = CopyCost()
        self.interrupt = interrupt
        self.send = send

    def register(self, vault: VaultClient, slot: SlotWriter) -> None:
        """Prepares a reserved slot for copies from the device."""

    def write(self, write: SlotWrite, state: TrainingState) -> None:
        """Copies and commits the state of a finished step. Checks the interrupt before it commits
        what an abort may have changed."""
        write.slot.begin()
        write.block.copy_to(write.slot.data, constants=write.constants)
        self.confirm(state)
        size = write.slot.constant_bytes
        if write.constants:
            write.slot.constants_checksum = checksum_of(write.slot.data[:size])
        checksum = checksum_of(write.slot.data[size:])
        if not write.constants:  # the first write into new memory is slower
            self.cost.mirror_finished(perf_counter() - write.began_s)
        write.slot.commit(write.step, write.metadata(), write.pin, checksum)

    def confirm(self, state: TrainingState) -> None:
        """Ends a step without a mirror. Checks the interrupt if an abort may have changed it."""
        if state.update_is_collective:
            self.interrupt.check()
        state.confirm()

    def post(self, message: WorkerMessage) -> None:
        """Posts a message of the step that was last written or confirmed, once that is done."""
        self.send(message)

    def settle(self) -> None:
        """Returns when the last step is committed and its messages are posted. Raises the
        error that prevented it."""

    def close(self) -> None:
        """Ends what is not settled. Raises nothing."""
