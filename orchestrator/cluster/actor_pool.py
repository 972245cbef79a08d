"""A job's reservations (one placement group for each worker) and the actors that run in them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from ray import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.cluster import ray_api
from rayzero.orchestrator.cluster.ray_api import wait_gone
from rayzero.orchestrator.cluster.vault_group import RayVaultGroup
from rayzero.orchestrator.interfaces import WorkerLostError
from rayzero.orchestrator.policies.placement import ResourceRequest, preferred_nodes
from rayzero.workers.actor import COMMAND_THREADS
from rayzero.workers.messages import WorkerInfo, WorkerSpec

_NODE_LABEL = "ray.io/node-id"  # Ray sets it on every node
_MAX_START_BACKOFF_S = 60.0
"""Longest delay before another start in a reservation in which workers do not start."""


@dataclass(eq=False)
class Reservation:
    """The resources of one worker: a placement group of one bundle. Ray places it once there are
    free resources, and again when its node is lost.

    Args:
        avoid_nodes: nodes that it must not be placed on.
        worker: index of the worker in it; None while it is unoccupied.
        available_at_s: time, by the pool's clock, before which no worker is started in it.
        start_failures: failed starts of workers since the last successful one.
        draining: its node is being drained, and another reservation was requested in its place.
    """

    group: PlacementGroup
    avoid_nodes: frozenset[str] = frozenset()
    worker: int | None = None
    available_at_s: float = 0.0
    start_failures: int = 0
    draining: bool = False


class Reservations:
    """The reservations of one job. Each is a placement group of its own, so that they are granted,
    removed and rescheduled one by one; pending ones are the demand that Ray's autoscaler sees."""

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._reservations: list[Reservation] = []

    def __len__(self) -> int:
        """The number of reservations that stay: without draining ones."""
        return sum(not reservation.draining for reservation in self._reservations)

    def __iter__(self) -> Iterator[Reservation]:
        """Oldest first."""
        return iter(tuple(self._reservations))

    @property
    def unoccupied(self) -> list[Reservation]:
        return [reservation for reservation in self._reservations if reservation.worker is None]

    async def request(self, count: int, need: ResourceRequest) -> None:
        """Requests more reservations, preferably on the nodes that are in use."""
        snapshot = await asyncio.to_thread(ray_api.node_snapshot)
        in_use = set((await self.ready()).values())
        for target in preferred_nodes(count, need, snapshot.free, in_use):
            self._reservations.append(
                Reservation(_create_placement_group(self._job, need, target, frozenset()))
            )

    def relocate(
        self, reservation: Reservation, need: ResourceRequest, avoid: Collection[str]
    ) -> None:
        """Requests it again elsewhere: not on `avoid`, nor on its `avoid_nodes`."""
        remove_placement_group(reservation.group)
        avoid_nodes = reservation.avoid_nodes | frozenset(avoid)
        reservation.group = _create_placement_group(self._job, need, None, avoid_nodes)

    async def ready(self) -> dict[Reservation, str]:
        """The granted reservations, each with its node's id."""
        if not self._reservations:
            return {}
        table = await asyncio.to_thread(placement_group_table)
        alive = await asyncio.to_thread(ray_api.alive_node_ids)
        granted = {}
        for reservation in self._reservations:
            entry = table.get(reservation.group.id.hex())
            if entry is None or entry["state"] != "CREATED":
                continue
            node = entry["bundles_to_node_id"][0]
            if node in alive:  # otherwise Ray is about to reschedule it
                granted[reservation] = node
        return granted

    def remove(self, reservation: Reservation) -> None:
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            remove_placement_group(reservation.group)

    def remove_all(self) -> None:
        for reservation in self:
            self.remove(reservation)


def remove_stale_reservations(job: str) -> int:
    """Removes the reservations of an earlier process of the job; their number. Ray removes them
    with the actor that created them, but not if that actor is restarted."""
    stale = [
        group_id
        for group_id, entry in placement_group_table().items()
        if entry["name"].startswith(_name_prefix(job)) and entry["state"] != "REMOVED"
    ]
    for group_id in stale:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
    return len(stale)


def _name_prefix(job: str) -> str:
    return f"rayzero/{job}/"


def _create_placement_group(
    job: str, need: ResourceRequest, target: str | None, avoid: frozenset[str]
) -> PlacementGroup:
    """Ray supports a soft target node with STRICT_PACK only; with one bundle all strategies are
    equal."""
    bundle = {"CPU": need.cpus} | ({"GPU": need.gpus} if need.gpus else {})
    selector = {_NODE_LABEL: f"!in({','.join(sorted(avoid))})"} if avoid else {}
    group: PlacementGroup = placement_group(
        [bundle],
        strategy="STRICT_PACK",
        name=_name_prefix(job) + secrets.token_hex(8),
        _soft_target_node_id=target,
        bundle_label_selector=[selector] if selector else None,
    )
    return group


@dataclass(eq=False)
class WorkerHandle:
    """A worker's actor, until it is replaced or removed.

    Args:
        info: None until the actor has started.
        announced: whether the controller knows the worker.
    """

    index: int
    actor: Any
    reservation: Reservation
    info: WorkerInfo | None = None
    announced: bool = False


class ActorPool:
    """Owns the reservations and the workers in them.

    Args:
        vaults: a node's vault is started together with its first worker.
        actor: the workers' class.
    """

    def __init__(
        self, setup: WorkerSpec, clock: Clock, vaults: RayVaultGroup, actor: type[Any]
    ) -> None:
        self.reservations = Reservations(setup.name)
        self._worker_spec = setup
        self._clock = clock
        self._vaults = vaults
        self._actor = ray.remote(actor)
        self._workers: dict[int, WorkerHandle] = {}
        self._indices = count()

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker: WorkerHandle) -> bool:
        return self._workers.get(worker.index) is worker

    @property
    def workers(self) -> list[WorkerHandle]:
        """Oldest first."""
        return list(self._workers.values())

    def get(self, index: int) -> WorkerHandle:
        if index not in self._workers:
            raise WorkerLostError("it was released or replaced")
        return self._workers[index]

    async def start_in_ready(self, need: ResourceRequest) -> list[WorkerHandle]:
        """Starts a worker in every unoccupied reservation that is granted and available. One on a
        node to avoid, or on a draining node, is relocated instead."""
        unoccupied, now_s = self.reservations.unoccupied, self._clock.now()
        if not any(reservation.available_at_s <= now_s for reservation in unoccupied):
            return []
        granted = await self.reservations.ready()
        draining = await asyncio.to_thread(ray_api.draining_node_ids)
        started = []
        for reservation in self.reservations.unoccupied:  # may have changed meanwhile
            node = granted.get(reservation)
            if node is None or reservation.available_at_s > self._clock.now():
                continue
            if node in reservation.avoid_nodes | draining:
                self.reservations.relocate(reservation, need, draining)
                continue
            self._vaults.start(node)
            started.append(self._start(reservation))
        return started

    async def wait_started(self, worker: WorkerHandle) -> WorkerInfo:
        """Waits until a worker's process has started.

        Raises:
            RayError: it did not start.
        """
        info: WorkerInfo = await worker.actor.describe.remote()
        worker.info = info
        worker.reservation.start_failures = 0
        return info

    def free(self, worker: WorkerHandle, delay_s: float) -> None:
        """Ends a worker. Its reservation is available after `delay_s`; a draining one is
        removed."""
        # The process may be alive: Ray also reports actors as lost that it cannot reach for a
        # while.
        ray.kill(self._workers.pop(worker.index).actor)
        worker.reservation.worker = None
        worker.reservation.available_at_s = self._clock.now() + delay_s
        if worker.reservation.draining:
            self.reservations.remove(worker.reservation)

    def start_failed(self, worker: WorkerHandle) -> float:
        """Frees the reservation of a worker that did not start; the delay, doubled with every
        failure."""
        delay_s = min(_MAX_START_BACKOFF_S, 2.0**worker.reservation.start_failures)
        worker.reservation.start_failures += 1
        self.free(worker, delay_s)
        return delay_s

    async def remove(self, workers: Sequence[WorkerHandle]) -> None:
        """Kills workers, removes their reservations, and waits until the processes have ended."""
        for worker in workers:
            self._workers.pop(worker.index, None)
            ray.kill(worker.actor)
            self.reservations.remove(worker.reservation)
        await wait_gone(worker.actor.describe for worker in workers)

    def _start(self, reservation: Reservation) -> WorkerHandle:
        cpus, gpus = self._worker_spec.cpus, self._worker_spec.gpus
        actor = self._actor.options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=COMMAND_THREADS,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                reservation.group, placement_group_bundle_index=0
            ),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(max(1, int(cpus)))}},
        )
        index = next(self._indices)
        worker = WorkerHandle(index, actor.remote(self._worker_spec, index), reservation)
        self._workers[index] = worker
        reservation.worker = index
        return worker
