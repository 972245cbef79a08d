"""Leftovers of earlier processes of a job in the cluster, found by their names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rayzero.orchestrator.cluster.ray_api import wait_gone
from rayzero.workers.lifetimes import VAULT, Owned, end_owned, find_owned


@dataclass(frozen=True)
class Inherited:
    """The leftovers that a new process of a job may use.

    Args:
        vaults: those of earlier runs, too.
        first_index: for its workers, whose names no earlier one has.
    """

    vaults: tuple[Owned, ...]
    first_index: int

    async def end_vaults(self, but_run: str) -> tuple[Owned, ...]:
        """Ends the vaults but those of a run, which it returns; all if that is empty."""
        kept = tuple(vault for vault in self.vaults if vault.run == but_run)
        for vault in set(self.vaults) - {*kept}:
            await asyncio.to_thread(vault.end)
        return kept


async def end_workers(job: str) -> Inherited:
    """Ends what earlier processes of a job have left, but the vaults. Waits until the workers have
    ended."""
    found = await asyncio.to_thread(find_owned, job)
    vaults = tuple(it for it in found if it.what.startswith(VAULT))
    workers = [it for it in found if not it.group and it.what.isdecimal()]
    actors = await asyncio.to_thread(_actors, workers)
    await asyncio.to_thread(end_owned, job, keep=vaults)
    await wait_gone(actor.describe for actor in actors)
    return Inherited(vaults, 1 + max((int(worker.what) for worker in workers), default=-1))


def _actors(workers: Iterable[Owned]) -> list[Any]:
    actors = []
    for worker in workers:
        with suppress(ValueError):  # it has ended
            actors.append(worker.actor())
    return actors
