"""The controller of one job: feeds events to the state machine and executes its instructions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayzero.engine.config import parse_config
from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator import machine
from rayzero.orchestrator.control.chaos import ClusterFaultInjector
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.completion import JobCompletion
from rayzero.orchestrator.control.context import Dependencies, JobContext, WorkerUnavailableError
from rayzero.orchestrator.control.dispatcher import MessageDispatcher
from rayzero.orchestrator.control.elastic import ElasticScaler
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.hang_detector import HangDetector
from rayzero.orchestrator.control.inbox import WorkerInbox
from rayzero.orchestrator.control.reconfigure import Reconfiguration
from rayzero.orchestrator.control.replication import Replication
from rayzero.orchestrator.control.restore import RestoreSelector
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.errors import JobStoppedError, internal_error
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job_events import ResourcesAwaited, RunAdopted, StateEntered, WorkersReady
from rayzero.orchestrator.job_file import check_batch_sizes
from rayzero.orchestrator.machine import Instruction, State
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.placement import spare_cores
from rayzero.orchestrator.policies.usefulness import LastRun
from rayzero.orchestrator.results import JobResult, JobStatus
from rayzero.workers.messages import WorkerInfo
from rayzero.workers.vault.process_end import ProcessEnd


class Controller:
    """Runs one job, once, from one event loop.

    Its components work in background tasks. `run` returns once all of them are cancelled, and the
    workers and vaults are released.
    """

    def __init__(
        self,
        plan: JobPlan,
        deps: Dependencies,
        past: JobFacts | None = None,
        last: LastRun | None = None,
    ) -> None:
        """
        Args:
            past: facts of a run that lost its controller and is to be continued.
            last: the last run, if it has ended.
        """
        ctx = self._context = JobContext(plan, deps, self._on_task_error)
        failures = self._failures = FailureHandler(ctx)
        vaults = self._vaults = VaultManager(ctx, self._on_process_died)
        injector = self._fault_injector = ClusterFaultInjector(ctx)
        checkpoints = self._checkpoints = CheckpointWriter(ctx, injector.on_checkpoint_committed)
        replication = Replication(ctx, checkpoints)
        restore = RestoreSelector(ctx, failures, vaults, checkpoints)
        completion = self._completion = JobCompletion(ctx, replication, checkpoints, restore, last)
        dispatcher = MessageDispatcher(
            ctx, failures, replication, vaults, injector, completion.begin
        )
        inbox = self._inbox = WorkerInbox(ctx, dispatcher.dispatch, failures.on_worker_lost)
        self._reconfiguration = Reconfiguration(ctx, failures, vaults, restore, inbox, checkpoints)
        self._hang_detector = HangDetector(ctx, inbox, failures)
        self._scaler = ElasticScaler(ctx, failures, vaults, inbox)
        self._error: RayzeroError | None = None
        self._summary: dict[str, Any] = {}
        self._started_at_s = ctx.now_s()
        if past is not None:
            self._adopt(past)

    async def run(self) -> JobResult:
        """Runs the job to its end.

        Raises:
            JobFailedError, ConfigError: the job failed.
            JobStoppedError: it was stopped.
        """
        ctx = self._context
        self.post_event(machine.Submitted())
        try:
            while not ctx.state.is_final:
                await self._handle_event(await ctx.events.get())
        finally:
            await self._release()
        return self._result()

    def post_event(self, event: machine.Event) -> None:
        """Queues an event. From another thread: `loop.call_soon_threadsafe(post_event, event)`."""
        self._context.post_event(event)

    def on_folder_removed(self) -> None:
        """The job's folder was removed, with its checkpoints, and made again."""
        self._checkpoints.forget_own()
        self._context.tasks.spawn(self._completion.store_newest())

    async def inject(self, faults: Sequence[str]) -> str:
        """Schedules faults; returns a message about the result.

        Raises:
            ConfigError: a fault is invalid, or impossible in this job.
        """
        return await self._fault_injector.inject(faults)

    def scale(self, min_workers: int, max_workers: int) -> str:
        """Changes the limits for the number of workers; returns a message about the result.

        Raises:
            ConfigError: the batch sizes of the engine config do not fit one of these numbers.
        """
        ctx = self._context
        if isinstance(engine := ctx.plan.spec.engine, dict):
            check_batch_sizes(parse_config(engine), min_workers, max_workers)
        self._scaler.set_limits(min_workers, max_workers)
        name, now = ctx.plan.spec.name, ctx.generation.world_size
        wanted = f"{min_workers} to {max_workers}" if min_workers != max_workers else max_workers
        return f"{name}: {wanted} worker{'s' * (max_workers != 1)} wanted; it has {now}"

    def status(self) -> JobStatus:
        """A snapshot of the job."""
        ctx = self._context
        spec = ctx.plan.spec
        facts, newest = ctx.facts, self._checkpoints.newest_own
        return JobStatus(
            name=spec.name,
            state=ctx.state,
            step=ctx.progress.steps,
            steps=spec.steps,
            generation=ctx.generation.number,
            world_size=ctx.generation.world_size,
            workers_min=ctx.registry.limits.min,
            workers_max=ctx.registry.limits.max,
            loss=ctx.progress.last_loss,
            began_at_s=facts.began_at_s,
            at_s=time.time(),
            faults=dict(sorted(facts.faults_by_cause.items())),
            repairs=facts.total_repairs,
            checkpoint_step=newest.step if newest is not None else None,
            journal=ctx.plan.journal_url,
            log=str(ctx.plan.log_path),
            waiting_for="" if ctx.state.is_final else facts.waiting_for,
            error="" if self._error is None else first_line(self._error),
        )

    def _adopt(self, past: JobFacts) -> None:
        """Continues an earlier controller's run, whose facts are this one's."""
        ctx = self._context
        now_s = ctx.now_s()
        unix_s = time.time()
        self._started_at_s = now_s - max(0.0, unix_s - past.began_at_s)
        ctx.generation = GenerationState(past.generation, on_change=ctx.changed.notify)
        ctx.progress.steps = past.step  # steps after the checkpoint will count as redone
        self._failures.history = past.faults_on_clock(now_s, unix_s)
        if past.scaled_limits is not None:
            least, most = past.scaled_limits
            ctx.registry.limits = replace(ctx.registry.limits, min=least, max=most)
        ctx.emit(RunAdopted(past.step, past.generation, unix_s - past.last_at_s))

    async def _handle_event(self, event: machine.Event) -> None:
        ctx, before = self._context, self._context.state
        if getattr(event, "generation", ctx.generation.number) < ctx.generation.number:
            return  # about a generation that has been replaced
        ctx.state, instructions = machine.apply_event(before, event)
        if isinstance(event, machine.FaultFatal) and ctx.state is State.FAILED:
            self._error = self._error or event.error
        if isinstance(event, machine.ResizeRequested) and ctx.state is State.RESIZING:
            ctx.timer.resize_requested(event.reason, ctx.generation.world_size)
        if ctx.state is not before:
            generation, trigger = ctx.generation, type(event).__name__
            ctx.emit(
                StateEntered(
                    ctx.state, generation.number, generation.world_size, ctx.progress.steps, trigger
                )
            )
        for instruction in instructions:
            await self._execute(instruction)

    async def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Instruction.PLACE_WORKERS:
                self._context.tasks.spawn(self._place_workers())
            case Instruction.FORM_GENERATION:
                self._reconfiguration.form_first()
            case Instruction.RECOVER:
                self._reconfiguration.recover()
            case Instruction.RESIZE:
                self._reconfiguration.resize()
            case Instruction.RELEASE_NOT_CHOSEN:
                self._scaler.release_not_chosen()
            case Instruction.STOP_TRAINING:
                self._reconfiguration.stop()
            case Instruction.RELEASE_WORKERS:
                await self._release()
            case Instruction.WRITE_SUMMARY:
                self._write_summary()

    async def _place_workers(self) -> None:
        ctx = self._context
        # First: a run that cannot start needs no workers, and workers read the record of faults.
        self._fault_injector.start(resumed=await self._checkpoints.resolve_resume())
        self._completion.announce(self._checkpoints.newest)
        began_at_s = ctx.now_s()
        workers = await ctx.deps.workers.start_workers(
            ctx.plan.resources, self._failures.on_start_failed, self._on_waiting
        )
        await self._vaults.ensure_open(worker.node_id for worker in workers)
        ctx.registry.start_s = ctx.now_s() - began_at_s
        ctx.registry.add(workers)
        ctx.emit(WorkersReady(workers))
        self._check_cores(workers)
        self._inbox.start(worker.index for worker in workers)
        self._scaler.start()
        ctx.tasks.spawn(self._hang_detector.run())
        self.post_event(machine.WorkersPlaced())

    def _on_waiting(self, text: str) -> None:
        if text != self._context.facts.waiting_for:
            self._context.emit(ResourcesAwaited(text, self._context.plan.resources.timeout_s))

    def _check_cores(self, workers: Sequence[WorkerInfo]) -> None:
        cpus = self._context.plan.spec.workers.cpus
        if cpus is None or not self._context.plan.updates_on_cpu:
            return
        node, share = spare_cores(workers, cpus)
        if share:
            self._context.warn(
                f"offload_optimizer: each worker updates its weights with {cpus:g} CPU threads "
                f"(workers.cpus), and node {node} has {share} cores for each of its workers: "
                "without workers.cpus it would use the node's CPUs / its GPUs"
            )

    async def _release(self) -> None:
        """Tasks first: they use the workers, and workers use the vaults."""
        await self._context.tasks.cancel_all()
        await self._context.deps.workers.release()
        await self._context.deps.vaults.release()

    def _on_process_died(self, worker: int, end: ProcessEnd) -> None:
        """A vault saw a worker's process end; its earlier messages are dispatched first."""
        self._inbox.deliver(worker)
        self._failures.on_worker_lost(worker, end.status, end.stack)

    def _on_task_error(self, error: Exception) -> None:
        """Turns every error of a background task into an event."""
        if isinstance(error, WorkerUnavailableError):
            self._failures.on_worker_lost(error.worker, error.cause)
        elif isinstance(error, RayzeroError):
            self.post_event(machine.FaultFatal(error))
        else:
            self.post_event(machine.FaultFatal(internal_error(error)))

    def _write_summary(self) -> None:
        """The training function's return value is merged in, and takes precedence over all but
        `steps`, by which clients see how far the job came."""
        ctx = self._context
        facts = ctx.facts
        progress = ctx.progress
        newest = self._checkpoints.newest_own
        resumed_from = self._checkpoints.resumed_from
        self._summary = {
            "job": ctx.plan.spec.name,
            "world_size": ctx.generation.world_size,
            "stage": ctx.plan.stage,
            "loss": {"first": progress.first_loss, "last": progress.last_loss},
            "tokens_per_s": progress.tokens_per_s,
            "seconds": ctx.now_s() - self._started_at_s,
            "peak_bytes": dict(sorted(progress.peak_bytes.items())),
            "world_sizes": list(progress.world_sizes),
            "faults": dict(sorted(facts.faults_by_cause.items())),
            "repairs": facts.total_repairs,
            "steps_redone": facts.steps_redone,
            "checkpoints": {
                "written": facts.checkpoints_written,
                "failed": facts.checkpoints_failed,
            },
            "newest_checkpoint": None if newest is None else newest.folder,
            "resumed_from": None if resumed_from is None else resumed_from.folder,
            "steps_trained": progress.steps_executed,
            **({"note": self._completion.note} if self._completion.note else {}),
            **ctx.generation.return_value,
            "steps": progress.steps,
        }

    def _result(self) -> JobResult:
        ctx = self._context
        name = ctx.plan.spec.name
        if ctx.state is State.SUCCEEDED:
            returned = {**ctx.generation.return_value}
            returned.pop("steps", None)  # always the job's
            return JobResult(name, self._summary, ctx.plan.summary_path, returned)
        if self._error is not None:
            raise self._error
        newest = self._checkpoints.newest_own
        raise JobStoppedError(
            f"job {name!r} was stopped after step {ctx.progress.steps}"
            + (f"; its newest checkpoint is {newest.folder}" if newest else ""),
            fix="" if newest else "checkpoint.every_steps; without it the job has saved nothing",
        )
