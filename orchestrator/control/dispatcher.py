"""Dispatches the workers' messages to the components that handle them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rayzero.orchestrator.control.checkpoint_pins import CheckpointPins
from rayzero.orchestrator.control.failures import FailureHandler
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.control.recovery_timer import RecoveryTimer
from rayzero.orchestrator.control.steps import StepReports
from rayzero.orchestrator.control.weight_versions import WeightVersions
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.policies.placement import CallState
from rayzero.orchestrator.progress import JobProgress
from rayzero.orchestrator.top.format import count_of
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import (
    Crashed,
    Divided,
    Finished,
    Joined,
    Left,
    LogLine,
    Mirrored,
    Pinned,
    Prepared,
    Restored,
    StepDivided,
    Stopped,
    WentBack,
)
from rayzero.workers.step_rows import Heartbeats, ReceivedMessage, StepRows


@dataclass(eq=False)
class MessageDispatcher:
    """Calls the handler of each message. Messages may be late: from a worker that is lost by now,
    or about an older generation."""

    _loop: JobLoop
    _members: Members
    _events: EventBus
    _progress: JobProgress
    _timer: RecoveryTimer
    _steps: StepReports
    _failures: FailureHandler
    _pins: CheckpointPins
    _versions: WeightVersions
    _rewind: Callable[[int], int]
    _on_all_finished: Callable[[], None]

    def __post_init__(self) -> None:
        # A table, not a chain of tests: a large job sends thousands of these a second.
        self._handlers: dict[type[ReceivedMessage], Callable[[int, Any], None]] = {
            Heartbeats: self._steps.on_heartbeats,
            StepRows: self._steps.on_rows,
            Joined: self._on_joined,
            Restored: self._on_restored,
            Prepared: self._on_prepared,
            Finished: self._on_left,
            Stopped: self._on_left,
            Crashed: self._on_crashed,
            Pinned: self._pins.on_pinned,
            Mirrored: self._versions.on_mirrored,
            WentBack: self._on_went_back,
            StepDivided: self._on_step_divided,
            Divided: self._steps.on_divided,
            LogLine: self._forward,
            FaultFired: self._forward,
        }

    def dispatch(self, worker: int, message: ReceivedMessage) -> None:
        self._handlers[type(message)](worker, message)

    def _forward(self, worker: int, message: LogLine | FaultFired) -> None:
        del worker
        self._events.emit(message)

    def _on_joined(self, worker: int, message: Joined) -> None:
        if self._members.generation.on_joined(worker, message):
            self._timer.enter_phase("load")

    def _on_restored(self, worker: int, message: Restored) -> None:
        if self._members.generation.on_restored(worker, message, self._loop.now_s()):
            self._timer.enter_phase("recompute")

    def _on_went_back(self, worker: int, message: WentBack) -> None:
        """Handles a training function that continues from its own checkpoint instead of the
        restored state."""
        del worker
        generation = self._members.generation
        if message.generation != generation.number or generation.fenced:
            return
        generation.step = message.step + 1
        redone = self._rewind(message.step)
        self._events.warn(
            f"the script has loaded its own checkpoint of step {message.step}, with a client state "
            f"that says where to start: {count_of(redone, 'finished step')} will be done "
            "again (none, if it loads only `if engine.global_steps == 0`, and skips their data)"
        )

    def _on_step_divided(self, worker: int, message: StepDivided) -> None:
        """Limits the next generations to numbers of ranks that divide the parts."""
        del worker
        registry, parts = self._members.registry, message.parts
        limits = replace(registry.limits, parts=parts)
        if limits == registry.limits:
            return
        registry.limits = limits
        if (most := limits.size(limits.max)) != limits.max:
            self._events.warn(
                f"a step has {parts} micro-batches, which the script's loader gives to ranks in "
                f"equal parts: of up to {limits.max} workers (workers.max) {most or 'none'} can "
                "train; gradient_accumulation_steps determines the number of micro-batches"
            )

    def _on_prepared(self, worker: int, message: Prepared) -> None:
        del message
        if self._members.registry.is_ahead(worker):
            self._members.registry.set_state(worker, CallState.PREPARED)

    def _on_crashed(self, worker: int, message: Crashed) -> None:
        if message.kind == "device":  # of any generation: the process ends
            self._failures.on_device_failed(worker, message)
        else:
            self._on_left(worker, message)

    def _on_left(self, worker: int, message: Left) -> None:
        generation = self._members.generation
        if self._members.registry.is_ahead(worker):
            if not self._members.registry.is_alive(worker):
                return  # it was left out, or lost
            error, traceback = "the training function returned before it trained", ""
            if isinstance(message, Crashed):
                error, traceback = message.error, message.traceback
            self._failures.on_newcomer_failed(worker, error, traceback)
            return
        faults_before = len(generation.pending_faults)
        if not generation.on_left(worker, message, self._loop.now_s()):
            return
        if not isinstance(message, Finished) and message.stays:
            keeps_rank = message.keeps_rank
            self._members.registry.set_state(worker, CallState.WAITING, keeps_rank=keeps_rank)
        if len(generation.pending_faults) > faults_before:
            self._failures.on_fault()
        if isinstance(message, Finished):
            self._progress.update_peaks({"process": message.peak_rss_bytes})
            if generation.all_finished:
                self._on_all_finished()
