"""From what was seen of workers to a judgement: who is lost, why, and what it means for the job."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.control.desk import Desk, GoneError
from rayzero.orchestrator.control.tasks import within
from rayzero.orchestrator.generation import Generation
from rayzero.orchestrator.notices import FaultSeen, Warned
from rayzero.orchestrator.policies import failure
from rayzero.orchestrator.policies.failure import HARDWARE, Cause, Fault
from rayzero.orchestrator.policies.recovery import Damaged
from rayzero.orchestrator.repairs import Repairs
from rayzero.orchestrator.states import State
from rayzero.workers.messages import Restore

GRACE_S = 3.0
"""How long a failed collective waits for a better explanation, such as a dead worker."""
KILL_S = 2.0
"""How long a repair waits for a kill to be carried out."""

_LOSSES = HARDWARE - {Cause.COLLECTIVE}


class Faults:
    """Keeps the job's record of faults, and tells the machine what they mean."""

    def __init__(self, desk: Desk, repairs: Repairs) -> None:
        self.record: list[Fault] = []
        """Every fault that was repaired, and every worker lost that was no member."""
        self.damaged = Damaged()
        self._desk = desk
        self._repairs = repairs
        self._condemned: dict[int, str] = {}
        self._dead: set[int] = set()
        """Who is in the record as gone: one may be lost to two generations while they change."""
        self._fatal = False
        self._kills: set[asyncio.Task[None]] = set()
        spec = desk.plan.spec.recovery
        self._budget = failure.Budget(spec.max_faults, spec.fault_window_s)

    def counts(self) -> dict[str, int]:
        """How many faults there were, by cause."""
        return dict(sorted(Counter(str(one.cause) for one in self.record).items()))

    def condemn(self, worker: int, why: str) -> None:
        """Kills a worker that hangs; its death will be known for what it is."""
        self._condemned[worker] = why
        self._kill(worker)

    async def buried(self) -> None:
        """Returns once nobody who was given up can do anything more, as far as that can be had."""
        if self._kills:
            dying = asyncio.wait(set(self._kills))
            with suppress(TimeoutError):
                await within(self._desk.ports.clock, KILL_S, dying)

    def lost(self, worker: int, detail: str) -> None:
        """A worker's process is gone, or no longer answers and counts as gone.

        Args:
            detail: what is known about the cause; empty when that may still come.
        """
        desk = self._desk
        if not desk.crew.alive(worker):
            self._explain(worker, detail)
            return
        desk.crew.lost(worker)
        self._kill(worker)  # what no longer answers, or seems dead, must not come back
        cause = self._cause(worker)
        text = self._condemned.get(worker) or detail
        fault = desk.generation.lost(worker, cause, text, desk.now_s())
        if fault is not None:
            self._tell(fault)
            self.judge()
        elif not desk.generation.over and desk.job.state is not State.STOPPING:
            info = desk.crew.info(worker)
            self._count(Fault(cause, info, None, 0, text, desk.now_s()))
            self._tell(self.record[-1])
        desk.bell.ring()

    def missing(self, worker: int) -> None:
        """A worker that was lost between its choice as a member and now."""
        desk = self._desk
        desk.generation.lost(worker, self._cause(worker), "", desk.now_s())
        self.judge()

    def abandon(self, worker: int, why: str) -> None:
        """Gives a member up that does not leave a fenced generation; part of the fault at hand."""
        desk = self._desk
        desk.crew.lost(worker)
        fault = desk.generation.lost(worker, Cause.HANG, why, desk.now_s())
        if fault is not None:
            desk.generation.faults.remove(fault)
            self._tell(fault)
        self._kill(worker)

    def judge(self, *, grace_over: bool = False) -> None:
        """Decides about the faults of the generation that are not decided yet."""
        desk, generation = self._desk, self._desk.generation
        if not generation.faults or desk.job.state is State.STOPPING or desk.job.state.is_final:
            return
        about = failure.Job(self._budget, desk.progress.done, generation.restore is not None)
        decision = failure.decide(generation.faults, self.record, about, grace_over=grace_over)
        match decision:
            case failure.Fail(error):
                if not self._fatal:  # it may be judged again before the machine has heard of it
                    desk.ports.probe.judged(failure.root_of(generation.faults))
                self._fatal = True
                desk.feed(ev.FaultFatal(error))
            case failure.Repair(root):
                self._repair(generation, root)
            case failure.Wait() if not grace_over:
                desk.tasks.spawn(self._judge_later(generation))

    def crashed(self) -> None:
        """A member's crash was noted in the generation."""
        self._tell(self._desk.generation.faults[-1])
        self.judge()

    def _repair(self, generation: Generation, root: Fault) -> None:
        desk = self._desk
        generation.fenced = True  # what its members say from now on is only their way out
        faults, generation.faults = generation.faults, []
        counted = [one for one in faults if one.cause in _LOSSES]
        for one in counted if root in counted else [*counted, root]:
            self._count(one)
        if root.cause is Cause.STATE and generation.restore is not None:
            self._exclude(generation.restore)
        gone = [one for one in faults if not desk.crew.alive(one.worker.index)]
        self._repairs.noticed(
            root.cause,
            [_who(one) for one in gone],
            generation.world_size,
            min(one.at_s for one in faults),
            desk.now_s(),
        )
        ranks = tuple(one.rank for one in gone if one.rank is not None)
        desk.feed(ev.FaultNoticed(generation.number, ranks))

    def _exclude(self, restore: Restore) -> None:
        """Its state could not be loaded: nobody begins from it again."""
        versions = {(slot.generation, slot.step) for slot in restore.slots}
        checkpoints = {restore.step} if restore.checkpoint else set()
        self.damaged = Damaged(
            self.damaged.versions | versions, self.damaged.checkpoints | checkpoints
        )

    def _explain(self, worker: int, detail: str) -> None:
        """The cluster says why a worker died whose death was known already."""
        if not detail:
            return
        for faults in (self._desk.generation.faults, self.record):
            for place, fault in enumerate(faults):
                if fault.worker.index == worker and not fault.detail:
                    faults[place] = replace(fault, detail=detail)
                    self._desk.see(Warned(failure.describe(faults[place])))
        self.judge()

    def _cause(self, worker: int) -> Cause:
        desk = self._desk
        node_id = desk.crew.info(worker).node_id
        if worker in self._condemned:
            return Cause.HANG
        if node_id in desk.crew.leaving:
            return Cause.PREEMPTED
        return Cause.PROCESS_LOST if node_id in desk.vaults else Cause.NODE_LOST

    async def _judge_later(self, generation: Generation) -> None:
        await self._desk.ports.clock.sleep(GRACE_S)
        if generation is self._desk.generation:
            self.judge(grace_over=True)

    def _kill(self, worker: int) -> None:
        killing = self._desk.tasks.spawn(self._killed(worker))
        self._kills.add(killing)
        killing.add_done_callback(self._kills.discard)

    async def _killed(self, worker: int) -> None:
        with suppress(GoneError):
            await self._desk.ask(worker, self._desk.ports.workers.kill(worker))

    def _count(self, fault: Fault) -> None:
        worker = fault.worker.index
        if fault.cause in _LOSSES and not self._desk.crew.alive(worker):
            if worker in self._dead:
                return
            self._dead.add(worker)
        self.record.append(fault)
        self._desk.ports.probe.judged(fault)
        self._desk.ports.note(
            "fault",
            cause=str(fault.cause),
            worker=asdict(fault.worker),
            rank=fault.rank,
            step=fault.step,
            generation=fault.generation,
            detail=(fault.detail.splitlines() or [""])[0],
        )

    def _tell(self, fault: Fault) -> None:
        text = failure.describe(fault)
        self._desk.see(FaultSeen(fault.cause, fault.worker, fault.rank, fault.step, text))


def _who(fault: Fault) -> str:
    return f"rank {fault.rank} on node {fault.worker.node} (pid {fault.worker.pid})"
