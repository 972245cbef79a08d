"""A cluster of simulated workers in a process of its own, for `control_plane`.

No torch, no Ray: a worker is a row, and says what a real one says, when it says it. What workers
say goes in batches through a pipe; commands, their answers and what vaults notice through another.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from rayzero.workers.messages import (
    Heartbeat,
    Joined,
    Restored,
    StepReport,
    Stopped,
    WorkerInfo,
    WorkerMessage,
)
from rayzero.workers.vault.records import ConnectionLost, SlotInfo

START_S = 0.3
"""From a replacement's being asked for to its being ready."""
STRIKE_AGAIN_S = 0.02
SLOT_BYTES = 2**28
PIECE = 32
"""Workers whose words are packed together."""
GAUGES = (
    *("loss", "lr", "grad_norm", "step_samples", "step_tokens", "skipped", "checkpoint_s"),
    *("resident_bytes", "replica_step", "replica_bytes", "mfu"),
    *(f"phases/{one}" for one in ("data", "forward", "backward", "reduce", "update", "mirror")),
    *(f"bytes/{one}" for one in ("model", "main", "grads", "optimizer", "slots", "staging")),
    *("collectives/reduce_scatter/calls", "collectives/reduce_scatter/bytes"),
    *("collectives/all_gather/calls", "collectives/all_gather/bytes"),
)
"""What an engine and its worker report of a step, beside the times."""


@dataclass(frozen=True)
class Scale:
    """How large the cluster is, and how busy.

    Args:
        workers: of the whole job.
        per_node: of them on one node.
        beat_s, step_s, fault_s: seconds between a worker's heartbeats, between steps, and between
            deaths.
    """

    workers: int
    per_node: int = 8
    beat_s: float = 1.0
    step_s: float = 1.0
    fault_s: float = 1.0


@dataclass
class _Row:
    """One worker."""

    info: WorkerInfo
    alive: bool = True
    generation: int = 0
    """0 while it is in no generation."""
    rank: int = 0


@dataclass
class Words:
    """What workers said, and behind that who says no more."""

    said: list[tuple[int, list[WorkerMessage]]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


@dataclass
class Batch:
    """What goes to the controller at once, but for what workers say.

    Args:
        news: deaths, as the vault of a node notices them, each with the moment.
    """

    news: list[tuple[str, ConnectionLost, float]] = field(default_factory=list)
    came: list[WorkerInfo] = field(default_factory=list)
    answers: list[tuple[int, Any]] = field(default_factory=list)


def run(scale: Scale, pipe: Connection, words: Connection, seed: int) -> None:
    """The process: until the pipes are closed."""
    world = _World(scale, random.Random(seed))
    while True:
        try:
            if pipe.poll(world.wait_s()):
                for name, args, ticket in pipe.recv():
                    answer = world.command(name, *args)
                    if ticket is not None:
                        world.out.answers.append((ticket, answer))
            world.tick()
            if (batch := world.batch()) is not None:
                pipe.send(batch)
            for piece in world.pieces():
                words.send(piece)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


class _World:
    def __init__(self, scale: Scale, draw: random.Random) -> None:
        self.out = Batch()
        self._words = Words()
        self._scale = scale
        self._draw = draw
        self._rows: list[_Row] = []
        self._members: list[_Row] = []
        self._wanted = 0  # members that the newest generation is to have
        self._generation = 0
        self._draining = self._strikes = False
        self._step = 0
        self._kept: dict[str, list[SlotInfo]] = {}
        self._order = count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def wait_s(self) -> float:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else 1.0

    def tick(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def batch(self) -> Batch | None:
        """What there is that does not wait behind anybody's words."""
        out, self.out = self.out, Batch()
        return out if out != Batch() else None

    def pieces(self) -> Iterator[Words]:
        """What was said, in pieces as small as workers' own answers would be."""
        words, self._words = self._words, Words()
        for start in range(0, len(words.said), PIECE):
            yield Words(words.said[start : start + PIECE])
        if words.lost:
            yield Words(lost=words.lost)

    def command(self, name: str, *args: Any) -> Any:
        """What a command of the controller does and answers."""
        return getattr(self, f"_do_{name}")(*args)

    def _do_place(self) -> tuple[WorkerInfo, ...]:
        for index in range(self._scale.workers):
            self._add(f"node-{index // self._scale.per_node}")
        self._every(self._scale.step_s, self._take_step)
        return tuple(row.info for row in self._rows)

    def _do_strike(self, every_s: float) -> None:
        self._strikes = every_s > 0
        if self._strikes:
            self._every(every_s, self._kill_one)

    def _do_replace(self, worker: int) -> None:
        node = self._rows[worker].info.node_id
        self._later(START_S, lambda: self.out.came.append(self._add(node)))

    def _do_kill(self, worker: int) -> None:
        self._rows[worker].alive = False

    def _do_assign(self, ranks: dict[int, int], generation: int, world_size: int) -> None:
        if generation > self._generation:
            self._generation, self._wanted = generation, world_size
            self._members, self._draining = [], False
        if generation < self._generation:
            return
        for worker, rank in ranks.items():
            row = self._rows[worker]
            if row.alive:
                row.generation, row.rank = generation, rank
                self._members.append(row)
        if len(self._members) == world_size:
            for one in self._members:
                joined = Joined(generation, one.rank)
                self._say(one, joined, Restored(generation, one.rank, self._step))

    def _do_leave(self, workers: Sequence[int], generation: int) -> None:
        for row in map(self._rows.__getitem__, workers):
            if row.generation == generation and row.alive:
                row.generation = 0
                self._say(row, Stopped(generation, row.rank, None))

    def _do_drain(self, workers: Sequence[int], generation: int) -> None:
        self._draining |= any(self._rows[one].generation == generation for one in workers)

    def _do_inventory(self, node: str) -> list[SlotInfo]:
        return self._kept.get(node, [])

    def _add(self, node: str) -> WorkerInfo:
        index = len(self._rows)
        row = _Row(WorkerInfo(index, node, node, "10.0.0.1", 1000 + index))
        self._rows.append(row)
        first_s = self._draw.uniform(0.0, self._scale.beat_s)
        self._later(first_s, lambda: self._beat(row))
        return row.info

    def _beat(self, row: _Row) -> None:
        if row.alive:
            self._later(self._scale.beat_s, lambda: self._beat(row))
            self._say(row, Heartbeat(row.rank, self._step + 1, "forward", 0.0))

    def _take_step(self) -> None:
        if not self._whole():
            return
        self._step += 1
        kept: defaultdict[str, list[SlotInfo]] = defaultdict(list)
        generation, wanted = self._generation, self._wanted
        times = {"step_s": self._scale.step_s, "exposed_comm_s": 0.01}
        for row in self._members:
            slot = SlotInfo(generation, row.rank, wanted, self._step, SLOT_BYTES, pinned=False)
            kept[row.info.node_id].append(slot)
            gauges = dict.fromkeys(GAUGES, float(self._step)) | times
            said: list[WorkerMessage] = [StepReport(generation, row.rank, self._step, {}, gauges)]
            if self._draining:
                row.generation = 0
                said.append(Stopped(generation, row.rank, None))
            self._say(row, *said)
        self._kept = dict(kept)

    def _kill_one(self) -> None:
        if not self._strikes:
            return
        if not self._whole():  # a generation is being formed: as soon as it stands
            self._later(STRIKE_AGAIN_S, self._kill_one)
            return
        row = self._draw.choice(self._members)
        row.alive = False
        self._words.lost.append(row.info.index)
        lost = ConnectionLost(row.info.index, row.info.pid)
        self.out.news.append((row.info.node_id, lost, time.monotonic()))

    def _whole(self) -> bool:
        inside = all(one.alive and one.generation == self._generation for one in self._members)
        return inside and len(self._members) == self._wanted > 0

    def _say(self, row: _Row, *messages: WorkerMessage) -> None:
        self._words.said.append((row.info.index, list(messages)))

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), work))

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        def again() -> None:
            self._later(seconds, again)
            work()

        self._later(seconds, again)
