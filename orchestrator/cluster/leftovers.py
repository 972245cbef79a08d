"""Leftovers of earlier processes of a job in the cluster, found by their names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from rayzero.orchestrator.cluster.ray_api import wait_gone
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.policies.attachment import (
    Attachment,
    find_attachment,
    newest_member,
)
from rayzero.workers.lifetimes import VAULT, Owned, find_owned, index_of, role_of
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.worker_status import WorkerStatus

_ASK_PAUSE_S = 0.2


@dataclass(frozen=True)
class Inherited:
    """The actors and placement groups that earlier processes of a job have left.

    Args:
        vaults: vaults of all runs.
        workers: workers of all runs, including workers of roles.
        groups: the workers' placement groups.
    """

    vaults: tuple[Owned, ...]
    workers: tuple[Owned, ...]
    groups: tuple[Owned, ...]

    @property
    def first_index(self) -> int:
        """The index of the next worker. No earlier worker has this or a greater one in its name."""
        return 1 + max(_by_index(self.workers), default=-1)

    async def end_vaults(self, but_run: str) -> tuple[Owned, ...]:
        """Ends all vaults except those of the run `but_run`, which it returns. If `but_run` is
        empty, ends all."""
        kept = tuple(vault for vault in self.vaults if vault.run == but_run)
        await _end(set(self.vaults) - {*kept})
        return kept

    async def end_workers(self) -> None:
        """Ends the workers and placement groups. Waits until the workers have ended."""
        actors = await asyncio.to_thread(_actors, _by_index(self.workers))
        await _end((*self.groups, *self.workers))
        await wait_gone(actor.describe for actor in actors.values())

    async def find_living(
        self, run: str, limit_s: float, first_limit_s: float
    ) -> LivingWorkers | None:
        """Returns the workers of a run that are alive, if the run can continue with them. Then all
        other workers are ended.

        Args:
            limit_s: how long the other workers may take to answer, once one has answered.
            first_limit_s: how long the first answer may take.
        """
        own = _by_index(worker for worker in self.workers if worker.run == run)
        actors = await asyncio.to_thread(_actors, own)
        roles = {index for index, worker in own.items() if role_of(worker.what)}
        statuses, members = await _ask_all(actors, roles, limit_s, first_limit_s)
        found = find_attachment(statuses, members)
        if found is None:
            return None
        workers = tuple((status, actors[status.info.index]) for status in statuses)
        groups = tuple(group for group in self.groups if group.run == run)
        living = {status.info.index for status in statuses}
        kept = {*groups, *(worker for index, worker in own.items() if index in living)}
        await _end(owned for owned in (*self.groups, *self.workers) if owned not in kept)
        return LivingWorkers(found, workers, groups)


@dataclass(frozen=True)
class LivingWorkers:
    """The workers of a lost process with which the next process continues.

    Args:
        workers: status and actor of each worker.
        groups: the placement groups of these workers, and those that wait for a worker.
    """

    found: Attachment
    workers: tuple[tuple[WorkerStatus, Any], ...]
    groups: tuple[Owned, ...]

    def hand_over(self, group: WorkerGroup) -> None:
        """Makes a group take over the workers of its role."""
        role = group.role
        workers = [(status, actor) for status, actor in self.workers if status.role == role]
        groups = [owned.group for owned in self.groups if role_of(owned.what) == role]
        group.adopt(workers, groups)

    async def ask_again(self, limit_s: float) -> LivingWorkers:
        """Returns the same workers with their status now. Called once agents obey this process: an
        earlier process that Ray could not reach may have sent commands since `find_living`. A
        worker that does not answer keeps its earlier status."""
        actors = {status.info.index: actor for status, actor in self.workers}
        roles = {status.info.index for status, _ in self.workers if status.role}
        answers, members = await _ask_all(actors, roles, limit_s, limit_s)
        newest = {status.info.index: status for status, _ in self.workers}
        newest |= {status.info.index: status for status in answers}
        return replace(self, found=find_attachment([*newest.values()], members) or self.found)


async def find_inherited(job: str) -> Inherited:
    """Finds what earlier processes of a job have left."""
    found = await asyncio.to_thread(find_owned, job)
    groups = tuple(owned for owned in found if owned.group)
    actors = [owned for owned in found if not owned.group]
    vaults = tuple(owned for owned in actors if owned.what.startswith(VAULT))
    workers = tuple(owned for owned in actors if index_of(owned.what) is not None)
    return Inherited(vaults, workers, groups)


async def _ask_all(
    actors: Mapping[int, Any], roles: Collection[int], limit_s: float, first_limit_s: float
) -> tuple[list[WorkerStatus], tuple[WorkerInfo, ...]]:
    """Returns the status of the workers that are alive, and the members of their newest generation
    by rank. There are no members if no training function has been called.

    Limits as of `find_living`. Other workers, such as spares, may still be starting. Once all
    members and all workers of roles have answered or ended, the wait for the others is limited to
    the time that has passed so far.

    Args:
        roles: indices of the workers of roles.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    until_s = began_s + first_limit_s
    pending = {index: loop.create_task(_ask(actor.status)) for index, actor in actors.items()}
    statuses: dict[int, WorkerStatus] = {}
    generation = 0
    members: tuple[WorkerInfo, ...] = ()
    while pending:
        left_s = max(0.0, until_s - loop.time())
        done, _ = await asyncio.wait(
            pending.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
        for index in [index for index, task in pending.items() if task in done]:
            if (status := pending.pop(index).result()) is not None:
                statuses[index] = status
                until_s = min(until_s, loop.time() + limit_s)
        while (newest := newest_member(statuses.values())) and newest.generation > generation:
            index = newest.info.index
            if (answer := await _within(limit_s, _ask(actors[index].members))) is None:
                del statuses[index]  # the worker has ended meanwhile
            else:
                generation = newest.generation
                members = answer
        if members and not pending.keys() & {*roles, *(member.index for member in members)}:
            until_s = min(until_s, 2 * loop.time() - began_s)
    for task in pending.values():
        task.cancel()
    return [*statuses.values()], members


async def _within(limit_s: float, answer: Awaitable[Any]) -> Any:
    with suppress(TimeoutError):
        return await asyncio.wait_for(answer, limit_s)
    return None


async def _ask(method: Any) -> Any:
    """Calls a method of an actor. Returns None if the actor's process has ended or not started."""
    with suppress(RayError):
        while True:
            try:
                return await method.remote()
            except ActorUnavailableError:  # Ray does not know yet whether it is alive
                await asyncio.sleep(_ASK_PAUSE_S)
    return None


async def _end(owned: Iterable[Owned]) -> None:
    for actor_or_group in owned:
        await asyncio.to_thread(actor_or_group.end)


def _by_index(workers: Iterable[Owned]) -> dict[int, Owned]:
    named = ((index_of(worker.what), worker) for worker in workers)
    return {index: worker for index, worker in named if index is not None}


def _actors(workers: Mapping[int, Owned]) -> dict[int, Any]:
    """Returns the actors of workers that have not ended, by index."""
    actors = {}
    for index, worker in workers.items():
        with suppress(ValueError):  # the worker has ended
            actors[index] = worker.actor()
    return actors
