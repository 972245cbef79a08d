"""A pure model of the repair protocol: what a rank does, and what may happen to it.

Each function maps a state to a state, without threads and without torch; `rank_steps` lists all
that may happen next to the workers, `protocol_controller` what the controller may do next.

A collective is a rendezvous. A rank completes it when all members of its generation take part,
also if one has died since; or it fails, if a member has died or has closed its connections. So a
collective completes for some ranks and fails for others. A fence makes it fail wherever a rank is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from rayzero.workers.messages import Assignment, InProcessStateInfo
from rayzero.workers.retained_state import why_not_held
from rayzero.workers.vault.records import Restore, SlotRef
from tests.workers.protocol_state import (
    ASSIGN,
    DRAIN,
    FENCE,
    RANKS,
    WAITS,
    Base,
    Controller,
    Ledger,
    ModelState,
    Mutation,
    Setting,
    Slot,
    Step,
    Worker,
    require,
)


def replace_worker(workers: tuple[Worker, ...], index: int, worker: Worker) -> tuple[Worker, ...]:
    return (*workers[:index], worker, *workers[index + 1 :])


def with_worker(model: ModelState, index: int, worker: Worker) -> ModelState:
    return model._replace(workers=replace_worker(model.workers, index, worker))


def rank_steps(setting: Setting, model: ModelState) -> Iterator[Step]:
    """All that may happen next to one worker. Equal workers are interchangeable: one is enough."""
    for index, worker in enumerate(model.workers):
        if worker.is_alive and worker not in model.workers[:index]:
            yield from worker_steps(setting, model, index)


def worker_steps(setting: Setting, model: ModelState, index: int) -> Iterator[Step]:
    """All that may happen next to this one."""
    worker, name = model.workers[index], f"worker {index}"
    if worker.commands & ASSIGN:
        assigned = with_worker(model, index, _enter(setting, model, worker))
        yield Step(f"an assignment arrives at {name}", assigned)
    if worker.place in WAITS:
        for result in _complete(setting, model, index, worker):
            yield Step(f"{name} completes {worker.place}", result)
    elif worker.place == "start":
        begun = worker._replace(place="compute", sent=1, has_begun=True)
        yield Step(f"{name} begins its first step", with_worker(model, index, begun))
    if worker.copying:
        text, result = _copy(setting, model, index, worker)
        yield Step(f"{name} {text}", result)
    yield from _ends(setting, model, index, worker, name)


def _ends(
    setting: Setting, model: ModelState, index: int, worker: Worker, name: str
) -> Iterator[Step]:
    """How its part in the generation may end: it is fenced, it sees that a peer is gone, or it has
    a fault."""
    fenced = bool(worker.commands & FENCE) and (
        not worker.commands & ASSIGN or setting.mutation is Mutation.FENCE_BEFORE_ASSIGN
    )
    if fenced and worker.place in ("idle", "parked"):
        ignored = worker._replace(commands=worker.commands & ~FENCE)
        yield Step(f"{name} ignores a fence", with_worker(model, index, ignored))
    elif fenced and (worker.place != "mirror" or setting.beside):
        for result in _fail(setting, model, index, worker, error=False):
            yield Step(f"{name} is fenced in {worker.place}", result)
    if worker.place in WAITS:
        if any(it.is_member and (it.place == "dead" or it.closed) for it in model.workers):
            for result in _fail(setting, model, index, worker, error=True):
                yield Step(f"{worker.place} fails on {name}", result, is_certain=False)
        if model.faults:
            for result in _fail(setting, model, index, worker, error=True):
                text = f"the connections of {name} break in {worker.place}"
                broken = result._replace(faults=model.faults - 1)
                yield Step(text, broken, is_certain=False)
    if model.faults:
        left = Worker(
            "dead",
            sent=worker.sent,
            reported=worker.reported,
            asks=worker.asks,
            is_member=worker.is_member,
            active=worker.active,
            joined=worker.joined,
            slots=worker.slots,
        )
        result = with_worker(model, index, left)._replace(faults=model.faults - 1)
        yield Step(f"{name} is killed in {worker.place}", result, is_certain=False)


def _fail(
    setting: Setting, model: ModelState, index: int, worker: Worker, *, error: bool
) -> Iterator[ModelState]:
    """Its process group is broken. In a vote, that may also be noticed after the vote and the
    update, when the gather of the weights is launched (stages 1 and 2): the update is revoked."""
    worker = worker._replace(drained=False)  # the mirror that a drain waits for is given up
    yield leave(setting, model, index, worker, error=error)
    if worker.place == "vote" and _all_take_part(model, worker):
        revoked = worker._replace(state=(), cut=0)
        yield leave(setting, model, index, revoked, error=error)


def leave(
    setting: Setting, model: ModelState, index: int, worker: Worker, *, error: bool
) -> ModelState:
    """The step in progress is lost, and the rank leaves its generation: it closes its connections,
    posts the message of that, and waits for the next generation, if its function outlives this one.
    What its mirror has not committed is given up.

    `error`: it has seen a collective fail; otherwise the generation was ended, or drained.
    """
    controller = model.controller
    if worker.copying == 1 and setting.mutation is not Mutation.REPORT_BEFORE_MIRROR:
        controller, worker = _report(controller, model.workers, worker)
    continues = worker.has_begun
    if setting.mutation is Mutation.FENCE_UNWINDS and not error and not worker.drained:
        continues = False
    left = worker._replace(
        place="parked" if continues else "idle",
        copying=0,
        closed=not worker.drained,
        drained=False,
        active=False,
        told=worker.cut > 0,
        commands=0,
    )
    if error and not controller.fenced:
        controller = controller._replace(pending=(*controller.pending, "collective"))
    return with_worker(model, index, left)._replace(controller=controller)


def _enter(setting: Setting, model: ModelState, worker: Worker) -> Worker:
    """An assignment has arrived: the function continues with a re-cut engine, or is called. The
    state is read now: slots do not change between the assignments and the first vote."""
    controller = model.controller
    base = controller.base
    resumes = worker.place == "parked" and base is not None
    require(resumes or not worker.has_begun, "the function of a survivor is called again")
    if base is not None:
        held = sum(
            any((it.generation, it.state) == (base.generation, base.state) for it in other.slots)
            for other in model.workers
        )
        require(held >= base.world_size, "a slot of the restored step is gone")
    if resumes and _keeps_state(setting, worker, base):
        require(base is None or worker.state == base.state, "a rank keeps another state")
    return Worker(
        "join",
        controller.generation,
        base,
        () if base is None else base.state,
        controller.generation,
        sent=0,
        has_begun=resumes,
        is_member=True,
        active=worker.active,
        commands=worker.commands & ~ASSIGN,
        slots=worker.slots,
    )


def _keeps_state(setting: Setting, worker: Worker, base: Base | None) -> bool:
    """By the rule of the product: `why_not_held`."""
    if not worker.cut:
        return False
    if setting.mutation is Mutation.KEEP_ANY_STATE:
        return True
    step, before = len(worker.state), worker.base
    return not _why_not_held(step, setting.whole, worker.generation, before, base)


@lru_cache(None)
def _why_not_held(
    step: int, whole: bool, generation: int, before: Base | None, base: Base | None
) -> str:
    assignment = Assignment(0, 0, 0, "", generation, 0, "", 0, _restore(before))
    left = InProcessStateInfo(step, whole, generation, RANKS)
    return why_not_held(left, assignment, _restore(base), altered=False)


def _restore(base: Base | None) -> Restore | None:
    if base is None:
        return None
    step, world_size = len(base.state), base.world_size
    return Restore(step, tuple(SlotRef(base.generation, r, step, "") for r in range(world_size)))


def _all_take_part(model: ModelState, worker: Worker) -> bool:
    """Whether all members take part in the collective in which a rank waits: in the same one."""
    members = [it for it in model.workers if it.is_member]
    if any(it.sent < worker.sent for it in members):
        return False
    for it in members:
        if it.sent == worker.sent and it.place in WAITS:
            same = (it.place, it.state) == (worker.place, worker.state)
            here, there = f"{worker.place} of {worker.state}", f"{it.place} of {it.state}"
            require(same, f"ranks meet in {here} and {there}")
    return True


def _complete(
    setting: Setting, model: ModelState, index: int, worker: Worker
) -> Iterator[ModelState]:
    """The collective that it waits in has completed on this rank."""
    skips_vote = worker.place == "vote" and setting.mutation is Mutation.COMMIT_WITHOUT_VOTE
    if not (_all_take_part(model, worker) or skips_vote):
        return
    if worker.place == "join":
        place = "compute" if worker.has_begun else "start"
        if worker.has_begun and setting.mutation is Mutation.MEET_WITHIN_STEP:
            place = "vote"
        sent = int(worker.has_begun)
        yield with_worker(model, index, worker._replace(place=place, sent=sent, joined=True))
    elif len(worker.state) == len(model.ledger):
        return  # the end of what is explored
    elif worker.place == "compute":
        if worker.copying and setting.mutation is not Mutation.VOTE_BEFORE_MIRROR:
            return
        world_size = sum(it.is_member for it in model.workers)
        ledger = _write_line(model.ledger, len(worker.state), worker.generation, world_size)
        votes = worker._replace(place="vote", sent=worker.sent + 1)
        yield with_worker(model, index, votes)._replace(ledger=ledger)
        if worker.commands & DRAIN:  # the request has arrived by then
            asks = votes._replace(asks=True, commands=worker.commands & ~DRAIN)
            yield with_worker(model, index, asks)._replace(ledger=ledger)
    else:
        state = (*worker.state, worker.generation)
        agreed = any(it.asks for it in model.workers if it.is_member)
        committed = worker._replace(place="mirror", state=state, drained=agreed)
        yield _begin_mirror(setting, model, index, committed)


def _write_line(ledger: Ledger, step: int, generation: int, world_size: int) -> Ledger:
    """A rank's line for a step, before its vote."""
    newest, lines, _ = ledger[step]
    line = (generation, lines + 1 if newest == generation else 1, world_size)
    return (*ledger[:step], line, *ledger[step + 1 :])


def _begin_mirror(setting: Setting, model: ModelState, index: int, worker: Worker) -> ModelState:
    """Announces to the vault what the vote has shown, and begins to overwrite the oldest slot. All
    workers share a vault: it releases the slots of all of them."""
    generation, base, kept = worker.generation, worker.base, model.workers
    if worker.mirrors == 1 or setting.mutation is Mutation.EARLY_RELEASE:
        kept = tuple(
            it._replace(slots=tuple(s for s in it.slots if s.generation >= generation))
            for it in kept
        )
    elif worker.mirrors == 0 and base is not None:
        step = len(base.state)
        kept = tuple(
            it._replace(
                slots=tuple(
                    s for s in it.slots if s.generation >= generation or len(s.state) >= step
                )
            )
            for it in kept
        )
    slots = kept[index].slots
    own = [it for it in slots if it.generation == generation]
    kept_slots = 0 if setting.mutation is Mutation.ONE_SLOT else 1
    overwritten = own[: len(own) - kept_slots]
    slots = tuple(it for it in slots if it not in overwritten)
    worker = worker._replace(slots=slots, copying=2, mirrors=min(2, worker.mirrors + 1))
    model = model._replace(workers=replace_worker(kept, index, worker))
    if setting.beside and not worker.drained:
        return _begin_step(setting, model, index, worker)
    return model


def _copy(
    setting: Setting, model: ModelState, index: int, worker: Worker
) -> tuple[str, ModelState]:
    """The next act of the mirror: its commit, then the report of its step."""
    commits = (worker.copying == 2) is (setting.mutation is not Mutation.REPORT_BEFORE_MIRROR)
    if commits:
        is_current = worker.generation == model.controller.generation
        require(is_current, "a slot of a generation that is over is written")
        world_size = sum(it.is_member for it in model.workers)
        slot = Slot(worker.generation, world_size, worker.cut, worker.state)
        worker = worker._replace(slots=(*worker.slots, slot))
    else:
        controller, worker = _report(model.controller, model.workers, worker)
        model = model._replace(controller=controller)
    worker = worker._replace(copying=worker.copying - 1)
    text = "commits its slot" if commits else "reports its step"
    if worker.copying or worker.place != "mirror":
        return text, with_worker(model, index, worker)
    return text, _begin_step(setting, model, index, worker)


def _report(
    controller: Controller, workers: tuple[Worker, ...], worker: Worker
) -> tuple[Controller, Worker]:
    """The report of the last step reaches the controller at once. Later, less is finished."""
    step, finished = len(worker.state), controller.finished
    others = sum(it.is_member and it.reported >= step for it in workers)
    worker = worker._replace(reported=step)
    if others == sum(it.is_member for it in workers) - 1 and step > len(finished):
        require(worker.state[: len(finished)] == finished, "a finished step is done again")
        controller = controller._replace(finished=worker.state)
    return controller, worker


def _begin_step(setting: Setting, model: ModelState, index: int, worker: Worker) -> ModelState:
    """Where the next step begins, a rank leaves a drained generation."""
    if worker.drained:
        return leave(setting, model, index, worker, error=False)
    return with_worker(model, index, worker._replace(place="compute", sent=worker.sent + 1))
