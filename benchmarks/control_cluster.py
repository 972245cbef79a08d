"""A cluster of simulated workers in a separate process, for `control_plane`.

Without torch and Ray: a worker is a record that sends the messages of a real worker at the same
times, in the batches that real agents make of them. Each node has a stream of its own.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from rayzero.workers.agent.link import (
    Attach,
    Frame,
    FrameKind,
    Hello,
    Link,
    NodeCommand,
    read_frame,
    unpack_call,
)
from rayzero.workers.agent.local_workers import LocalWorkers
from rayzero.workers.agent.node_agent import BEAT_S
from rayzero.workers.authenticated import AuthenticatedServer
from rayzero.workers.messages import (
    GenerationSpec,
    Heartbeat,
    Joined,
    Prepared,
    RankAssignment,
    Restored,
    StepReport,
    Stopped,
    WorkerInfo,
    WorkerMessage,
)
from rayzero.workers.stacks import Stacks
from rayzero.workers.vault.records import ConnectionLost, SlotInfo

CONTROLLER = Attach(0, b"benchmark")
START_S = 0.3
"""Start time of a replacement worker."""
FAULT_RETRY_S = 0.02
SLOT_BYTES = 2**28
GAUGES = (
    *("loss", "lr", "grad_norm", "step_samples", "step_tokens", "skipped", "checkpoint_s"),
    *("resident_bytes", "replica_step", "replica_bytes", "mfu"),
    *(f"phases/{name}" for name in ("data", "forward", "backward", "reduce", "update", "mirror")),
    *(f"bytes/{name}" for name in ("model", "main", "grads", "optimizer", "slots", "staging")),
    *("collectives/reduce_scatter/calls", "collectives/reduce_scatter/bytes"),
    *("collectives/all_gather/calls", "collectives/all_gather/bytes"),
)
"""Per-step metrics of an engine and its worker, except times."""


@dataclass(frozen=True)
class Scale:
    """Size and load of the cluster.

    Args:
        workers: total number of workers.
        per_node: workers per node.
        heartbeat_s, step_s, fault_s: intervals between the heartbeats of a worker that has nothing
            else to send, between steps, and between faults.
    """

    workers: int
    per_node: int = 8
    heartbeat_s: float = 1.0
    step_s: float = 1.0
    fault_s: float = 1.0


@dataclass
class _Worker:
    """A simulated worker."""

    info: WorkerInfo
    alive: bool = True
    generation: int = 0
    """0 if it is not part of a generation."""
    rank: int = 0
    has_sent: bool = False
    """Since the previous heartbeats."""


@dataclass
class _Agent:
    """A node's end of its stream."""

    link: Link
    workers: LocalWorkers


class SimulatedAgents(AuthenticatedServer):
    """The agents of all nodes, on one port; a connection's `Attach` names the node."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self._agents: dict[str, _Agent] = {}
        self._cluster = _Cluster(scale, random.Random(seed), self._agents)
        super().__init__("the simulated agents", "rayzero-agents", "127.0.0.1", 60.0)
        self.secret = os.urandom(32)
        self.admit(self.secret)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await read_frame(reader)
        node = pickle.loads(first.payload).controller.decode()
        if node not in self._agents:  # else an earlier connection has ended
            link = Link()
            workers = LocalWorkers(partial(link.send, FrameKind.MESSAGES))
            self._agents[node] = _Agent(link, workers)
        link = self._agents[node].link
        writer.write(link.encode(FrameKind.HELLO, pickle.dumps(Hello(-1))))
        link.open(writer.write, first.acknowledged)
        beats = asyncio.create_task(_beat(link))
        try:
            while True:
                frame = await read_frame(reader)
                is_new = link.accept(frame)
                if is_new and frame.kind is FrameKind.COMMAND:
                    self._cluster.command(pickle.loads(frame.payload))
                elif is_new and frame.kind is FrameKind.CALL:
                    number, name, args = pickle.loads(frame.payload)
                    reply = number, None, self._cluster.execute(name, *args)
                    link.send(FrameKind.REPLY, pickle.dumps(reply))
        finally:
            beats.cancel()
            link.close()


@lru_cache(maxsize=2)
def _loads(call: bytes) -> Any:
    """The same call comes for each node."""
    return unpack_call(call)


async def _in_turn(workers: list[_Worker]) -> AsyncIterator[_Worker]:
    """Workers, node by node; other frames, and the agents' beats, are sent in between."""
    node = ""
    for worker in workers:
        if worker.info.node_id != node:
            node = worker.info.node_id
            await asyncio.sleep(0)
        yield worker


async def _beat(link: Link) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        link.beat_with_next()


def run(scale: Scale, pipe: Connection, seed: int) -> None:
    """Main function of the process; returns when the pipe is closed."""
    agents = SimulatedAgents(scale, seed)
    pipe.send((agents.port, agents.secret))
    with suppress(EOFError):
        pipe.recv()
    agents.close()


class _Cluster:
    def __init__(self, scale: Scale, rng: random.Random, agents: Mapping[str, _Agent]) -> None:
        self._agents = agents
        self._scale = scale
        self._rng = rng
        self._workers: list[_Worker] = []
        self._members: list[_Worker] = []
        self._world_size = 0  # of the latest generation
        self._generation = 0
        self._draining = False
        self._fault_s = 0.0  # between two; 0: there are none
        self._step = 0
        self._slots: dict[str, list[SlotInfo]] = {}
        self._frames = count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def execute(self, name: str, *args: Any) -> Any:
        """Execute a command of the controller and return its reply."""
        return getattr(self, f"_do_{name}")(*args)

    def command(self, command: NodeCommand) -> None:
        """Execute a command in each of its workers."""
        method, arguments = _loads(command.call)
        for index, own in command.own.items():
            worker = self._workers[index]
            if worker.alive:
                result = getattr(self, f"_on_{method}")(worker, *arguments, *own)
                reply = pickle.dumps((None, result))
                answer = pickle.dumps((CONTROLLER.controller, command.number, reply))
                self._send_frame(worker, FrameKind.ANSWER, answer)

    def _do_start(self) -> tuple[WorkerInfo, ...]:
        for index in range(self._scale.workers):
            self._add(f"node-{index // self._scale.per_node}")
        self._every(self._scale.step_s, self._take_step)
        self._every(self._scale.heartbeat_s, self._send_heartbeats)
        return tuple(worker.info for worker in self._workers)

    def _do_inject_faults(self, interval_s: float) -> None:
        self._fault_s = interval_s
        self._inject_fault_later()

    def _do_replace(self, worker: int) -> None:
        node = self._workers[worker].info.node_id
        self._later(START_S, lambda: self._send_event(node, self._add(node)))

    def _do_kill(self, worker: int) -> None:
        self._workers[worker].alive = False

    def _on_open_store(self, worker: _Worker) -> int:
        return 4000

    def _on_assign(self, worker: _Worker, spec: GenerationSpec, place: RankAssignment) -> None:
        generation = spec.generation
        if spec.is_ahead:
            self._send(worker, Prepared(generation, place.rank))
            return
        if generation > self._generation:
            self._generation, self._world_size = generation, spec.world_size
            self._members, self._draining = [], False
        if generation < self._generation:
            return
        worker.generation, worker.rank = generation, place.rank
        self._members.append(worker)
        if len(self._members) == spec.world_size:
            self._tasks.append(asyncio.create_task(self._begin(generation)))

    async def _begin(self, generation: int) -> None:
        async for member in self._members_in_turn(generation):
            joined = Joined(generation, member.rank)
            self._send(member, joined, Restored(generation, member.rank, self._step))

    def _on_fence(self, worker: _Worker, generation: int) -> None:
        if worker.generation == generation:
            worker.generation = 0
            self._send(worker, Stopped(generation, worker.rank, stays=True))

    _on_stop = _on_end = _on_fence

    def _on_dump_stack(self, worker: _Worker) -> Stacks:
        """Asked for if this process has not had the time to send anything for long."""
        return Stacks("", beat=Heartbeat(worker.rank, self._step + 1, "forward", 0.0))

    def _on_drain(self, worker: _Worker, generation: int) -> None:
        self._draining |= worker.generation == generation

    def _do_inventory(self, node: str) -> list[SlotInfo]:
        return self._slots.get(node, [])

    def _add(self, node: str) -> WorkerInfo:
        index = len(self._workers)
        worker = _Worker(WorkerInfo(index, node, node, "10.0.0.1", 1000 + index))
        self._workers.append(worker)
        return worker.info

    async def _send_heartbeats(self) -> None:
        """From workers that have sent nothing else."""
        async for worker in _in_turn(self._workers):
            if worker.alive and not worker.has_sent:
                self._send(worker)
            worker.has_sent = False

    async def _take_step(self) -> None:
        if not self._is_complete():
            return
        self._step += 1
        step, generation, world_size = self._step, self._generation, self._world_size
        leaves = self._draining  # or none does: some without a next step would keep the others
        times = {"step_s": self._scale.step_s, "exposed_comm_s": 0.01}
        times |= {it: self._scale.step_s / 10 for it in GAUGES if it.startswith("phases/")}
        gauges = dict.fromkeys(GAUGES, float(step)) | times
        slots: defaultdict[str, list[SlotInfo]] = defaultdict(list)
        async for worker in self._members_in_turn(generation):
            slots[worker.info.node_id].append(
                SlotInfo(generation, worker.rank, world_size, step, SLOT_BYTES, pinned=False)
            )
            messages: list[WorkerMessage] = [StepReport(generation, worker.rank, step, {}, gauges)]
            if leaves:
                worker.generation = 0
                messages.append(Stopped(generation, worker.rank, stays=True))
            self._send(worker, *messages)
        if sum(map(len, slots.values())) < world_size:
            self._step = step - 1  # some had no part in it
        else:
            self._slots = dict(slots)

    async def _members_in_turn(self, generation: int) -> AsyncIterator[_Worker]:
        """Without those that are lost or leave meanwhile."""
        async for worker in _in_turn(self._members):
            if worker.alive and worker.generation == generation:
                yield worker

    def _inject_fault(self) -> None:
        if not self._fault_s:
            return
        if not self._is_complete():  # retry when the next generation is complete
            self._later(FAULT_RETRY_S, self._inject_fault)
            return
        worker = self._rng.choice(self._members)
        worker.alive = False
        lost = ConnectionLost(worker.info.index, worker.info.pid, has_ended=True)
        self._send_event(worker.info.node_id, (lost, time.monotonic()))
        self._inject_fault_later()

    def _inject_fault_later(self) -> None:
        """At any time of a step: with equal intervals all faults would be at the same one."""
        self._later(self._fault_s * self._rng.uniform(0.5, 1.5), self._inject_fault)

    def _is_complete(self) -> bool:
        joined = all(m.alive and m.generation == self._generation for m in self._members)
        return joined and len(self._members) == self._world_size > 0

    def _send(self, worker: _Worker, *messages: WorkerMessage) -> None:
        """Sends messages, and a heartbeat at the end, as a worker does."""
        kind = FrameKind.CHANGES
        if not messages:
            kind = FrameKind.QUIET
        elif isinstance(messages[-1], StepReport):
            kind = FrameKind.STEPS
        worker.has_sent = True
        beat = Heartbeat(worker.rank, self._step + 1, "forward", 0.0)
        self._send_frame(worker, kind, pickle.dumps([*messages, beat], pickle.HIGHEST_PROTOCOL))

    def _send_frame(self, worker: _Worker, kind: FrameKind, payload: bytes) -> None:
        frame = Frame(kind, next(self._frames), 0, payload)
        self._agents[worker.info.node_id].workers.add(worker.info.index, frame)

    def _send_event(self, node: str, event: Any) -> None:
        agent = self._agents[node]
        agent.workers.flush()
        agent.link.send(FrameKind.EVENTS, pickle.dumps([event]))

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, callback)

    def _every(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def repeat() -> None:
            while True:
                began_s = time.monotonic()
                await work()
                await asyncio.sleep(began_s + seconds - time.monotonic())

        self._tasks.append(asyncio.create_task(repeat()))
