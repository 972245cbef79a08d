"""The engine's `Device` on a virtual accelerator: that of CUDA, on virtual streams and events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from rayzero.engine.device import CudaDevice, Event, Stream
from tests.support.virtual_device.machine import current_machine
from tests.support.virtual_device.memory import Home
from tests.support.virtual_device.placement import DEVICE
from tests.support.virtual_device.timelines import VirtualStream, merge


class VirtualDevice(CudaDevice):
    """Stands for all CUDA devices; each thread has a machine of its own.

    `read`, `send`, `pin` and copies are those of `CudaDevice`: torch's calls in them are booked.
    """

    def __init__(self) -> None:
        super().__init__(DEVICE)

    @property
    def name(self) -> str:
        return "virtual"

    def make_current(self) -> None:
        return

    def new_stream(self) -> Stream:
        return current_machine().new_stream("side")

    def current_stream(self) -> Stream:
        return current_machine().stream

    @contextmanager
    def use_stream(self, stream: VirtualStream) -> Iterator[None]:
        with current_machine().use_stream(stream):
            yield

    def record_event(self) -> Event:
        return current_machine().stream.record_event()

    def record_use(self, tensor: Tensor) -> None:
        machine = current_machine()
        machine.memory.record_use(tensor, machine.stream)

    def synchronize(self, timeout_s: float | None = None) -> None:
        machine = current_machine()
        clock = dict(machine.host.clock)
        for stream in machine.all_streams:
            merge(clock, stream.clock)
        machine.host_waits("device.synchronize", clock)

    def register_host(self, memory: Tensor) -> None:
        machine = current_machine()
        machine.place(memory, Home.PAGEABLE)
        machine.memory.move(memory, Home.REGISTERED)

    def unregister_host(self, memory: Tensor) -> None:
        machine = current_machine()
        for access in machine.memory.unfinished(memory, machine.host.clock):
            machine.memory.early_frees[f"registered memory: {access}"] += 1
        machine.memory.move(memory, Home.PAGEABLE)

    def memory_info(self) -> tuple[int, int] | None:
        return 8 << 30, current_machine().memory.device_bytes

    def peak_bytes(self) -> int | None:
        return current_machine().memory.peak_bytes

    def empty_cache(self) -> None:
        return

    def rng_state(self) -> Tensor | None:
        return None

    def seed(self, seed: int) -> None:
        return
