"""From a worker's message to those whom it concerns."""

from __future__ import annotations

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.control.chaos import Chaos
from rayzero.orchestrator.control.desk import Desk
from rayzero.orchestrator.control.faults import Faults
from rayzero.orchestrator.control.keeping import Keeping
from rayzero.orchestrator.control.speeds import Speeds
from rayzero.orchestrator.control.vaults import Vaults
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.repairs import Repairs, append
from rayzero.workers.messages import (
    FaultFired,
    Finished,
    Heartbeat,
    LogLine,
    Message,
    Pinned,
    Report,
)


class Hearing:
    """Messages may be late: of a worker that is lost by now, or of an older generation."""

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

    def receive(self, worker: int, message: Message) -> None:
        match message:
            case LogLine() | FaultFired():
                self._desk.see(message)
            case Report():
                self._reported(worker, message)
            case Pinned():
                self._keeping.take(worker, message)
            case _:
                self._passes(worker, message)

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
            append(desk.plan.output_dir, passed)
            desk.see(passed)
        self._keeping.step_finished(record.generation)
        self._vaults.step_finished()
        self._chaos.step_finished(record.step)

    def _passes(self, worker: int, message: Message) -> None:
        desk, generation = self._desk, self._desk.generation
        known, was_restored = len(generation.faults), generation.restored
        was_in = generation.holds(worker)
        for event in generation.take(worker, message, desk.now_s()):
            desk.feed(event)
            self._repairs.enter("load", desk.now_s())
        if generation.restored and not was_restored:
            self._repairs.enter("redo", desk.now_s())
        if len(generation.faults) > known:
            self._faults.crashed()
        if isinstance(message, Finished) and was_in and not generation.holds(worker):
            desk.progress.count(message.counters)
            desk.progress.peak({"process": message.peak_rss_bytes})
            if generation.finished:
                desk.tasks.spawn(self._finish())
        if not isinstance(message, Heartbeat):
            desk.bell.ring()
        elif generation.rank_of(worker) == message.rank and was_in:
            desk.ports.probe.beat(message, desk.crew.info(worker).node)

    async def _finish(self) -> None:
        """The job has succeeded once what was pinned on the way is stored."""
        generation = self._desk.generation
        await self._keeping.settled()
        self._desk.feed(ev.AllFinished(generation.number))
