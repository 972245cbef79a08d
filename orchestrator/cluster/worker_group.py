"""The workers of a job: Ray actors, each in its own reservation, started again when lost.

Rule of ordering: `reservation-after-death` (docs/engine.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import ray
from ray.exceptions import RayActorError, RayError, RuntimeEnvSetupError

from rayzero.orchestrator.aio import BackgroundTasks, Clock, PendingReplies
from rayzero.orchestrator.cluster import ray_api
from rayzero.orchestrator.cluster.actor_pool import ActorPool, WorkerHandle
from rayzero.orchestrator.cluster.ray_api import NodeTable, death_cause
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_commands import Call
from rayzero.orchestrator.cluster.worker_watch import WorkerWatch
from rayzero.orchestrator.errors import (
    JobFailedError,
    VaultLostError,
    WorkerStartError,
)
from rayzero.orchestrator.policies.placement import (
    Capacity,
    ResourceRequest,
    cluster_too_small_error,
    missing_resources,
    total_fit,
)
from rayzero.workers.actor import WorkerActor
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo, WorkerSpec
from rayzero.workers.vault.vault import Vault
from rayzero.workers.worker_status import WorkerStatus

OnStartFailure: TypeAlias = Callable[[WorkerStartError], None]
OnWaiting: TypeAlias = Callable[[str], None]

_ACQUIRE_INTERVAL_S = 0.02  # interval of checks for granted reservations while the job starts
_FILL_INTERVAL_S = 0.5  # the same while the job runs
WAITING_INTERVAL_S = 5.0
"""While reservations are missing, the job reports at this interval what it waits for. Ray grants
free resources within a second, so a wait of some seconds needs an explanation."""
_EXTRA_WORKER_WAIT_S = 1.0  # how long to wait for one more worker once the minimum has been reached
_PING_INTERVAL_S = 0.5  # between two questions to Ray whether a worker is alive
_KILL_TIMEOUT_S = 1.0  # how long a vault may take to kill a process

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerGroup:
    """The workers of one job, each in its own reservation of CPUs and GPUs. The group owns them
    from `start_workers` or `adopt` until `release`. Used from one event loop.

    As long as the job lives, one background task starts a worker in every granted reservation that
    has none. A reservation outlives its worker's process. If its node is lost, it waits until Ray
    places it on another one.

    There may be thousands of workers: a command to many is one call, and their messages arrive
    together, because a task or a timer for each would cost more than all other work.

    Args:
        can_grow: nodes may join the cluster. If not, only as many workers are requested as fit.
        vaults: started on the workers' nodes, and used to kill workers.
        actor: class of the workers' actors.
        indices: yields the index of each new worker. All groups of a job share it.
    """

    def __init__(
        self,
        setup: WorkerSpec,
        clock: Clock,
        can_grow: bool,
        vaults: VaultGroup,
        actor: type[Any] = WorkerActor,
        indices: Iterator[int] | None = None,
    ) -> None:
        self._clock = clock
        self._can_grow = can_grow
        self._vaults = vaults
        self._pool = ActorPool(setup, clock, vaults, indices or count(), actor)
        self._resources = ResourceRequest(1, 1, 1.0, 0.0, 0.0)  # replaced by `start_workers`
        self._started: asyncio.Queue[WorkerHandle | Exception] = asyncio.Queue()
        self._free_reservation = asyncio.Event()
        self._tasks = BackgroundTasks(self._started.put_nowait)  # `next_worker` raises their errors
        self._watch = WorkerWatch(vaults.mail, vaults.commands, self._node_of, self._find_cause)
        self.subscribe = self._watch.subscribe
        self.receive = self._watch.receive

    @property
    def role(self) -> str:
        """Role of the group's workers; empty for workers that become ranks."""
        return self._pool.role

    async def start_workers(
        self,
        need: ResourceRequest,
        on_failure: OnStartFailure | None = None,
        on_waiting: OnWaiting = lambda _: None,
    ) -> tuple[WorkerInfo, ...]:
        """Requests `need.max_workers` reservations and starts a worker in each that is granted.
        Returns when each of these workers has started or failed to, and at least `need.min_workers`
        have started. The other reservations stay requested, so that Ray's autoscaler sees them.

        Args:
            on_failure: called for every worker that is started again because its process ended. It
                may raise. By default, the first failure is an error.
            on_waiting: called every `WAITING_INTERVAL_S` with the resources that are missing and
                the jobs that hold them; with an empty text once there are enough.

        Raises:
            JobFailedError: fewer than `need.min_workers` were granted or started in time, or a
                worker failed in a way that would repeat itself.
        """
        self._resources = need
        await self._acquire(on_waiting)
        on_waiting("")
        first = self._pool.workers
        for worker in first:
            self._tasks.spawn(self._await_started(worker))
        self._tasks.spawn(self._fill_reservations())
        try:
            async with asyncio.timeout(need.timeout_s):
                started = await self._collect_started(first, on_failure)
        except TimeoutError:
            raise JobFailedError(
                f"the workers' processes did not start within {need.timeout_s:g} s",
                fix="set a longer workers.start_timeout_s in the job file",
            ) from None
        for worker in started:
            worker.announced = True
        return tuple(worker.info for worker in started if worker.info is not None)

    def adopt(self, workers: Iterable[tuple[WorkerStatus, Any]], groups: Iterable[str]) -> None:
        """Takes over workers of an earlier process of the job, instead of `start_workers`. Their
        messages are received from now on. Arguments as of `ActorPool.adopt`."""
        self._watch.subscribe(self._pool.adopt(workers, groups))

    def resume(self, need: ResourceRequest) -> None:
        """Starts workers in reservations without one, and requests missing reservations. Called
        after `adopt`."""
        self._resources = need
        self._tasks.spawn(self._fill_reservations())
        self._tasks.spawn(self._adjust())

    async def next_worker(self) -> WorkerInfo:
        """Returns the next worker that has started after those of `start_workers`: in a reservation
        that was granted later, or as a replacement. Waits without limit; can be cancelled. Raises
        WorkerStartError if a worker did not start; it is started again automatically."""
        while True:
            worker = await self._next_event()
            if worker in self._pool and worker.info is not None and not worker.announced:
                worker.announced = True
                return worker.info

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        """Starts a new worker, with a new index, in the reservation of a lost one."""
        lost = self._pool.find(worker)
        if lost is None:
            return  # lost before `adopt`, whose caller has it replaced already
        lost.reservation.avoid_nodes = frozenset(avoid_nodes)
        self._pool.free(lost, delay_s)
        self._free_reservation.set()

    def resize(self, least: int, most: int) -> None:
        """Changes the number of reservations. Removes surplus ones without an announced worker."""
        self._resources = replace(self._resources, min_workers=least, max_workers=most)
        self._tasks.spawn(self._adjust())

    async def release_worker(self, worker: int) -> None:
        """Ends a worker's process and removes its reservation."""
        await self._pool.remove([self._pool.get(worker)])

    async def kill(self, worker: int) -> None:
        """Ends a worker's process with SIGKILL. Its reservation stays.

        The vault kills the process, which takes a millisecond, and Ray then finds the true cause of
        death. `ray.kill` would report itself as the cause even if the worker had died before, and
        would wait 5 s for a stopped process to exit by itself."""
        victim = self._pool.get(worker)
        if victim.info is not None:
            with suppress(VaultLostError, TimeoutError):
                killed = self._vaults.call(victim.info.node_id, Vault.kill, victim.info.pid)
                if await asyncio.wait_for(killed, _KILL_TIMEOUT_S):
                    return
        ray.kill(victim.actor)

    async def call(self, worker: int, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        """Calls a method of `WorkerCalls` (`workers/calls.py`) in a worker's process. Raises what
        the method raises; WorkerLostError if the process is gone."""
        call = Call(method.__name__, args, in_order=False)
        reply: T = await self._vaults.commands.call(worker, self._node_of(worker), call)
        return reply

    def broadcast(
        self, workers: Iterable[int], method: Callable[[Any, *Ts], None], *args: *Ts
    ) -> PendingReplies:
        """Calls a method of `WorkerCalls` in several workers' processes. A worker runs the commands
        of `broadcast` and `assign` in the order in which they were sent."""
        return self._watch.broadcast(workers, Call(method.__name__, args, in_order=True))

    def assign(
        self, formation: GenerationSpec, places: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        """Starts a generation on these workers, each with its own rank."""
        own = {worker: (place,) for worker, place in places.items()}
        call = Call(WorkerCalls.assign.__name__, (formation,), in_order=True, own=own)
        return self._watch.broadcast(places, call)

    async def draining_nodes(self) -> frozenset[str]:
        """Returns the ids of nodes that are drained or about to be lost. Waits for the answer of
        the cluster's head without limit; can be cancelled."""
        return await self._vaults.head(ray_api.draining_node_ids)

    async def leave_nodes(self, draining: Collection[str]) -> None:
        """Requests another reservation for each one on these nodes. The old reservation is removed
        when its worker ends."""
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

    async def release(self) -> None:
        """Ends all workers and removes all reservations. May be called at any time, repeatedly."""
        self._watch.close()
        await self._tasks.cancel_all()
        await self._pool.remove_all()

    def _node_of(self, worker: int) -> str:
        return self._pool.get(worker).node_id

    async def _find_cause(self, worker: int) -> str:
        """Waits for the end of a worker's process, and returns the cause. Ray knows it within a
        second."""
        actor = self._pool.get(worker).actor
        return death_cause(await ray_api.await_end(actor.ping, _PING_INTERVAL_S))

    async def _collect_started(
        self, first: Sequence[WorkerHandle], on_failure: OnStartFailure | None
    ) -> list[WorkerHandle]:
        while True:
            starting = [worker for worker in first if worker in self._pool and worker.info is None]
            started = [worker for worker in self._pool.workers if worker.info is not None]
            if not starting and len(started) >= self._resources.min_workers:
                return started
            try:
                await self._next_event()
            except WorkerStartError as failure:
                if failure.repeats or on_failure is None:
                    raise JobFailedError(f"a worker could not start: {failure.cause}") from None
                on_failure(failure)

    async def _next_event(self) -> WorkerHandle:
        """Returns the next worker that has started, or was removed before. Raises an error that
        `_await_started` has put instead."""
        event = await self._started.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def _acquire(self, on_waiting: OnWaiting) -> None:
        """Requests all reservations and starts workers in the granted ones. Returns when there are
        as many workers as fit; or at least `min_workers`, and none more for `_EXTRA_WORKER_WAIT_S`.
        """
        need = self._resources
        cluster = await self._vaults.head(ray_api.node_snapshot)
        total = total_fit(cluster.all_capacities, need)
        if not self._can_grow and total < need.min_workers:
            raise cluster_too_small_error(
                cluster.all_capacities, cluster.total_free, need, waited_s=0
            )
        most = need.max_workers if self._can_grow else min(need.max_workers, total)
        fit_now = sum(node.fits(need) for node in cluster.free.values())
        expected = min(fit_now, most) if fit_now >= need.min_workers else most
        requested_s = last_start_s = said_s = self._clock.now()
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
            if workers < need.min_workers and now_s - said_s >= WAITING_INTERVAL_S:
                said_s = now_s
                cluster = await self._vaults.head(ray_api.node_snapshot)
                on_waiting(await self._missing(cluster, workers))
            await self._clock.sleep(_ACQUIRE_INTERVAL_S)

    async def _cluster_too_small(self, workers: int) -> JobFailedError:
        """Returns the error for a job with too few reservations, and releases all it has. In the
        error, resources that the job itself has reserved count as free."""
        cluster = await self._vaults.head(ray_api.node_snapshot)
        need, free = self._resources, cluster.total_free
        usable = Capacity(free.cpus + workers * need.cpus, free.gpus + workers * need.gpus)
        missing = await self._missing(cluster, workers)
        await self.release()
        return cluster_too_small_error(
            cluster.all_capacities, usable, need, need.timeout_s, missing
        )

    async def _missing(self, cluster: NodeTable, workers: int) -> str:
        jobs = await self._pool.held_by_other_jobs()
        return missing_resources(
            cluster.all_capacities, cluster.total_free, self._resources, workers, jobs
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
        limit_s, repeats = self._resources.timeout_s, False
        try:
            await asyncio.wait_for(self._pool.wait_started(worker), limit_s)
            self._started.put_nowait(worker)
            return
        except TimeoutError:
            cause = f"its process did not start within {limit_s:g} s"
        except RayError as error:
            cause, repeats = death_cause(error), _fails_again(error)
        if worker not in self._pool:  # it was removed meanwhile
            self._started.put_nowait(worker)
            return
        names = await self._vaults.head(ray_api.node_names)
        node = worker.node_id
        info = WorkerInfo(worker.index, node, names.get(node, node), "", 0)
        delay_s = self._pool.start_failed(worker)
        self._free_reservation.set()
        self._started.put_nowait(WorkerStartError(cause, info, repeats, delay_s))

    async def _adjust(self) -> None:
        """Requests or removes reservations. Reads the limits only after the cluster has answered,
        because several calls may run at once and the newest limits count."""
        cluster = None if self._can_grow else await self._vaults.head(ray_api.node_snapshot)
        most = self._resources.max_workers
        if cluster is not None:
            most = min(most, total_fit(cluster.all_capacities, self._resources))
        await self._pool.adjust(most, self._resources)
        self._free_reservation.set()


def _fails_again(error: RayError) -> bool:
    """Returns whether the error lies in the worker's code or environment, not in the machine."""
    failed_in_init = isinstance(error, RayActorError) and error.actor_init_failed
    return failed_in_init or isinstance(error, RuntimeEnvSetupError)
