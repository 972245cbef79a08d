"""WorkerGroup, VaultGroup, CheckpointStore protocols; job commands.

What the controller needs of workers and vaults, without Ray: tests put fakes in their place.

The job's checkpoints as the controller needs them: which there are, commit one, prune.

What somebody may want of a running job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rayzero.orchestrator.aio import PendingReplies
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.workers.messages import (
    GenerationSpec,
    RankAssignment,
    WorkerInfo,
    WorkerMessage,
)
from rayzero.workers.vault.records import RankFile, SlotInfo, SlotRef, VaultEvent

WORKER_POLL_S = 2.0
"""Within which a worker that is listened to says something, if only that it lives."""


class WorkerLostError(Exception):
    """A worker's process is gone. The text says what the cluster knows about the cause."""


class VaultLostError(Exception):
    """A vault's process is gone, or its node."""


@dataclass(frozen=True)
class WorkerReports:
    """What came of the workers at once.

    Args:
        said: (worker, its messages in order), for the hearer to keep; without messages it said
            that it lives.
        lost: (worker, what is known about the cause); it says no more, and has said all before.
    """

    messages: Sequence[tuple[int, list[WorkerMessage]]] = ()
    lost: Sequence[tuple[int, str]] = ()


class WorkerGroup(Protocol):
    """The workers of one job, each in a seat: its own reservation of CPUs and GPUs.

    A seat outlives its worker's process; on a lost node it waits for another one. Calls that wait
    for one worker may raise WorkerLostError. What goes to many goes at once, and what many say
    comes at once: there may be thousands, and a task or a timer for each would cost more than
    everything else.
    """

    async def start_workers(self, need: ResourceRequest) -> tuple[WorkerInfo, ...]:
        """Asks for `need.most` seats and starts a worker in each that is there; returns when all
        of these answer. Seats that are not there stay asked for (the autoscaler sees them).

        Raises:
            JobFailedError: fewer than `need.least` came in time, or a worker did not start.
        """

    async def next_worker(self) -> WorkerInfo:
        """The next worker that became ready behind the first ones: in a seat that came later, or
        as a replacement. Waits without end; can be cancelled.

        Raises:
            WorkerLostError: one did not start; it is tried again without being asked for.
        """

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        """Starts a new worker in the seat of one that is gone; it gets an index of its own."""

    def resize(self, least: int, most: int) -> None:
        """Asks for so many seats from now on. Seats beyond `most` that hold no worker go."""

    async def release_worker(self, worker: int) -> None:
        """Ends a worker's process and gives its seat back."""

    async def kill(self, worker: int) -> None:
        """Ends a worker's process at once, whatever state it is in (SIGKILL); the seat stays."""

    async def open_store(self, worker: int) -> int:
        """The port of a new store in that worker's process."""

    def assign(
        self, formation: GenerationSpec, places: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        """Begins a generation on these workers, each at its own place."""

    def subscribe(self, workers: Iterable[int]) -> None:
        """From now on `hear` tells what these say, from the first word on."""

    async def receive(self) -> WorkerReports:
        """What happened on the workers since the last call; waits for something to happen."""

    def stop(self, workers: Iterable[int], generation: int) -> PendingReplies:
        """Asks workers to unwind the user's function at their next report, phase or step.

        Like `drain` and `fence` meant for one generation: when it comes late, it does nothing.
        """

    def drain(self, workers: Iterable[int], generation: int) -> PendingReplies:
        """Asks workers, and so all, to unwind at the end of the step at hand, mirrored."""

    def fence(self, workers: Iterable[int], generation: int) -> PendingReplies:
        """As `stop`, and breaks off the collective they may be waiting in."""

    async def inject_faults(self, worker: int, faults: Sequence[str]) -> None:
        """Further faults for one worker: all that were injected since the job began."""

    async def salvage(self, worker: int, vault: str) -> SlotInfo:
        """Copies the state in an unwound worker's memory into the vault at that address.

        Raises:
            EngineError, VaultGoneError: there is no state, or that vault is gone.
        """

    async def dump_stack(self, worker: int) -> str:
        """The Python stacks of a worker's process."""

    async def draining_nodes(self) -> frozenset[str]:
        """Ids of the nodes that the cluster is draining or is about to lose. For each seat there,
        another one is asked for elsewhere; the old one goes with its worker."""

    async def release(self) -> None:
        """Ends every worker and gives the resources back. May be called at any time, and twice."""


class VaultGroup(Protocol):
    """One vault a node. All calls that name a node may raise VaultLostError."""

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        """Makes sure that each of these nodes has a vault; their addresses, by node.

        Raises:
            JobFailedError: one did not start.
        """

    async def poll(self, node_id: str, timeout_s: float) -> list[VaultEvent]:
        """What a vault noticed; waits up to `timeout_s` for something to happen."""

    async def inventory(self, node_id: str) -> list[SlotInfo]:
        """Every whole version that a vault holds."""

    async def unpin(self, node_id: str, generation: int, step: int) -> None:
        """Frees what was pinned at that step or before."""

    async def replicate(self, node_id: str, slots: Sequence[SlotRef]) -> int:
        """Copies other vaults' slots into this one, in place of the replicas it has of the same
        generations and ranks; the bytes copied."""

    async def write(self, node_id: str, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        """Writes slots of this vault as files of the checkpoint in `folder`; they are durable.

        Raises:
            StoreError: the store cannot take them: full, gone, forbidden. It says which.
        """

    async def inspect(self, node_id: str, pid: int) -> str:
        """What the system says about a process on that node: its state, its stack if py-spy can
        be had. For a worker that does not answer."""

    async def usage(self, node_id: str) -> dict[str, Any]:
        """Bytes held: `slots`, `replicas`; `available`."""

    async def inject_faults(self, faults: Sequence[str]) -> None:
        """Further faults for every vault, now and to come: all that were injected since the job
        began."""

    async def why_not_injectable(self, node_id: str, fault: str) -> str:
        """Why a fault of a vault or a node cannot happen there; empty when it can."""

    async def inject_node_fault(self, node_id: str, fault: str) -> None:
        """Makes it happen; most often nobody is left to answer."""

    async def close(self, node_id: str) -> None:
        """Ends a vault that nobody needs any more, if there is one. Ray's autoscaler keeps a node
        for as long as there is a vault."""

    async def release(self) -> None:
        """Ends every vault. May be called at any time, and twice."""


class CheckpointStore(Protocol):
    """One job's folder of checkpoints. Everything that waits for a store is awaited, and none of
    it blocks the event loop. All of it may raise StoreError: full, gone, forbidden, slow."""

    def folder(self, step: int) -> str:
        """Where the checkpoint of that step lies, or is to lie."""

    async def resolve_resume(self) -> CheckpointRef | None:
        """What this run of the job begins from, by `checkpoint.resume`.

        Raises:
            ConfigError: there is no such checkpoint, or there are some and none is wanted.
        """

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        """The newest whole checkpoint but for these steps."""

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        """Makes a checkpoint exist: its files are durable, its manifest is now."""

    async def prune(self) -> None:
        """Removes what `checkpoint.keep` and `keep_every` do not keep."""


@dataclass(frozen=True)
class ScaleWorkers:
    """Between `least` and `most` workers from now on."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True)
class InjectFaults:
    """These faults, in the fault language; the step may be left out."""

    faults: tuple[str, ...]


JobCommand: TypeAlias = ScaleWorkers | InjectFaults
