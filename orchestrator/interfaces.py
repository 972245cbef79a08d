"""What the controller needs of workers and vaults, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from rayzero.orchestrator.aio import PendingReplies
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.messages import (
    GenerationSpec,
    RankAssignment,
    WorkerInfo,
    WorkerMessage,
)

if TYPE_CHECKING:
    from rayzero.workers.vault.vault import Vault

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WORKER_POLL_S = 2.0
"""Longest time between two messages of a subscribed worker; an empty one says that it lives."""


class WorkerLostError(Exception):
    """A worker's process is gone. The text says what the cluster knows about the cause."""


class VaultLostError(Exception):
    """A vault's process is gone, or its node."""


@dataclass(frozen=True)
class WorkerReports:
    """Messages and losses of several workers.

    Args:
        messages: (worker, its messages in order); an empty list says that the worker is alive. The
            receiver owns the lists.
        lost: (worker, the cause as far as it is known); its last messages come before this.
    """

    messages: Sequence[tuple[int, list[WorkerMessage]]] = ()
    lost: Sequence[tuple[int, str]] = ()


class WorkerGroup(Protocol):
    """The workers of one job, each in its own reservation of CPUs and GPUs.

    A reservation outlives its worker's process; when its node is lost it waits for another one.
    There may be thousands of workers: a command to many is one call, and their messages arrive
    together, because a task or a timer for each would cost more than all other work.
    """

    async def start_workers(self, need: ResourceRequest) -> tuple[WorkerInfo, ...]:
        """Requests `need.max_workers` reservations and starts a worker in each that is granted;
        returns when these workers have started. The others stay requested, so that Ray's
        autoscaler sees them.

        Raises:
            JobFailedError: fewer than `need.min_workers` were granted in time, or a worker did not
                start.
        """

    async def next_worker(self) -> WorkerInfo:
        """The next worker that has started after the first ones: in a reservation that was granted
        later, or as a replacement. Waits without limit; can be cancelled.

        Raises:
            WorkerLostError: a worker did not start; it is started again automatically.
        """

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        """Starts a new worker, with an index of its own, in the reservation of a lost one."""

    def resize(self, least: int, most: int) -> None:
        """Changes the number of reservations. Empty ones beyond `most` are removed."""

    async def release_worker(self, worker: int) -> None:
        """Ends a worker's process and removes its reservation."""

    async def kill(self, worker: int) -> None:
        """Ends a worker's process with SIGKILL; its reservation stays."""

    async def call(self, worker: int, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """Calls `method`, one of `WorkerCalls` (`workers/messages.py`), in a worker's process.

        Raises:
            WorkerLostError: the process is gone.
            Exception: what the method raises.
        """

    def broadcast(
        self, workers: Iterable[int], method: Callable[[Any, *Ts], None], *args: *Ts
    ) -> PendingReplies:
        """Calls `method`, one of `WorkerCalls`, in several workers' processes."""

    def assign(
        self, formation: GenerationSpec, places: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        """Starts a generation on these workers, each with its own rank."""

    def subscribe(self, workers: Iterable[int]) -> None:
        """Includes the messages of these workers, from their first one, in `receive`."""

    async def receive(self) -> WorkerReports:
        """Messages and losses since the last call; waits until there are some."""

    async def draining_nodes(self) -> frozenset[str]:
        """Ids of the nodes that the cluster drains or is about to lose. For each reservation there
        another one is requested elsewhere; the old one is removed with its worker."""

    async def release(self) -> None:
        """Ends all workers and removes all reservations. May be called at any time, repeatedly."""


class VaultGroup(Protocol):
    """One vault for each node. Calls that name a node may raise VaultLostError."""

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        """Starts a vault on each of these nodes that has none; the addresses by node.

        Raises:
            JobFailedError: one did not start.
        """

    async def call(self, node_id: str, method: Callable[[Vault, *Ts], T], *args: *Ts) -> T:
        """Calls `method`, one of `Vault`, in a node's vault.

        Raises:
            VaultLostError: the vault's process or its node is gone.
            Exception: what the method raises.
        """

    async def inject_faults(self, faults: Sequence[FaultSpec]) -> None:
        """Replaces the faults that were injected since the job started, in every vault, also in
        those that start later."""

    async def why_not_injectable(self, node_id: str, fault: FaultSpec) -> str:
        """Why a fault of a vault or a node is impossible there; empty if it is possible."""

    async def inject_node_fault(self, node_id: str, fault: FaultSpec) -> None:
        """Injects a fault of a vault or a node, which usually ends the process that would reply."""

    async def close(self, node_id: str) -> None:
        """Ends a node's vault, if it has one. Ray's autoscaler keeps a node with a vault alive."""

    async def release(self) -> None:
        """Ends all vaults. May be called at any time, repeatedly."""
