"""The controller of the model of the repair protocol.

Its decisions are those of the product: the state machine (`machine.apply_event`), the failure
policy (`failure.decide`), the selection of the step (`recovery.select_recovery_step`) and of the
members (`membership.select_members`). Reduced here is what only waits: `control/reconfigure.py`,
the event queue and the bookkeeping of `control/generation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from rayzero.orchestrator import machine
from rayzero.orchestrator.machine import Instruction, State
from rayzero.orchestrator.policies import failure
from rayzero.orchestrator.policies.failure import Fault, FaultBudget, FaultCause
from rayzero.orchestrator.policies.membership import WorkerLimits, select_members
from rayzero.orchestrator.policies.recovery import (
    Excluded,
    FromWorkers,
    StoredSlot,
    select_recovery_step,
)
from rayzero.workers.messages import InProcessStateInfo, WorkerInfo
from rayzero.workers.vault.records import SlotInfo
from tests.workers.protocol_model import replace_worker
from tests.workers.protocol_state import (
    ASSIGN,
    DRAIN,
    FENCE,
    RANKS,
    Base,
    Controller,
    History,
    Ledger,
    ModelState,
    Mutation,
    Setting,
    Slot,
    Step,
    Worker,
    require,
)

MOST_GENERATIONS = 7
"""The first one, two for each fault, which may be seen only when the next one is formed, and one
for each new worker."""
LIMITS = WorkerLimits(1, RANKS)


def controller_steps(setting: Setting, model: ModelState) -> Iterator[Step]:
    """All that the controller may do next, or learn."""
    controller = model.controller
    for index, worker in enumerate(model.workers):
        if worker.place == "dead" and not worker.known_lost:
            yield Step(f"the controller learns of the loss of worker {index}", _lose(model, index))
    if controller.pending and not controller.fenced:
        recovering = _decide(controller, grace_over=True)
        yield Step("the grace period is over", model._replace(controller=recovering))
    if controller.events:
        yield Step(f"the controller handles {controller.events[0]}", _handle(model))
    if controller.phase:
        yield from _attempt_steps(setting, model)
    yield from _growth_steps(model)


def _growth_steps(model: ModelState) -> Iterator[Step]:
    """A new worker is ready. That is seen where members are selected, and while the job runs: then
    a resize is proposed."""
    workers, controller = model.workers, model.controller
    started = [it for it in workers if it.place != "out" and not it.known_lost]
    waiting = next((i for i, it in enumerate(workers) if it.place == "out"), None)
    if waiting is None or len(started) >= RANKS:
        return
    ready = model._replace(workers=replace_worker(workers, waiting, Worker("idle")))
    if controller.phase == "members":
        yield Step("a new worker is ready", ready, is_certain=False)
        return
    all_joined = all(it.joined for it in workers if it.is_member)
    if all_joined and controller.state is State.RUNNING and not controller.events:
        event = machine.ResizeRequested(controller.generation, "more workers")
        proposed = ready._replace(controller=_post(controller, event))
        text = "a new worker is ready: a resize begins"
        yield Step(text, _handle(proposed), is_certain=False)


def _lose(model: ModelState, index: int) -> ModelState:
    """`FailureHandler.on_worker_lost`."""
    worker, controller = model.workers[index], model.controller
    lost = worker._replace(known_lost=True, active=False, told=False)
    if worker.is_member:
        pending = (*controller.pending, "lost")
        controller = _decide(controller._replace(pending=pending), grace_over=False)
    return model._replace(workers=replace_worker(model.workers, index, lost), controller=controller)


def _decide(controller: Controller, *, grace_over: bool) -> Controller:
    """`FailureHandler.evaluate`: recovers from the pending faults, or waits for their cause."""
    if not _recovers(controller.pending, grace_over):
        return controller
    recovering = controller._replace(fenced=True, pending=())
    return _post(recovering, machine.FaultRecoverable(controller.generation))


@lru_cache(None)
def _recovers(pending: tuple[str, ...], grace_over: bool) -> bool:
    worker = WorkerInfo(0, "a", "a", "", 1)
    faults = [Fault(FaultCause(cause), worker, 0, 1, "") for cause in pending]
    budget = FaultBudget(100, 1.0)
    decision = failure.decide(faults, (), budget, steps=1, restored_step=0, grace_over=grace_over)
    return isinstance(decision, Fault)


def _post(controller: Controller, event: machine.Event) -> Controller:
    return controller._replace(events=(*controller.events, event))


def _handle(model: ModelState) -> ModelState:
    """`Controller._handle_event`."""
    event, *later = model.controller.events
    controller = model.controller._replace(events=tuple(later))
    model = model._replace(controller=controller)
    if getattr(event, "generation", controller.generation) < controller.generation:
        return model
    state, instructions = machine.apply_event(controller.state, event)
    model = model._replace(controller=controller._replace(state=state))
    for instruction in instructions:
        if instruction is Instruction.RECOVER:
            model = _begin(model, "fence", FENCE)
        elif instruction is Instruction.RESIZE:
            model = _begin(model, "drain", DRAIN)
    return model


def _begin(model: ModelState, phase: str, command: int) -> ModelState:
    """Begins an attempt in place of the present one: the active members are fenced or drained."""
    workers = tuple(
        it._replace(commands=it.commands | command) if it.active and it.is_alive else it
        for it in model.workers
    )
    controller = model.controller._replace(phase=phase)
    if command == FENCE:
        controller = controller._replace(fenced=True)
    return model._replace(workers=workers, controller=controller)


def _attempt_steps(setting: Setting, model: ModelState) -> Iterator[Step]:
    """`Reconfiguration._reconfigure`."""
    workers, controller = model.workers, model.controller
    if controller.phase in ("fence", "drain"):
        early = setting.mutation is Mutation.SELECT_BEFORE_LEFT
        if early or not any(it.active for it in workers):
            yield from _select_steps(setting, model)
    elif controller.phase == "members":
        numbered = _number_generation(model)
        yield Step("a generation is numbered, and opens its store", numbered)
        yield Step("a generation is assigned", _assign(setting, numbered))
    elif controller.phase == "store":
        yield Step("its store is open, and it is assigned", _assign(setting, model))
    elif all(it.joined for it in workers if it.is_member):
        formed = controller._replace(phase="")
        if not controller.fenced:
            formed = _post(formed, machine.GenerationFormed(controller.generation))
        yield Step("all have joined", model._replace(controller=formed))


def _select_steps(setting: Setting, model: ModelState) -> Iterator[Step]:
    """`RestoreSelector.select`."""
    workers = model.workers
    slots = tuple(it.slots for it in workers)
    left = tuple(
        (index, len(it.state)) for index, it in enumerate(workers) if it.told and it.is_member
    )
    world_size = sum(it.is_member for it in workers)
    generation = model.controller.generation, world_size
    finished = len(model.controller.finished)
    source = _newest(slots, left, generation, setting.whole, finished)
    if isinstance(source, FromWorkers):
        if all(workers[index].is_alive for index in source.workers):
            salvaged = _salvage(model, source.workers)
            yield Step("the newest step in the workers' memories is selected", salvaged)
            return
        source = _newest(slots, (), generation, setting.whole, finished)
    if not isinstance(source, FromWorkers):
        yield Step("the newest step in the vault is selected", _restore(model, source))


@lru_cache(None)
def _newest(
    slots: tuple[tuple[Slot, ...], ...],
    left: tuple[tuple[int, int], ...],
    cut_for: tuple[int, int],
    whole: bool,
    finished: int,
) -> Base | FromWorkers | None:
    """The newest state in slots; or the workers whose memories have a newer one."""
    held, ranks = [], dict[int, int]()
    for own in slots:
        for generation in {it.generation for it in own}:
            rank = ranks[generation] = ranks.get(generation, -1) + 1
            held += [
                StoredSlot(SlotInfo(generation, rank, it.world_size, len(it.state), 0, False), "")
                for it in own
                if it.generation == generation
            ]
    in_process = {index: InProcessStateInfo(step, whole, *cut_for) for index, step in left}
    source = select_recovery_step(held, in_process, None, Excluded(), finished)
    if source is None or isinstance(source, FromWorkers):
        return source
    generation = source.slots[0].generation
    chosen = [
        it
        for own in slots
        for it in own
        if (it.generation, len(it.state)) == (generation, source.step)
    ]
    require(len({(it.cut, it.state) for it in chosen}) == 1, "slots of several states are restored")
    return Base(chosen[0].state, generation, len(source.slots))


def _salvage(model: ModelState, sources: tuple[int, ...]) -> ModelState:
    """Copies the states in workers' memories into the vault."""
    workers = model.workers
    world_size = sum(it.is_member for it in workers) if len(sources) > 1 else 1
    for index in sources:
        worker = workers[index]
        slot = Slot(worker.generation, world_size, worker.cut, worker.state)
        others = tuple(it for it in worker.slots if it != slot)
        workers = replace_worker(workers, index, worker._replace(slots=(*others, slot)))
    first = workers[sources[0]]
    states = {(workers[index].cut, workers[index].state) for index in sources}
    require(len(states) == 1, "memories of several states are restored")
    base = Base(first.state, first.generation, world_size)
    return _restore(model._replace(workers=workers), base)


def _restore(model: ModelState, base: Base | None) -> ModelState:
    finished = model.controller.finished
    state = () if base is None else base.state
    require(state[: len(finished)] == finished, f"finished {finished}, restored {state}")
    check_samples(model.ledger, state)
    given_up = ((0, 0, 0),) * (len(model.ledger) - len(state))
    model = model._replace(ledger=(*model.ledger[: len(state)], *given_up))
    return model._replace(controller=model.controller._replace(phase="members", base=base))


def check_samples(ledger: Ledger, state: History) -> None:
    """The lines of a step's newest generation are those of the generation that made it."""
    for generation, (newest, lines, world_size) in zip(state, ledger, strict=False):
        require((newest, lines) == (generation, world_size), "samples are used twice, or not")


def _number_generation(model: ModelState) -> ModelState:
    """A generation of the ready workers, in place of the present one."""
    workers, controller = model.workers, model.controller
    ready = [
        WorkerInfo(index, "a", "a", "", index)
        for index, it in enumerate(workers)
        if it.place != "out" and not it.known_lost
    ]
    members = {index for index, it in enumerate(workers) if it.is_member}
    selection = select_members(ready, LIMITS, members)
    require(selection is not None, "no worker is left")
    chosen = frozenset[int]() if selection is None else selection.indices
    restored = () if controller.base is None else controller.base.state
    require(controller.generation < MOST_GENERATIONS, "the job is repaired again and again")
    return model._replace(
        workers=tuple(
            _outside_of_generation(it, controller.base)._replace(is_member=index in chosen)
            for index, it in enumerate(workers)
        ),
        controller=controller._replace(
            phase="store",
            generation=controller.generation + 1,
            fenced=False,
            pending=(),
            finished=max(controller.finished, restored, key=len),  # `JobProgress.start_generation`
        ),
    )


def _outside_of_generation(worker: Worker, base: Base | None) -> Worker:
    """What is left of a worker when its generation is over: see `explore` for the slots."""
    kept = ()
    if base is not None:
        version = base.generation, base.world_size, base.state
        kept = tuple(
            it for it in worker.slots if (it.generation, it.world_size, it.state) == version
        )
    if worker.place == "dead":
        return Worker("dead", known_lost=worker.known_lost, slots=kept)
    return Worker(
        worker.place,
        worker.generation,
        worker.base,
        worker.state,
        worker.cut,
        has_begun=worker.has_begun,
        slots=kept,
    )


def _assign(setting: Setting, model: ModelState) -> ModelState:
    """Sends the assignments. A member may have been lost since the generation was numbered."""
    waits_for_lost = setting.mutation is Mutation.WAIT_FOR_LOST
    workers = tuple(
        it._replace(
            active=waits_for_lost or not it.known_lost, commands=ASSIGN if it.is_alive else 0
        )
        if it.is_member
        else it
        for it in model.workers
    )
    return model._replace(workers=workers, controller=model.controller._replace(phase="join"))


def is_complete(model: ModelState) -> bool:
    """Whether all ranks of the newest generation wait in the step after the last one."""
    members = [it for it in model.workers if it.is_member]
    controller = model.controller
    return (
        all(it.place == "compute" and len(it.state) == len(model.ledger) for it in members)
        and not any(it.copying for it in members)
        and not any(it.commands & ~DRAIN for it in members)
        and controller.state in (State.RUNNING, State.RESIZING)
        and not controller.events
    )
