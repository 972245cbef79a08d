"""The calls that the controller makes in a worker's process. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.messages import GenerationSpec, RankAssignment
from rayzero.workers.stacks import Stacks
from rayzero.workers.vault.records import SlotInfo


class WorkerCalls(Protocol):
    """The calls that the controller makes in a worker's process, by `WorkerGroup.call` and
    `broadcast`.

    `stop`, `end`, `drain`, `divide` and `fence` do nothing if the worker has left that generation.
    """

    def open_store(self) -> int:
        """Serves a TCP store for rendezvous; returns its port."""

    def assign(self, generation: GenerationSpec, member: RankAssignment) -> None:
        """Starts a generation: joins its process group, then calls the training function."""

    def stop(self, generation: int) -> None:
        """Leaves the generation at the training function's next report, phase or step; `Stopped`
        follows."""

    def end(self, generation: int) -> None:
        """Called when the job is stopped. SystemExit is raised in the training function where it
        leaves the generation, so that its `finally` blocks run."""

    def drain(self, generation: int) -> None:
        """Leaves the generation after a step that all ranks agree on and have mirrored; `Stopped`
        follows. A training function that outlives its generation waits for the next one; any
        other is abandoned, and its process is replaced."""

    def divide(self, generation: int, shares: Sequence[float]) -> None:
        """Divides the samples of later steps by these shares of the ranks, from a step on that all
        ranks agree on; `Divided` follows, from rank 0. Does nothing if the training function has
        read later samples already, or reads them by a loader that is not the engine's."""

    def fence(self, generation: int) -> None:
        """Leaves the generation at once. A wait for peers is aborted. `Stopped` follows, as for
        `drain`."""

    def inject(self, faults: Sequence[FaultSpec]) -> None:
        """Replaces the list of all faults injected since the job started."""

    def salvage(self, vault: str, step: int) -> SlotInfo:
        """Copies the state of that step from the memory of this worker, which has left its
        generation, into the vault with that address.

        Raises:
            EngineError: the training function is still running, or there is no such state.
            VaultGoneError: the vault does not answer.
        """

    def dump_stack(self) -> Stacks:
        """Returns the stacks of the process's threads."""
