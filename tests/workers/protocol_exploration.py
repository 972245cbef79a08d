"""Explores all states of the model of the repair protocol, breadth first.

Four reductions keep their number small. None of them hides a state that must not be:

- *Order of workers.* Nothing depends on which worker is which, so states that differ in the order
  of their workers are one.
- *Joined actions.* What a rank does between two acts that others see is one act: to complete a
  collective and to take part in the next one; to vote, update, publish and begin the mirror; to
  lose a step, close its connections and post the message of that. A rank that is killed in between
  is as one that is killed after all of it, whose peers see the failure at once. Forward, backward
  and the reduction are one collective: a rank changes nothing between them. A fence that arrives
  while the slot is written takes effect where the next step begins, as in the product. A report
  arrives at once: the later it does, the less is finished, and may be lost.
- *What cannot be read again.* When a generation is numbered, the earlier ones are over: nobody
  writes their slots any more (which is checked), and the newest complete version was selected. An
  older one could be read only after a violation, an incomplete one stays incomplete, so all but the
  selected version are dropped.
- *Independent steps.* Once no fault is left, an act that nothing else can prevent, and that
  prevents and changes nothing else that may happen next, is taken first: an assignment that
  arrives, a step of a mirror in the training thread; in a generation that has no dead, no closed
  and no fenced member and no undecided fault, any act of one rank. What may begin a resize is tried
  at each of them: the request reaches the ranks at any later vote. With a fault left nothing is
  left out, because a kill depends on the order of everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from tests.workers.protocol_controller import check_samples, controller_steps, is_complete
from tests.workers.protocol_model import rank_steps, worker_steps
from tests.workers.protocol_state import (
    ASSIGN,
    FENCE,
    Controller,
    History,
    Ledger,
    ModelState,
    Mutation,
    ProtocolError,
    Setting,
    Step,
    Worker,
    initial_state,
    require,
)

T = TypeVar("T", bound=Hashable)
Key: TypeAlias = tuple[tuple[int, ...], int, int, int]
Ancestry: TypeAlias = dict[Key, tuple[Key, str] | None]


class Numbers(Generic[T]):
    """Numbers for values: equal ones have the same. Most values are the same objects as before,
    which are found without comparing them."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._by_value: dict[T, int] = {}
        self._by_identity: dict[int, int] = {}  # of objects in `values`

    def __call__(self, value: T) -> int:
        number = self._by_identity.get(id(value))
        if number is None:
            number = self._by_value.setdefault(value, len(self.values))
            if number == len(self.values):
                self.values.append(value)
                self._by_identity[id(value)] = number
        return number


class StateKeys:
    """A state as a few small numbers, the same for each order of the workers."""

    def __init__(self) -> None:
        self._workers = Numbers[Worker]()
        self._controllers = Numbers[Controller]()
        self._ledgers = Numbers[Ledger]()

    def key(self, model: ModelState) -> Key:
        workers = tuple(sorted(map(self._workers, model.workers)))
        return (
            workers,
            self._controllers(model.controller),
            self._ledgers(model.ledger),
            model.faults,
        )

    def state(self, key: Key) -> ModelState:
        workers, controller, ledger, faults = key
        return ModelState(
            tuple(map(self._workers.values.__getitem__, workers)),
            self._controllers.values[controller],
            self._ledgers.values[ledger],
            faults,
        )


class Explored(NamedTuple):
    """Args:
    states: their number.
    ends: the states of the training with which runs end, and by how many ranks.
    steps: what has happened somewhere.
    """

    states: int
    ends: frozenset[tuple[History, int]]
    steps: frozenset[str]


def explore(setting: Setting, *, reduces: bool = True) -> Explored:
    """Visits every state that can be reached. Raises ProtocolError with the shortest way to a state
    that must not be.

    It ends, so no run goes on for ever without a fault: each act brings a rank, a generation or the
    controller forward, and the number of generations is limited.

    Args:
        reduces: independent steps are taken first.
    """
    keys = StateKeys()
    first = keys.key(initial_state(setting))
    came_from: Ancestry = {first: None}
    waiting, ends, happened = [first], set[tuple[History, int]](), set[str]()
    for key in waiting:  # which grows
        model = keys.state(key)
        try:
            steps = list(_next_steps(setting, model, reduces=reduces))
            ends.update(_check_progress(model, any(it.is_certain for it in steps)))
        except ProtocolError as error:
            raise ProtocolError(f"{error}\n{_trace(came_from, key)}\n{model}") from None
        for text, result, _ in steps:
            happened.add(text)
            reached = keys.key(result)
            if reached not in came_from:
                came_from[reached] = key, text
                waiting.append(reached)
    return Explored(len(waiting), frozenset(ends), frozenset(happened))


def _next_steps(setting: Setting, model: ModelState, *, reduces: bool) -> Iterator[Step]:
    if reduces and not model.faults and (first := _independent_steps(setting, model)):
        return iter(first)
    return chain(rank_steps(setting, model), controller_steps(setting, model))


def _independent_steps(setting: Setting, model: ModelState) -> list[Step]:
    """Those to take first, when no fault is left; none, if there are no such ones."""
    workers, controller = model.workers, model.controller
    for index, worker in enumerate(workers):
        is_written = worker.place == "mirror" and not setting.beside
        enters = worker.commands == ASSIGN and worker.is_alive
        if is_written or (enters and setting.mutation is not Mutation.FENCE_BEFORE_ASSIGN):
            return list(worker_steps(setting, model, index))
    ends = controller.fenced or controller.pending
    if ends or any(
        it.place == "dead" or it.closed or it.commands & FENCE for it in workers if it.is_member
    ):
        return []
    ahead = list(controller_steps(setting, model))
    if ahead and (controller.events or controller.phase == "join"):
        return ahead
    for index, worker in enumerate(workers):
        if worker.active and (steps := list(worker_steps(setting, model, index))):
            return steps + ahead
    return []


def _check_progress(model: ModelState, goes_on: bool) -> Iterator[tuple[History, int]]:
    """The end of a run, which is complete. That a run goes on may depend on nothing that may never
    happen."""
    if not (is_complete(model) and model.controller.phase in ("", "drain")):
        require(goes_on, "no worker can go on, and the job is not complete")
        return
    members = [it for it in model.workers if it.is_member]
    (state,) = {it.state for it in members}
    require(model.controller.finished == state, "the last step is not reported by all")
    check_samples(model.ledger, state)
    yield state, len(members)


def _trace(came_from: Ancestry, key: Key) -> str:
    """The steps that lead there; workers are numbered anew after each of them."""
    lines: list[str] = []
    while (link := came_from[key]) is not None:
        key, text = link
        lines.append(text)
    return "\n".join(reversed(lines))
