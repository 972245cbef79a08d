"""A job's reservations (one placement group for each worker) and the actors that run in them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.cluster import ray_api
from rayzero.orchestrator.cluster.head_calls import HeadCalls
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.orchestrator.policies.placement import Capacity, ResourceRequest, preferred_nodes
from rayzero.workers.actor import ACTOR_THREADS
from rayzero.workers.lifetimes import NAMESPACE, group_of_id, name_in_run, owned_name, parse_owned
from rayzero.workers.messages import RoleWorkerSpec, WorkerInfo, WorkerSpec
from rayzero.workers.worker_status import WorkerStatus

_NODE_LABEL = "ray.io/node-id"  # Ray sets it on every node
_MAX_START_BACKOFF_S = 60.0
"""Longest delay before the next start in a reservation where workers have failed to start."""


@dataclass(eq=False)
class Reservation:
    """The resources of one worker: a placement group of one bundle. Ray places the group once
    resources are free, and again when its node is lost.

    Args:
        avoid_nodes: nodes on which the group must not be placed.
        worker: index of the worker that occupies the reservation; None while there is none.
        available_at_s: time, by the pool's clock, before which no worker is started here.
        start_failures: failed starts of workers since the last successful one.
        draining: its node is being drained, and another reservation was requested instead.
    """

    group: PlacementGroup
    avoid_nodes: frozenset[str] = frozenset()
    worker: int | None = None
    available_at_s: float = 0.0
    start_failures: int = 0
    draining: bool = False


@dataclass(eq=False)
class WorkerHandle:
    """A worker's actor, until it is replaced or removed.

    Args:
        node_id: id of the node on which the actor was started.
        info: None until the actor has started.
        announced: the controller knows the worker.
    """

    index: int
    actor: Any
    reservation: Reservation
    node_id: str
    info: WorkerInfo | None = None
    announced: bool = False


class ActorPool:
    """Owns the reservations of one job and the workers in them.

    Each reservation is a placement group of its own, so that reservations are granted, removed and
    rescheduled one by one. Pending reservations are the demand that Ray's autoscaler sees.

    Args:
        vaults: a node's vault is started together with its first worker.
        indices: yields the index of each new worker.
        actor: class of the workers' actors.

    Attributes:
        role: role of the pool's workers; empty for workers that become ranks.
    """

    def __init__(
        self,
        setup: WorkerSpec,
        clock: Clock,
        vaults: VaultGroup,
        indices: Iterator[int],
        actor: type[Any],
    ) -> None:
        self._worker_spec = setup
        self.role = setup.role if isinstance(setup, RoleWorkerSpec) else ""
        self._clock = clock
        self._vaults = vaults
        self._head: HeadCalls = vaults.head
        self._actor = ray.remote(actor)
        self._reservations: list[Reservation] = []
        self._workers: dict[int, WorkerHandle] = {}
        self._indices = indices
        self._capacities: dict[str, Capacity] = {}  # of nodes that were alive in the last query
        self._adjusting = asyncio.Lock()

    def __contains__(self, worker: WorkerHandle) -> bool:
        return self._workers.get(worker.index) is worker

    @property
    def workers(self) -> list[WorkerHandle]:
        """The pool's workers, oldest first."""
        return list(self._workers.values())

    def find(self, index: int) -> WorkerHandle | None:
        return self._workers.get(index)

    def get(self, index: int) -> WorkerHandle:
        if index not in self._workers:
            raise WorkerLostError("it was released or replaced")
        return self._workers[index]

    @property
    def unoccupied(self) -> list[Reservation]:
        """Reservations without a worker, oldest first."""
        return [reservation for reservation in self._reservations if reservation.worker is None]

    async def held_by_other_jobs(self) -> dict[str, Capacity]:
        """Returns the CPUs and GPUs in the reservations of the cluster's other jobs, by job."""
        table = await self._head(placement_group_table)
        held: dict[str, Capacity] = {}
        for entry in table.values():
            owned = parse_owned(entry["name"])
            if owned is None or owned.job == self._worker_spec.name:
                continue
            if entry["state"] == "CREATED":
                job, bundles = held.get(owned.job, Capacity(0.0, 0.0)), entry["bundles"].values()
                held[owned.job] = Capacity(
                    job.cpus + sum(bundle.get("CPU", 0.0) for bundle in bundles),
                    job.gpus + sum(bundle.get("GPU", 0.0) for bundle in bundles),
                )
        return held

    def adopt(
        self, workers: Iterable[tuple[WorkerStatus, Any]], groups: Iterable[str]
    ) -> list[int]:
        """Takes over the workers and placement groups of an earlier process of the job.

        Args:
            workers: status and actor of each worker.
            groups: ids of the placement groups.

        Returns:
            The workers' indices.
        """
        reservations = {group: Reservation(group_of_id(group)) for group in groups}
        self._reservations += reservations.values()
        for status, actor in workers:
            info, reservation = status.info, reservations.get(status.group)
            if reservation is None:  # the group has been removed, and Ray ends the worker
                ray.kill(actor)
                continue
            reservation.worker = info.index
            self._workers[info.index] = WorkerHandle(
                info.index, actor, reservation, info.node_id, info, announced=True
            )
        return [*self._workers]

    async def reserve(self, number: int, need: ResourceRequest) -> None:
        """Requests `number` more reservations, preferably on nodes that already have some."""
        cluster = await self._head(ray_api.node_snapshot)
        in_use = set((await self._granted()).values())
        for target in preferred_nodes(number, need, cluster.free, in_use):
            self._reservations.append(Reservation(await self._request(need, target, ())))

    async def adjust(self, most: int, need: ResourceRequest) -> None:
        """Requests missing reservations, or removes surplus ones without an announced worker."""
        async with self._adjusting:  # otherwise two calls would both request what is missing
            surplus = sum(not reservation.draining for reservation in self._reservations) - most
            if surplus < 0:
                await self.reserve(-surplus, need)
                return
        unoccupied = self.unoccupied[::-1][:surplus]
        for reservation in unoccupied:
            self._remove_reservation(reservation)
        unannounced = [worker for worker in self.workers[::-1] if not worker.announced]
        await self.remove(unannounced[: surplus - len(unoccupied)])

    async def start_in_ready(self, need: ResourceRequest) -> list[WorkerHandle]:
        """Starts a worker in every unoccupied reservation that is granted and available. Instead, a
        reservation on a draining node or a node to avoid is requested again elsewhere."""
        now_s = self._clock.now()
        if not any(reservation.available_at_s <= now_s for reservation in self.unoccupied):
            return []
        granted = await self._granted()
        capacities = self._capacities
        draining = await self._head(ray_api.draining_node_ids)
        started = []
        for reservation in self.unoccupied:  # read again: it may have changed meanwhile
            node = granted.get(reservation)
            if node is None or reservation.available_at_s > self._clock.now():
                continue
            if node in reservation.avoid_nodes | draining:
                await self._move(reservation, need, reservation.avoid_nodes | draining)
                continue
            self._vaults.start(node)
            worker = await self._start(reservation, node, need, capacities[node])
            if worker is not None:
                started.append(worker)
        return started

    async def wait_started(self, worker: WorkerHandle) -> None:
        """Waits until a worker's process has started, and sets the worker's `info`. Raises RayError
        if the process does not start."""
        worker.info = await worker.actor.describe.remote()
        worker.reservation.start_failures = 0

    def free(self, worker: WorkerHandle, delay_s: float) -> None:
        """Ends a worker. Its reservation becomes available after `delay_s`, or is removed if its
        node is draining."""
        # The process may be alive: Ray also reports an actor as lost if it cannot reach the actor.
        ray.kill(self._workers.pop(worker.index).actor)
        worker.reservation.worker = None
        worker.reservation.available_at_s = self._clock.now() + delay_s
        if worker.reservation.draining:
            self._remove_reservation(worker.reservation)

    def start_failed(self, worker: WorkerHandle) -> float:
        """Frees the reservation of a worker that did not start. Returns the delay until the next
        start, which doubles with every failure."""
        delay_s = min(_MAX_START_BACKOFF_S, 2.0**worker.reservation.start_failures)
        worker.reservation.start_failures += 1
        self.free(worker, delay_s)
        return delay_s

    async def remove(self, workers: Sequence[WorkerHandle]) -> None:
        """Kills workers, removes their reservations, and waits until the processes have ended."""
        for worker in workers:
            self._workers.pop(worker.index, None)
            ray.kill(worker.actor)
            self._remove_reservation(worker.reservation)
        await ray_api.wait_gone(worker.actor.describe for worker in workers)
        await self._head.settle(ray_api.GONE_TIMEOUT_S)

    async def remove_all(self) -> None:
        for reservation in tuple(self._reservations):
            if reservation.worker not in self._workers:
                self._remove_reservation(reservation)
        await self.remove(self.workers)

    def _remove_reservation(self, reservation: Reservation) -> None:
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._head.post(remove_placement_group, reservation.group)

    async def _granted(self) -> dict[Reservation, str]:
        """Returns the granted reservations, each with the id of its node."""
        if not self._reservations:
            return {}
        table = await self._head(placement_group_table)
        alive = self._capacities = await self._head(ray_api.node_capacities)
        granted = {}
        for reservation in self._reservations:
            entry = table.get(reservation.group.id.hex())
            if entry is None or entry["state"] != "CREATED":
                continue
            node = entry["bundles_to_node_id"][0]
            if node in alive:  # otherwise Ray is about to reschedule it
                granted[reservation] = node
        return granted

    async def _request(
        self, need: ResourceRequest, target: str | None, avoid: Collection[str]
    ) -> PlacementGroup:
        """Requests a placement group. Its strategy is STRICT_PACK, because Ray supports a soft
        target node with no other. For a group of one bundle all strategies are equal."""
        bundle = {"CPU": need.cpus} | ({"GPU": need.gpus} if need.gpus else {})
        avoid_label = {_NODE_LABEL: f"!in({','.join(sorted(avoid))})"}
        name = self._name(secrets.token_hex(8))

        def request() -> PlacementGroup:
            group: PlacementGroup
            with suppress(ValueError):  # a request that was given up may have been received
                group = get_placement_group(name)
                return group
            group = placement_group(
                [bundle],
                strategy="STRICT_PACK",
                name=name,
                lifetime="detached",
                _soft_target_node_id=target,
                bundle_label_selector=[avoid_label] if avoid else None,
            )
            return group

        return await self._head(request)

    async def _move(
        self, reservation: Reservation, need: ResourceRequest, avoid: Collection[str]
    ) -> None:
        """Requests an unoccupied reservation again on another node."""
        self._head.post(remove_placement_group, reservation.group)
        group = await self._request(need, None, avoid)
        if reservation in self._reservations:
            reservation.group = group
        else:
            self._head.post(remove_placement_group, group)

    async def _start(
        self, reservation: Reservation, node_id: str, need: ResourceRequest, node: Capacity
    ) -> WorkerHandle | None:
        """Starts a worker. Returns None if the reservation was removed meanwhile, because Ray then
        also ends the worker."""
        threads = need.threads or node.cpus_per_gpu
        index = reservation.worker = next(self._indices)
        options = self._actor.options(
            name=self._name(str(index)),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,  # a request that was given up may have been received
            num_cpus=need.cpus,
            num_gpus=need.gpus,
            max_concurrency=ACTOR_THREADS,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                reservation.group, placement_group_bundle_index=0
            ),
            runtime_env={"env_vars": {**need.env, "OMP_NUM_THREADS": str(threads)}},
        )
        start = partial(options.remote, self._worker_spec, index, self._vaults.orphan_s)
        process = await self._head(start)
        if reservation not in self._reservations:
            return None
        worker = self._workers[index] = WorkerHandle(index, process, reservation, node_id)
        return worker

    def _name(self, name: str) -> str:
        spec = self._worker_spec
        return owned_name(spec.name, spec.run, name_in_run(self.role, name))
