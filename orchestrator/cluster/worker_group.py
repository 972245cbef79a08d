"""The workers of a job on Ray: each in a seat that is asked for, taken, and taken again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from rayzero.orchestrator.aio import Clock, PendingReplies
from rayzero.orchestrator.cluster import ray_api as nodes
from rayzero.orchestrator.cluster.actor_calls import ActorPoller
from rayzero.orchestrator.cluster.actor_pool import ActorPool, WorkerHandle
from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause
from rayzero.orchestrator.cluster.vault_group import RayVaultGroup
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.interfaces import VaultLostError, WorkerLostError, WorkerReports
from rayzero.orchestrator.policies.placement import (
    Capacity,
    ResourceRequest,
    cluster_too_small_error,
    total_fit,
)
from rayzero.workers.actor import WorkerActor
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo, WorkerSpec
from rayzero.workers.vault.vault import Vault

_ACQUIRE_INTERVAL_S = 0.02
"""How often to look for seats while a job waits for them."""


_FILL_INTERVAL_S = 0.5
"""How often to look for seats that are to come behind a running job."""


_EXTRA_WORKER_WAIT_S = 1.0
"""How long to hope for one more seat when the least number stands."""


_KILL_TIMEOUT_S = 1.0
"""How long a vault may take to kill a process."""


_OBJECT_STORE_WORKERS = 64
"""Workers from which on what all of them are told goes through the object store."""

P = ParamSpec("P")
T = TypeVar("T")


class RayWorkerGroup:
    """Owns the seats and the workers in them, from `place` to `release`. Used from one event loop.

    An usher, one background task, puts a worker into every vacant seat as soon as it stands; it
    sleeps while no seat is vacant. Tasks end in `release`.

    Args:
        can_grow: whether more nodes may come; if not, no more seats are asked for than could fit.
        vaults: started where workers are, and asked to kill them.
        actor: the class of the workers.
    """

    def __init__(
        self,
        setup: WorkerSpec,
        clock: Clock,
        can_grow: bool,
        vaults: RayVaultGroup,
        actor: type[Any] = WorkerActor,
    ) -> None:
        self._clock = clock
        self._can_grow = can_grow
        self._vaults = vaults
        self._resources = ResourceRequest(
            1, 1, setup.cpus, setup.gpus, 0.0
        )  # until `place` says more
        self._pool = ActorPool(setup, clock, vaults, actor)
        self._poller = ActorPoller(lambda worker, limit_s: self._actor(worker).poll.remote(limit_s))
        self._started: asyncio.Queue[WorkerHandle | Exception] = asyncio.Queue()
        self._free_reservation = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start_workers(self, need: ResourceRequest) -> tuple[WorkerInfo, ...]:
        self._resources = need
        await self._acquire()
        first = self._pool.workers
        answers = asyncio.gather(*(self._await_first_start(worker) for worker in first))
        try:
            await asyncio.wait_for(answers, need.timeout_s)
        except TimeoutError:
            raise JobFailedError(
                f"the workers' processes did not answer within {need.timeout_s:g} s",
                fix="workers.start_timeout_s in the job file",
            ) from None
        except RayError as error:
            raise JobFailedError(f"a worker could not start: {death_cause(error)}") from None
        stayed = [worker for worker in first if worker in self._pool]
        for worker in stayed:
            worker.announced = True
        self._spawn(self._fill_reservations())
        return tuple(worker.info for worker in stayed if worker.info is not None)

    async def next_worker(self) -> WorkerInfo:
        while True:
            came = await self._started.get()
            if isinstance(came, Exception):
                raise came
            if came in self._pool and came.info is not None:
                came.announced = True
                return came.info

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        lost = self._pool.get(worker)
        lost.reservation.avoid_nodes = frozenset(avoid_nodes)
        self._pool.free(lost, delay_s)
        self._free_reservation.set()

    def resize(self, least: int, most: int) -> None:
        now = self._resources
        self._resources = ResourceRequest(least, most, now.cpus, now.gpus, now.timeout_s)
        self._spawn(self._adjust(most))

    async def release_worker(self, worker: int) -> None:
        await self._pool.remove([self._pool.get(worker)])

    async def kill(self, worker: int) -> None:
        """The vault kills in a millisecond, and then Ray sees by itself why its process ended: it
        would say that we killed it, also of one that had died. Ray alone asks first: a stopped
        process would live on for another 5 s."""
        victim = self._pool.get(worker)
        if victim.info is not None:
            with suppress(VaultLostError, TimeoutError):
                killed = self._vaults.call(victim.info.node_id, Vault.kill, victim.info.pid)
                if await asyncio.wait_for(killed, _KILL_TIMEOUT_S):
                    return
        ray.kill(victim.actor)

    async def call(
        self,
        worker: int,
        method: Callable[Concatenate[Any, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        actor = self._pool.get(worker).actor
        try:
            reply: T = await getattr(actor, method.__name__).remote(*args, **kwargs)
            return reply
        except ACTOR_LOST as error:
            raise WorkerLostError(death_cause(error)) from None

    def broadcast(
        self,
        workers: Iterable[int],
        method: Callable[Concatenate[Any, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> PendingReplies:
        return self._poller.broadcast(
            workers,
            lambda worker: getattr(self._actor(worker), method.__name__).remote(*args, **kwargs),
        )

    def assign(
        self, formation: GenerationSpec, places: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        # With a thousand workers it holds a thousand slots: packed once, and fetched once a node.
        packed = formation if len(places) < _OBJECT_STORE_WORKERS else ray.put(formation)
        return self._poller.broadcast(
            places, lambda worker: self._actor(worker).assign.remote(packed, places[worker])
        )

    def subscribe(self, workers: Iterable[int]) -> None:
        self._poller.subscribe(workers)

    async def receive(self) -> WorkerReports:
        return await self._poller.receive()

    async def draining_nodes(self) -> frozenset[str]:
        leaving = await asyncio.to_thread(nodes.draining_node_ids)
        doomed = [
            worker.reservation
            for worker in self._pool.workers
            if worker.info and worker.info.node_id in leaving and not worker.reservation.draining
        ]
        if doomed and self._can_grow:
            for seat in doomed:
                seat.draining = True
            await self._pool.reservations.request(len(doomed), self._resources)
            self._free_reservation.set()
        return leaving

    async def release(self) -> None:
        self._poller.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.remove(self._pool.workers)
        self._pool.reservations.remove_all()

    async def _await_first_start(self, worker: WorkerHandle) -> None:
        try:
            await self._pool.wait_started(worker)
        except RayError:
            if worker in self._pool:  # else lower limits have dismissed it meanwhile
                raise

    async def _acquire(self) -> None:
        """Asks for all seats and starts workers in those that come; returns when all came that
        there was room for, or after a while without another one."""
        need = self._resources
        seen = await asyncio.to_thread(nodes.node_snapshot)
        holds = total_fit(seen.all_capacities, need)
        if not self._can_grow and holds < need.min_workers:
            raise cluster_too_small_error(seen.all_capacities, seen.total_free, need, waited_s=0)
        most = need.max_workers if self._can_grow else min(need.max_workers, holds)
        fits = sum(node.fits(need) for node in seen.free.values())
        expected = min(fits, most) if fits >= need.min_workers else most
        asked_s = came_s = self._clock.now()
        await self._pool.reservations.request(most, need)
        while len(self._pool) < min(expected, self._resources.max_workers):
            need = self._resources  # the limits may change meanwhile
            if await self._pool.start_in_ready(need):
                came_s = self._clock.now()
                continue
            now_s, seated = self._clock.now(), len(self._pool)
            if seated >= need.min_workers and now_s - came_s >= _EXTRA_WORKER_WAIT_S:
                return
            if seated < need.min_workers and now_s - asked_s >= need.timeout_s:
                raise await self._cluster_too_small(seated)
            await self._clock.sleep(_ACQUIRE_INTERVAL_S)

    async def _cluster_too_small(self, seated: int) -> JobFailedError:
        """What we hold ourselves counts as free: it is what the job could have had."""
        seen = await asyncio.to_thread(nodes.node_snapshot)
        need, free = self._resources, seen.total_free
        ours = Capacity(free.cpus + seated * need.cpus, free.gpus + seated * need.gpus)
        await self.release()
        return cluster_too_small_error(seen.all_capacities, ours, need, waited_s=need.timeout_s)

    async def _fill_reservations(self) -> None:
        while True:
            if not self._pool.reservations.unoccupied:
                self._free_reservation.clear()
                await self._free_reservation.wait()
            for worker in await self._pool.start_in_ready(self._resources):
                self._spawn(self._await_started(worker))
            await self._clock.sleep(_FILL_INTERVAL_S)

    async def _await_started(self, worker: WorkerHandle) -> None:
        """Tells of a worker once it answers; one that does not start is tried again later."""
        limit_s = self._resources.timeout_s
        try:
            await asyncio.wait_for(self._pool.wait_started(worker), limit_s)
            self._started.put_nowait(worker)
            return
        except TimeoutError:
            why = f"its process did not answer within {limit_s:g} s"
        except RayError as error:
            why = death_cause(error)
        if worker in self._pool:  # else it was dismissed meanwhile
            delay_s = self._pool.start_failed(worker)
            self._free_reservation.set()
            self._started.put_nowait(
                WorkerLostError(f"a worker did not start, the next try is in {delay_s:g} s: {why}")
            )

    async def _adjust(self, most: int) -> None:
        """Asks for the seats that are missing, or gives back those that nobody knows of."""
        seats = self._pool.reservations
        if not self._can_grow:
            seen = await asyncio.to_thread(nodes.node_snapshot)
            most = min(most, total_fit(seen.all_capacities, self._resources))
        if len(seats) < most:
            await seats.request(most - len(seats), self._resources)
            self._free_reservation.set()
        for seat in seats.unoccupied[::-1][: max(0, len(seats) - most)]:
            seats.remove(seat)
        unknown = [worker for worker in self._pool.workers[::-1] if not worker.announced]
        await self._pool.remove(unknown[: max(0, len(seats) - most)])

    def _actor(self, worker: int) -> Any:
        return self._pool.get(worker).actor

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._report_errors(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # when it was cancelled before it began

    async def _report_errors(self, work: Coroutine[Any, Any, None]) -> None:
        """What goes wrong behind the scenes is raised by `next_worker`."""
        try:
            await work
        except Exception as error:  # noqa: BLE001
            self._started.put_nowait(error)
