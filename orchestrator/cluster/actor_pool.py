"""Placement groups and worker actors.

Who works for a job: the actors in its seats, from the start of their processes to the end.

Seats: what a job reserves in the cluster, one worker's CPUs and GPUs each.
"""

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
from rayzero.orchestrator.cluster import ray_api as nodes
from rayzero.orchestrator.cluster.ray_api import wait_gone
from rayzero.orchestrator.cluster.vault_group import RayVaultGroup
from rayzero.orchestrator.interfaces import WorkerLostError
from rayzero.orchestrator.policies.placement import ResourceRequest, preferred_nodes
from rayzero.workers.actor import COMMAND_THREADS
from rayzero.workers.messages import WorkerInfo, WorkerSpec

_NODE_LABEL = "ray.io/node-id"  # Ray puts it on every node


@dataclass(eq=False)
class Reservation:
    """A placement group of one bundle. Ray keeps looking for a place for it: at first until there
    is room, and again when its node is lost.

    Args:
        avoid: nodes it must not be on.
        worker: the index of the worker in it; None while it is vacant.
        due_s: by the group's clock, when a vacant seat may be taken.
        failures: workers that did not start in it since the last one that did.
        doomed: its node is leaving, and another seat was asked for in its place.
    """

    group: PlacementGroup
    avoid_nodes: frozenset[str] = frozenset()
    worker: int | None = None
    available_at_s: float = 0.0
    start_failures: int = 0
    draining: bool = False


class Reservations:
    """The seats of one job. Each has a placement group of its own, so that seats come, go and wait
    for nodes one by one; what waits is the demand that Ray's autoscaler sees."""

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._reservations: list[Reservation] = []

    def __len__(self) -> int:
        """How many there will be: those that are doomed do not count."""
        return sum(not seat.draining for seat in self._reservations)

    def __iter__(self) -> Iterator[Reservation]:
        """The oldest first."""
        return iter(tuple(self._reservations))

    @property
    def unoccupied(self) -> list[Reservation]:
        return [seat for seat in self._reservations if seat.worker is None]

    async def request(self, count: int, need: ResourceRequest) -> None:
        """Asks for more seats, next to those that are there where that can be."""
        seen = await asyncio.to_thread(nodes.node_snapshot)
        in_use = set((await self.ready()).values())
        for target in preferred_nodes(count, need, seen.free, in_use):
            self._reservations.append(
                Reservation(_create_placement_group(self._job, need, target, frozenset()))
            )

    def relocate(self, seat: Reservation, need: ResourceRequest, avoid: Collection[str]) -> None:
        """Asks for the seat anew, on none of these nodes nor those it is to avoid anyway."""
        remove_placement_group(seat.group)
        seat.group = _create_placement_group(
            self._job, need, None, seat.avoid_nodes | frozenset(avoid)
        )

    async def ready(self) -> dict[Reservation, str]:
        """The seats that are there, each with its node's id."""
        if not self._reservations:
            return {}
        table = await asyncio.to_thread(placement_group_table)
        living = await asyncio.to_thread(nodes.alive_node_ids)
        found = {}
        for seat in self._reservations:
            entry = table.get(seat.group.id.hex())
            if entry is None or entry["state"] != "CREATED":
                continue
            node = entry["bundles_to_node_id"][0]
            if node in living:  # else Ray moves the seat in a moment
                found[seat] = node
        return found

    def remove(self, seat: Reservation) -> None:
        if seat in self._reservations:
            self._reservations.remove(seat)
            remove_placement_group(seat.group)

    def remove_all(self) -> None:
        for seat in self:
            self.remove(seat)


def remove_stale_reservations(job: str) -> int:
    """Gives back what an earlier process of that job reserved and left; how many seats. Ray removes
    them with the actor that made them, but not where that actor is started anew."""
    left = [
        id_
        for id_, one in placement_group_table().items()
        if one["name"].startswith(_name_prefix(job)) and one["state"] != "REMOVED"
    ]
    for id_ in left:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(id_))))
    return len(left)


def _name_prefix(job: str) -> str:
    return f"rayzero/{job}/"


def _create_placement_group(
    job: str, need: ResourceRequest, target: str | None, avoid: frozenset[str]
) -> PlacementGroup:
    """Ray takes a wish for a node with this strategy only; with one bundle all are the same."""
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


_MAX_START_BACKOFF_S = 60.0
"""The longest pause before a worker is started again in a seat where none would start."""


@dataclass(eq=False)
class WorkerHandle:
    """A worker's process, until it is replaced or dismissed.

    Args:
        info: None until it answered.
        known: whether the controller has heard of it.
    """

    index: int
    actor: Any
    reservation: Reservation
    info: WorkerInfo | None = None
    announced: bool = False


class ActorPool:
    """Owns the seats and the workers in them.

    Args:
        vaults: a node's vault is started when a seat there is taken, beside the worker.
        actor: the class of the workers.
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
        """The oldest first."""
        return list(self._workers.values())

    def get(self, index: int) -> WorkerHandle:
        if index not in self._workers:
            raise WorkerLostError("it was dismissed or replaced")
        return self._workers[index]

    async def start_in_ready(self, need: ResourceRequest) -> list[WorkerHandle]:
        """Starts a worker in every vacant seat that stands; one on a bad node is moved instead."""
        if not any(
            seat.available_at_s <= self._clock.now() for seat in self.reservations.unoccupied
        ):
            return []
        standing = await self.reservations.ready()
        leaving = await asyncio.to_thread(nodes.draining_node_ids)
        started = []
        for seat in self.reservations.unoccupied:
            node = standing.get(seat)
            if node is None or seat.available_at_s > self._clock.now():
                continue
            if node in seat.avoid_nodes | leaving:
                self.reservations.relocate(seat, need, leaving)
                continue
            self._vaults.start(node)
            started.append(self._start(seat))
        return started

    async def wait_started(self, worker: WorkerHandle) -> WorkerInfo:
        """Waits for a worker's first answer.

        Raises:
            RayError: its process did not start.
        """
        info: WorkerInfo = await worker.actor.describe.remote()
        worker.info = info
        worker.reservation.start_failures = 0
        return info

    def free(self, worker: WorkerHandle, delay_s: float) -> None:
        """Ends a worker, if it still lives; its seat may be taken after that long, or goes if it
        is doomed."""
        # Ray takes a process that it cannot reach for a while for lost, too.
        ray.kill(self._workers.pop(worker.index).actor)
        worker.reservation.worker = None
        worker.reservation.available_at_s = self._clock.now() + delay_s
        if worker.reservation.draining:
            self.reservations.remove(worker.reservation)

    def start_failed(self, worker: WorkerHandle) -> float:
        """Vacates the seat of a worker that did not start; the pause, longer every time."""
        delay_s = min(_MAX_START_BACKOFF_S, 2.0**worker.reservation.start_failures)
        worker.reservation.start_failures += 1
        self.free(worker, delay_s)
        return delay_s

    async def remove(self, workers: Sequence[WorkerHandle]) -> None:
        """Kills workers, gives their seats back, and waits until their processes are gone."""
        for worker in workers:
            self._workers.pop(worker.index, None)
            ray.kill(worker.actor)
            self.reservations.remove(worker.reservation)
        await wait_gone(worker.actor.describe for worker in workers)

    def _start(self, seat: Reservation) -> WorkerHandle:
        cpus, gpus = self._worker_spec.cpus, self._worker_spec.gpus
        actor = self._actor.options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=COMMAND_THREADS,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                seat.group, placement_group_bundle_index=0
            ),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(max(1, int(cpus)))}},
        )
        index = next(self._indices)
        worker = WorkerHandle(index, actor.remote(self._worker_spec, index), seat)
        self._workers[index] = worker
        seat.worker = index
        return worker
