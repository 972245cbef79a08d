"""A job that is killed, resized and drained at given steps: a plan, and the controller for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import parse_fault
from rayzero.workers.messages import Divided, Prepared, Stopped
from rayzero.workers.vault.records import Restore
from tests.workers.local_controller import LocalController
from tests.workers.local_workers import LocalWorkers
from tests.workers.survivor_jobs import gate_files

Kind = Literal[
    "kill",
    "stop",
    "kill_in_repair",
    "replace",
    "drain",
    "grow",
    "shrink",
    "leave",
    "return",
    "divide",
    "look",
]
PHASES = ["data", "forward", "backward", "reduce", "update", "publish", "mirror"]
SPACING = 3
"""Steps from one event to the next."""
MOST = 3
"""Members at a time."""


@dataclass(frozen=True)
class Event:
    """What happens in a step.

    Attributes:
        kind: `replace` is a kill, with another worker in the next generation. Who leaves waits for
            a generation that it is in, until `return`. `divide` gives the ranks other
            shares of the samples, `look` changes nothing.
        faults: what is injected; for the others the ranks wait for the controller before the step.
    """

    step: int
    kind: Kind
    faults: tuple[str, ...] = ()


def draw(seed: int, count: int) -> list[Event]:
    """Random events for a job that begins with all members."""
    rng = random.Random(seed)
    events: list[Event] = []
    world, waiting = MOST, 0
    while len(events) < count:
        step = SPACING * (len(events) + 1)
        possible: list[Kind] = ["drain"]
        if world < MOST:
            possible += ["grow"] * 3 + ["return"] * waiting
        if world > 1:
            possible += ["kill", "kill", "kill", "stop", "replace", "replace", "shrink"]
            possible += [] if waiting else ["leave"]
        if world > 2:
            possible += ["kill_in_repair", "kill_in_repair"]
        kind = rng.choice(possible)
        faults = draw_faults(rng, kind, step, world)
        waiting += (kind == "leave") - (kind == "return")
        lost = len(faults) + (kind in ("shrink", "leave"))
        world += (kind in ("grow", "return", "replace")) - lost
        events.append(Event(step, kind, faults))
    return events


def draw_faults(rng: random.Random, kind: Kind, step: int, world: int) -> tuple[str, ...]:
    rank, phase = rng.randrange(world), rng.choice(PHASES)
    if kind in ("kill", "stop", "replace"):
        return (fault("stop" if kind == "stop" else "kill", rank, step, phase),)
    if kind == "kill_in_repair":
        second = fault("kill", rng.randrange(world - 1), step, rng.choice(["join", "load"]))
        return fault("kill", rank, step, phase), second
    return ()


def fault(kind: str, rank: int, step: int, phase: str) -> str:
    return str(parse_fault(f'{kind}(rank={rank}, step={step}, phase="{phase}")'))


class EventController(LocalController):
    """Makes the events happen, one after the other.

    Attributes:
        starts: of each generation, its world size and the step that it starts from.
    """

    def __init__(
        self,
        local: LocalWorkers,
        events: Sequence[Event],
        seed: int | None,
        look: Callable[[list[int]], None] = lambda pids: None,
    ) -> None:
        """
        Args:
            seed: of the members' order; None: new ones are appended.
            look: called with the processes of the ranks, which wait.
        """
        super().__init__(local)
        self.starts: list[tuple[int, int]] = []
        self._look = look
        self._folder = Path(local.setup.output_dir)
        self._events = [event for event in events if not event.faults]
        self._replaced = [event for event in events if event.kind == "replace"]
        self._rng = None if seed is None else random.Random(seed)
        self._draining: Event | None = None
        self._waiting: list[int] = []

    @property
    def divided(self) -> int:
        """How often the ranks have agreed on other shares."""
        return sum(isinstance(it, Divided) for them in self._local.seen.values() for it in them)

    def _act(self, generation: int) -> None:
        """Lets the ranks go on once all of them wait for the next event."""
        if not self._events or self._draining:
            return
        event = self._events[0]
        arrived, opened = gate_files(self._folder, event.step)
        pids = [self._local.workers[index].pid for index in self._members]
        if not all(arrived.with_name(f"{arrived.name}-{pid}").exists() for pid in pids):
            return
        self._events.pop(0)
        if event.kind == "look":
            self._look(pids)
        elif event.kind == "divide":
            shares = [2 ** (event.step + number) % 7 for number, _ in enumerate(self._members)]
            for index in self._members:
                args = generation, [share / sum(shares) for share in shares]
                self._local.workers[index].call("divide", *args)
        else:
            self._draining = event
            for index in self._members:
                self._local.workers[index].call("drain", generation)
        opened.touch()

    def _fence(self, generation: int) -> None:
        """Not after a drain: all have left."""
        if self._draining is None:
            super()._fence(generation)
            return
        ends = [self._local.wait_end(index, generation) for index in self._members]
        if not all(isinstance(end, Stopped) for end in ends):
            self.wrong.append(f"drain of {self._draining}: {ends}")
        self._generation_members = self._members

    def _prepare(self, index: int, members: Sequence[int]) -> None:
        """Calls a new function ahead of its generation, which begins when it waits for that, or
        before."""
        self._local.prepare(index, members.index(index), len(members))
        if self._rng is None or self._rng.random() < 0.5:
            self._local.wait(index, lambda message: isinstance(message, Prepared))

    def _choose_members(self, restore: Restore | None) -> None:
        """Those that are left, in another order, changed as the event says."""
        members, event = [*self._members], self._draining
        for index in {*self._generation_members}.difference(members):
            self._local.workers.pop(index).end()
        self._draining = None
        fired = {record.fault for record in FaultRecord(self._folder).read()}
        replaced = [event for event in self._replaced if fired.issuperset(event.faults)]
        self._replaced = [event for event in self._replaced if event not in replaced]
        if self._rng is not None:
            self._rng.shuffle(members)
        if event is not None and event.kind == "shrink":
            self._local.workers.pop(members.pop()).end()
        if event is not None and event.kind == "leave":
            self._waiting.append(members.pop())
        if event is not None and event.kind == "return":
            members.append(self._waiting.pop())
        grows = event is not None and event.kind == "grow"
        new = [self._local.start_worker() for _ in range(len(replaced) + grows)]
        members += new
        if self._rng is not None:
            self._rng.shuffle(members)
        if grows and restore is not None:
            self._prepare(new[-1], members)
        self._members = members
        self.starts.append((len(members), restore.step if restore else 0))
