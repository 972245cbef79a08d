"""A fake cluster for the controller's tests: workers that train, vaults that keep slots.

Everything happens when the test says so, in virtual time, and messages arrive as in a real cluster:
late, after their sender died, from generations that have ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.errors import RayzeroError
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.orchestrator.aio import (
    WORKER_POLL_S,
    Clock,
    PendingReplies,
    WorkerReports,
    with_timeout,
)
from rayzero.orchestrator.errors import JobFailedError, VaultLostError, WorkerLostError
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
    Pinned,
    RankAssignment,
    Restored,
    StepReport,
    Stopped,
    WorkerInfo,
    WorkerMessage,
)
from rayzero.workers.vault.records import ConnectionLost, SlotInfo, SlotRef

Node = Callable[[int], str]


@dataclass
class FakeProcess:
    """One worker's process."""

    info: WorkerInfo
    unsent: deque[list[WorkerMessage] | WorkerLostError] = field(default_factory=deque)
    """Messages before the controller subscribes."""
    subscribed: bool = False
    """Whether the controller has subscribed."""
    alive: bool = True
    assign: Assignment | None = None
    """While it is in the user's function."""
    ready: bool = False
    """Whether its generation was joined, and its state loaded."""
    step: int = 0
    drain: bool = False
    unresponsive: bool = False
    """Whether it does not answer commands."""
    stuck: bool = False
    """Whether it does not unwind."""
    engine: bool = True
    delayed: bool = False
    """Whether its messages are held back for a while, in `backlog`."""
    backlog: list[list[WorkerMessage] | WorkerLostError] = field(default_factory=list)


@dataclass
class FakeVault:
    """One node's vault."""

    address: str
    events: asyncio.Queue[list[ConnectionLost] | VaultLostError] = field(
        default_factory=asyncio.Queue
    )
    slots: dict[tuple[int, int, int], SlotInfo] = field(default_factory=dict)
    files: list[tuple[str, SlotRef]] = field(default_factory=list)


class FakeCluster:
    """The cluster, as a WorkerGroup. `vaults` is its VaultGroup.

    Args:
        size: number of workers at the start.
        auto: whether workers join and load by themselves; otherwise the test says so.
        mirrors: whether finished steps are mirrored to the vaults.
        checkpoint_every: steps between pinned steps for checkpoints; 0: never.
    """

    def __init__(
        self,
        size: int = 2,
        node_of: Node = lambda _: "a",
        *,
        auto: bool = True,
        mirrors: bool = True,
        checkpoint_every: int = 0,
    ) -> None:
        self.node_of = node_of
        self.auto = auto
        self.mirrors = mirrors
        self.checkpoint_every = checkpoint_every
        self.processes: dict[int, FakeProcess] = {}
        self.joining: asyncio.Queue[WorkerInfo | WorkerLostError] = asyncio.Queue()
        self.assigned: list[tuple[int, Assignment]] = []
        self.commands: list[tuple[str, int]] = []
        self.injected: list[tuple[int, tuple[str, ...]]] = []
        self.replaced: list[tuple[int, float, tuple[str, ...]]] = []
        self.resized: list[tuple[int, int]] = []
        self.draining: frozenset[str] = frozenset()
        self.start_error: JobFailedError | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.releases = 0
        self.committed = 0
        """The newest step that all ranks of a generation finished."""
        self.losses_allowed = False
        """Whether copies of it were lost that nothing could have preserved."""
        self.messages: asyncio.Queue[tuple[int, list[WorkerMessage] | WorkerLostError]] = (
            asyncio.Queue()
        )
        """Of subscribed workers, in order."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Commands in progress."""
        self.next_poll_s = 0.0
        """When the next empty messages are due."""
        self.initial_workers = [self.add_process() for _ in range(size)]
        self.delays: dict[str, int] = {}
        """Turns of the event loop that commands take, by name."""
        self.vaults = FakeVaultGroup(self)
        self.clock: Clock = Clock()
        """Replaced by the harness's virtual clock."""

    # What a test does.

    def add_process(self, node: str | None = None) -> WorkerInfo:
        index = len(self.processes)
        node = node or self.node_of(index)
        info = WorkerInfo(index, node, f"host-{node}", f"10.0.0.{index}", 100 + index)
        self.processes[index] = FakeProcess(info)
        return info

    def join(self, node: str | None = None) -> int:
        """A new worker becomes ready after the initial ones."""
        info = self.add_process(node)
        self.joining.put_nowait(info)
        return info.index

    def send(self, worker: int, *messages: WorkerMessage) -> None:
        self._post(self.processes[worker], list(messages))

    def report_cause(self, worker: int, cause: str) -> None:
        """The cluster reports why a worker died."""
        self._post(self.processes[worker], WorkerLostError(cause))

    def deliver_delayed(self, worker: int) -> None:
        """The messages of a delayed worker arrive."""
        process = self.processes[worker]
        process.delayed = False
        backlog, process.backlog = process.backlog, []
        for said in backlog:
            self._post(process, said)

    def _post(self, process: FakeProcess, said: list[WorkerMessage] | WorkerLostError) -> None:
        if process.delayed:
            process.backlog.append(said)
        elif not process.subscribed:
            process.unsent.append(said)
        else:
            self.messages.put_nowait((process.info.index, said))

    def kill(
        self, worker: int, cause: str = "the process was killed", *, reported: bool = True
    ) -> None:
        """A process dies. Its vault reports it at once, the cluster the cause a little later."""
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
        self,
        worker: int,
        kind: CrashKind,
        error: str = "ValueError: hole",
        step: int | None = None,
    ) -> None:
        """An exception leaves a worker's function."""
        process = self.processes[worker]
        assign = process.assign
        assert assign is not None
        at = process.step + 1 if step is None else step
        process.assign = None
        self.send(
            worker,
            Crashed(assign.generation, assign.rank, kind, at, error, "the user's frames"),
        )

    def lose_node(self, node: str) -> None:
        for process in self.processes.values():
            if process.info.node_id == node and process.alive:
                process.alive, process.assign = False, None
                slow, process.delayed = process.delayed, False
                self._post(process, WorkerLostError("its node is gone"))
                process.delayed = slow
        self.vaults.kill(node)

    def kill_vault(self, node: str) -> None:
        self.vaults.kill(node)

    @property
    def members(self) -> list[FakeProcess]:
        """The processes in the newest generation's function, by rank."""
        inside = [one for one in self.processes.values() if one.alive and one.assign]
        newest = max((one.assign.generation for one in inside if one.assign), default=0)
        mine = [one for one in inside if one.assign and one.assign.generation == newest]
        return sorted(mine, key=lambda one: one.assign.rank if one.assign else 0)

    @property
    def can_step(self) -> bool:
        members = self.members
        if not members or members[0].assign is None:
            return False
        return len(members) == members[0].assign.world_size and all(one.ready for one in members)

    def step(self, last: bool = False) -> bool:
        """One optimizer step of all ranks, if all are ready. `last`: the functions return."""
        if not self.can_step:
            return False
        members = self.members
        drain = any(one.drain for one in members)
        step = members[0].step + 1
        due = bool(self.checkpoint_every) and step % self.checkpoint_every == 0
        pin = due and not self._pinned(members)
        kept = []
        for one in members:
            assign = one.assign
            assert assign is not None
            one.step = step
            said: list[WorkerMessage] = []
            if one.engine and (self.mirrors or drain or pin):
                kept.append(self._mirror(one, assign, step, pin))
            said.append(StepReport(assign.generation, assign.rank, step, {}, {"step_s": 0.1}))
            if pin:
                said.append(Pinned(assign.generation, assign.rank, step, True, 0.01))
            if last:
                said.append(Finished(assign.generation, assign.rank, {}, {}, 1))
            elif drain:
                said.append(Stopped(assign.generation, assign.rank, self._memory(one)))
            if last or drain:
                one.assign, one.drain = None, False
            self.send(one.info.index, *said)
        self.committed = max(self.committed, step)
        self.losses_allowed = not (kept and all(kept))
        return True

    def _pinned(self, members: Sequence[FakeProcess]) -> bool:
        """A worker has room for one pinned step."""
        for one in members:
            vault = self.vaults.by_node.get(one.info.node_id)
            assign = one.assign
            if vault is None or assign is None:
                return True
            for (generation, rank, _), slot in vault.slots.items():
                if slot.pinned and (generation, rank) == (assign.generation, assign.rank):
                    return True
        return False

    def _mirror(self, process: FakeProcess, assign: Assignment, step: int, pin: bool) -> bool:
        vault = self.vaults.by_node.get(process.info.node_id)
        if vault is None or vault.address != assign.vault:
            return False  # a mirror without a vault fails softly
        generation, rank = assign.generation, assign.rank
        mine = [key for key in vault.slots if key[:2] == (generation, rank)]
        free = sorted(key for key in mine if not vault.slots[key].pinned)
        for key in free[:-1]:  # two buffers alternate
            del vault.slots[key]
        vault.slots[generation, rank, step] = SlotInfo(
            generation, rank, assign.world_size, step, 64, pin
        )
        if len(mine) > 1:  # the vote proved that all ranks have mirrored
            for vault in self.vaults.by_node.values():
                for key, slot in list(vault.slots.items()):
                    if key[0] < generation and not slot.pinned and not slot.replica:
                        del vault.slots[key]
        return True

    def _memory(self, process: FakeProcess) -> InProcessStateInfo | None:
        return InProcessStateInfo(process.step, whole=False) if process.engine else None

    def _unwind(self, process: FakeProcess) -> None:
        assign = process.assign
        if assign is None or process.stuck or not process.alive:
            return
        process.assign, process.drain = None, False
        memory = self._memory(process) if process.ready else None
        self.send(process.info.index, Stopped(assign.generation, assign.rank, memory))

    def _join(self, generation: int) -> None:
        """All ranks join once all have their assignments."""
        members = [
            one for one in self.members if one.assign and one.assign.generation == generation
        ]
        if not members or members[0].assign is None:
            return
        if len(members) < members[0].assign.world_size:
            return
        resumed = members[0].assign.restore
        if self.losses_allowed or (resumed and resumed.checkpoint):
            self.committed, self.losses_allowed = resumed.step if resumed else 0, True
        for one in members:
            assign = one.assign
            assert assign is not None
            joined = Joined(generation, assign.rank)
            if not one.engine:
                one.ready, one.step = True, 0
                self.send(one.info.index, joined)
                continue
            missing = [ref for ref in self._slots(assign) if not self.vaults.holds(ref)]
            if missing:
                self.send(one.info.index, joined)
                self.crash(one.info.index, "state", f"{missing[0]} is gone", 0)
                continue
            one.step = assign.restore.step if assign.restore else 0
            assert self.losses_allowed or one.step == self.committed, "a committed step was lost"
            one.ready = True
            self.send(one.info.index, joined, Restored(generation, assign.rank, one.step))

    @staticmethod
    def _slots(assign: Assignment) -> tuple[SlotRef, ...]:
        return assign.restore.slots if assign.restore else ()

    # WorkerGroup.

    async def start_workers(self, need: ResourceRequest) -> tuple[WorkerInfo, ...]:
        await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error
        return tuple(self.initial_workers)

    async def next_worker(self) -> WorkerInfo:
        came = await self.joining.get()
        if isinstance(came, WorkerLostError):
            raise came
        return came

    def replace(self, worker: int, delay_s: float, avoid_nodes: Sequence[str]) -> None:
        assert not self.processes[worker].alive
        self.replaced.append((worker, delay_s, tuple(avoid_nodes)))

    def resize(self, least: int, most: int) -> None:
        self.resized.append((least, most))

    async def release_worker(self, worker: int) -> None:
        self.commands.append(("dismiss", worker))
        self.kill(worker, "dismissed")

    async def kill_worker(self, worker: int) -> None:
        await self.delay("kill")
        self.commands.append(("kill", worker))
        self.kill(worker, "killed by the controller")

    async def call(self, worker: int, method: Callable[..., Any], *args: Any) -> Any:
        return await getattr(self, method.__name__)(worker, *args)

    def broadcast(
        self, workers: Iterable[int], method: Callable[..., None], *args: Any
    ) -> PendingReplies:
        answers: PendingReplies = getattr(self, method.__name__)(workers, *args)
        return answers

    async def open_store(self, worker: int) -> int:
        await self._receive_command("store", worker)
        return 4000 + worker

    def assign(
        self, formation: GenerationSpec, places: Mapping[int, RankAssignment]
    ) -> PendingReplies:
        return self._command("assign", places, lambda w: self._assign(w, formation, places[w]))

    def _assign(self, worker: int, formation: GenerationSpec, own: RankAssignment) -> None:
        process, assign = self.processes[worker], Assignment(**vars(own), **vars(formation))
        assert process.assign is None, "two generations at once"
        for other in self.processes.values():
            if other.alive and other.assign is not None:
                assert other.assign.generation == assign.generation, "two generations at once"
        self.assigned.append((worker, assign))
        process.assign, process.ready, process.drain = assign, False, False
        if self.auto:
            self._join(assign.generation)

    def subscribe(self, workers: Iterable[int]) -> None:
        for process in map(self.processes.__getitem__, workers):
            process.subscribed = True
            while process.unsent:
                self._post(process, process.unsent.popleft())

    async def receive(self) -> WorkerReports:
        """Every live worker sends at least an empty message from time to time."""
        try:
            limit_s = self.next_poll_s - self.clock.now()
            first = [await with_timeout(self.clock, limit_s, self.messages.get())]
        except TimeoutError:
            self.next_poll_s = self.clock.now() + WORKER_POLL_S
            there = [one for one in self.processes.values() if one.subscribed and one.alive]
            return WorkerReports([(one.info.index, []) for one in there if not one.unresponsive])
        while not self.messages.empty():
            first.append(self.messages.get_nowait())
        said = [(worker, one) for worker, one in first if isinstance(one, list)]
        lost = [(worker, str(one)) for worker, one in first if isinstance(one, WorkerLostError)]
        return WorkerReports(said, lost)

    def _is_in(self, worker: int, generation: int) -> bool:
        assign = self.processes[worker].assign
        return assign is not None and assign.generation == generation

    def stop(self, workers: Iterable[int], generation: int) -> PendingReplies:
        def stops(worker: int) -> None:
            if self.auto and self._is_in(worker, generation):
                self._unwind(self.processes[worker])

        return self._command("stop", workers, stops)

    def drain(self, workers: Iterable[int], generation: int) -> PendingReplies:
        def drains(worker: int) -> None:
            if self._is_in(worker, generation):
                self.processes[worker].drain = True

        return self._command("drain", workers, drains)

    def fence(self, workers: Iterable[int], generation: int) -> PendingReplies:
        def leaves(worker: int) -> None:
            if self._is_in(worker, generation):
                self._unwind(self.processes[worker])

        return self._command("fence", workers, leaves)

    def _command(
        self, name: str, workers: Iterable[int], act: Callable[[int], None]
    ) -> PendingReplies:
        answers = PendingReplies(workers)
        way = asyncio.ensure_future(self._carry(name, answers, act))
        self.tasks.add(way)
        way.add_done_callback(self.tasks.discard)
        return answers

    async def _carry(self, name: str, answers: PendingReplies, act: Callable[[int], None]) -> None:
        await self.delay(name)
        for worker in sorted(answers.pending):
            process = self.processes[worker]
            if not process.alive:
                self.messages.put_nowait((worker, WorkerLostError("")))
            elif process.unresponsive:
                continue
            else:
                self.commands.append((name, worker))
                act(worker)
            answers.mark_done([worker])

    def inject(self, workers: Iterable[int], faults: Sequence[FaultSpec]) -> PendingReplies:
        return self._command(
            "inject",
            workers,
            lambda worker: self.injected.append((worker, tuple(map(str, faults)))),
        )

    async def salvage(self, worker: int, vault: str) -> SlotInfo:
        await self._receive_command("salvage", worker)
        process = self.processes[worker]
        _, assign = next(one for one in reversed(self.assigned) if one[0] == worker)
        slot = SlotInfo(
            assign.generation, assign.rank, assign.world_size, process.step, 64, pinned=False
        )
        vault = self.vaults.by_node[process.info.node_id]
        vault.slots[slot.generation, slot.rank, slot.step] = slot
        return slot

    async def dump_stack(self, worker: int) -> str:
        await self._receive_command("stack", worker)
        return "the stack"

    async def draining_nodes(self) -> frozenset[str]:
        return self.draining

    async def release(self) -> None:
        self.releases += 1
        for way in self.tasks:
            way.cancel()

    def beat(self, worker: int, **values: Any) -> None:
        process = self.processes[worker]
        rank = process.assign.rank if process.assign else 0
        beat = Heartbeat(rank, process.step + 1, "forward", 0.0)
        self.send(worker, replace(beat, **values))

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
    """The cluster's WorkerGroup: `kill` is a test's method there, and the controller's here."""

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
        self.replicated: list[tuple[str, tuple[SlotRef, ...]]] = []
        self.write_errors: list[Exception] = []
        self.injected: tuple[str, ...] = ()
        self.not_injectable: dict[str, str] = {}
        self.node_faults: list[tuple[str, str]] = []
        self.writes = 0
        self.releases = 0
        self.may_open = True
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._cluster = cluster

    def kill(self, node: str) -> None:
        """A vault dies, with everything it held."""
        vault = self.by_node.pop(node, None)
        if vault is not None:
            self._cluster.losses_allowed = True
            vault.events.put_nowait(VaultLostError("the vault was killed"))

    async def close(self, node_id: str) -> None:
        self.closed.append(node_id)
        vault = self.by_node.pop(node_id, None)
        if vault is not None:
            vault.events.put_nowait(VaultLostError("closed"))

    def holds(self, ref: SlotRef) -> bool:
        vault = self.by_node.get(ref.node_id)
        return vault is not None and (ref.generation, ref.rank, ref.step) in vault.slots

    async def open(self, node_ids: Sequence[str]) -> dict[str, str]:
        await asyncio.sleep(0)
        if not self.may_open:
            raise JobFailedError("no vault can be opened")
        for node in node_ids:
            if node not in self.by_node:
                self.opened.append(node)
                self.by_node[node] = FakeVault(f"vault-{node}-{self.opened.count(node)}")
        return {node: self.by_node[node].address for node in node_ids}

    async def call(self, node_id: str, method: Callable[..., Any], *args: Any) -> Any:
        return await getattr(self, method.__name__)(node_id, *args)

    async def poll(self, node_id: str, timeout_s: float) -> list[ConnectionLost]:
        try:
            news = await with_timeout(
                self._cluster.clock, timeout_s, self._of(node_id).events.get()
            )
        except TimeoutError:
            return []
        if isinstance(news, VaultLostError):
            raise news
        return news

    async def inventory(self, node_id: str) -> list[SlotInfo]:
        await self._cluster.delay("inventory")
        return list(self._of(node_id).slots.values())

    async def unpin(self, node_id: str, generation: int, step: int) -> None:
        self.unpinned.append((node_id, generation, step))
        vault = self._of(node_id)
        for key, slot in vault.slots.items():
            if key[0] <= generation and key[2] <= step:
                vault.slots[key] = slot._replace(pinned=False)

    async def replicate(self, node_id: str, slots: Sequence[SlotRef]) -> int:
        await asyncio.sleep(0)
        vault = self._of(node_id)
        self.replicated.append((node_id, tuple(slots)))
        for ref in slots:
            if not self.holds(ref):
                raise RayzeroError(f"{ref} is gone")
            original = self._of(ref.node_id).slots[ref.generation, ref.rank, ref.step]
            vault.slots[ref.generation, ref.rank, ref.step] = original._replace(
                replica=True, pinned=True
            )
        return 64 * len(slots)

    async def write(self, node_id: str, folder: str, slots: Sequence[SlotRef]) -> list[RankFile]:
        await asyncio.sleep(0)
        self.writes += 1
        await self.may_write.wait()
        if self.write_errors:
            raise self.write_errors.pop(0)
        vault = self._of(node_id)
        files = []
        for ref in slots:
            if (ref.generation, ref.rank, ref.step) not in vault.slots:
                raise RayzeroError(f"{ref} is gone")
            vault.files.append((folder, ref))
            files.append(RankFile(f"rank-{ref.rank}", ref.rank, 64, "", "", BlockIndex(), {}))
        return files

    async def inspect(self, node_id: str, pid: int) -> str:
        return f"process {pid} is stopped"

    async def inject_faults(self, faults: Sequence[FaultSpec]) -> None:
        await asyncio.sleep(0)
        self.injected = tuple(map(str, faults))

    async def why_not_injectable(self, node_id: str, fault: FaultSpec) -> str:
        await asyncio.sleep(0)
        self._of(node_id)
        return self.not_injectable.get(node_id, "")

    async def inject_node_fault(self, node_id: str, fault: FaultSpec) -> None:
        await asyncio.sleep(0)
        self.node_faults.append((node_id, str(fault)))
        if fault.kind == "kill_vault":
            self.kill(node_id)
            raise VaultLostError("it was struck")
        if fault.kind == "drop_node":
            self._cluster.lose_node(node_id)

    async def release(self) -> None:
        self.releases += 1

    def _of(self, node_id: str) -> FakeVault:
        if node_id not in self.by_node:
            raise VaultLostError("the node has no vault")
        return self.by_node[node_id]


class FakeCheckpointStore:
    """A checkpoint store that keeps steps in a list."""

    def __init__(self, *steps: int) -> None:
        self.steps = list(steps)
        self.prunes = 0
        self.resume_error: RayzeroError | None = None
        self.errors: list[Exception] = []

    def folder(self, step: int) -> str:
        return f"/runs/job/step-{step}"

    async def resolve_resume(self) -> CheckpointRef | None:
        if self.resume_error is not None:
            raise self.resume_error
        return await self.newest(frozenset())

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        steps = [step for step in self.steps if step not in excluding]
        return CheckpointRef(max(steps), self.folder(max(steps))) if steps else None

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        assert [file.rank for file in sorted(files, key=lambda one: one.rank)] == list(
            range(len(files))
        )
        self.steps.append(step)

    async def prune(self) -> None:
        self.prunes += 1
