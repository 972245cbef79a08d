"""A fake cluster for the controller's tests: workers that train, vaults that store slots.

The test drives all events, in virtual time. Messages arrive as in a real cluster: late, after their
sender died, and from generations that have ended.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.errors import RayzeroError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.orchestrator.aio import (
    WORKER_POLL_S,
    Clock,
    PendingReplies,
    WorkerReports,
)
from rayzero.orchestrator.control.vaults import BEAT_WAIT_S
from rayzero.orchestrator.errors import (
    JobFailedError,
    VaultLostError,
    WorkerLostError,
    WorkerStartError,
)
from rayzero.orchestrator.policies.attachment import (
    Attachment,
    find_attachment,
    newest_member,
)
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.messages import (
    Assignment,
    Crashed,
    CrashKind,
    Finished,
    GenerationSpec,
    Heartbeat,
    InProcessStateInfo,
    Joined,
    Notes,
    Pinned,
    Prepared,
    RankAssignment,
    Restored,
    StepReport,
    Stopped,
    WorkerInfo,
    WorkerMessage,
)
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.counts import RolloutCounts
from rayzero.workers.rollouts.ledger import RolloutLedger, RolloutPlan
from rayzero.workers.stacks import Stacks
from rayzero.workers.vault.health import HealthReport
from rayzero.workers.vault.records import ConnectionLost, SlotInfo, SlotRef, VaultGoneError
from rayzero.workers.worker_status import GenerationRecord, WorkerStatus

WorkerOutput = list[WorkerMessage] | WorkerLostError

LAST_WORKER = 200
"""The greatest index that agents have heard of, in jobs that are re-attached to."""


@dataclass
class FakeProcess:
    """The process of a worker."""

    info: WorkerInfo
    unsent: deque[WorkerOutput] = field(default_factory=deque)
    """Output before the controller subscribes."""
    subscribed: bool = False
    alive: bool = True
    assign: Assignment | None = None  # while the user's function runs
    ahead: Assignment | None = None  # with which it was called before its generation began
    ready: bool = False  # it has joined its generation and loaded its state
    step: int = 0
    drain: bool = False
    unresponsive: bool = False  # it ignores commands
    stuck: bool = False  # it does not unwind, as in a long call
    hangs_at: str = ""  # the line of the user's in its stacks
    leaving: bool = False  # it unwinds once it is not stuck any more
    engine: bool = True
    holds_state: bool = True  # its memory has a state when its function ends
    memory_step: int | None = None  # of that state, if it is not the one that it has trained
    cut_for: Assignment | None = None  # its shard
    in_loop: bool = False  # its function has an engine, and trains
    notes: Notes | None = None  # for the function that is called in its place
    retired: bool = False  # it was ended after its function had left
    delayed: bool = False  # its output is held back in `backlog`
    backlog: list[WorkerOutput] = field(default_factory=list)
    record: GenerationRecord = field(default_factory=GenerationRecord)


@dataclass
class FakeVault:
    """The vault of a node."""

    address: str
    failure: str = ""  # "hangs": polls never return; "broken": they say that it does not serve
    events: asyncio.Queue[list[ConnectionLost] | VaultLostError] = field(
        default_factory=asyncio.Queue
    )
    slots: dict[tuple[int, int, int], SlotInfo] = field(default_factory=dict)
    rollouts: RolloutPlan | None = None
    buffer: BufferAddress | None = None
    told: tuple[int, int, tuple[int, ...]] = (0, 0, ())  # of its buffer: see `update_rollouts`
    files: list[tuple[str, SlotRef]] = field(default_factory=list)


class FakeCluster:
    """A WorkerGroup; `vaults` is the VaultGroup.

    Args:
        workers: number of initial workers; or their nodes, which have names of one letter.
        auto: whether workers join and load automatically; otherwise the test sends the messages.
        mirrors: whether finished steps are mirrored to the vaults.
        checkpoint_every: steps between pinned steps for checkpoints; 0: never.
    """

    def __init__(
        self,
        workers: int | str = 2,
        *,
        auto: bool = True,
        mirrors: bool = True,
        checkpoint_every: int = 0,
    ) -> None:
        self.auto = auto
        self.mirrors = mirrors
        self.checkpoint_every = checkpoint_every
        self.processes: dict[int, FakeProcess] = {}
        self.joining: asyncio.Queue[WorkerInfo | WorkerLostError] = asyncio.Queue()
        self.assigned: list[tuple[int, Assignment]] = []
        self.leaving: set[int] = set()  # whose functions do not continue in their loops
        self.other_nodes = ""  # for replacements, where a worker's node is avoided
        self.prepares = True  # functions come to their engines where no generation has begun
        self.bound = False  # whether functions continue only with the same rank of as many
        self.commands: list[tuple[str, int]] = []
        self.injected: list[tuple[int, tuple[str, ...]]] = []
        self.replaced: list[tuple[int, float, tuple[str, ...]]] = []
        self.resized: list[tuple[int, int]] = []
        self.draining: frozenset[str] = frozenset()
        self.head_answers = asyncio.Event()
        self.head_answers.set()
        self.start_error: JobFailedError | None = None
        self.start_failures: list[WorkerStartError] = []  # of workers that are then replaced
        self.awaited: list[str] = []  # what `start_workers` waits for, until `may_start`
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.releases = 0
        self.replicated: tuple[int, int] = (0, 0)  # generation and step
        self.committed = 0  # the newest step that all ranks of a generation finished
        self.losses_allowed = False  # all copies of the committed step may have been lost
        self.versions: dict[int, int] = {}  # by generation, the newest step that all have mirrored
        self.messages: asyncio.Queue[tuple[int, WorkerOutput]] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()  # commands in progress
        self.newest_command: asyncio.Task[None] | None = None
        self.beat_of: Callable[[int], Heartbeat] | None = None  # of a worker, at any time
        self.reading: frozenset[int] = frozenset()  # workers whose loaders read
        self.next_poll_s = 0.0  # when the next empty poll replies are due
        nodes = workers if isinstance(workers, str) else "a" * workers
        self.initial_workers = [self.add_process(node) for node in nodes]
        self.delays: dict[str, int] = {}  # turns of the event loop that commands take, by name
        self.vaults = FakeVaultGroup(self)
        self.clock: Clock = Clock()  # the harness replaces it

    # Methods for tests.

    def add_process(self, node: str) -> WorkerInfo:
        index = len(self.processes)
        info = WorkerInfo(index, node, f"host-{node}", f"10.0.0.{index}", 100 + index)
        self.processes[index] = FakeProcess(info)
        return info

    def join(self, node: str = "a") -> int:
        """Add a worker that becomes ready after the initial ones, and return its index."""
        info = self.add_process(node)
        self.joining.put_nowait(info)
        return info.index

    def lose_controller(self) -> None:
        """Keep what the controller has not received for the next one."""
        for task in self.tasks:
            task.cancel()
        for process in self.processes.values():
            process.subscribed = False
        while not self.messages.empty():
            worker, output = self.messages.get_nowait()
            if isinstance(output, list):
                self.processes[worker].unsent.append(output)
        self.messages, self.joining = asyncio.Queue(), asyncio.Queue()
        self.next_poll_s = 0.0

    def find_attachment(self, roles: Iterable[WorkerStatus] = ()) -> Attachment | None:
        """What the next controller finds, which ends workers that do not answer."""
        self.vaults.attached = tuple(self.vaults.by_node)
        self.vaults.last_worker = LAST_WORKER
        statuses = [
            process.record.status(process.info, "", process.drain or process.leaving)
            for process in self.processes.values()
            if process.alive and not process.unresponsive
        ] + [*roles]
        newest = newest_member(statuses)
        if newest is None:
            return None
        return find_attachment(statuses, self.processes[newest.info.index].record.members)

    def resume(self, need: ResourceRequest) -> None:
        self.resized.append((need.min_workers, need.max_workers))

    def send(self, worker: int, *messages: WorkerMessage) -> None:
        for message in messages:
            self.processes[worker].record.note(message)
        self._post(self.processes[worker], list(messages))

    def prepare(self, worker: int) -> None:
        """Bring a function that was called ahead of its generation to its engine."""
        if assign := self.processes[worker].ahead:
            self.send(worker, Prepared(assign.generation, assign.rank))

    def runs(self, pid: int) -> bool:
        return any(it.alive and it.info.pid == pid for it in self.processes.values())

    def report_cause(self, worker: int, cause: str) -> None:
        """Report why a worker died, as the cluster does."""
        self._post(self.processes[worker], WorkerLostError(cause))

    def deliver_delayed(self, worker: int) -> None:
        """Deliver the output of a delayed worker."""
        process = self.processes[worker]
        process.delayed = False
        backlog, process.backlog = process.backlog, []
        for output in backlog:
            self._post(process, output)

    def release_stuck(self, worker: int) -> None:
        """End a worker's long call."""
        process = self.processes[worker]
        process.stuck = False
        if process.leaving:
            self._unwind(process)

    def _post(self, process: FakeProcess, output: WorkerOutput) -> None:
        if process.delayed:
            process.backlog.append(output)
        elif not process.subscribed:
            process.unsent.append(output)
        else:
            self.messages.put_nowait((process.info.index, output))

    def kill(
        self, worker: int, cause: str = "the process was killed", *, reported: bool = True
    ) -> None:
        """Kill a process. Its vault reports it first, and then the cluster with the cause."""
        process = self.processes[worker]
        if not process.alive:
            return
        process.alive, process.assign = False, None
        vault = self.vaults.by_node.get(process.info.node_id)
        if vault is not None:
            vault.events.put_nowait([ConnectionLost(worker, process.info.pid)])
        if reported:
            self._post(process, WorkerLostError(cause))

    def crash(
        self, worker: int, kind: CrashKind, error: str = "ValueError: hole", step: int | None = None
    ) -> None:
        """Raise an exception from a worker's function."""
        process = self.processes[worker]
        assign = process.assign or process.ahead
        assert assign is not None
        crash_step = process.step + 1 if step is None else step
        process.assign = None
        if kind == "state" and process.cut_for is assign:
            process.cut_for = None  # it has not loaded its state
        self.send(
            worker,
            Crashed(
                *(assign.generation, assign.rank, kind, crash_step, error, "the user's frames"),
                memory=self._memory(process),
                stays=kind == "collective" and self._stays(process),
            ),
        )

    def lose_node(self, node: str) -> None:
        for process in self.processes.values():
            if process.info.node_id == node and process.alive:
                process.alive, process.assign = False, None
                delayed, process.delayed = process.delayed, False
                self._post(process, WorkerLostError("its node is gone"))
                process.delayed = delayed
        self.vaults.kill(node)

    @property
    def members(self) -> list[FakeProcess]:
        """Processes that run the newest generation, by rank."""
        running = [
            (process.assign.generation, process.assign.rank, process)
            for process in self.processes.values()
            if process.alive and process.assign
        ]
        newest = max((generation for generation, _, _ in running), default=0)
        members = [item for item in running if item[0] == newest]
        return [process for _, _, process in sorted(members, key=lambda item: item[1])]

    @property
    def can_step(self) -> bool:
        members = self.members
        is_ready = bool(members) and all(process.ready for process in members)
        return is_ready and len(members) == members[0].assign.world_size

    def step(self, last: bool = False) -> bool:
        """Run an optimizer step of all ranks if all are ready. `last`: the functions return."""
        if not self.can_step:
            return False
        members = self.members
        generation = members[0].assign.generation
        drain = any(process.drain for process in members)
        step = members[0].step + 1
        due = bool(self.checkpoint_every) and step % self.checkpoint_every == 0
        pin = due and not self._has_pinned_slot(members)
        mirrored = []
        for process in members:
            assign = process.assign
            assert assign is not None
            process.step = step
            if process.engine and (self.mirrors or drain or pin):
                mirrored.append(self._mirror(process, assign, step, pin))
            gauges = {"step_s": 0.1}
            if mirrored and all(mirrored):
                gauges["replica_step"] = float(step)
            messages: list[WorkerMessage] = [
                StepReport(assign.generation, assign.rank, step, {}, gauges)
            ]
            if pin:
                messages.append(Pinned(assign.generation, assign.rank, step, 0.01))
            if self.replicated[0] == generation:
                gauges |= {"replicated_step": self.replicated[1], "replicated_bytes": 64.0}
            if last:
                memory = self._memory(process)
                messages.append(Finished(assign.generation, assign.rank, {}, {}, 1, memory=memory))
            elif drain:
                messages.append(self._stopped(process, assign))
            if last or drain:
                process.assign, process.drain = None, False
            self.send(process.info.index, *messages)
        if mirrored and all(mirrored):
            self.versions[generation] = step
        self.committed = max(self.committed, step)
        self.losses_allowed = not (mirrored and all(mirrored))
        return True

    def replicate(self, step: int) -> None:
        """What the vaults do with a step that all ranks keep, without the controller."""
        for process in self.members:
            assign = process.assign
            assert assign is not None
            self._mirror(process, assign, step, pin=True)
            key = assign.generation, assign.rank, step
            own = self.vaults.by_node[process.info.node_id].slots[key]
            for node in assign.replica_nodes:
                self.vaults.by_node[node].slots[key] = own._replace(replica=True)
            self.replicated = assign.generation, step

    def _has_pinned_slot(self, members: Sequence[FakeProcess]) -> bool:
        """Whether a member's only buffer for a pinned step is in use."""
        for process in members:
            vault = self.vaults.by_node.get(process.info.node_id)
            if vault is None:
                return True
            own = (process.assign.generation, process.assign.rank)
            if any(slot.pinned and key[:2] == own for key, slot in vault.slots.items()):
                return True
        return False

    def _mirror(self, process: FakeProcess, assign: Assignment, step: int, pin: bool) -> bool:
        vault = self.vaults.by_node.get(process.info.node_id)
        if vault is None or vault.address != assign.vault:
            return False  # training continues without a mirror
        generation, rank = assign.generation, assign.rank
        rank_keys = [key for key in vault.slots if key[:2] == (generation, rank)]
        free = sorted(key for key in rank_keys if not vault.slots[key].pinned)
        for key in free[:-1]:  # two buffers alternate
            del vault.slots[key]
        vault.slots[generation, rank, step] = SlotInfo(
            generation, rank, assign.world_size, step, 64, pin
        )
        if len(rank_keys) > 1:  # a step after the first mirror, so all ranks have mirrored
            for vault in self.vaults.by_node.values():
                for key, slot in list(vault.slots.items()):
                    if key[0] < generation and not slot.pinned and not slot.replica:
                        del vault.slots[key]
        return True

    def _stays(self, process: FakeProcess) -> bool:
        """Whether its function waits in its loop for the next generation."""
        return process.in_loop and process.info.index not in self.leaving

    def _memory(self, process: FakeProcess) -> InProcessStateInfo | None:
        cut_for, step = process.cut_for, process.memory_step
        if cut_for is None or not process.holds_state:
            return None
        step = process.step if step is None else step
        return InProcessStateInfo(step, False, cut_for.generation, cut_for.world_size)

    def _unwind(self, process: FakeProcess) -> None:
        assign = process.assign
        if assign is None or not process.alive:
            return
        if process.stuck:
            process.leaving = True
            return
        process.assign, process.drain, process.leaving = None, False, False
        stopped = self._stopped(process, assign)
        self.send(process.info.index, replace(stopped, notes=process.notes))

    def _stopped(self, process: FakeProcess, assign: Assignment) -> Stopped:
        memory, stays = self._memory(process), self._stays(process)
        end = {"memory": memory, "stays": stays, "keeps_rank": self.bound}
        return Stopped(assign.generation, assign.rank, **end)

    def _join(self, generation: int) -> None:
        """Let all ranks join once all have their assignments."""
        members = [it for it in self.members if it.assign.generation == generation]
        if not members or len(members) < members[0].assign.world_size:
            return
        restore = members[0].assign.restore
        if self.losses_allowed or (restore and restore.checkpoint):
            self.committed, self.losses_allowed = restore.step if restore else 0, True
        for process in members:
            assign = process.assign
            worker, joined = process.info.index, Joined(generation, assign.rank)
            if not process.engine:
                process.ready, process.step = True, 0
                self.send(worker, joined)
                continue
            missing = [ref for ref in self._slots(assign) if not self.vaults.has_slot(ref)]
            if missing:
                self.send(worker, joined)
                self.crash(worker, "state", f"{missing[0]} is gone", 0)
                continue
            process.step = assign.restore.step if assign.restore else 0
            self.versions[generation] = process.step
            if not self.losses_allowed:
                assert process.step == self.committed, "a committed step was lost"
            process.ready = process.in_loop = True
            process.cut_for = assign
            if assign.restore is None and self.mirrors:
                self._mirror(process, assign, 0, pin=False)
            self.send(worker, joined, Restored(generation, assign.rank, process.step))

    @staticmethod
    def _slots(assign: Assignment) -> tuple[SlotRef, ...]:
        return assign.restore.slots if assign.restore else ()

    # The interface of WorkerGroup.

    async def start_workers(
        self,
        need: ResourceRequest,
        on_failure: Callable[[WorkerStartError], None],
        on_waiting: Callable[[str], None],
    ) -> tuple[WorkerInfo, ...]:
        for text in self.awaited:
            on_waiting(text)
        await self.may_start.wait()
        on_waiting("")
        for failure in self.start_failures:
            on_failure(failure)
        if self.start_error is not None:
            raise self.start_error
        return tuple(self.initial_workers)

    async def next_worker(self) -> WorkerInfo:
        worker = await self.joining.get()
        if isinstance(worker, WorkerLostError):
            raise worker
        return worker

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        assert not self.processes[worker].alive
        self.replaced.append((worker, delay_s, tuple(avoid_nodes)))
        process = self.processes[worker]
        nodes = [process.info.node_id, *self.other_nodes]
        if process.retired and self.auto:
            for node in [it for it in nodes if it not in avoid_nodes][:1]:
                self.join(node)

    def resize(self, min_workers: int, max_workers: int) -> None:
        self.resized.append((min_workers, max_workers))

    async def release_worker(self, worker: int) -> None:
        self.commands.append(("dismiss", worker))
        self.kill(worker, "dismissed")

    async def kill_worker(self, worker: int) -> None:
        await self.delay("kill")
        self.commands.append(("kill", worker))
        process = self.processes[worker]
        process.retired = process.alive and process.assign is None
        self.kill(worker, "killed by the controller")

    async def call(self, worker: int, method: Callable[..., Any], *args: Any) -> Any:
        return await getattr(self, method.__name__)(worker, *args)

    def broadcast(
        self, workers: Iterable[int], method: Callable[..., None], *args: Any
    ) -> PendingReplies:
        execute: Callable[..., object] = {
            "stop": lambda worker, generation: self.auto and self._leave(worker, generation),
            "end": lambda worker, generation: None,
            "drain": self._drain,
            "fence": self._leave,
            "inject": lambda worker, faults: self.injected.append(
                (worker, tuple(map(str, faults)))
            ),
        }[method.__name__]
        return self._command(method.__name__, workers, lambda worker: execute(worker, *args))

    async def open_store(self, worker: int) -> int:
        await self._receive_command("store", worker)
        return 4000 + worker

    def assign(
        self, generation: GenerationSpec, ranks: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        return self._command("assign", ranks, lambda w: self._assign(w, generation, ranks[w]))

    def _assign(self, worker: int, generation: GenerationSpec, rank: RankAssignment) -> None:
        process, assign = self.processes[worker], Assignment(**vars(rank), **vars(generation))
        assert process.assign is None, "two generations at once"
        if assign.is_ahead:
            assert not process.in_loop, "two functions in a process"
            assert process.ahead is None
            process.ahead = assign
            process.record.assign(assign)
            if self.prepares:
                self.prepare(worker)
            return
        if planned := process.ahead:
            assert assign.survivors_stay, "nobody waits for the new function"
            assert (planned.rank, planned.world_size) == (assign.rank, assign.world_size)
            process.ahead = None
        for other in self.processes.values():
            if other.alive and other.assign is not None:
                assert other.assign.generation == assign.generation, "two generations at once"
        self.assigned.append((worker, assign))
        process.record.assign(assign)
        process.assign, process.ready, process.drain = assign, False, False
        process.leaving = False
        if self.auto:
            self._join(assign.generation)

    def subscribe(self, workers: Iterable[int]) -> None:
        for process in map(self.processes.__getitem__, workers):
            process.subscribed = True
            while process.unsent:
                self._post(process, process.unsent.popleft())

    async def receive(self) -> WorkerReports:
        """Responsive workers send at least an empty poll reply every WORKER_POLL_S."""
        try:
            if (timeout_s := self.next_poll_s - self.clock.now()) <= 0:
                raise TimeoutError  # else messages at one time could put the reply off for ever
            async with self.clock.timeout(timeout_s):
                outputs = [await self.messages.get()]
        except TimeoutError:
            self.next_poll_s = self.clock.now() + WORKER_POLL_S
            polled = [
                worker
                for worker, process in self.processes.items()
                if process.subscribed and process.alive and not process.unresponsive
            ]
            return WorkerReports([(worker, []) for worker in polled])
        while not self.messages.empty():
            outputs.append(self.messages.get_nowait())
        messages = [(worker, output) for worker, output in outputs if isinstance(output, list)]
        lost = [(worker, str(it)) for worker, it in outputs if isinstance(it, WorkerLostError)]
        return WorkerReports(messages, lost)

    def _leave(self, worker: int, generation: int) -> None:
        assign = self.processes[worker].assign
        if assign and assign.generation == generation:
            self._unwind(self.processes[worker])

    def _drain(self, worker: int, generation: int) -> None:
        assign = self.processes[worker].assign
        if assign and assign.generation == generation:
            self.processes[worker].drain = True

    def _command(
        self, name: str, workers: Iterable[int], execute: Callable[[int], object]
    ) -> PendingReplies:
        replies = PendingReplies(workers)
        task = asyncio.ensure_future(self._execute(name, replies, execute, self.newest_command))
        self.newest_command = task  # workers execute them in order
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return replies

    async def _execute(
        self,
        name: str,
        replies: PendingReplies,
        execute: Callable[[int], object],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self.delay(name)
        for worker in sorted(replies.pending):
            process = self.processes[worker]
            if not process.alive:
                self.messages.put_nowait((worker, WorkerLostError("")))
            elif process.unresponsive:
                continue
            else:
                self.commands.append((name, worker))
                execute(worker)
            replies.mark_done([worker])

    async def salvage(self, worker: int, vault: str, step: int) -> SlotInfo:
        await self._receive_command("salvage", worker)
        process = self.processes[worker]
        cut_for = process.cut_for
        assert cut_for is not None
        slot = SlotInfo(
            cut_for.generation, cut_for.rank, cut_for.world_size, step, 64, pinned=False
        )
        if (vault := self.vaults.by_node.get(process.info.node_id)) is None:
            raise VaultGoneError("it was killed")
        vault.slots[slot.generation, slot.rank, slot.step] = slot
        self.versions[slot.generation] = slot.step  # all ranks do so
        return slot

    async def dump_stack(self, worker: int) -> Stacks:
        await self._receive_command("stack", worker)
        place = self.processes[worker].hangs_at
        beat = self.beat_of(worker) if self.beat_of is not None else None
        summary, reads = f"at {place}" if place else "", worker in self.reading
        return Stacks("the stack", place, summary=summary, reads=reads, beat=beat)

    async def draining_nodes(self) -> frozenset[str]:
        await self.head_answers.wait()
        return self.draining

    async def leave_nodes(self, draining: frozenset[str]) -> None: ...

    async def release(self) -> None:
        self.releases += 1
        for task in self.tasks:
            task.cancel()

    def send_heartbeat(self, worker: int, **values: Any) -> None:
        process = self.processes[worker]
        rank = process.assign.rank if process.assign else 0
        heartbeat = Heartbeat(rank, process.step + 1, "forward", 0.0)
        self.send(worker, heartbeat._replace(**values))

    async def delay(self, command: str) -> None:
        for _ in range(1 + self.delays.get(command, 0)):
            await asyncio.sleep(0)

    async def _receive_command(self, command: str, worker: int) -> None:
        await self.delay(command)
        process = self.processes[worker]
        if not process.alive:
            raise WorkerLostError("")
        if process.unresponsive:
            await asyncio.Event().wait()
        self.commands.append((command, worker))


class FakeWorkerGroup:
    """The cluster as the controller sees it: `kill` is the command, not the test's method."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, "kill_worker" if name == "kill" else name)


class FakeVaultGroup:
    """The cluster's VaultGroup."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.by_node: dict[str, FakeVault] = {}
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.unpinned: list[tuple[str, int, int]] = []
        self.write_errors: list[Exception] = []
        self.injected: tuple[str, ...] = ()
        self.not_injectable: dict[str, str] = {}
        self.node_faults: list[tuple[str, str]] = []
        self.health_limit_s: float | None = None
        self.figures: dict[str, dict[str, float]] = {}  # by node, of the next health check
        self.checked: list[str] = []  # nodes, of checks that the controller asked for
        self.still_running: set[int] = set()  # killed processes that have not exited
        self.releases = 0
        self.may_open = True
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._buffers = count(1)
        self.opening_rollouts = False
        self.attached: tuple[str, ...] = ()
        self.last_worker = -1
        self._cluster = cluster

    def has_buffer(self, address: BufferAddress | None) -> bool:
        """Whether it answers."""
        return address in [vault.buffer for vault in self.by_node.values() if vault.buffer]

    def kill(self, node: str) -> None:
        """Kill a vault with all of its slots."""
        vault = self.by_node.pop(node, None)
        if vault is not None:
            self._cluster.losses_allowed = True
            vault.events.put_nowait(VaultLostError("the vault was killed"))

    async def close(self, node_id: str) -> None:
        self.closed.append(node_id)
        vault = self.by_node.pop(node_id, None)
        if vault is not None:
            vault.events.put_nowait(VaultLostError("closed"))

    def has_slot(self, ref: SlotRef) -> bool:
        vault = self.by_node.get(ref.node_id)
        return vault is not None and (ref.generation, ref.rank, ref.step) in vault.slots

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        await self._cluster.delay("vault")
        if not self.may_open:
            raise JobFailedError("no vault can be opened")
        for node in node_ids:
            if node not in self.by_node:
                self.opened.append(node)
                self.by_node[node] = FakeVault(f"vault-{node}-{self.opened.count(node)}")
        return {node: self.by_node[node].address for node in node_ids}

    async def call(self, node_id: str, method: Callable[..., Any], *args: Any) -> Any:
        return await getattr(self, method.__name__)(node_id, *args)

    async def open_rollouts(
        self, node_id: str, plan: RolloutPlan, host: str, timeout_s: float
    ) -> BufferAddress:
        self.opening_rollouts = True
        await self._cluster.delay("rollouts")
        vault = self._vault(node_id)
        vault.rollouts, vault.told = plan, (0, 0, ())
        secret = vault.address.encode()
        vault.buffer = BufferAddress(host, next(self._buffers), secret, node_id, vault.address)
        return vault.buffer

    async def update_rollouts(
        self, node_id: str, generation: int, version: int, lost: tuple[int, ...]
    ) -> RolloutCounts:
        vault = self._vault(node_id)
        if vault.rollouts is None:
            raise VaultGoneError("no buffer")
        versions = self._cluster.versions
        begun = versions.get(generation, max(versions.values(), default=0))  # else it is to begin
        assert version <= begun, "not all ranks have mirrored it"
        vault.told = generation, version, lost
        return replace(RolloutLedger(vault.rollouts).counts(), published=version)

    async def close_rollouts(self, node_id: str) -> None:
        vault = self._vault(node_id)
        vault.rollouts = vault.buffer = None

    async def events(self, node_id: str, limit_s: float) -> list[ConnectionLost]:
        clock = self._cluster.clock
        while True:
            vault = self._vault(node_id)
            if vault.failure == "hangs":
                await clock.sleep(limit_s)
                raise TimeoutError(f"its process did not respond for {limit_s:g} s")
            if vault.failure == "broken":
                raise VaultLostError("its thread has ended")
            with suppress(TimeoutError):
                async with clock.timeout(BEAT_WAIT_S):
                    events = await vault.events.get()
                if isinstance(events, VaultLostError):
                    raise events
                return events

    async def inventory(self, node_id: str) -> list[SlotInfo]:
        await self._cluster.delay("inventory")
        return list(self._vault(node_id).slots.values())

    async def unpin(self, node_id: str, generation: int, step: int) -> None:
        self.unpinned.append((node_id, generation, step))
        vault = self._vault(node_id)
        for key, slot in vault.slots.items():
            if key[0] <= generation and key[2] <= step:
                vault.slots[key] = slot._replace(pinned=False)

    async def write(self, node_id: str, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        await asyncio.sleep(0)
        await self.may_write.wait()
        if self.write_errors:
            raise self.write_errors.pop(0)
        vault = self._vault(node_id)
        files = []
        for ref in slots:
            if (ref.generation, ref.rank, ref.step) not in vault.slots:
                raise RayzeroError(f"{ref} is gone")
            vault.files.append((folder, ref))
            files.append(RankFile(f"rank-{ref.rank}", 64, "", "", 0, ref.rank, BlockIndex(), {}))
        return files

    async def check_health(self, node_id: str, limit_s: float) -> None:
        self._vault(node_id)
        self.checked.append(node_id)

    async def health(self, node_id: str) -> HealthReport:
        self._vault(node_id)
        return HealthReport({"memory": 12.0, **self.figures.get(node_id, {})}, unix_s=time.time())

    async def measure_link(self, node_id: str, other: str) -> float:
        figures = (self.figures.get(node, {}).get("link", 1.0) for node in (node_id, other))
        return min(figures)

    async def runs(self, node_id: str, pid: int) -> bool:
        self._vault(node_id)
        return pid in self.still_running or self._cluster.runs(pid)

    async def inspect(self, node_id: str, pid: int) -> str:
        self._vault(node_id)
        return f"process {pid} is stopped"

    async def inject_faults(self, faults: Sequence[FaultSpec]) -> None:
        await asyncio.sleep(0)
        self.injected = tuple(map(str, faults))

    async def why_not_injectable(self, node_id: str, fault: FaultSpec) -> str:
        await asyncio.sleep(0)
        self._vault(node_id)
        return self.not_injectable.get(node_id, "")

    async def inject_node_fault(self, node_id: str, fault: FaultSpec) -> None:
        await asyncio.sleep(0)
        self.node_faults.append((node_id, str(fault)))
        if fault.kind == "kill_vault":
            self.kill(node_id)
            raise VaultLostError("killed by a fault")
        if fault.kind == "drop_node":
            self._cluster.lose_node(node_id)

    async def release(self) -> None:
        self.releases += 1

    def _vault(self, node_id: str) -> FakeVault:
        if node_id not in self.by_node:
            raise VaultLostError("the node has no vault")
        return self.by_node[node_id]


class FakeCheckpointStore:
    """A checkpoint store with a list of steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = list(steps)
        self.marked: dict[int, str] = {}
        self.prunes = 0
        self.keep = sys.maxsize
        self.resume_error: RayzeroError | None = None
        self.errors: list[Exception] = []
        self.check_lease: Callable[[], object] = lambda: None

    def folder(self, step: int) -> str:
        return f"/runs/job/step-{step}"

    async def check_folder(self) -> None:
        self.check_lease()

    async def resolve_resume(self) -> CheckpointRef | None:
        if self.resume_error is not None:
            raise self.resume_error
        return await self.newest(frozenset())

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        steps = [step for step in self.steps if step not in excluding]
        return CheckpointRef(max(steps), self.folder(max(steps))) if steps else None

    async def mark_damaged(self, checkpoint: CheckpointRef, problem: str) -> None:
        await asyncio.sleep(0)
        self.marked[checkpoint.step] = problem

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        assert sorted(file.rank for file in files) == list(range(len(files)))
        self.steps.append(step)

    async def prune(self) -> tuple[int, ...]:
        self.prunes += 1
        removed, self.steps = self.steps[: -self.keep], self.steps[-self.keep :]
        return tuple(removed)
