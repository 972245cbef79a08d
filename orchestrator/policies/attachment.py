"""The state of a job whose controller was lost, as its workers report it to the next one. Pure.

A generation is *whole* if all of its ranks live and have joined it, and none is leaving: then it
continues. Otherwise it is repaired as after any other fault, with the workers that continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rayzero.orchestrator.policies.placement import CallState, FunctionCall
from rayzero.workers.messages import (
    Assignment,
    Crashed,
    Joined,
    Left,
    RankAssignment,
    Stopped,
    WorkerInfo,
)
from rayzero.workers.worker_status import WorkerStatus


@dataclass(frozen=True)
class Attachment:
    """The newest generation of a lost controller, and what is left of it.

    Args:
        generation: the assignment of the generation, as one of its members has got it.
        members: all members by rank, including lost ones.
        present: the living members that have begun the generation.
        others: all other living workers for ranks.
        roles: the living workers of roles.
    """

    generation: Assignment
    members: tuple[WorkerInfo, ...]
    present: tuple[WorkerStatus, ...]
    others: tuple[WorkerStatus, ...]
    roles: tuple[WorkerStatus, ...] = ()

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All living workers for ranks."""
        return tuple(status.info for status in (*self.present, *self.others))

    @cached_property
    def lost(self) -> tuple[WorkerInfo, ...]:
        """The members that do not live any more, by rank."""
        living = {worker.index for worker in self.workers}
        return tuple(worker for worker in self.members if worker.index not in living)

    @property
    def is_whole(self) -> bool:
        return len(self.present) == len(self.members) and not any(
            status.is_leaving or status.has_sent(Stopped, Crashed) or not status.has_sent(Joined)
            for status in self.present
        )

    @property
    def step(self) -> int:
        """The number of steps that all ranks have reported in this generation; 0 if there are
        none."""
        return min(status.step for status in self.present)

    def assignments(self) -> dict[int, RankAssignment]:
        """Returns the members' assignments by worker, in the order of the ranks. For lost members,
        only the rank is known."""
        vaults = {status.info.index: _vault(status) for status in self.present}
        return {
            worker.index: RankAssignment(rank, 0, 0, vaults.get(worker.index, ""))
            for rank, worker in enumerate(self.members)
        }

    def vault_addresses(self) -> dict[str, str]:
        """Returns the vault's address on each node, as the members know it."""
        return {status.info.node_id: _vault(status) for status in self.present}

    def calls(self) -> dict[int, FunctionCall]:
        """Returns the calls of the living workers' training functions, by worker."""
        found = {}
        for status in (*self.present, *self.others):
            if status.begin is not None:
                call = FunctionCall(
                    status.begin.rank, status.begin.world_size, status.begin.generation
                )
                found[status.info.index] = call
        for status in self.others:
            if (left := _waits(status)) is not None and status.info.index in found:
                found[status.info.index] = found[status.info.index].come_to(
                    CallState.WAITING, keeps_rank=left.keeps_rank
                )
        return found

    @property
    def useless(self) -> list[int]:
        """Living workers whose functions were called, and cannot continue in a next generation."""
        return [
            status.info.index
            for status in self.others
            if status.assignment is not None and _waits(status) is None
        ]


def newest_member(statuses: Iterable[WorkerStatus]) -> WorkerStatus | None:
    """Returns a worker that has begun the newest generation; None if no function has been
    called."""
    begun = [status for status in statuses if status.begin is not None]
    return max(begun, key=lambda status: status.generation, default=None)


def find_attachment(
    statuses: Sequence[WorkerStatus], members: Sequence[WorkerInfo]
) -> Attachment | None:
    """Returns the newest generation and what is left of it; None if nothing is.

    Args:
        statuses: of all living workers.
        members: of `newest_member`'s generation, by rank.
    """
    newest = newest_member(statuses)
    if newest is None or newest.assignment is None or not members:
        return None
    present = [
        status
        for status in statuses
        if status.assignment is not None
        and status.begin is not None
        and status.generation == newest.generation
        and not status.assignment.is_ahead
    ]
    if not present:
        return None
    present.sort(key=lambda status: status.assignment.rank if status.assignment else 0)
    others = [status for status in statuses if status not in present and not status.role]
    roles = tuple(status for status in statuses if status.role)
    return Attachment(newest.assignment, tuple(members), tuple(present), tuple(others), roles)


def _vault(status: WorkerStatus) -> str:
    return "" if status.assignment is None else status.assignment.vault


def _waits(status: WorkerStatus) -> Left | None:
    """Returns the message with which a function began to wait for the next generation; None if it
    does not wait."""
    left = [message for message in status.messages if isinstance(message, Left) and message.stays]
    return left[-1] if left else None
