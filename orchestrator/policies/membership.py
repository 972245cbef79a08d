"""Who is in the next generation; worker registry.

Who takes part in the next generation.

Which workers there are, and which of them may take part. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from rayzero.orchestrator.errors import JobFailedError
from rayzero.workers.messages import WorkerInfo


@dataclass(frozen=True)
class Candidate:
    """A worker whose process is alive.

    Args:
        member: whether it takes part now: its process and its memory are warm.
        leaving: whether its node is about to go.
    """

    worker: WorkerInfo
    is_member: bool
    on_draining_node: bool


@dataclass(frozen=True)
class WorkerLimits:
    """How many members, and how many more workers are kept ready."""

    min: int
    max: int
    spares: int = 0


@dataclass(frozen=True)
class Selected:
    """The next generation.

    Args:
        chosen: its members, by index.
        moved: left out because their nodes are leaving: their work goes on elsewhere.
        surplus: nobody needs them any more.
    """

    members: tuple[WorkerInfo, ...]
    displaced: tuple[WorkerInfo, ...] = ()
    surplus: tuple[WorkerInfo, ...] = ()

    @cached_property
    def indices(self) -> frozenset[int]:
        """The chosen ones'."""
        return frozenset(worker.index for worker in self.members)


@dataclass(frozen=True)
class NotEnough:
    """There are too few to go on."""

    available: int


MembershipSelection: TypeAlias = Selected | NotEnough


def select_members(candidates: Sequence[Candidate], wanted: WorkerLimits) -> MembershipSelection:
    """Survivors first, then whoever is ready; those on leaving nodes only where nobody else is.

    It is stable: asked again with the chosen ones as members, it chooses the same.
    """
    order = sorted(
        candidates, key=lambda one: (one.on_draining_node, not one.is_member, one.worker.index)
    )
    staying = [one for one in order if not one.on_draining_node]
    size = min(wanted.max, max(wanted.min, len(staying)))
    if len(order) < wanted.min:
        return NotEnough(len(order))
    chosen, rest = order[:size], order[size:]
    moved = [one.worker for one in rest if one.on_draining_node]
    ready = [one.worker for one in rest if not one.on_draining_node]
    return Selected(
        tuple(sorted((one.worker for one in chosen), key=lambda worker: worker.index)),
        tuple(moved),
        tuple(ready[wanted.spares :]),
    )


def not_enough_error(short: NotEnough, wanted: WorkerLimits, waited_s: float) -> JobFailedError:
    """The error for a job that cannot go on, and got no workers in time."""
    return JobFailedError(
        f"{short.available} of at least {wanted.min} workers are left, and no replacement was ready "
        f"within {waited_s:g} s",
        allowed=f"{wanted.min} to {wanted.max} workers (workers.min, workers.max)",
        fix="workers.min or workers.start_timeout_s in the job file, or the size of the cluster",
    )


class WorkerRegistry:
    """Every worker the job ever had, by index, and what became of it.

    A worker is ready from `add` on: its process answers, and its node has a vault. It stays so
    until it is lost, or is let go.
    """

    def __init__(self, wanted: WorkerLimits) -> None:
        self.limits = wanted
        self.draining_nodes: frozenset[str] = frozenset()
        """Ids of nodes that are about to go."""
        self.members: frozenset[int] = frozenset()
        """Of the newest generation."""
        self.awaiting_replacement: list[WorkerInfo] = []
        """Workers that are gone and whose seats wait for a replacement."""
        self._all: dict[int, WorkerInfo] = {}
        self._alive: dict[int, WorkerInfo] = {}
        self._ready: tuple[WorkerInfo, ...] | None = ()
        self._nodes: tuple[str, ...] | None = ()
        self._selection: tuple[tuple[object, ...], MembershipSelection] | None = None
        """The last one, and what it was made of."""
        self._version = 0

    def add(self, workers: Iterable[WorkerInfo]) -> None:
        new = {worker.index: worker for worker in workers}
        self._all |= new
        self._alive |= new
        self._invalidate()

    def info(self, worker: int) -> WorkerInfo:
        return self._all[worker]

    def owns_process(self, worker: int, pid: int) -> bool:
        """Whether that was this worker's process, and not one of an earlier job's."""
        return worker in self._all and self._all[worker].pid == pid

    def is_alive(self, worker: int) -> bool:
        return worker in self._alive

    @property
    def ready(self) -> tuple[WorkerInfo, ...]:
        """Everyone who is ready, members or not, by index."""
        if self._ready is None:
            self._ready = tuple(map(self._alive.__getitem__, sorted(self._alive)))
        return self._ready

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of those who are ready, each once, in order of their first worker."""
        if self._nodes is None:
            self._nodes = tuple(dict.fromkeys(worker.node_id for worker in self.ready))
        return self._nodes

    def mark_lost(self, worker: int) -> None:
        """Its process is gone; its seat waits for a replacement."""
        self.remove(worker)
        self.awaiting_replacement.append(self._all[worker])

    def remove(self, worker: int) -> None:
        """It is about to be ended, by wish."""
        self._alive.pop(worker, None)
        self._invalidate()

    def select_members(self) -> MembershipSelection:
        """Who takes part next, as things stand. It is asked for at every turn of things, and
        worked out again only when something changed."""
        made_of = (self._version, self.limits, self.draining_nodes, self.members)
        if self._selection is None or self._selection[0] != made_of:
            self._selection = (made_of, self._compute_selection())
        return self._selection[1]

    def _compute_selection(self) -> MembershipSelection:
        there, wanted = self.ready, self.limits
        if not self.draining_nodes and wanted.min <= len(there) <= wanted.max:
            return Selected(there)  # as mostly: all of them, whoever is a member now
        return select_members(
            [
                Candidate(one, one.index in self.members, one.node_id in self.draining_nodes)
                for one in there
            ],
            wanted,
        )

    def _invalidate(self) -> None:
        self._ready = self._nodes = None
        self._version += 1
