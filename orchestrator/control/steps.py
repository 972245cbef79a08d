"""The steps of the ranks: their reports become the job's progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayzero.orchestrator.control.calls import Calls
from rayzero.orchestrator.control.chaos import ClusterFaultInjector
from rayzero.orchestrator.control.checkpoint_pins import CheckpointPins
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.control.vaults import VaultManager
from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import StepReplicated
from rayzero.orchestrator.policies.balance import Balancer, describe_shares
from rayzero.orchestrator.policies.stragglers import SpeedTracker
from rayzero.orchestrator.policies.usefulness import EqualLosses
from rayzero.orchestrator.progress import JobProgress, StepRecord
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import Divided
from rayzero.workers.step_rows import Heartbeats, StepRows


@dataclass(eq=False)
class StepReports:
    """Adds up the ranks' reports of a step. A step that all ranks have finished is announced to the
    components that depend on it."""

    _loop: JobLoop
    _members: Members
    _events: EventBus
    _progress: JobProgress
    _timer: RecoveryTimer
    _pins: CheckpointPins
    _vaults: VaultManager
    _versions: WeightVersions
    _injector: ClusterFaultInjector
    _calls: Calls
    _balancer: Balancer
    _speeds: SpeedTracker = field(default_factory=SpeedTracker)
    _equal_losses: EqualLosses = field(default_factory=EqualLosses)
    _replicated: tuple[int, int] = (0, 0)
    """The generation and the newest step of which other nodes have replicas."""

    def start_generation(self, generation: GenerationState) -> tuple[float, ...]:
        """Begins a generation. Returns its ranks' shares of a step."""
        step = 0 if generation.restore is None else generation.restore.step
        for record in self._progress.start_generation(
            generation.number, generation.world_size, step
        ):
            self._events.emit(record)
        self._versions.start_generation(generation)
        members = tuple(generation.assignments)
        self._speeds.start_generation(members)
        measured = self._speeds.shares_per_s(members) if self._balancer.enabled else ()
        return self._balancer.start_generation(members, measured)

    def continue_generation(
        self, generation: GenerationState, reported: int, step: int, shares: tuple[float, ...]
    ) -> None:
        """Continues a lost controller's generation. All ranks have finished `step` steps, and that
        controller has reported `reported`.

        Args:
            shares: its ranks' shares of a step, when it began.
        """
        self._progress.continue_generation(generation.number, generation.world_size, reported, step)
        members = tuple(generation.assignments)
        self._balancer.start_generation(members, [None] * len(members))
        if shares:
            self._balancer.on_divided(shares)

    def on_rows(self, worker: int, rows: StepRows) -> None:
        del worker
        if rows.generation == self._members.generation.number:
            self._members.generation.advance_to(rows.step + 1)
            self._note_replicated(rows)
            self._events.emit(rows)
            self._judge(rows)
        record = self._progress.add_rows(rows)
        if record is not None:
            self._events.emit(record)
            self._on_step_finished(record)

    def _note_replicated(self, rows: StepRows) -> None:
        """Announces a step of which other nodes have all replicas, as the ranks have agreed."""
        step = int(rows.gauge(0, "replicated_step") or 0)
        nbytes = int(rows.gauge(0, "replicated_bytes") or 0)
        if step and (rows.generation, step) > self._replicated:
            self._replicated = rows.generation, step
            self._events.emit(StepReplicated(step, nbytes))

    def _judge(self, rows: StepRows) -> None:
        """Looks for slow ranks, and for ranks that train on the same samples."""
        # A worker that has fewer samples because it is slow stays slow: what counts is the time
        # that an even share takes.
        if "exposed_comm_s" in rows.positions:  # else the job has no engine that measures
            for worker, rank, own_s, samples in zip(
                rows.workers, rows.ranks, rows.own_s, rows.column("step_samples"), strict=True
            ):
                share = self._balancer.relative_share(rank, int(samples))
                if text := self._speeds.add_step(worker, own_s / share):
                    self._events.warn(text)
        if text := self._equal_losses.add(rows, self._members.generation.world_size):
            self._events.warn(text)

    def _on_step_finished(self, record: StepRecord) -> None:
        self._loop.changed.notify()  # JobProgress
        if recovery := self._timer.completed(record.step_s, record.world_size):
            self._events.emit(recovery)
        self._pins.on_step_finished(record.generation)
        self._vaults.on_step_finished()
        self._versions.on_step_finished(record)
        self._injector.on_step_finished(record.step)
        self._balance(record)

    def _balance(self, record: StepRecord) -> None:
        generation = self._members.generation
        members = tuple(generation.assignments)
        shares = self._balancer.on_step_finished(
            record.step_s,
            int(record.gauges.get("step_samples", 0)),
            lambda: self._speeds.shares_per_s(members),
        )
        if shares and not generation.fenced:
            self._calls.broadcast(generation.active, WorkerCalls.divide, generation.number, shares)

    def on_divided(self, worker: int, message: Divided) -> None:
        """Records that the ranks divide the samples of a step by new shares now."""
        del worker
        if message.generation != self._members.generation.number:
            return
        self._balancer.on_divided(message.shares)
        self._events.warn(describe_shares(message.shares))

    def on_heartbeats(self, worker: int, beats: Heartbeats) -> None:
        del worker
        if own := self._members.generation.on_heartbeats(beats):
            self._events.emit(own)
