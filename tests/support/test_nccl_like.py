"""The NCCL-like device and group: what would hide a mistake of the product if it were not so."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread, Timer

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.workers.nccl_settings import apply_nccl_settings
from tests.support.nccl_like.group import NcclLikeGroup
from tests.support.nccl_like.settings import NcclLike
from tests.support.nccl_like.stream import VirtualDevice

LIMIT_S = 240.0


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process of the tests."""
    apply_nccl_settings(environment := dict[str, str]())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice(NcclLike())


def close_gate(device: VirtualDevice) -> Event:
    """A kernel that stands until the event is set."""
    gate = Event()
    device.stream.launch(lambda: gate.wait(LIMIT_S) and None)
    return gate


def make_groups(**settings: object) -> list[NcclLikeGroup]:
    """Two ranks of one process, each with a device of its own."""
    store = dist.HashStore()
    values = NcclLike(watchdog_s=60.0, **settings)  # type: ignore[arg-type]

    def make(rank: int) -> NcclLikeGroup:
        return NcclLikeGroup(store, rank, 2, VirtualDevice(values))

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(make, range(2))]


def test_host_runs_ahead_and_waits_where_it_reads(device: VirtualDevice):
    gate, value = close_gate(device), torch.zeros(3)
    with device.mode():
        value.add_(1.0)
        total = (value * 2).sum()
        assert device.stream.busy
        Timer(0.1, gate.set).start()
        assert total.item() == 6.0  # waits
    assert value.tolist() == [1.0] * 3


def test_only_a_wait_orders_streams(device: VirtualDevice):
    """A copy on another stream does not wait for a collective that stands, nor does it see what the
    default stream has yet to compute."""
    gate, value, copy = close_gate(device), torch.zeros(2), torch.ones(2)
    side = device.new_stream()
    with device.mode():
        value.add_(1.0)
        with device.use_stream(side):
            copy.copy_(value)
            assert device.read(copy) == [0.0, 0.0], "the default stream stands"
            side.wait_stream(device.stream)
            copy.copy_(value)
            copied = device.record_event()
        assert not copied.query()
        gate.set()
        copied.synchronize()
        assert device.read(copy) == [1.0, 1.0]


def test_wait_of_a_collective_orders_the_current_stream():
    group, other = make_groups()
    tensor = torch.ones(2)
    with group._device.mode():
        work = group.allreduce([tensor])
        assert group._device.read(tensor) == [1.0, 1.0], "nobody has waited for the work"
        assert not work.is_completed()
        work.wait()
        doubled = tensor * 2
        other.allreduce([torch.ones(2)])
        assert group._device.read(doubled) == [4.0, 4.0]
    group.abort()
    other.abort()


@pytest.mark.parametrize("garbage", ["nan", "plausible", "random"])
def test_abort_ends_what_stands_without_an_exception_and_leaves_garbage(garbage: str):
    group, _ = make_groups(garbage=garbage)
    tensors: list[Tensor] = [torch.ones(2), torch.ones(2)]
    for tensor in tensors:
        assert group.allreduce([tensor]).wait()  # the other rank never takes part
    with pytest.raises(TimeoutError):
        group.stream.synchronize(0.2)
    group.abort()
    group.stream.synchronize(LIMIT_S)
    for tensor in tensors:
        assert tensor.tolist() != [2.0, 2.0]
    with pytest.raises((ValueError, dist.DistBackendError), match="aborted"):
        group.allreduce([torch.ones(1)])


def test_second_abort_at_the_same_time_fails():
    group, _ = make_groups(abort_s=0.5)
    first = Thread(target=group.abort)
    first.start()
    time.sleep(0.1)
    with pytest.raises(dist.DistBackendError, match="another thread"):
        group.abort()
    first.join()
    group.abort()  # afterwards there is nothing to do


def test_loss_of_a_peer_is_no_exception_but_an_error_to_be_polled():
    group, other = make_groups()
    group._device.settings = NcclLike(watchdog_s=0.0)
    tensor = torch.ones(2)
    group.allreduce([tensor])
    other.abort()
    other._mesh.close()
    deadline_s = time.monotonic() + LIMIT_S
    while group.get_error().name == "SUCCESS" and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert group.get_error().name == "REMOTE_ERROR"
    assert group.stream.busy, "the collective stands until it is aborted"
    group.abort()
    group.stream.synchronize(LIMIT_S)
