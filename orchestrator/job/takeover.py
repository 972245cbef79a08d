"""The part of an earlier process of a job that a new one takes over: run, vaults, workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rayzero.orchestrator.cluster.leftovers import LivingWorkers, find_inherited
from rayzero.orchestrator.control.calls import reply_limit_s
from rayzero.orchestrator.job.lease import AwaitedLease, next_epoch, outlast_store
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
    plan: JobPlan,
    begin_lease: Callable[[bool], AwaitedLease],
    warn: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> Takeover:
    """Ends all that earlier processes of the job have left, but what is continued. Living workers
    of the same run, whose process Ray has restarted, are continued at once, or once the store
    answers; all else only once the lease is held.

    Args:
        begin_lease: with whether the job trains already.

    Raises:
        RayzeroError: as `acquire_lease`, `outlast_store` and `load_past_runs`.
    """
    inherited = await find_inherited(plan.spec.name)
    patience_s = plan.worker_spec.patience_s
    limit_s = reply_limit_s(patience_s)
    first_limit_s = max(limit_s, patience_s)
    living = await inherited.find_living(plan.worker_spec.run, limit_s, first_limit_s)
    lease = begin_lease(living is not None)
    load = partial(load_past_runs, plan, warn)
    if living is not None:
        past = await asyncio.to_thread(outlast_store, load, warn, is_stopped)
        find_epoch = partial(next_epoch, plan.job_folder)
        epoch = await asyncio.to_thread(outlast_store, find_epoch, warn, is_stopped)
        if past.lost is None:  # its journal was removed
            living = None
            await inherited.end_workers()
    if living is None:
        epoch = (await asyncio.to_thread(lease.wait)).epoch
        await inherited.end_workers()  # first: they write into the folder
        past = await asyncio.to_thread(load)
    continued = past.lost.run if past.lost is not None else ""
    vaults = await inherited.end_vaults(continued)
    return Takeover(past, vaults, living, inherited.first_index, epoch)
