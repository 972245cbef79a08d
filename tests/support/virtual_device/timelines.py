"""Vector clocks: streams, events and host threads, and what is ordered before what.

A timeline runs its operations one after another: a stream of the device, or a thread of the host.
Its clock says how many operations of every timeline have ended for certain before its next one
starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.virtual_device.machine import Machine

Clock = dict[str, int]  # operations by timeline


def merge(clock: Clock, other: Clock) -> None:
    """Everything that is ordered before `other` is now ordered before `clock`, too."""
    for name, count in other.items():
        if count > clock.get(name, 0):
            clock[name] = count


class Timeline:
    """Operations in order. `on_host`: a thread; its operations have run when they return."""

    def __init__(self, name: str, *, on_host: bool) -> None:
        self.name = name
        self.on_host = on_host
        self.clock: Clock = {}

    def advance(self) -> int:
        """The number of a new operation."""
        number = self.clock.get(self.name, 0) + 1
        self.clock[self.name] = number
        return number


class VirtualStream(Timeline):
    """A stream: waits order its later operations, and do not stop the host."""

    def __init__(self, name: str, machine: Machine) -> None:
        super().__init__(name, on_host=False)
        self._machine = machine

    def wait_stream(self, other: VirtualStream) -> None:
        merge(self.clock, other.clock)

    def wait_event(self, event: VirtualEvent) -> None:
        merge(self.clock, event.clock)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        event = event or VirtualEvent(self._machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._machine.host_waits("stream.synchronize", self.clock)


class VirtualEvent:
    """An event. One that was never recorded is complete: waiting for it does nothing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.clock: Clock = {}

    def record(self, stream: VirtualStream | None = None) -> None:
        self.clock = dict((stream or self._machine.stream).clock)

    def wait(self, stream: VirtualStream | None = None) -> None:
        (stream or self._machine.stream).wait_event(self)

    def query(self) -> bool:
        """Whether the host knows that it is over. One that it does not know may still take long, so
        the answer is no: the caller must be right then, too."""
        known = self._machine.host.clock
        reached = all(count <= known.get(name, 0) for name, count in self.clock.items())
        self._machine.polled = self.clock
        return reached

    def synchronize(self) -> None:
        self._machine.host_waits("event.synchronize", self.clock)
