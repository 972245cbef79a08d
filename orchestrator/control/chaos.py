"""Acts out the faults that no worker can: a vault's, a node's, and damage to what is stored.

Those of workers, and of vaults that write, happen there; what is wished for while the job runs is
handed on to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rayzero.engine.checkpoint.store import is_remote
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.aio import with_timeout
from rayzero.orchestrator.control.context import COMMAND_TIMEOUT_S, JobContext
from rayzero.orchestrator.interfaces import VaultLostError, WorkerCalls
from rayzero.orchestrator.job_events import JobWarning
from rayzero.workers.chaos.inject import FaultRecord, FaultSchedule, StoreFaultInjector
from rayzero.workers.chaos.spec import FaultSpec, parse_fault
from rayzero.workers.vault.records import RankFile

VAULT_REPLY_TIMEOUT_S = 5.0
"""How long a vault may take to answer: somebody may be waiting for what comes of it."""


class ClusterFaultInjector:
    """Owns the record of the faults that happened, from `begin` on. Does nothing without faults."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._faults = [parse_fault(text) for text in context.plan.worker_spec.faults]
        self._record = FaultRecord(context.plan.output_dir)
        self._schedule = FaultSchedule(self._faults, self._record, context.emit)
        self._store = StoreFaultInjector(self._schedule)
        self._in_progress: set[FaultSpec] = set()
        self._skipped: set[FaultSpec] = set()

    def start(self, *, resumed: bool) -> None:
        """A run begins. What happened in an earlier one counts only if it is gone on with.

        Raises:
            ConfigError: the record cannot be written.
        """
        self._record.retain_only({str(fault) for fault in self._faults} if resumed else ())
        self._schedule.set_faults(self._faults)

    async def inject(self, texts: Sequence[str]) -> str:
        """Further faults, at the next chance if they name no step; what was scheduled, in words.

        Raises:
            ConfigError: one is no fault, or can never happen in this job. Then none is taken.
        """
        ctx = self._context
        here = ctx.progress.steps + 1
        faults = [parse_fault(text, here) for text in texts]
        for fault in faults:
            if why := await self._why_impossible(fault):
                raise ConfigError(f"fault {str(fault)!r} cannot happen: {why}")
        ctx.injected_faults += tuple(map(str, faults))
        self._schedule.set_faults([*self._faults, *map(parse_fault, ctx.injected_faults)])
        with suppress(TimeoutError):  # a vault that does not answer is taken for lost elsewhere
            await with_timeout(
                ctx.deps.clock,
                VAULT_REPLY_TIMEOUT_S,
                ctx.deps.vaults.inject_faults(ctx.injected_faults),
            )
        for worker in ctx.generation.active:  # the next generation's members are told with it
            ctx.tasks.spawn(
                ctx.call_worker(
                    worker, ctx.deps.workers.call(worker, WorkerCalls.inject, ctx.injected_faults)
                )
            )
        when = {fault: "" if fault.step <= here else " from that step on" for fault in faults}
        name = ctx.plan.spec.name
        return "\n".join(f"{name}: {one} at the next chance{when[one]}" for one in faults)

    def on_step_finished(self, step: int) -> None:
        """The next one is being worked on."""
        for fault in self._schedule.due(step + 1):
            if (
                fault.target in ("vault", "cluster")
                and fault not in self._in_progress | self._skipped
            ):
                self._in_progress.add(fault)
                self._context.tasks.spawn(self._inject_node_fault(fault, step + 1))

    def on_checkpoint_committed(self, step: int, folder: str, files: Sequence[RankFile]) -> None:
        """A checkpoint exists now."""
        torn = [fault for fault in self._schedule.due(step) if fault.kind == "tear_file"]
        if torn and is_remote(folder):
            for fault in torn:
                self._skip(fault, f"{folder} is not on a disk")
        elif torn:
            path = folder.removeprefix("file://")
            self._store.after_commit(step, {one.rank: Path(path, one.name) for one in files})

    async def _inject_node_fault(self, fault: FaultSpec, step: int) -> None:
        ctx = self._context
        try:
            nodes = self._nodes_by_rank()
            if fault.node >= len(nodes):
                return  # there may be one later
            if why := await self._why_not_injectable(fault):
                self._skip(fault, why)
                return
            node = nodes[fault.node]
            members = ctx.generation.workers
            rank = next(rank for rank, one in enumerate(members) if one.node_id == node)
            self._schedule.record_fired(fault, rank, step)
            await with_timeout(
                ctx.deps.clock,
                COMMAND_TIMEOUT_S,
                ctx.deps.vaults.inject_node_fault(node, str(fault)),
            )
        except (VaultLostError, TimeoutError):
            pass  # it is gone, or was gone before: then the next step's end is another chance
        finally:
            self._in_progress.discard(fault)

    def _skip(self, fault: FaultSpec, why: str) -> None:
        if fault not in self._skipped:
            self._skipped.add(fault)
            self._context.emit(JobWarning(f"fault {fault} was not acted out: {why}"))

    async def _why_impossible(self, fault: FaultSpec) -> str:
        """Why a fault cannot happen in this job as it stands; empty when it can."""
        ctx = self._context
        most, nodes = ctx.registry.limits.max, len(self._nodes_by_rank())
        if fault.target == "worker":
            return f"the job has at most {most} workers" if fault.rank >= most else ""
        if fault.target in ("vault", "cluster"):
            if fault.node >= nodes:
                return f"the job is on {nodes} node{'s' * (nodes != 1)} now, counted from 0"
            try:
                return await self._why_not_injectable(fault)
            except (VaultLostError, TimeoutError):
                return "that node's vault does not answer"
        if ctx.plan.worker_spec.mirror.checkpoint_every_steps is None:
            return "the job writes no checkpoints (checkpoint.every_steps)"
        if fault.kind == "tear_file" and is_remote(ctx.plan.job_folder):
            return f"{ctx.plan.job_folder} is not on a disk"
        return ""

    async def _why_not_injectable(self, fault: FaultSpec) -> str:
        ctx = self._context
        command = ctx.deps.vaults.why_not_injectable(self._nodes_by_rank()[fault.node], str(fault))
        return await with_timeout(ctx.deps.clock, VAULT_REPLY_TIMEOUT_S, command)

    def _nodes_by_rank(self) -> list[str]:
        """The nodes in the order of their first ranks."""
        return list(dict.fromkeys(one.node_id for one in self._context.generation.workers))
