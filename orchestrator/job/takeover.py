"""Takes over what earlier processes of a job have left: its run, its vaults and its workers."""

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
    """The parts of an earlier run with which a job's new process continues.

    Args:
        past: the earlier runs in the job's folder.
        vaults: the vaults of the run that is continued.
        living: the workers of that run that are alive; None if there are none.
        first_index: index of the next worker. It is greater than the index of every earlier worker
            whose actor name is known.
        epoch: epoch of this process's claim. Agents obey it before the lease is held.
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
    """Takes over what is continued, and ends everything else that earlier processes have left.

    Workers of the same run that are alive, because Ray has restarted the job's process, continue
    before the lease is held: all that is needed is that the store answers. Everything else waits
    for the lease.

    Args:
        begin_lease: begins to acquire the lease; called with whether the job is training already.

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
        if past.lost is None:  # the run's journal was removed, so it cannot be continued
            living = None
            await inherited.end_workers()
    if living is None:
        epoch = (await asyncio.to_thread(lease.wait)).epoch
        await inherited.end_workers()  # before the load: workers write into the folder
        past = await asyncio.to_thread(load)
    continued = past.lost.run if past.lost is not None else ""
    vaults = await inherited.end_vaults(continued)
    return Takeover(past, vaults, living, inherited.first_index, epoch)
