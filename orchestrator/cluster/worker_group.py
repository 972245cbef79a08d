"""The workers of a job: Ray actors, each in its own reservation, started again when lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, TypeVarTuple

import ray
from ray.exceptions import RayError

from rayzero.orchestrator.aio import BackgroundTasks, Clock, PendingReplies, WorkerReports
from rayzero.orchestrator.cluster import ray_api
from rayzero.orchestrator.cluster.actor_calls import ActorPoller
from rayzero.orchestrator.cluster.actor_pool import ActorPool, WorkerHandle
from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.errors import JobFailedError, VaultLostError, WorkerLostError
from rayzero.orchestrator.policies.placement import (
    Capacity,
    ResourceRequest,
    cluster_too_small_error,
    total_fit,
)
from rayzero.workers.actor import WorkerActor
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo, WorkerSpec
from rayzero.workers.vault.vault import Vault

_ACQUIRE_INTERVAL_S = 0.02  # interval of checks for granted reservations while the job starts
_FILL_INTERVAL_S = 0.5  # the same while the job runs
_EXTRA_WORKER_WAIT_S = 1.0  # how long to wait for one more worker once the minimum has been reached
_KILL_TIMEOUT_S = 1.0  # how long a vault may take to kill a process
_OBJECT_STORE_WORKERS = 64
"""From this number of workers on a generation's spec goes through the object store."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerGroup:
    """The workers of one job, each in its own reservation of CPUs and GPUs; owned from
    `start_workers` until `release`. Used from one event loop.

    A reservation outlives its worker's process; when its node is lost it waits for another one. One
    background task starts a worker in every granted reservation without one. There may be thousands
    of workers: a command to many is one call, and their messages arrive together, because a task or
    a timer for each would cost more than all other work.

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
        self._clock = clock
        self._can_grow = can_grow
        self._vaults = vaults
        # Replaced by `start_workers`.
        self._resources = ResourceRequest(1, 1, setup.cpus, setup.gpus, 0.0)
        self._pool = ActorPool(setup, clock, vaults, actor)
        self._poller = ActorPoller(
            lambda worker, limit_s: self._call_actor(worker, "poll", limit_s)
        )
        self._started: asyncio.Queue[WorkerHandle | Exception] = asyncio.Queue()
        self._free_reservation = asyncio.Event()
        self._tasks = BackgroundTasks(self._started.put_nowait)  # `next_worker` raises their errors

    async def start_workers(self, need: ResourceRequest) -> tuple[WorkerInfo, ...]:
        """Requests `need.max_workers` reservations and starts a worker in each that is granted;
        returns when these workers have started. The others stay requested, so that Ray's
        autoscaler sees them.

        Raises:
            JobFailedError: fewer than `need.min_workers` were granted in time, or a worker did not
                start.
        """
        self._resources = need
        await self._acquire()
        first = self._pool.workers
        starts = asyncio.gather(*(self._await_first_start(worker) for worker in first))
        try:
            await asyncio.wait_for(starts, need.timeout_s)
        except TimeoutError:
            raise JobFailedError(
                f"the workers' processes did not start within {need.timeout_s:g} s",
                fix="workers.start_timeout_s in the job file",
            ) from None
        except RayError as error:
            raise JobFailedError(f"a worker could not start: {death_cause(error)}") from None
        started = [worker for worker in first if worker in self._pool]
        for worker in started:
            worker.announced = True
        self._tasks.spawn(self._fill_reservations())
        return tuple(worker.info for worker in started if worker.info is not None)

    async def next_worker(self) -> WorkerInfo:
        """The next worker that has started after the first ones: in a reservation that was granted
        later, or as a replacement. Waits without limit; can be cancelled.

        Raises:
            WorkerLostError: a worker did not start; it is started again automatically.
        """
        while True:
            started = await self._started.get()
            if isinstance(started, Exception):
                raise started
            if started in self._pool and started.info is not None:
                started.announced = True
                return started.info

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        """Starts a new worker, with an index of its own, in the reservation of a lost one."""
        lost = self._pool.get(worker)
        lost.reservation.avoid_nodes = frozenset(avoid_nodes)
        self._pool.free(lost, delay_s)
        self._free_reservation.set()

    def resize(self, least: int, most: int) -> None:
        """Changes the number of reservations. Empty ones beyond `most` are removed."""
        self._resources = replace(self._resources, min_workers=least, max_workers=most)
        self._tasks.spawn(self._adjust(most))

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
        """Calls `method`, one of `WorkerCalls` (`workers/messages.py`), in a worker's process.

        Raises:
            WorkerLostError: the process is gone.
            Exception: what the method raises.
        """
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
        draining = await asyncio.to_thread(ray_api.draining_node_ids)
        affected = [
            worker.reservation
            for worker in self._pool.workers
            if worker.info and worker.info.node_id in draining and not worker.reservation.draining
        ]
        if affected and self._can_grow:
            for reservation in affected:
                reservation.draining = True
            await self._pool.reserve(len(affected), self._resources)
            self._free_reservation.set()
        return draining

    async def release(self) -> None:
        """Ends all workers and removes all reservations. May be called at any time, repeatedly."""
        self._poller.close()
        await self._tasks.cancel_all()
        await self._pool.remove_all()

    async def _await_first_start(self, worker: WorkerHandle) -> None:
        try:
            await self._pool.wait_started(worker)
        except RayError:
            if worker in self._pool:  # otherwise lower limits have removed it meanwhile
                raise

    async def _acquire(self) -> None:
        """Requests all reservations and starts workers in the granted ones. Returns when there are
        as many as fit, or enough and no further one within `_EXTRA_WORKER_WAIT_S`."""
        need = self._resources
        cluster = await asyncio.to_thread(ray_api.node_snapshot)
        total = total_fit(cluster.all_capacities, need)
        if not self._can_grow and total < need.min_workers:
            raise cluster_too_small_error(
                cluster.all_capacities, cluster.total_free, need, waited_s=0
            )
        most = need.max_workers if self._can_grow else min(need.max_workers, total)
        fit_now = sum(node.fits(need) for node in cluster.free.values())
        expected = min(fit_now, most) if fit_now >= need.min_workers else most
        requested_s = last_start_s = self._clock.now()
        await self._pool.reserve(most, need)
        while len(self._pool.workers) < min(expected, self._resources.max_workers):
            need = self._resources  # the limits may change meanwhile
            if await self._pool.start_in_ready(need):
                last_start_s = self._clock.now()
                continue
            now_s, workers = self._clock.now(), len(self._pool.workers)
            if workers >= need.min_workers and now_s - last_start_s >= _EXTRA_WORKER_WAIT_S:
                return
            if workers < need.min_workers and now_s - requested_s >= need.timeout_s:
                raise await self._cluster_too_small(workers)
            await self._clock.sleep(_ACQUIRE_INTERVAL_S)

    async def _cluster_too_small(self, workers: int) -> JobFailedError:
        """The error, with the job's own reservations counted as free."""
        cluster = await asyncio.to_thread(ray_api.node_snapshot)
        need, free = self._resources, cluster.total_free
        usable = Capacity(free.cpus + workers * need.cpus, free.gpus + workers * need.gpus)
        await self.release()
        return cluster_too_small_error(
            cluster.all_capacities, usable, need, waited_s=need.timeout_s
        )

    async def _fill_reservations(self) -> None:
        while True:
            if not self._pool.unoccupied:
                self._free_reservation.clear()
                await self._free_reservation.wait()
            for worker in await self._pool.start_in_ready(self._resources):
                self._tasks.spawn(self._await_started(worker))
            await self._clock.sleep(_FILL_INTERVAL_S)

    async def _await_started(self, worker: WorkerHandle) -> None:
        """Announces a worker once it has started; a failed start is repeated later."""
        limit_s = self._resources.timeout_s
        try:
            await asyncio.wait_for(self._pool.wait_started(worker), limit_s)
            self._started.put_nowait(worker)
            return
        except TimeoutError:
            cause = f"its process did not start within {limit_s:g} s"
        except RayError as error:
            cause = death_cause(error)
        if worker in self._pool:  # otherwise it was removed meanwhile
            delay_s = self._pool.start_failed(worker)
            self._free_reservation.set()
            self._started.put_nowait(
                WorkerLostError(f"a worker did not start, trying again in {delay_s:g} s: {cause}")
            )

    async def _adjust(self, most: int) -> None:
        if not self._can_grow:
            cluster = await asyncio.to_thread(ray_api.node_snapshot)
            most = min(most, total_fit(cluster.all_capacities, self._resources))
        await self._pool.adjust(most, self._resources)
        self._free_reservation.set()

    def _call_actor(self, worker: int, method: str, *args: Any) -> Any:
        """The reference to the reply."""
        return self._pool.get(worker).actor.call.remote(method, *args)
