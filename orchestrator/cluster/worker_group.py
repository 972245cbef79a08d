"""The workers of a job: Ray actors, each in its own reservation, started again when lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

import ray

from rayzero.orchestrator.aio import Clock, PendingReplies, WorkerReports
from rayzero.orchestrator.cluster.actor_calls import ActorPoller
from rayzero.orchestrator.cluster.actor_pool import ActorPool
from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_starter import OnStartFailure, OnWaiting, WorkerStarter
from rayzero.orchestrator.errors import VaultLostError, WorkerLostError
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.actor import WorkerActor
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo, WorkerSpec
from rayzero.workers.vault.vault import Vault

_KILL_TIMEOUT_S = 1.0  # how long a vault may take to kill a process
_OBJECT_STORE_WORKERS = 64
"""From this number of workers on a generation's spec goes through the object store."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerGroup:
    """The workers of one job, each in its own reservation of CPUs and GPUs; owned from
    `start_workers` until `release`. Used from one event loop.

    There may be thousands of workers: a command to many is one call, and their messages arrive
    together, because a task or a timer for each would cost more than all other work.

    Args:
        can_grow: whether nodes may join the cluster; if not, no more is requested than can fit.
        vaults: started on the workers' nodes, and used to kill workers.
        actor: the workers' class.
    """

    def __init__(
        self,
        setup: WorkerSpec,
        clock: Clock,
        can_grow: bool,
        vaults: VaultGroup,
        actor: type[Any] = WorkerActor,
    ) -> None:
        self._vaults = vaults
        self._pool = ActorPool(setup, clock, vaults, actor)
        self._starter = WorkerStarter(self._pool, clock, can_grow)
        self._poller = ActorPoller(
            lambda worker, limit_s: self._call_actor(worker, "poll", limit_s)
        )

    async def start_workers(
        self,
        need: ResourceRequest,
        on_failure: OnStartFailure | None = None,
        on_waiting: OnWaiting = lambda _: None,
    ) -> tuple[WorkerInfo, ...]:
        """The first workers; see `WorkerStarter.start_first`."""
        return await self._starter.start_first(need, on_failure, on_waiting)

    async def next_worker(self) -> WorkerInfo:
        """The next worker that has started after the first ones: in a reservation that was granted
        later, or as a replacement. Waits without limit; can be cancelled. Raises WorkerStartError
        if a worker did not start; it is started again automatically."""
        return await self._starter.next_worker()

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        """Starts a new worker, with an index of its own, in the reservation of a lost one."""
        self._starter.replace(self._pool.get(worker), delay_s, avoid_nodes)

    def resize(self, least: int, most: int) -> None:
        """Changes the number of reservations. Empty ones beyond `most` are removed."""
        self._starter.resize(least, most)

    async def release_worker(self, worker: int) -> None:
        """Ends a worker's process and removes its reservation."""
        await self._pool.remove([self._pool.get(worker)])

    async def kill(self, worker: int) -> None:
        """Ends a worker's process with SIGKILL; its reservation stays.

        Kills through the vault, which takes a millisecond, and leaves Ray to find the true cause
        of death. `ray.kill` would report itself as the cause, also of a worker that had died
        before, and would wait 5 s for a stopped process to exit by itself."""
        victim = self._pool.get(worker)
        if victim.info is not None:
            with suppress(VaultLostError, TimeoutError):
                killed = self._vaults.call(victim.info.node_id, Vault.kill, victim.info.pid)
                if await asyncio.wait_for(killed, _KILL_TIMEOUT_S):
                    return
        ray.kill(victim.actor)

    async def call(self, worker: int, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """Calls `method`, one of `WorkerCalls` (`workers/calls.py`), in a worker's process, and
        raises what it raises; WorkerLostError if the process is gone."""
        try:
            reply: T = await self._call_actor(worker, method.__name__, *args)
            return reply
        except ACTOR_LOST as error:
            raise WorkerLostError(death_cause(error)) from None

    def broadcast(
        self, workers: Iterable[int], method: Callable[[Any, *Ts], None], *args: *Ts
    ) -> PendingReplies:
        """Calls `method`, one of `WorkerCalls`, in several workers' processes."""
        return self._poller.broadcast(
            workers, lambda worker: self._call_actor(worker, method.__name__, *args)
        )

    def assign(
        self, formation: GenerationSpec, places: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        """Starts a generation on these workers, each with its own rank."""
        # It names a slot of every worker: serialized once, and fetched once for each node.
        spec = formation if len(places) < _OBJECT_STORE_WORKERS else ray.put(formation)
        return self._poller.broadcast(
            places, lambda worker: self._call_actor(worker, "assign", spec, places[worker])
        )

    def subscribe(self, workers: Iterable[int]) -> None:
        """Includes the messages of these workers, from their first one, in `receive`."""
        self._poller.subscribe(workers)

    async def receive(self) -> WorkerReports:
        """Messages and losses since the last call; waits until there are some."""
        return await self._poller.receive()

    async def draining_nodes(self) -> frozenset[str]:
        """Ids of the nodes that the cluster drains or is about to lose. For each reservation there
        another one is requested elsewhere; the old one is removed with its worker."""
        return await self._starter.move_off_draining()

    async def release(self) -> None:
        """Ends all workers and removes all reservations. May be called at any time, repeatedly."""
        self._poller.close()
        await self._starter.release()

    def _call_actor(self, worker: int, method: str, *args: Any) -> Any:
        """The reference to the reply."""
        return self._pool.get(worker).actor.call.remote(method, *args)
