"""How many workers, and which rank each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from rayzero.orchestrator.errors import JobFailedError
from rayzero.workers.messages import WorkerInfo


@dataclass(frozen=True)
class Need:
    """What the job asks for: between `least` and `most` workers of so many CPUs and GPUs each."""

    least: int
    most: int
    cpus: float
    gpus: float
    timeout_s: float


@dataclass(frozen=True)
class Capacity:
    """CPUs and GPUs: a node's, or what is free in the whole cluster."""

    cpus: float
    gpus: float

    def room(self, need: Need) -> int:
        """How many workers fit in here."""
        rooms = [floor(self.cpus / need.cpus)] if need.cpus else []
        rooms += [floor(self.gpus / need.gpus)] if need.gpus else []
        return min(rooms)


class Place(NamedTuple):
    """A worker's place in a generation."""

    worker: int
    rank: int
    local_rank: int
    local_world_size: int


def could_hold(nodes: Sequence[Capacity], need: Need) -> int:
    """How many workers the nodes could hold if they were free: a worker never spans two nodes."""
    return sum(node.room(need) for node in nodes)


def too_small(
    nodes: Sequence[Capacity], free: Capacity, need: Need, waited_s: float
) -> JobFailedError:
    """The error for a cluster that has no room for the least number of workers."""
    each = f"{need.cpus:g} CPU" + (f" and {need.gpus:g} GPU" if need.gpus else "")
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    waited = f" after {waited_s:g} s" if waited_s else ""
    fits = min(could_hold(nodes, need), free.room(need))
    return JobFailedError(
        f"the cluster has room for {fits} of at least {need.least} workers with {each} "
        f"each{waited}: it has {cpus:g} CPU and {gpus:g} GPU on "
        f"{len(nodes)} node{'s' * (len(nodes) != 1)}, "
        f"of which {free.cpus:g} CPU and {free.gpus:g} GPU are free",
        allowed=f"free resources for {need.least} workers within {need.timeout_s:g} s "
        "(workers.start_timeout_s)",
        fix="workers.min, workers.cpus or workers.gpus in the job file, or the size of the cluster",
    )


def first(workers: Sequence[WorkerInfo]) -> WorkerInfo:
    """Who gets rank 0."""
    return min(workers, key=lambda one: one.index)


def ranks(workers: Sequence[WorkerInfo]) -> tuple[Place, ...]:
    """Ranks in the workers' order, but node by node, so that neighbours in rank share a node."""
    nodes: dict[str, list[WorkerInfo]] = {}
    for worker in sorted(workers, key=lambda one: one.index):
        nodes.setdefault(worker.node_id, []).append(worker)
    seated = ((one, local, len(mine)) for mine in nodes.values() for local, one in enumerate(mine))
    return tuple(
        Place(one.index, rank, local, size) for rank, (one, local, size) in enumerate(seated)
    )
