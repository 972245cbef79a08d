"""Leftovers of earlier processes of a job in the cluster, found by their names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from rayzero.orchestrator.cluster.actor_pool import role_of_reservation
from rayzero.orchestrator.cluster.ray_api import wait_gone
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.policies.attachment import (
    Attachment,
    find_attachment,
    newest_member,
)
from rayzero.workers.lifetimes import VAULT, Owned, find_owned
from rayzero.workers.worker_status import WorkerStatus

_ASK_PAUSE_S = 0.2


@dataclass(frozen=True)
class Inherited:
    """The actors and placement groups that earlier processes of a job have left.

    Args:
        vaults: those of earlier runs, too.
        workers: the roles', too.
    """

    vaults: tuple[Owned, ...]
    workers: tuple[Owned, ...]
    groups: tuple[Owned, ...]

    @property
    def first_index(self) -> int:
        """The index of the next worker: no earlier one has its name."""
        return 1 + max((int(worker.what) for worker in self.workers), default=-1)

    async def end_vaults(self, but_run: str) -> tuple[Owned, ...]:
        """Ends the vaults but those of a run, which it returns; all if that is empty."""
        kept = tuple(vault for vault in self.vaults if vault.run == but_run)
        await _end(set(self.vaults) - {*kept})
        return kept

    async def end_workers(self, keep: Iterable[Owned] = ()) -> None:
        """Ends the workers and the groups but these. Waits until the workers have ended."""
        ended = [it for it in (*self.groups, *self.workers) if it not in {*keep}]
        actors = await asyncio.to_thread(_actors, [it for it in ended if not it.group])
        await _end(ended)
        await wait_gone(actor.describe for actor in actors)

    async def find_living(self, run: str, limit_s: float) -> LivingWorkers | None:
        """The workers of a run that train on, if there are some. The others, and those of other
        runs, are ended."""
        own = [worker for worker in self.workers if worker.run == run]
        actors = await asyncio.to_thread(_actors, own)
        answers = await asyncio.gather(*(_ask(actor, limit_s) for actor in actors))
        living = {
            status.info.index: (status, actor)
            for status, actor in zip(answers, actors, strict=True)
            if status is not None
        }
        statuses = [status for status, _ in living.values()]
        newest = newest_member(statuses)
        if newest is None:
            return None
        members = await asyncio.wait_for(living[newest.info.index][1].members.remote(), limit_s)
        found = find_attachment(statuses, members)
        if found is None:
            return None
        groups = tuple(group for group in self.groups if group.run == run)
        kept = [worker for worker in own if int(worker.what) in living]
        await self.end_workers(keep=[*kept, *groups])
        return LivingWorkers(found, tuple(living.values()), groups)


@dataclass(frozen=True)
class LivingWorkers:
    """The workers of a lost process that the next one continues with.

    Args:
        workers: each with its actor.
        groups: their placement groups, and those that wait for a worker.
    """

    found: Attachment
    workers: tuple[tuple[WorkerStatus, Any], ...]
    groups: tuple[Owned, ...]

    def hand_over(self, group: WorkerGroup) -> None:
        """Has a group own its part of them."""
        role = group.role
        workers = [it for it in self.workers if it[0].role == role]
        groups = [it.group for it in self.groups if role_of_reservation(it.what) == role]
        group.adopt(workers, groups)


async def find_inherited(job: str) -> Inherited:
    """Finds what earlier processes of a job have left."""
    found = await asyncio.to_thread(find_owned, job)
    groups = tuple(it for it in found if it.group)
    actors = [it for it in found if not it.group]
    vaults = tuple(it for it in actors if it.what.startswith(VAULT))
    workers = tuple(it for it in actors if it.what.isdecimal())
    return Inherited(vaults, workers, groups)


async def _ask(actor: Any, limit_s: float) -> WorkerStatus | None:
    """None if its process has ended, is not ready, or does not answer in time."""
    with suppress(RayError, TimeoutError):
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    status: WorkerStatus | None = await actor.status.remote()
                    return status
                except ActorUnavailableError:  # Ray does not know yet whether it lives
                    await asyncio.sleep(_ASK_PAUSE_S)
    return None


async def _end(owned: Iterable[Owned]) -> None:
    for it in owned:
        await asyncio.to_thread(it.end)


def _actors(workers: Sequence[Owned]) -> list[Any]:
    actors = []
    for worker in workers:
        with suppress(ValueError):  # it has ended
            actors.append(worker.actor())
    return actors
