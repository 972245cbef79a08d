"""The part of an earlier process of a job that a new one takes over: run, vaults, workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rayzero.orchestrator.cluster.leftovers import LivingWorkers, find_inherited
from rayzero.orchestrator.control.calls import reply_limit_s
from rayzero.orchestrator.job.lease import AwaitedLease, next_epoch
from rayzero.orchestrator.job.past_runs import PastRuns, load_past_runs
from rayzero.orchestrator.plan import JobPlan
from rayzero.workers.lifetimes import Owned


@dataclass(frozen=True)
class Takeover:
    """
    Args:
        vaults: of the run that is continued.
        living: of that run; None: none has lived on.
        first_index: for the next workers: no earlier one has this or a greater one, as far as
            names tell.
        epoch: of this process's claim, which agents obey before the lease is held.
    """

    past: PastRuns
    vaults: tuple[Owned, ...]
    living: LivingWorkers | None
    first_index: int
    epoch: int


async def take_over(
    plan: JobPlan, begin_lease: Callable[[bool], AwaitedLease], warn: Callable[[str], None]
) -> Takeover:
    """Ends all that earlier processes of the job have left, but what is continued. Living workers
    of the same run, whose process Ray has restarted, are continued at once; all else only once the
    lease is held.

    Args:
        begin_lease: with whether the job trains already.

    Raises:
        RayzeroError: as `acquire_lease` and `load_past_runs`.
    """
    inherited = await find_inherited(plan.spec.name)
    limit_s = reply_limit_s(plan.worker_spec.patience_s)
    living = await inherited.find_living(plan.worker_spec.run, limit_s)
    lease = begin_lease(living is not None)
    if living is None:
        await asyncio.to_thread(lease.wait)
        await inherited.end_workers()  # first: they write into the folder
    past = await asyncio.to_thread(load_past_runs, plan, warn)
    if living is not None and past.lost is None:  # its journal was removed
        living = None
        await inherited.end_workers()
    if living is None:
        epoch = (await asyncio.to_thread(lease.wait)).epoch
    else:
        epoch = await asyncio.to_thread(next_epoch, plan.job_folder)
    continued = past.lost.run if past.lost is not None else ""
    vaults = await inherited.end_vaults(continued)
    return Takeover(past, vaults, living, inherited.first_index, epoch)
