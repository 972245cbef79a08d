"""Placement policy: resources of a job, ranks of workers, preferred nodes, avoidance of bad nodes.

Neighbouring ranks share a node, and a job uses as few nodes as possible. A replacement on a node
that keeps failing starts with a growing delay; then the node is avoided.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, count, cycle, islice
from math import floor
from typing import NamedTuple

from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.policies.failure import LOSS_CAUSES, Fault, incidents
from rayzero.orchestrator.top.format import count_of
from rayzero.workers.messages import RankAssignment, WorkerInfo

_LEAST_SHARE = 0.01  # of a CPU or GPU; less is what Ray's view of free resources lags
_MAX_HOLDERS = 3  # that are named


@dataclass(frozen=True)
class ResourceRequest:
    """The job's request: `min_workers` to `max_workers` workers with `cpus` and `gpus` each.

    Args:
        threads: compute threads of each worker; 0: the node's CPUs divided by the node's GPUs.
        env: environment variables of each worker, besides those of its node.
    """

    min_workers: int
    max_workers: int
    cpus: float
    gpus: float
    timeout_s: float
    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Capacity:
    """CPUs and GPUs of a node, or free in the whole cluster."""

    cpus: float
    gpus: float

    @property
    def cpus_per_gpu(self) -> int:
        """A node's CPUs for each of its GPUs, at least one."""
        return max(1, floor(self.cpus / max(1.0, self.gpus)))

    @property
    def text(self) -> str:
        """`2 CPUs and 1 GPU`, without a resource of which there is none."""
        amounts = (("CPU", self.cpus), ("GPU", self.gpus))
        parts = [f"{number:g} {kind}{'s' * (number != 1)}" for kind, number in amounts if number]
        return " and ".join(parts)

    def fits(self, need: ResourceRequest) -> int:
        counts = [floor(self.cpus / need.cpus)] if need.cpus else []
        counts += [floor(self.gpus / need.gpus)] if need.gpus else []
        return min(counts)


def total_fit(nodes: Sequence[Capacity], need: ResourceRequest) -> int:
    return sum(node.fits(need) for node in nodes)


def cluster_too_small_error(
    nodes: Sequence[Capacity],
    free: Capacity,
    need: ResourceRequest,
    waited_s: float,
    missing: str = "",
) -> JobFailedError:
    """Returns the error for a cluster that is too small for `min_workers`; `missing` is what
    `missing_resources` returns, if that was waited for."""
    each = f"{need.cpus:g} CPU" + (f" and {need.gpus:g} GPU" if need.gpus else "")
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    waited = f" after {waited_s:g} s" if waited_s else ""
    fits = min(total_fit(nodes, need), free.fits(need))
    return JobFailedError(
        f"the cluster has room for {fits} of at least {need.min_workers} workers with {each} "
        f"each{waited}: it has {cpus:g} CPU and {gpus:g} GPU on "
        f"{count_of(len(nodes), 'node')}, of which {free.cpus:g} CPU and {free.gpus:g} GPU are free"
        + (f"; it waited for {missing}" if missing else ""),
        allowed=f"free resources for {need.min_workers} workers within {need.timeout_s:g} s "
        "(workers.start_timeout_s)",
        fix="workers.min, workers.cpus or workers.gpus in the job file, or the size of the cluster",
    )


def missing_resources(
    nodes: Sequence[Capacity],
    free: Capacity,
    need: ResourceRequest,
    workers: int,
    jobs: Mapping[str, Capacity],
) -> str:
    """Returns the resources that a job waits for, and their holders: `2 CPUs: held by job a (2
    CPUs)`.

    Args:
        workers: number of workers that have their resources.
        jobs: what each other job of the cluster holds.
    """
    missing = need.min_workers - workers
    cpus, gpus = missing * need.cpus, missing * need.gpus
    scarce_cpus, scarce_gpus = free.cpus < cpus, free.gpus < gpus
    if not scarce_cpus and not scarce_gpus:
        each = Capacity(need.cpus, need.gpus).text
        return f"{each} on one node for each worker; free on several nodes: {free.text}"

    def scarce(capacity: Capacity) -> Capacity:
        return Capacity(
            capacity.cpus if scarce_cpus else 0.0, capacity.gpus if scarce_gpus else 0.0
        )

    total = Capacity(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))
    named = jobs.values()
    other_cpus = total.cpus - free.cpus - workers * need.cpus - sum(job.cpus for job in named)
    other_gpus = total.gpus - free.gpus - workers * need.gpus - sum(job.gpus for job in named)
    others = Capacity(*(n if n > _LEAST_SHARE else 0.0 for n in (other_cpus, other_gpus)))
    held = {f"job {name}": scarce(capacity) for name, capacity in jobs.items()}
    held["other work in the cluster"] = scarce(others)
    holders = sorted(
        (name for name, capacity in held.items() if capacity.text),
        key=lambda name: (-held[name].gpus, -held[name].cpus, name),
    )
    listed = [f"{name} ({held[name].text})" for name in holders[:_MAX_HOLDERS]]
    if more := len(holders) - len(listed):
        listed.append(f"{more} more")
    reasons = [f"held by {', '.join(listed)}"] if listed else []
    if total_fit(nodes, need) < need.min_workers:
        reasons.append(f"the cluster has {scarce(total).text or 'none'} in all, until a node joins")
    text = scarce(Capacity(cpus, gpus)).text
    return f"{text}: {'; '.join(reasons)}" if reasons else text


class CallState(StrEnum):
    """The state of the call of a training function."""

    RUNNING = "running"
    """The function runs in a generation, or has ended."""
    PREPARING = "preparing"
    """Called before its generation, and on its way to where it needs the training state."""
    PREPARED = "prepared"
    """Waits for its generation where it needs the training state."""
    WAITING = "waiting"
    """Waits in its loop for the next generation."""


_AHEAD = (CallState.PREPARING, CallState.PREPARED)

HAS_LEFT_ITS_LOOP = "it was outside its training loop, in which alone it can wait for a new group"
"""Why a function does not continue that is `CallState.RUNNING` after its generation."""
IS_MISPLACED = "it continues only with the same rank and number of ranks"
"""Why the function of a `misplaced` worker does not continue."""


class FunctionCall(NamedTuple):
    """The call of the training function in a worker's process. There is one in each process.

    Args:
        rank, world_size, generation: with which the function was called, or is to begin.
        keeps_rank: whether a function that waits in its loop continues only with the same rank and
            number of ranks.
    """

    rank: int
    world_size: int
    generation: int = 0
    state: CallState = CallState.RUNNING
    keeps_rank: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether its generation has not begun."""
        return self.state in _AHEAD

    @property
    def is_waiting(self) -> bool:
        return self.state is CallState.WAITING

    @property
    def is_bound(self) -> bool:
        """Whether the function continues only with its rank and number of ranks."""
        return self.is_ahead or (self.is_waiting and self.keeps_rank)

    def fits(self, rank: int, world_size: int) -> bool:
        """Returns whether the function can continue with this rank and number of ranks."""
        return not self.is_bound or (self.rank, self.world_size) == (rank, world_size)

    def come_to(self, state: CallState, *, keeps_rank: bool = False) -> FunctionCall:
        """Returns the same call in another state."""
        return FunctionCall(self.rank, self.world_size, self.generation, state, keeps_rank)


def assign_ranks(
    workers: Sequence[WorkerInfo],
    vaults: Mapping[str, str],
    calls: Mapping[int, FunctionCall] | None = None,
    nodes: Sequence[str] = (),
    replicas: int = 0,
) -> dict[int, RankAssignment]:
    """Returns the assignments by worker, in the order of the ranks.

    A worker keeps the rank with which its training function was entered, if there is such a rank:
    the function may have stored it, and the worker's part of the state stays where it is. Each
    other rank goes to a worker on the node that had it, if there is one; the rest node by node, so
    that neighbours in rank share a node.

    Args:
        workers: by index.
        vaults: addresses by node.
        calls: by worker; each rank once.
        nodes: by rank, the nodes of the previous generation.
        replicas: number of replicas of each rank's state: on the next nodes of a ring in rank
            order, or on all other nodes if there are fewer.
    """
    entered = {worker: call.rank for worker, call in (calls or {}).items()}
    world_size = len(workers)
    placed = {
        entered[worker.index]: worker
        for worker in workers
        if entered.get(worker.index, world_size) < world_size
    }
    others: dict[str, deque[WorkerInfo]] = {}
    for worker in workers:
        if placed.get(entered.get(worker.index, world_size)) is not worker:
            others.setdefault(worker.node_id, deque()).append(worker)
    for rank, node in enumerate(nodes[:world_size]):
        if rank not in placed and others.get(node):
            placed[rank] = others[node].popleft()
    rest = chain.from_iterable(others.values())
    by_rank = [placed[rank] if rank in placed else next(rest) for rank in range(world_size)]
    local_sizes = Counter(worker.node_id for worker in workers)
    local_ranks = {node: count() for node in local_sizes}
    ring = list(dict.fromkeys(worker.node_id for worker in by_rank))
    copies = min(replicas, len(ring) - 1)
    targets = {
        node: tuple(islice(cycle(ring), position, position + copies))
        for position, node in enumerate(ring, start=1)
    }
    return {
        worker.index: RankAssignment(
            rank,
            next(local_ranks[worker.node_id]),
            local_sizes[worker.node_id],
            vaults.get(worker.node_id, ""),
            replica_nodes=targets[worker.node_id],
        )
        for rank, worker in enumerate(by_rank)
    }


def misplaced(
    assignments: Mapping[int, RankAssignment],
    calls: Mapping[int, FunctionCall],
) -> list[int]:
    """Returns the workers whose functions cannot continue with their new ranks: functions that
    continue only with the rank and the number of ranks of their call, and have other ones now."""
    return [
        worker
        for worker, assignment in assignments.items()
        if worker in calls and not calls[worker].fits(assignment.rank, len(assignments))
    ]


def preferred_nodes(
    count: int, need: ResourceRequest, free: Mapping[str, Capacity], in_use: Collection[str]
) -> list[str | None]:
    """Returns the preferred node of each of `count` new reservations; None where no node has room.

    These are only preferences: by the time a reservation is made its node may be full, and another
    is used.

    Args:
        free: free resources by node id.
        in_use: nodes that have reservations of the job already; these come first.
    """
    fits = {node: capacity.fits(need) for node, capacity in free.items()}
    order = sorted(fits, key=lambda node: (node not in in_use, -fits[node], node))
    preferred = [node for node in order for _ in range(fits[node])][:count]
    return [*preferred, *[None] * (count - len(preferred))]


def spare_cores(workers: Iterable[WorkerInfo], cpus: float) -> tuple[str, int]:
    """Returns the node with the fewest cores for each of its workers, and that number; `("", 0)` if
    the number is not more than `cpus`."""
    nodes = Counter((worker.node, worker.cores) for worker in workers)
    share, node = min((cores // count, node) for (node, cores), count in nodes.items())
    return (node, share) if share > cpus else ("", 0)


MAX_BACKOFF_S = 60.0

QUARANTINE_FAULTS = 3
"""Number of hardware faults within the window after which a node is avoided."""


def restart_backoff_s(
    faults: Sequence[Fault], node_id: str, window_s: float, now_s: float
) -> float:
    """Returns the start delay of a replacement on that node: 0 for its first fault, then 1, 2, 4
    ... 60."""
    count = count_hardware_faults(faults, node_id, window_s, now_s)
    return 0.0 if count <= 1 else min(MAX_BACKOFF_S, 2.0 ** (count - 2))


def quarantined_nodes(
    faults: Sequence[Fault],
    nodes: Iterable[str],
    window_s: float,
    now_s: float,
    unhealthy: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Returns the nodes to avoid: those that keep failing, and `unhealthy` ones; none if that would
    leave no node of the job."""
    all_nodes = frozenset(nodes)
    recent = incidents(faults, LOSS_CAUSES, now_s - window_s)
    counts = Counter(fault.worker.node_id for fault in recent)
    failing = (node for node, count in counts.items() if count >= QUARANTINE_FAULTS)
    bad = all_nodes.intersection(failing) | unhealthy
    return bad if all_nodes - bad else frozenset()


def count_hardware_faults(
    faults: Sequence[Fault], node_id: str, window_s: float, now_s: float
) -> int:
    """Returns the number of hardware faults of a node, without failed collectives, which do not
    point to a node."""
    return sum(
        fault.worker.node_id == node_id
        for fault in incidents(faults, LOSS_CAUSES, now_s - window_s)
    )
