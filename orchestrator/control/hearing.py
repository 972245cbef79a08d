"""From a worker's message to those whom it concerns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.control.chaos import Chaos
from rayzero.orchestrator.control.desk import Desk
from rayzero.orchestrator.control.faults import Faults
from rayzero.orchestrator.control.keeping import Keeping
from rayzero.orchestrator.control.speeds import Speeds
from rayzero.orchestrator.control.vaults import Vaults
from rayzero.orchestrator.notices import Warned
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.repairs import Repairs, append
from rayzero.workers.messages import (
    Crashed,
    FaultFired,
    Finished,
    Heartbeat,
    Joined,
    LogLine,
    Message,
    Pinned,
    Report,
    Restored,
    Stopped,
)


class Hearing:
    """Messages may be late: of a worker that is lost by now, or of an older generation.

    The bell is rung for the last of many only: thousands of rings would wake those who wait
    thousands of times, and they wait for all.
    """

    def __init__(
        self,
        desk: Desk,
        faults: Faults,
        keeping: Keeping,
        speeds: Speeds,
        repairs: Repairs,
        vaults: Vaults,
        chaos: Chaos,
    ) -> None:
        self._desk = desk
        self._chaos = chaos
        self._faults = faults
        self._keeping = keeping
        self._speeds = speeds
        self._repairs = repairs
        self._vaults = vaults
        # A table, not a chain of tests: a large job says thousands of these a second.
        self._concerned: dict[type[Message], Callable[[int, Any], None]] = {
            Heartbeat: self._beats,
            Report: self._reported,
            Joined: self._joins,
            Restored: self._restores,
            Finished: self._leaves,
            Stopped: self._leaves,
            Crashed: self._leaves,
            Pinned: keeping.take,
            LogLine: self._told,
            FaultFired: self._told,
        }

    def receive(self, worker: int, message: Message) -> None:
        self._concerned[type(message)](worker, message)

    def _told(self, worker: int, message: LogLine | FaultFired) -> None:
        del worker
        self._desk.see(message)

    def _reported(self, worker: int, report: Report) -> None:
        desk = self._desk
        if report.generation == desk.generation.number:
            desk.generation.reached(report.step + 1)
            desk.ports.probe.reported(report)
            self._speeds.add(worker, report)
        record = desk.progress.add(report)
        if record is not None:
            desk.see(record)
            self._step_finished(record)

    def _step_finished(self, record: StepRecord) -> None:
        desk = self._desk
        desk.bell.ring()
        passed = self._repairs.finished(record.step_s, record.world_size, desk.now_s())
        if passed is not None:
            try:
                append(desk.plan.output_dir, passed)
            except OSError as error:  # a full disk is no reason to end a job that was just repaired
                desk.see(Warned(f"repairs.jsonl cannot be written: {error.strerror or error}"))
            desk.see(passed)
        self._keeping.step_finished(record.generation)
        self._vaults.step_finished()
        self._chaos.step_finished(record.step)

    def _beats(self, worker: int, beat: Heartbeat) -> None:
        desk = self._desk
        if desk.generation.beats(worker, beat):
            desk.ports.probe.beat(beat, desk.crew.info(worker).node)

    def _joins(self, worker: int, message: Joined) -> None:
        desk = self._desk
        if formed := desk.generation.joins(worker, message):
            desk.feed(formed)
            self._repairs.enter("load", desk.now_s())

    def _restores(self, worker: int, message: Restored) -> None:
        if self._desk.generation.restores(worker, message):
            self._repairs.enter("redo", self._desk.now_s())
            self._desk.bell.ring()

    def _leaves(self, worker: int, message: Finished | Stopped | Crashed) -> None:
        desk, generation = self._desk, self._desk.generation
        known = len(generation.faults)
        if not generation.leaves(worker, message, desk.now_s()):
            return
        if generation.deserted or not isinstance(message, Stopped):
            desk.bell.ring()
        if len(generation.faults) > known:
            self._faults.crashed()
        if isinstance(message, Finished):
            desk.progress.count(message.counters)
            desk.progress.peak({"process": message.peak_rss_bytes})
            if generation.finished:
                desk.tasks.spawn(self._finish())

    async def _finish(self) -> None:
        """The job has succeeded once what was pinned on the way is stored."""
        generation = self._desk.generation
        await self._keeping.settled()
        self._desk.feed(ev.AllFinished(generation.number))
