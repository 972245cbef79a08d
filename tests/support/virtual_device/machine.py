"""One rank's virtual accelerator: its streams and memory, and what its host waited for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tests.support.virtual_device.memory import Home, Memory, current_place, describe
from tests.support.virtual_device.timelines import Clock, Timeline, VirtualStream, merge

_thread = threading.local()


class Machine:
    """A rank: its training thread, and others that run while that one waits.

    Attributes:
        host_syncs: what the host waited for, by kind and place.
        launches: every collective, in order of launch: group, name, elements, dtype.
        default_home: where a storage is of which nothing is known.
        forced_home: where the results of the current call are, if it says so.
        in_flight, most_in_flight: collectives that nobody has waited for, now and at most.
        polled: what an event that was asked in vain comes after.
        operators: how many were booked.
        all_streams: that were made, the compute stream first.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self._host = Timeline("host", on_host=True)
        self.host_syncs: Counter[str] = Counter()
        self.launches: list[tuple[str, str, int, str]] = []
        self.default_home = Home.PAGEABLE
        self.forced_home: Home | None = None
        self.in_flight = 0
        self.most_in_flight = 0
        self.polled: Clock = {}
        self.operators = 0
        self._streams = [VirtualStream("compute", self)]
        self.all_streams = list(self._streams)
        self._made: Counter[str] = Counter()

    @property
    def host(self) -> Timeline:
        """The timeline of the calling thread of the host."""
        return getattr(_thread, "timeline", None) or self._host

    @property
    def stream(self) -> VirtualStream:
        """The current stream."""
        return self._streams[-1]

    @property
    def compute(self) -> VirtualStream:
        return self._streams[0]

    def new_stream(self, name: str) -> VirtualStream:
        self._made[name] += 1
        stream = VirtualStream(f"{name}{self._made[name]}", self)
        self.all_streams.append(stream)
        return stream

    @contextmanager
    def use_stream(self, stream: VirtualStream) -> Iterator[None]:
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    @contextmanager
    def home(self, home: Home) -> Iterator[None]:
        """New storages within are there."""
        before, self.default_home = self.default_home, home
        try:
            yield
        finally:
            self.default_home = before

    @contextmanager
    def results_in(self, home: Home) -> Iterator[None]:
        """Results of operators within are there."""
        before, self.forced_home = self.forced_home, home
        try:
            yield
        finally:
            self.forced_home = before

    @contextmanager
    def host_thread(self, thread: Timeline) -> Iterator[None]:
        """Operations of the calling thread are those of another thread of the host."""
        before = getattr(_thread, "timeline", None)
        _thread.timeline = thread
        try:
            yield
        finally:
            _thread.timeline = before

    def home_of(self, tensor: Tensor) -> Home:
        """Where a tensor is; a storage that was never seen is now in `default_home`."""
        home = self.memory.home(tensor)
        return self.place(tensor, self.default_home) if home is None else home

    def place(self, tensor: Tensor, home: Home) -> Home:
        timeline = self.host if home.on_host else self.stream
        return self.memory.place(tensor, home, timeline, self.host)

    def run(
        self,
        operator: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        timeline: Timeline | None = None,
    ) -> None:
        """Books an operator on a timeline, by default the current stream. All tensors have a
        home."""
        self.operators += 1
        timeline = timeline or self.stream
        if not timeline.on_host:
            merge(timeline.clock, self.host.clock)  # launched after what the host has done
        number, what = timeline.advance(), (operator, current_place())
        for tensor in reads:
            self.memory.access(tensor, timeline, number, what, writes=False)
        for tensor in writes:
            self.memory.access(tensor, timeline, number, what, writes=True)

    def time_passes(self) -> None:
        """A thread of the host slept until the event that it polls was reached."""
        merge(self.host.clock, self.polled)

    def host_waits(self, kind: str, clock: Clock) -> None:
        """The host waits for what is ordered before `clock`."""
        self.host_syncs[f"{kind} at {describe(current_place())}"] += 1
        merge(self.host.clock, clock)


def current_machine() -> Machine:
    """The calling thread's. Raises LookupError outside `use_machine`."""
    machine: Machine | None = getattr(_thread, "machine", None)
    if machine is None:
        raise LookupError("this thread has no virtual accelerator")
    return machine


def find_machine() -> Machine | None:
    """The calling thread's, or None."""
    machine: Machine | None = getattr(_thread, "machine", None)
    return machine


@contextmanager
def use_machine(machine: Machine) -> Iterator[Machine]:
    before = find_machine()
    _thread.machine = machine
    try:
        yield machine
    finally:
        _thread.machine = before
