"""Resources, ranks, node packing, node back-off.

How many workers, and which rank each of them gets.

Which node a worker's seat should be on: as few nodes as can be, so that neighbours share one.

Where a replacement starts, and when: nodes that keep failing wait longer, then are avoided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.policies.failure import HARDWARE_CAUSES, Fault, incidents
from rayzero.workers.messages import WorkerInfo


@dataclass(frozen=True)
class ResourceRequest:
    """What the job asks for: between `least` and `most` workers of so many CPUs and GPUs each."""

    min_workers: int
    max_workers: int
    cpus: float
    gpus: float
    timeout_s: float


@dataclass(frozen=True)
class Capacity:
    """CPUs and GPUs: a node's, or what is free in the whole cluster."""

    cpus: float
    gpus: float

    def fits(self, need: ResourceRequest) -> int:
        """How many workers fit in here."""
        rooms = [floor(self.cpus / need.cpus)] if need.cpus else []
        rooms += [floor(self.gpus / need.gpus)] if need.gpus else []
        return min(rooms)


class RankPlacement(NamedTuple):
    """A worker's place in a generation."""

    worker: int
    rank: int
    local_rank: int
    local_world_size: int


def total_fit(nodes: Sequence[Capacity], need: ResourceRequest) -> int:
    """How many workers the nodes could hold if they were free: a worker never spans two nodes."""
    return sum(node.fits(need) for node in nodes)


def cluster_too_small_error(
    nodes: Sequence[Capacity], free: Capacity, need: ResourceRequest, waited_s: float
) -> JobFailedError:
    """The error for a cluster that has no room for the least number of workers."""
    each = f"{need.cpus:g} CPU" + (f" and {need.gpus:g} GPU" if need.gpus else "")
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    waited = f" after {waited_s:g} s" if waited_s else ""
    fits = min(total_fit(nodes, need), free.fits(need))
    return JobFailedError(
        f"the cluster has room for {fits} of at least {need.min_workers} workers with {each} "
        f"each{waited}: it has {cpus:g} CPU and {gpus:g} GPU on "
        f"{len(nodes)} node{'s' * (len(nodes) != 1)}, "
        f"of which {free.cpus:g} CPU and {free.gpus:g} GPU are free",
        allowed=f"free resources for {need.min_workers} workers within {need.timeout_s:g} s "
        "(workers.start_timeout_s)",
        fix="workers.min, workers.cpus or workers.gpus in the job file, or the size of the cluster",
    )


def rank_zero(workers: Sequence[WorkerInfo]) -> WorkerInfo:
    """Who gets rank 0."""
    return min(workers, key=lambda one: one.index)


def assign_ranks(workers: Sequence[WorkerInfo]) -> tuple[RankPlacement, ...]:
    """Ranks in the workers' order, but node by node, so that neighbours in rank share a node."""
    nodes: dict[str, list[WorkerInfo]] = {}
    for worker in sorted(workers, key=lambda one: one.index):
        nodes.setdefault(worker.node_id, []).append(worker)
    seated = ((one, local, len(mine)) for mine in nodes.values() for local, one in enumerate(mine))
    return tuple(
        RankPlacement(one.index, rank, local, size)
        for rank, (one, local, size) in enumerate(seated)
    )


def preferred_nodes(
    count: int, need: ResourceRequest, free: Mapping[str, Capacity], in_use: Collection[str]
) -> list[str | None]:
    """A node to wish for, for each of `count` new seats; None where none has room.

    Wishes only: by the time a seat is made, its node may be full, and it goes elsewhere.

    Args:
        free: what each node has left, by its id.
        in_use: nodes that hold seats of the job already; these come first.
    """
    rooms = {node: capacity.fits(need) for node, capacity in free.items()}
    order = sorted(rooms, key=lambda node: (node not in in_use, -rooms[node], node))
    wishes = [node for node in order for _ in range(rooms[node])][:count]
    return [*wishes, *[None] * (count - len(wishes))]


MAX_BACKOFF_S = 60.0


QUARANTINE_FAULTS = 3
"""So many hardware faults of one node within the window, and it is avoided."""


def restart_backoff_s(
    faults: Sequence[Fault], node_id: str, window_s: float, now_s: float
) -> float:
    """How long a replacement on that node waits: 0 for its first fault, then 1, 2, 4 ... 60."""
    count = _count_hardware_faults(faults, node_id, window_s, now_s)
    return 0.0 if count <= 1 else min(MAX_BACKOFF_S, 2.0 ** (count - 2))


def quarantined_nodes(
    faults: Sequence[Fault], nodes: Iterable[str], window_s: float, now_s: float
) -> frozenset[str]:
    """The nodes to avoid; none when that would leave no node of the job's to go to."""
    known = frozenset(nodes)
    bad = frozenset(
        one
        for one in known
        if _count_hardware_faults(faults, one, window_s, now_s) >= QUARANTINE_FAULTS
    )
    return bad if bad < known else frozenset()


def _count_hardware_faults(
    faults: Sequence[Fault], node_id: str, window_s: float, now_s: float
) -> int:
    """Hardware faults of a node. A collective that failed says nothing about who is at fault."""
    mine = [
        one
        for one in faults
        if one.worker.node_id == node_id
        and one.cause in HARDWARE_CAUSES
        and one.cause != "collective"
        and one.at_s > now_s - window_s
    ]
    return len(incidents(mine))
