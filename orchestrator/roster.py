"""Who works for a job: the actors in its seats, from the start of their processes to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayzero.orchestrator import nodes
from rayzero.orchestrator.clock import Clock
from rayzero.orchestrator.group import WorkerLostError
from rayzero.orchestrator.lost import gone
from rayzero.orchestrator.policies.placement import Need
from rayzero.orchestrator.seats import Seat, Seats
from rayzero.orchestrator.vault_group import RayVaultGroup
from rayzero.workers.actor import COMMAND_THREADS
from rayzero.workers.messages import Setup, WorkerInfo

_RETRY_MAX_S = 60.0
"""The longest pause before a worker is started again in a seat where none would start."""


@dataclass(eq=False)
class Worker:
    """A worker's process, until it is replaced or dismissed.

    Args:
        info: None until it answered.
        known: whether the controller has heard of it.
    """

    index: int
    actor: Any
    seat: Seat
    info: WorkerInfo | None = None
    known: bool = False


class Roster:
    """Owns the seats and the workers in them.

    Args:
        vaults: a node's vault is started when a seat there is taken, beside the worker.
        actor: the class of the workers.
    """

    def __init__(self, setup: Setup, clock: Clock, vaults: RayVaultGroup, actor: type[Any]) -> None:
        self.seats = Seats(setup.name)
        self._setup = setup
        self._clock = clock
        self._vaults = vaults
        self._actor = ray.remote(actor)
        self._workers: dict[int, Worker] = {}
        self._indices = count()

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker: Worker) -> bool:
        return self._workers.get(worker.index) is worker

    @property
    def workers(self) -> list[Worker]:
        """The oldest first."""
        return list(self._workers.values())

    def get(self, index: int) -> Worker:
        if index not in self._workers:
            raise WorkerLostError("it was dismissed or replaced")
        return self._workers[index]

    async def fill(self, need: Need) -> list[Worker]:
        """Starts a worker in every vacant seat that stands; one on a bad node is moved instead."""
        if not any(seat.due_s <= self._clock.now() for seat in self.seats.vacant):
            return []
        standing = await self.seats.standing()
        leaving = await asyncio.to_thread(nodes.draining)
        started = []
        for seat in self.seats.vacant:
            node = standing.get(seat)
            if node is None or seat.due_s > self._clock.now():
                continue
            if node in seat.avoid | leaving:
                self.seats.move(seat, need, leaving)
                continue
            self._vaults.begin(node)
            started.append(self._start(seat))
        return started

    async def introduced(self, worker: Worker) -> WorkerInfo:
        """Waits for a worker's first answer.

        Raises:
            RayError: its process did not start.
        """
        info: WorkerInfo = await worker.actor.describe.remote()
        worker.info = info
        worker.seat.failures = 0
        return info

    def vacate(self, worker: Worker, delay_s: float) -> None:
        """Ends a worker, if it still lives; its seat may be taken after that long, or goes if it
        is doomed."""
        # Ray takes a process that it cannot reach for a while for lost, too.
        ray.kill(self._workers.pop(worker.index).actor)
        worker.seat.worker = None
        worker.seat.due_s = self._clock.now() + delay_s
        if worker.seat.doomed:
            self.seats.give_back(worker.seat)

    def failed(self, worker: Worker) -> float:
        """Vacates the seat of a worker that did not start; the pause, longer every time."""
        delay_s = min(_RETRY_MAX_S, 2.0**worker.seat.failures)
        worker.seat.failures += 1
        self.vacate(worker, delay_s)
        return delay_s

    async def end(self, workers: Sequence[Worker]) -> None:
        """Kills workers, gives their seats back, and waits until their processes are gone."""
        for worker in workers:
            self._workers.pop(worker.index, None)
            ray.kill(worker.actor)
            self.seats.give_back(worker.seat)
        await gone(worker.actor.describe for worker in workers)

    def _start(self, seat: Seat) -> Worker:
        cpus, gpus = self._setup.cpus, self._setup.gpus
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
        worker = Worker(index, actor.remote(self._setup, index), seat)
        self._workers[index] = worker
        seat.worker = index
        return worker
