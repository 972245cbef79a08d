"""The job in numbers as it stands: everything that is told of it, in one place. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.orchestrator.metrics.goodput import Account, Times, Why
from rayzero.orchestrator.metrics.history import History
from rayzero.orchestrator.metrics.ranks import Ranks
from rayzero.orchestrator.metrics.replicas import Replicas
from rayzero.orchestrator.metrics.steps import Steps
from rayzero.orchestrator.metrics.troubles import Checkpoints, Troubles
from rayzero.orchestrator.notices import (
    Checkpointed,
    CheckpointFailed,
    FaultSeen,
    Notice,
    Repaired,
    Resized,
    Resumed,
    StateEntered,
)
from rayzero.orchestrator.policies.failure import Budget, Fault
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.states import State
from rayzero.workers.messages import Heartbeat, Report


@dataclass(frozen=True)
class Now:
    """A moment, by two clocks.

    Args:
        s: of the controller's clock, of which only differences mean anything.
        unix_s: Unix time.
    """

    s: float
    unix_s: float


@dataclass(frozen=True)
class Facts:
    """What is known of a job before it begins.

    Args:
        steps: how many it asks for; None: nobody knows.
        stage: the ZeRO stage; None without an engine config.
        replicas: whether steps are copied out of the ranks' processes.
        checkpoints: whether any are written as it trains.
    """

    name: str
    steps: int | None
    stage: int | None
    least: int
    most: int
    hang_timeout_s: float
    budget: Budget
    replicas: bool = True
    checkpoints: bool = False


class Tally:
    """Takes what an observer and a probe are told. It has no clock: every call says when it is."""

    def __init__(self, facts: Facts, now: Now) -> None:
        self.facts = facts
        self.began = now
        self.state = State.PENDING
        self.state_at = now
        self.generation = 0
        self.world_size = 0
        self.limits = (facts.least, facts.most)
        self.account = Account(now.s)
        self.steps = Steps()
        self.ranks = Ranks()
        self.troubles = Troubles(facts.budget)
        self.replicas = Replicas()
        self.checkpoints = Checkpoints(facts.checkpoints)
        self.history = History()
        self.stood_at: int | None = None
        """The step that an adopted run stood at, until it goes on."""

    def see(self, notice: Notice, now: Now) -> None:
        match notice:
            case StateEntered():
                self._enter(notice, now)
            case StepRecord():
                self._step(notice, now)
            case Repaired() | Resized():
                self._pass(notice, now)
            case FaultSeen():
                self._tell_fault(notice, now)
            case Resumed():
                self.steps.step = notice.step
                if notice.step != self.checkpoints.step:  # else its age is known
                    self.checkpoints.found(notice.step, now.unix_s)
            case Checkpointed():
                self._store(notice, now)
            case CheckpointFailed():
                self.checkpoints.failed += 1
            case _:
                pass

    def reported(self, report: Report) -> None:
        self.ranks.reported(report)

    def beat(self, heartbeat: Heartbeat, node: str) -> None:
        self.ranks.beats(heartbeat, node)

    def judged(self, fault: Fault) -> None:
        self.troubles.judged(fault)

    def limited(self, least: int, most: int) -> None:
        self.limits = (least, most)

    def sends(self, so: bool, now: Now) -> None:
        self.replicas.sends(so, now.unix_s)

    def copied(self, step: int, nbytes: int, now: Now) -> None:
        self.replicas.copied(step, nbytes, now.unix_s)

    def times(self, now: Now) -> Times:
        return self.account.at(now.s)

    def _enter(self, notice: StateEntered, now: Now) -> None:
        self.account.entered(notice.state, now.s)
        self.state, self.state_at = notice.state, now
        self.generation = notice.generation
        if notice.world_size != self.world_size:
            self.world_size = notice.world_size
            self.ranks.begin(notice.world_size)
        if notice.state is State.RUNNING:
            self.history.generations.append(
                {
                    "at_s": now.unix_s,
                    "generation": notice.generation,
                    "world_size": notice.world_size,
                }
            )

    def _step(self, record: StepRecord, now: Now) -> None:
        checkpoint_s = record.waits.get("checkpoint_s", 0.0)
        waits = {
            Why.DATA: record.waits.get("phases/data", 0.0),
            Why.MIRROR: max(0.0, record.waits.get("phases/mirror", 0.0) - checkpoint_s),
            Why.CHECKPOINT: checkpoint_s,
        }
        self.account.stepped(record.step, record.step_s, waits, now.s)
        if self.stood_at is not None:
            self.troubles.steps_redone += max(0, self.stood_at - record.step + 1)
            self.stood_at = None
        if record.loss is not None:
            if record.step <= self.steps.step:
                self.history.loss.rewind(record.step)
            self.history.loss.add(record.step, record.loss)
        self.steps.add(record, now.unix_s)
        self.checkpoints.stepped(now.unix_s)
        if self.facts.replicas:
            self.replicas.node.owe(now.unix_s)
        if record.mirrored_step is not None:
            self.replicas.mirrored(record.mirrored_step, record.mirrored_bytes, now.unix_s)

    def _pass(self, notice: Repaired | Resized, now: Now) -> None:
        entry: dict[str, object] = {
            "at_s": now.unix_s,
            "kind": "repair" if isinstance(notice, Repaired) else "resize",
            "cause": notice.cause if isinstance(notice, Repaired) else notice.reason,
            "step": notice.step,
            "steps_redone": notice.steps_redone if isinstance(notice, Repaired) else 0,
            "world_size_before": notice.world_size_before,
            "world_size": notice.world_size,
            "total_s": notice.total_s,
            "seconds": dict(notice.seconds),
        }
        self.history.ways.append(entry)
        if isinstance(notice, Repaired):
            self.troubles.repaired(notice)
        else:
            self.troubles.resizes += 1
        self.account.passed(notice.seconds, now.s)

    def _tell_fault(self, notice: FaultSeen, now: Now) -> None:
        entry = {"cause": notice.cause, "rank": notice.rank, "step": notice.step}
        self.history.faults.append({"at_s": now.unix_s, **entry, "text": notice.text})

    def _store(self, notice: Checkpointed, now: Now) -> None:
        self.checkpoints.stored(notice, now.unix_s)
        entry = {"step": notice.step, "bytes": notice.nbytes, "seconds": notice.seconds}
        self.history.checkpoints.append({"at_s": now.unix_s, **entry})
