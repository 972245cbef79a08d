"""Mirrors beside training on the virtual accelerator: the session, the vault, the copying thread.

The thread `rayzero-mirror` is a real one, but only one of the two threads runs at a time: whoever
gives it work waits until it is idle again. On paper they run beside each other: their operations
are on timelines of their own, ordered by the queue, flags and `join` only. So every run is the
same, and finds what any timing would.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from xxhash import xxh3_64_intdigest

from rayzero.engine.session import HostSession, StepRequests, use_session
from rayzero.engine.state.composite import CompositeState
from rayzero.workers import state_copy
from rayzero.workers.messages import Assignment, MirrorPolicy, StepReport
from rayzero.workers.mirror import Mirror
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault import mappings, slots
from rayzero.workers.vault.mappings import SlotMapping
from rayzero.workers.vault.slots import SlotHeader, SlotWriter, encode_index, write_header
from tests.support.virtual_device.machine import Machine, current_machine, use_machine
from tests.support.virtual_device.operators import Operators
from tests.support.virtual_device.placement import Placement
from tests.support.virtual_device.rank import VirtualPool
from tests.support.virtual_device.timelines import Clock, Timeline, merge

_CHUNK_BYTES = 1000
_LIMIT_S = 30.0  # for the other thread
_ASSIGNMENT = Assignment(
    generation=1,
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    store_host="",
    store_port=0,
    vault=None,
)


class VirtualQueue:
    """Who puts something waits until the other thread waits for more, or has ended."""

    def __init__(self) -> None:
        self._items: deque[tuple[Any, Clock]] = deque()
        self._changed = threading.Condition()
        self.idle = True  # the thread that calls `get` waits there

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append((item, dict(current_machine().host.clock)))
            self.idle = False
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.idle, _LIMIT_S):
                raise TimeoutError("the mirror's thread does not end")

    def get(self) -> Any:
        with self._changed:
            if not self._items:
                self.end()
                self._changed.wait_for(lambda: bool(self._items))
            item, clock = self._items.popleft()
        merge(current_machine().host.clock, clock)
        return item

    def end(self) -> None:
        with self._changed:
            self.idle = True
            self._changed.notify_all()


class VirtualThread:
    """The copier's thread, on a timeline of its own."""

    newest: VirtualThread

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.timeline = Timeline(name, on_host=True)
        self._machine = current_machine()
        self._target = target
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        VirtualThread.newest = self

    def start(self) -> None:
        merge(self.timeline.clock, self._machine.host.clock)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        merge(self._machine.host.clock, self.timeline.clock)

    def _run(self) -> None:
        machine = self._machine
        with use_machine(machine), machine.host_thread(self.timeline):
            with Placement(machine), Operators(machine):
                self._target()
            copier: Any = self._target.__self__  # type: ignore[attr-defined]
            copier._jobs.end()


class VirtualFlag(threading.Event):
    """Who sees it set is ordered after who has set it."""

    def __init__(self) -> None:
        super().__init__()
        self._clock: Clock = {}

    def set(self) -> None:
        merge(self._clock, current_machine().host.clock)
        super().set()

    def is_set(self) -> bool:
        found = super().is_set()
        if found:
            merge(current_machine().host.clock, self._clock)
        return found

    def wait(self, timeout: float | None = None) -> bool:
        """The other thread is idle: a flag that is not set will not be."""
        return self.is_set()


class VirtualJob(state_copy._Job):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.host_copied, self.done = VirtualFlag(), VirtualFlag()


class VirtualStop(StopFlag):
    """The interrupt; a thread that waits for it sleeps."""

    def wait(self, timeout: float | None = None) -> bool:
        current_machine().time_passes()
        return self.is_set()


def _checksum(data: memoryview) -> int:
    """Reads registered memory, which torch does not see."""
    machine = current_machine()
    if len(data):
        read = torch.frombuffer(data, dtype=torch.uint8)
        machine.home_of(read)
        machine.run("checksum", [read], [], machine.host)
    return xxh3_64_intdigest(data)


class FakeVault:
    """The vault's client: slots in memory of this process. `calls`: what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._mappings: list[SlotMapping] = []

    def reserve(self, generation: int, rank: int, world_size: int, table: Any) -> SlotWriter:
        encoded = len(encode_index(table))
        header = SlotHeader(generation, rank, world_size, encoded, table.nbytes)
        fd = os.memfd_create("slot")
        try:
            os.ftruncate(fd, header.nbytes)
            write_header(fd, header)
            return SlotWriter(SlotMapping(fd), table)
        finally:
            os.close(fd)

    def register(self, mapping: SlotMapping, register: Any) -> None:
        if not mapping.registered:
            mapping.register(register)
            self._mappings.append(mapping)

    def announce_loaded(self, generation: int, step: int) -> None:
        self.calls.append("loaded")

    def announce_complete(self, generation: int) -> None:
        self.calls.append("complete")

    def replicate(self, generation: int, rank: int, step: int, nodes: Sequence[str]) -> None:
        self.calls.append("replicate")

    def announce_replicated(self, generation: int, step: int) -> None:
        self.calls.append("replicated")

    def release_spares(self, used: Sequence[SlotWriter]) -> None:
        self.calls.append(f"spares but {len(used)}")

    def close(self) -> None:
        for mapping in self._mappings:
            mapping.close(1.0)


class MirroringSession(HostSession):
    """A worker's session, of which only the mirror is there.

    It raises where a step is believed too early: the vote of the next one is entered, its update is
    confirmed, or a message is posted, before the host has seen the end of the update.
    """

    def __init__(self, machine: Machine) -> None:
        self.posted: list[str] = []
        self.vault = FakeVault()
        self._machine = machine
        self._interrupt = VirtualStop(sys.exit)
        policy = MirrorPolicy(replicas=1, every_steps=1, checkpoint_every_steps=2)
        vault: Any = self.vault
        self._mirror = Mirror(policy, _ASSIGNMENT, None, vault, self._post, self._interrupt)
        self._engine: Any = None
        self._state = CompositeState()
        self._updated = 0  # kernels of the compute stream, until the end of the last update

    def on_engine_ready(self, engine: Any) -> None:
        self._engine = engine
        self._state.add("", engine.state)
        confirm = engine.state.confirm

        def confirm_when_seen() -> None:
            self._check_seen("confirmed")
            confirm()

        engine.state.confirm = confirm_when_seen

    def step_requests(self) -> StepRequests:
        requests = self._mirror.step_requests(self._engine.progress.step + 1)
        thread = getattr(self._mirror._copier, "_thread", None)
        if thread is not None and _behind(self._machine, thread.timeline):
            raise AssertionError("a vote was entered before the last step was mirrored")
        return requests

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        step = int(metrics["step"])
        self._updated = self._machine.compute.clock.get("compute", 0)
        self._mirror.step_done(step, agreed, self._state)
        self._mirror.post(StepReport(1, 0, step))

    def prepare(self, step: int) -> None:
        """Step 3, from 0, has no vault; step 4 is interrupted."""
        if step == 3:
            self._mirror._vault = None
        elif step == 4:
            vault: Any = self.vault
            self._mirror._vault = vault
            self._mirror.settle()
            self._interrupt.set()
            self._interrupt.check = lambda: None  # type: ignore[method-assign]  trains on

    def close(self) -> None:
        self._mirror.close()
        self.vault.close()

    def _post(self, message: Any) -> None:
        self._check_seen("reported")
        self.posted.append(f"{type(message).__name__} {message.step}")

    def _check_seen(self, what: str) -> None:
        """The calling thread, or the mirror's: `post` is told by a flag under a lock."""
        thread = getattr(self._mirror._copier, "_thread", None)
        clocks = [self._machine.host.clock] + ([thread.timeline.clock] if thread else [])
        if max(clock.get("compute", 0) for clock in clocks) < self._updated:
            raise AssertionError(f"a step was {what} before the host had seen its end")


def _behind(machine: Machine, thread: Timeline) -> bool:
    return machine.host.clock.get(thread.name, 0) < thread.clock.get(thread.name, 0)


@contextmanager
def mirroring_session() -> Iterator[MirroringSession]:
    """Engines that are built within are mirrored; ends them."""
    machine = current_machine()
    with ExitStack() as stack:
        for target, name, new in (
            (state_copy, "Thread", VirtualThread),
            (state_copy, "SimpleQueue", VirtualQueue),
            (state_copy, "Flag", VirtualFlag),
            (state_copy, "_Job", VirtualJob),
            (state_copy, "ThreadPoolExecutor", VirtualPool),
            (state_copy, "xxh3_64_intdigest", _checksum),
            (state_copy, "CHUNK_BYTES", _CHUNK_BYTES),
            (slots, "CHUNK_BYTES", _CHUNK_BYTES),
            (mappings, "sleep", lambda seconds: machine.time_passes()),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        session = MirroringSession(machine)
        stack.enter_context(use_session(session))
        stack.callback(session.close)
        yield session
