"""The transfer over a device with streams, on a device that only logs what would be ordered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.process_group import SingleRankBackend
from rayzero.engine.config import parse_config
from rayzero.engine.device import Device, Event, Stream, replace_device
from rayzero.engine.engine import Engine
from rayzero.engine.offload import transfer as transfer_module
from rayzero.engine.offload.nvme_store import MappedFile, NvmeStore
from rayzero.engine.offload.plan import Offload
from rayzero.engine.offload.stores import DeviceStore, HostStore, UpdateChunk
from rayzero.engine.offload.transfer import HostTransfer, StreamTransfer, make_transfer
from rayzero.engine.precision.policy import choose_precision

CPU = torch.device("cpu")


class LoggedStream(Stream):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, LoggedStream)
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, LoggedEvent)
        self._log.append(f"{self.name} waits for event {event.number}")

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


class LoggedEvent(Event):
    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self._log = number, log

    def synchronize(self) -> None:
        self._log.append(f"host waits for event {self.number}")


class LoggedDevice(Device):
    asynchronous = True
    separate_memory = True

    def __init__(self) -> None:
        super().__init__(CPU)
        self.log: list[str] = []
        self._streams = 0
        self._events = 0
        self._current = LoggedStream("compute", self.log)

    def new_stream(self) -> Stream:
        self._streams += 1
        return LoggedStream({1: "d2h", 2: "h2d"}[self._streams], self.log)

    def current_stream(self) -> Stream:
        return self._current

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record_event(self, stream: Stream | None = None) -> Event:
        self._events += 1
        self.log.append(f"event {self._events} on {self._current.name}")
        return LoggedEvent(self._events, self.log)


class LoggedCopies(TorchDispatchMode):
    """Logs copies: those that do not block are the device's."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            late = len(args) > 2 and args[2]
            cast = " with a cast" if args[0].dtype is not args[1].dtype else ""
            self._log.append(("device" if late else "host") + " copies" + cast)
        return func(*args, **kwargs or {})


@pytest.fixture
def device() -> LoggedDevice:
    return LoggedDevice()


def test_transfer_follows_the_device(device: LoggedDevice) -> None:
    assert type(make_transfer(CPU)) is HostTransfer
    assert make_transfer(torch.device("meta")).separate_memory
    with replace_device(device):
        assert isinstance(make_transfer(CPU), StreamTransfer)


def test_cast_is_done_on_the_cpu_and_its_buffers_wait_for_their_copies(
    device: LoggedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "CAST_NUMEL", 4)
    transfer = StreamTransfer(device)
    source, target = torch.randn(15), torch.zeros(15, dtype=torch.bfloat16)
    with LoggedCopies(device.log):
        transfer.h2d(source, target)
    assert torch.equal(target, source.bfloat16())
    part = ["host copies with a cast", "device copies"]
    assert device.log == [
        "h2d waits for compute",
        *(*part, "event 1 on h2d", *part, "event 2 on h2d"),
        *("host waits for event 1", *part, "event 3 on h2d"),
        *("host waits for event 2", *part, "event 4 on h2d"),
    ]
    assert transfer.staging_bytes == 2 * 4 * 2
    device.log.clear()
    with LoggedCopies(device.log):
        transfer.h2d(source, torch.zeros(15))
    assert device.log == ["h2d waits for compute", "device copies", "event 5 on h2d"]


@pytest.mark.parametrize("early", [True, False])
def test_copy_to_the_host_is_ordered_by_events(device: LoggedDevice, early: bool) -> None:
    """Whether the reduction is waited for on the copy's stream, or by the host before the copy."""
    transfer = StreamTransfer(device)
    source, target = torch.ones(4), transfer.host_zeros(4, torch.float32)
    reduced = Collectives(SingleRankBackend()).all_reduce(source)
    pending = transfer.d2h(reduced, source, target, add=False, early=early)
    if not early:
        assert device.log == []
        pending.wait()
    pending.release()
    transfer.wait_d2h()
    assert device.log == [
        "d2h waits for compute",
        "event 1 on d2h",
        "compute waits for event 1",
        "host waits for event 1",
    ]
    assert torch.equal(target, source)


def test_device_store_does_not_wait_for_its_copies(device: LoggedDevice) -> None:
    precision = choose_precision(parse_config({"train_batch_size": 1}), CPU)
    store = DeviceStore(precision, CPU, separate_memory=True)
    with LoggedCopies(device.log):
        store.copy_to_model(torch.ones(4), torch.zeros(4))
    assert device.log == ["device copies"]


def test_update_waits_for_earlier_sends_of_its_weights(device: LoggedDevice) -> None:
    """The vote of today waits for them, too."""
    state = Engine.build(nn.Linear(2, 2), torch.optim.SGD, config={"train_batch_size": 1}).state
    precision = choose_precision(parse_config({"train_batch_size": 1}), CPU)
    transfer = StreamTransfer(device)
    store = HostStore(precision, transfer, separate_memory=True)
    offload = Offload(transfer, None, store, store, None, offload_ratio=1.0)
    state._runtime = replace(state._runtime, offload=offload)
    main, target = torch.ones(4), torch.zeros(4)
    for _ in range(2):
        with state.updating():
            device.log.append("update")
            list(store.update_chunks([UpdateChunk(main, (main,), (target,))], {}))
    sends = ["h2d waits for compute", "event 1 on h2d"]
    update = ["host waits for h2d", "update"]
    assert device.log[:6] == [*update, *sends, *update]


def test_a_chunk_is_read_from_its_file_beside_the_copies_of_later_ones(
    device: LoggedDevice, tmp_path: Path
) -> None:
    """Chunk i's buffer waits for the copy of chunk i - 3, while that of chunk i - 1 runs."""
    precision = choose_precision(parse_config({"train_batch_size": 1}), CPU)
    file = MappedFile(tmp_path)
    store = NvmeStore(precision, StreamTransfer(device), file, 3, 4, separate_memory=True)
    mains = [store.main_weights(torch.ones(4), torch.ones(4)) for _ in range(6)]
    chunks = [UpdateChunk(main, (main,), (torch.zeros(4),)) for main in mains]
    for update in range(2):
        for index in store.update_chunks(chunks, {}):
            device.log.append(f"update {6 * update + index + 1}")
    store.close()
    sends = [
        line for number in range(1, 13) for line in (f"update {number}", f"event {number} on h2d")
    ]
    assert [line for line in device.log if "waits" not in line] == sends
    newest = {}  # of the events that had been recorded before each wait
    for number, line in enumerate(device.log):
        if line.startswith("host waits"):
            newest[line] = sum(" on h2d" in before for before in device.log[:number])
    # In the second update the first two chunks are read before anything is updated.
    ahead = {1: 2, 2: 3, 3: 4, 4: 6, 5: 6, 6: 7, 7: 8, 8: 9, 9: 10}
    assert newest == {f"host waits for event {event}": sent for event, sent in ahead.items()}
