"""The end of a job: the training function has returned on every rank, and the last checkpoint is
stored.

If the checkpoint of the last step is missing (a vault was lost with the pinned step, or no buffer
was free), the state is stored from the vaults or from the memory of the workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import machine
from rayzero.orchestrator.control.checkpoint_pins import CheckpointPins
from rayzero.orchestrator.control.checkpoints import CheckpointWriter
from rayzero.orchestrator.control.loop import JobLoop, JobMachine
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.restore import RestoreSelector
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.policies.usefulness import LastRun, check_trained, nothing_left
from rayzero.orchestrator.progress import JobProgress

STORE_TRIES = 3
"""Attempts to store a state while training replaces it with newer ones."""


@dataclass(eq=False)
class JobCompletion:
    """Stores the last checkpoint, if it is due and not stored, and reports how the job ended."""

    _plan: JobPlan
    _loop: JobLoop
    _machine: JobMachine
    _members: Members
    _events: EventBus
    _progress: JobProgress
    _pins: CheckpointPins
    _checkpoints: CheckpointWriter
    _restore: RestoreSelector
    _last: LastRun | None
    """The last run, if it has ended and this one continues it."""
    note: str = ""
    """Why no step was trained; empty if one was."""
    _has_announced: bool = False

    def announce(self, found: CheckpointRef | None) -> None:
        """Warns about a run that starts from this checkpoint, if no step is left or the job differs
        from its last run."""
        if found is None:
            return
        differences = () if self._last is None else self._last.differences
        if text := nothing_left(found, self._plan.spec.steps):
            self._has_announced = True
            self._events.warn(text)
        if differences:
            self._events.warn(f"this job differs from its last run: {'; '.join(differences)}")

    def begin(self) -> None:
        """Completes the job. Called when the training function has returned on every rank of the
        newest generation."""
        self._loop.spawn(self._complete())

    async def store_newest(self) -> None:
        """Stores the newest state in memory as a checkpoint, if the job writes checkpoints. If
        training replaces the state meanwhile, the next one is tried."""
        for _ in range(STORE_TRIES):
            try:
                state = await self._restore.find(1)
            except RayzeroError:
                state = None
            if state is None or not self._plan.writes_checkpoints:
                return
            await self._checkpoints.write_state(state)
            if self._checkpoints.covers(state.step):
                return

    async def _complete(self) -> None:
        generation = self._members.generation
        if (last := self._due_step()) is not None:
            self._checkpoints.expect(last)
        await self._pins.wait_idle()
        # A function that returns at once may be faster than the report that all ranks have joined.
        forming = (State.STARTING, State.RECOVERING)
        await self._loop.wait_until(
            lambda: self._machine.state not in forming or self._members.generation is not generation
        )
        if self._members.generation is not generation:
            return
        spec = self._plan.spec
        problem = check_trained(
            self._progress,
            spec.steps,
            has_engine=generation.all_restored,
            launched=spec.launch is not None,
            last=self._last,
        )
        if isinstance(problem, RayzeroError):
            self._machine.post(machine.FaultFatal(problem))
            return
        if not self._progress.steps_executed:
            self.note = problem or ""
        if problem is not None and not self._has_announced:
            self._events.warn(problem)
        step = self._due_step()
        if step is not None and not self._checkpoints.covers(step):
            await self._store(step)
            if not self._checkpoints.covers(step):
                self._machine.post(machine.FaultFatal(self._error(step)))
                return
        self._machine.post(machine.AllFinished(generation.number))

    def _due_step(self) -> int | None:
        """Returns the step that should be the newest checkpoint: the last one. None if there should
        be none."""
        if not self._plan.writes_checkpoints or not self._members.generation.all_restored:
            return None  # without an engine there is no state
        return self._progress.steps or None

    async def _store(self, step: int) -> None:
        if step in self._checkpoints.abandoned:
            return  # all attempts to write it have failed
        nodes = {worker.node_id for worker in self._members.generation.workers}
        limit_s = self._plan.spec.workers.start_timeout_s
        # A lost vault is being opened again.
        await self._loop.wait_for(limit_s, lambda: nodes <= self._members.vault_addresses.keys())
        try:
            state = await self._restore.find(step)
        except RayzeroError as error:
            self._events.warn(f"the state of step {step} cannot be copied: {error.seen}")
            return
        if state is not None and state.step >= step:
            await self._checkpoints.write_state(state)

    def _error(self, step: int) -> JobFailedError:
        newest = self._checkpoints.newest_own
        cause = self._checkpoints.abandoned.get(step, "no complete copy of its state is left")
        stored = "there is no other one"
        if newest is not None:
            stored = f"the newest one is of step {newest.step} in {newest.folder}"
        return JobFailedError(
            f"training has ended after step {self._progress.steps}, but the checkpoint of step "
            f"{step} is not stored: {cause}; {stored}",
            fix="checkpoint.path, or the storage it names; the same job continues from the newest "
            "checkpoint with checkpoint.resume: auto",
        )
