"""The controller of one job: feeds events to the state machine and executes its instructions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayzero.engine.config import parse_config
from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator import machine
from rayzero.orchestrator.control.components import Components, Dependencies
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job_events import ResourcesAwaited, RunAdopted, StateEntered, WorkersReady
from rayzero.orchestrator.job_file import check_batch_sizes
from rayzero.orchestrator.machine import Instruction, State
from rayzero.orchestrator.plan import JobPlan, updates_on_cpu
from rayzero.orchestrator.policies.attachment import Attachment
from rayzero.orchestrator.policies.placement import spare_cores
from rayzero.orchestrator.policies.usefulness import LastRun
from rayzero.orchestrator.results import JobResult, JobStatus
from rayzero.workers.messages import WorkerInfo


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
        found: Attachment | None = None,
    ) -> None:
        """
        Args:
            past: facts of a run that lost its controller and is to be continued.
            last: the last run, if it has ended.
            found: what is left of the newest generation of `past`, if it is to continue.
        """
        self._plan = plan
        self._deps = deps
        parts = self._parts = Components(plan, deps, last)
        self._loop = parts.loop
        self._machine = parts.machine
        self._members = parts.members
        self._progress = parts.progress
        self._roles = parts.roles
        self._error: RayzeroError | None = None
        self._summary: dict[str, Any] = {}
        self._started_at_s = self._loop.now_s()
        self._found = found
        if past is not None:
            self._adopt(past)

    async def run(self) -> JobResult:
        """Runs the job to its end.

        Raises:
            JobFailedError, ConfigError: the job failed.
            JobStoppedError: it was stopped.
        """
        if self._found is None:
            self.post_event(machine.Submitted())
        else:
            self.post_event(machine.GenerationFound(self._found.generation.generation))
        try:
            while not self._machine.state.is_final:
                await self._handle_event(await self._machine.next_event())
        finally:
            await self._release()
        return self._result()

    def post_event(self, event: machine.Event) -> None:
        """Queues an event. From another thread: `loop.call_soon_threadsafe(post_event, event)`."""
        self._machine.post(event)

    def on_folder_removed(self) -> None:
        """Stores the newest state again. Called when the job's folder was removed, with its
        checkpoints, and made again."""
        self._parts.checkpoints.forget_own()
        self._loop.spawn(self._parts.completion.store_newest())

    async def inject(self, faults: Sequence[str]) -> str:
        """Schedules faults; returns a message about the result.

        Raises:
            ConfigError: a fault is invalid, or impossible in this job.
        """
        return await self._parts.injector.inject(faults)

    def scale(self, min_workers: int, max_workers: int, role: str = "") -> str:
        """Changes the limits for the number of workers, of the job or of a role. Returns a message
        about the result.

        Raises:
            ConfigError: the batch sizes of the engine config do not fit one of these numbers; or
                there is no such role.
        """
        name = self._plan.spec.name
        wanted = f"{min_workers} to {max_workers}" if min_workers != max_workers else max_workers
        what = f"worker{'s' * (max_workers != 1)} wanted"
        if role:
            pool = self._roles.find(role)
            pool.scale(min_workers, max_workers)
            return f"{name}, role {role}: {wanted} {what}; it has {pool.running}"
        if isinstance(engine := self._plan.spec.engine, dict):
            check_batch_sizes(parse_config(engine), min_workers, max_workers)
        self._parts.scaler.set_limits(min_workers, max_workers)
        return f"{name}: {wanted} {what}; it has {self._members.generation.world_size}"

    def status(self) -> JobStatus:
        """Returns a snapshot of the job."""
        spec = self._plan.spec
        facts, newest = self._deps.events.facts, self._parts.checkpoints.newest_own
        generation, limits = self._members.generation, self._members.registry.limits
        return JobStatus(
            name=spec.name,
            state=self._machine.state,
            step=self._progress.steps,
            steps=spec.steps,
            generation=generation.number,
            world_size=generation.world_size,
            workers_min=limits.min,
            workers_max=limits.max,
            loss=self._progress.last_loss,
            began_at_s=facts.began_at_s,
            at_s=time.time(),
            faults=dict(sorted(facts.faults_by_cause.items())),
            repairs=facts.total_repairs,
            checkpoint_step=newest.step if newest is not None else None,
            journal=self._plan.journal_url,
            log=str(self._plan.log_path),
            waiting_for="" if self._machine.state.is_final else facts.waiting_for,
            error="" if self._error is None else first_line(self._error),
            roles=self._roles.status(),
        )

    def _adopt(self, past: JobFacts) -> None:
        """Continues the run of an earlier controller, with that controller's facts."""
        now_s = self._loop.now_s()
        unix_s = time.time()
        self._started_at_s = now_s - max(0.0, unix_s - past.began_at_s)
        self._members.generation = GenerationState(
            past.generation, on_change=self._loop.changed.notify
        )
        self._progress.steps = past.step  # steps after the checkpoint will count as redone
        self._parts.failures.history = past.faults_on_clock(now_s, unix_s)
        if past.scaled_limits is not None:
            least, most = past.scaled_limits
            registry = self._members.registry
            registry.limits = replace(registry.limits, min=least, max=most)
        offline_s = unix_s - past.last_at_s
        if self._found is not None:
            self._parts.reconfiguration.reattachment.begin(self._found, offline_s)
        else:
            self._deps.events.emit(RunAdopted(past.step, past.generation, offline_s))

    async def _handle_event(self, event: machine.Event) -> None:
        before = self._machine.state
        newest = self._members.generation
        if getattr(event, "generation", newest.number) < newest.number:
            return  # about a generation that has been replaced
        self._machine.state, instructions = machine.apply_event(before, event)
        if isinstance(event, machine.FaultFatal) and self._machine.state is State.FAILED:
            self._error = self._error or event.error
        if isinstance(event, machine.ResizeRequested) and self._machine.state is State.RESIZING:
            self._parts.reconfiguration.on_resize_requested(event.reason)
        if self._machine.state is not before:
            trigger, step = type(event).__name__, self._progress.steps
            self._deps.events.emit(
                StateEntered(self._machine.state, newest.number, newest.world_size, step, trigger)
            )
        for instruction in instructions:
            await self._execute(instruction)

    async def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Instruction.PLACE_WORKERS:
                self._loop.spawn(self._place_workers())
            case Instruction.RESUME_WORKERS if self._found is not None:
                self._loop.spawn(self._resume_workers(self._found))
            case Instruction.FORM_GENERATION:
                self._parts.reconfiguration.form_first()
            case Instruction.RECOVER:
                self._parts.reconfiguration.recover()
            case Instruction.RESIZE:
                self._parts.reconfiguration.resize()
            case Instruction.RELEASE_NOT_CHOSEN:
                self._parts.scaler.release_not_chosen()
            case Instruction.STOP_TRAINING:
                self._parts.reconfiguration.cancel()
                self._loop.spawn(self._parts.stop.run())
            case Instruction.RELEASE_WORKERS:
                await self._release()
            case Instruction.WRITE_SUMMARY:
                self._write_summary()

    async def _place_workers(self) -> None:
        # First: a run that cannot start needs no workers, and workers read the record of faults.
        self._parts.injector.start(resumed=await self._parts.checkpoints.resolve_resume())
        self._parts.completion.announce(self._parts.checkpoints.newest)
        began_at_s = self._loop.now_s()
        self._parts.scaler.health.start()
        self._roles.start()
        need = self._plan.resources
        if self._roles.by_name:
            need = replace(need, max_workers=need.min_workers)
        workers = await self._deps.workers.start_workers(
            need, self._parts.failures.on_start_failed, self._on_waiting
        )
        if self._roles.by_name:
            self._loop.spawn(self._grow())
        await self._parts.vaults.open_attached()
        await self._roles.rollouts.close_left()
        await self._parts.vaults.ensure_open(worker.node_id for worker in workers)
        await self._parts.scaler.health.look_at(workers)
        self._members.registry.add(workers)
        self._deps.events.emit(WorkersReady(workers, self._loop.now_s() - began_at_s))
        self._check_cores(workers)
        self._parts.inbox.start(worker.index for worker in workers)
        self._parts.scaler.start()
        self._loop.spawn(self._parts.hang_detector.run())
        self.post_event(machine.WorkersPlaced())

    async def _resume_workers(self, found: Attachment) -> None:
        injector = self._parts.injector
        injector.start(resumed=True)
        injector.injected = found.generation.faults
        self._parts.scaler.health.start()
        await self._parts.reconfiguration.reattachment.resume(found)
        self._parts.scaler.start()
        self._loop.spawn(self._parts.hang_detector.run())

    async def _grow(self) -> None:
        await self._roles.grow()
        limits = self._members.registry.limits
        self._deps.workers.resize(limits.min, limits.max + limits.spares)

    def _on_waiting(self, text: str) -> None:
        if text != self._deps.events.facts.waiting_for:
            self._deps.events.emit(ResourcesAwaited(text, self._plan.resources.timeout_s))

    def _check_cores(self, workers: Sequence[WorkerInfo]) -> None:
        cpus = self._plan.spec.workers.cpus
        if cpus is None or not updates_on_cpu(self._plan.spec):
            return
        node, share = spare_cores(workers, cpus)
        if share:
            self._deps.events.warn(
                f"offload_optimizer: each worker updates its weights with {cpus:g} CPU threads "
                f"(workers.cpus), and node {node} has {share} cores for each of its workers: "
                "without workers.cpus it would use the node's CPUs / its GPUs"
            )

    async def _release(self) -> None:
        """Cancels the tasks first, which use the workers. Workers use the vaults, which are
        released last."""
        await self._roles.end()
        await self._loop.tasks.cancel_all()
        await self._deps.workers.release()
        await self._roles.release()
        await self._deps.vaults.release()

    def _write_summary(self) -> None:
        """Computes the summary. The training function's return value is merged in, and takes
        precedence over all keys but `steps`, which tells clients how far the job came."""
        facts = self._deps.events.facts
        progress = self._progress
        newest = self._parts.checkpoints.newest_own
        resumed_from = self._parts.checkpoints.resumed_from
        self._summary = {
            "job": self._plan.spec.name,
            "world_size": self._members.generation.world_size,
            "stage": self._plan.stage,
            "loss": {"first": progress.first_loss, "last": progress.last_loss},
            "tokens_per_s": progress.tokens_per_s,
            "seconds": self._loop.now_s() - self._started_at_s,
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
            **({"note": self._parts.completion.note} if self._parts.completion.note else {}),
            **self._members.generation.return_value,
            "steps": progress.steps,
        }

    def _result(self) -> JobResult:
        name = self._plan.spec.name
        if self._machine.state is State.SUCCEEDED:
            returned = {**self._members.generation.return_value}
            returned.pop("steps", None)  # always the job's
            return JobResult(name, self._summary, self._plan.summary_path, returned)
        if self._error is not None:
            raise self._error
        newest = self._parts.checkpoints.newest_own
        raise JobStoppedError(
            f"job {name!r} was stopped after step {self._progress.steps}"
            + (f"; its newest checkpoint is {newest.folder}" if newest else ", and saved nothing"),
            fix="" if newest else "set checkpoint.every_steps: a stop then saves the state",
        )
