"""Who takes part in the next generation."""

from __future__ import annotations

from collections.abc import Sequence
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
    member: bool
    leaving: bool


@dataclass(frozen=True)
class Wanted:
    """How many members, and how many more workers are kept ready."""

    least: int
    most: int
    spares: int = 0


@dataclass(frozen=True)
class Members:
    """The next generation.

    Args:
        chosen: its members, by index.
        moved: left out because their nodes are leaving: their work goes on elsewhere.
        surplus: nobody needs them any more.
    """

    chosen: tuple[WorkerInfo, ...]
    moved: tuple[WorkerInfo, ...] = ()
    surplus: tuple[WorkerInfo, ...] = ()

    @cached_property
    def indices(self) -> frozenset[int]:
        """The chosen ones'."""
        return frozenset(worker.index for worker in self.chosen)


@dataclass(frozen=True)
class Short:
    """There are too few to go on."""

    there: int


Choice: TypeAlias = Members | Short


def choose(candidates: Sequence[Candidate], wanted: Wanted) -> Choice:
    """Survivors first, then whoever is ready; those on leaving nodes only where nobody else is.

    It is stable: asked again with the chosen ones as members, it chooses the same.
    """
    order = sorted(candidates, key=lambda one: (one.leaving, not one.member, one.worker.index))
    staying = [one for one in order if not one.leaving]
    size = min(wanted.most, max(wanted.least, len(staying)))
    if len(order) < wanted.least:
        return Short(len(order))
    chosen, rest = order[:size], order[size:]
    moved = [one.worker for one in rest if one.leaving]
    ready = [one.worker for one in rest if not one.leaving]
    return Members(
        tuple(sorted((one.worker for one in chosen), key=lambda worker: worker.index)),
        tuple(moved),
        tuple(ready[wanted.spares :]),
    )


def too_few(short: Short, wanted: Wanted, waited_s: float) -> JobFailedError:
    """The error for a job that cannot go on, and got no workers in time."""
    return JobFailedError(
        f"{short.there} of at least {wanted.least} workers are left, and no replacement was ready "
        f"within {waited_s:g} s",
        allowed=f"{wanted.least} to {wanted.most} workers (workers.min, workers.max)",
        fix="workers.min or workers.start_timeout_s in the job file, or the size of the cluster",
    )
