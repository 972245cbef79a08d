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
        """The job is stopped: SystemExit is raised in the training function where it leaves the
        generation, so that its `finally` blocks run."""

    def drain(self, generation: int) -> None:
        """Leaves the generation after a step that all ranks agree on and have mirrored; `Stopped`
        follows. A function that can waits for the next generation; another one is given up."""

    def divide(self, generation: int, shares: Sequence[float]) -> None:
        """Divides the samples of later steps by these shares of the ranks, from a step on that all
        ranks agree on; `Divided` follows, from rank 0. Does nothing if the training function has
        read what it trains on later, or its samples are not read by a loader of the engine's."""

    def fence(self, generation: int) -> None:
        """Leaves the generation at once, also out of a wait for peers, which is aborted; `Stopped`
        follows, as for `drain`."""

    def inject(self, faults: Sequence[FaultSpec]) -> None:
        """Replaces the list of all faults injected since the job started."""

    def salvage(self, vault: str, step: int) -> SlotInfo:
        """Copies the state of a step in memory, of a worker that has left its generation, into that
        vault.

        Raises:
            EngineError: the training function is still running, or there is no such state.
            VaultGoneError: the vault does not answer.
        """

    def dump_stack(self) -> Stacks:
        """Returns what the threads of the process do."""
