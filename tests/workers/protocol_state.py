"""The state of the model of the repair protocol: see `protocol_model`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from rayzero.orchestrator.machine import Event, State

RANKS = 3
STEPS = 2
"""How many are explored: a run is complete when all ranks wait in the step after the last one."""

History: TypeAlias = tuple[int, ...]
"""A training state: for each of its steps, the generation that made it. Two states of one step that
were made by different generations differ: in rounding, and in the split of the samples."""


class Mutation(StrEnum):
    """A defect that the exploration has to find."""

    NONE = "none"
    REPORT_BEFORE_MIRROR = "a step is reported before it is mirrored"
    COMMIT_WITHOUT_VOTE = "a step is committed without the vote"
    MEET_WITHIN_STEP = "a survivor continues the lost step where it broke"
    ONE_SLOT = "a step's mirror overwrites that of the step before"
    VOTE_BEFORE_MIRROR = "a rank votes before its mirror of the step before is complete"
    EARLY_RELEASE = "slots of older generations are released at the first mirror"
    KEEP_ANY_STATE = "a survivor keeps its state, whatever step is restored"
    FENCE_UNWINDS = "a fence unwinds the training function"
    SELECT_BEFORE_LEFT = "the step to restore is selected before all have left"
    FENCE_BEFORE_ASSIGN = "a fence may overtake the assignment to its generation"
    WAIT_FOR_LOST = "a member that was lost before it was assigned is waited for"


@dataclass(frozen=True)
class Setting:
    """What is explored.

    Args:
        beside: the mirror of a step is copied beside the next one (on a GPU).
        whole: each rank has the whole state (stage 0).
        begins: the first step of the job is among them: the only slot is of its beginning.
        faults: kills and breaks, together.
        newcomers: new workers that may become ready, where one was lost.
    """

    beside: bool = False
    whole: bool = False
    begins: bool = False
    faults: int = 2
    newcomers: int = 1
    mutation: Mutation = Mutation.NONE


class Slot(NamedTuple):
    """A complete slot. `cut`: the generation whose ranks the part of the state was cut for."""

    generation: int
    world_size: int
    cut: int
    state: History


class Base(NamedTuple):
    """The state that a generation starts from: that of the slots of a generation."""

    state: History
    generation: int
    world_size: int


ASSIGN, FENCE, DRAIN = 1, 2, 4
"""Commands that the controller has sent to a worker, and that have not arrived."""

WAITS = ("join", "compute", "vote")
"""Where a rank waits for its peers: the rendezvous; the collectives of forward and backward, and
the gather of the weights of the step before; the vote."""


class Worker(NamedTuple):
    """One worker: its process, what its vault holds of it, and what the controller knows of it.

    Args:
        place: `out` (not started), `idle` (its function does not run), `parked` (its function waits
            for the next generation), `start` (it runs to its first step), one of WAITS, `mirror`
            (the step is committed, its slot is written, it is reported), or `dead`.
        generation, base: that it was assigned last, and the state that this started from.
        state, cut: in its memory; `cut` is 0 if there is none that can be used.
        sent: the number of the last collective of its generation that it took part in; 0 is the
            rendezvous, -1 none.
        copying: 2: the last step's mirror is not complete; 1: not reported; 0: neither.
        mirrors: in this generation, up to 2.
        reported: the newest step that it has reported in this generation.
        closed: its connections are.
        asks: its vote asks for a drain; `drained`: all have agreed.
        has_begun: its function has begun a step, so that it outlives its generation.
        is_member: of the controller's newest generation.
        active, told, joined: as a member: it has not left; it has, with a state in its memory; it
            has joined, with the state loaded.
        known_lost: the controller knows that it is dead.
        commands: that have not arrived.
        slots: complete ones, by step; they outlive the process.
    """

    place: str
    generation: int = 0
    base: Base | None = None
    state: History = ()
    cut: int = 0
    sent: int = -1
    copying: int = 0
    mirrors: int = 0
    reported: int = 0
    closed: bool = False
    asks: bool = False
    drained: bool = False
    has_begun: bool = False
    is_member: bool = False
    active: bool = False
    told: bool = False
    joined: bool = False
    known_lost: bool = False
    commands: int = 0
    slots: tuple[Slot, ...] = ()

    @property
    def is_alive(self) -> bool:
        return self.place not in ("dead", "out")


class Controller(NamedTuple):
    """The controller's state.

    Args:
        phase: of the attempt to form a generation: `fence`, `drain`, `members` (the step is
            selected), `store` (the generation is numbered, its store is being opened), `join`; or
            empty, if there is no attempt.
        base: the state that the newest generation starts from, or the next one will.
        events: posted to the state machine, and not handled yet.
        pending: causes of faults of the newest generation that the policy has not decided.
        finished: the state of the newest step that all ranks of a generation have reported.
    """

    state: State
    generation: int
    phase: str = ""
    base: Base | None = None
    events: tuple[Event, ...] = ()
    fenced: bool = False
    pending: tuple[str, ...] = ()
    finished: History = ()


Ledger: TypeAlias = tuple[tuple[int, int, int], ...]
"""For each step, the newest generation with lines for it, how many of its ranks wrote one, and how
many ranks it has."""


class ModelState(NamedTuple):
    """The whole: `faults` is how many may still happen."""

    workers: tuple[Worker, ...]
    controller: Controller
    ledger: Ledger
    faults: int


class Step(NamedTuple):
    """What may happen next. `is_certain`: it will, if nothing else does. A fault may never happen,
    a new worker never come, and with NCCL a rank does not see that its peer is gone."""

    text: str
    result: ModelState
    is_certain: bool = True


class ProtocolError(AssertionError):
    """The protocol has done what it must not."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise ProtocolError(text)


def initial_state(setting: Setting) -> ModelState:
    """The first generation begins a step, which is its third: its ranks have two slots each. Or its
    first one, with one slot."""
    slots = tuple(Slot(1, RANKS, 1, (1,) * step) for step in (1, 2))
    state, reported, mirrors = (1, 1), 2, 2
    if setting.begins:
        slots, state, reported, mirrors = (Slot(1, RANKS, 1, ()),), (), 0, 1
    member = Worker(
        "compute",
        1,
        state=state,
        cut=1,
        sent=1,
        mirrors=mirrors,
        reported=reported,
        has_begun=True,
        is_member=True,
        active=True,
        joined=True,
        slots=slots,
    )
    workers = (*(member for _ in range(RANKS)), *(Worker("out") for _ in range(setting.newcomers)))
    last_step = len(state) + STEPS
    ledger = (((1, RANKS, RANKS),) * last_step)[: len(state)] + ((0, 0, 0),) * STEPS
    controller = Controller(State.RUNNING, 1, finished=state)
    return ModelState(workers, controller, ledger, setting.faults)
