"""The CUDA device on a GPU: order, pinned memory, health."""

from __future__ import annotations

import mmap

import pytest
import torch

from rayzero.engine.device import CudaDevice, get_device

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 100_000_000  # about 50 ms


@pytest.fixture
def device() -> CudaDevice:
    device = get_device(torch.device("cuda", 0))
    assert isinstance(device, CudaDevice)
    return device


def test_read_waits_for_the_stream(device: CudaDevice) -> None:
    stream = device.new_stream()
    with device.use_stream(stream):
        values = device.send([1.0, 2.0], torch.float64)
        torch.cuda._sleep(SLEEP_CYCLES)
        values.add_(1.0)
        assert device.read(values) == [2.0, 3.0]
    assert device.current_stream() != stream


def test_stream_waits_for_an_event(device: CudaDevice) -> None:
    first, second = device.new_stream(), device.new_stream()
    values = device.send([1.0], torch.float32)
    first.wait_stream(device.current_stream())
    with device.use_stream(first):
        torch.cuda._sleep(SLEEP_CYCLES)
        values.add_(1.0)
        event = device.record_event()
    assert not event.query()
    second.wait_event(event)
    with device.use_stream(second):
        assert device.read(values) == [2.0]


def test_registered_memory_is_pinned(device: CudaDevice) -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    device.register_host(memory)
    assert memory.is_pinned()
    device.unregister_host(memory)


def test_healthy_device_is_idle_in_time(device: CudaDevice) -> None:
    device.warm_up()
    device.check_health(30)
    device.synchronize(30)
    assert device.peak_bytes()
    state = device.rng_state()
    assert state is not None
    device.set_rng_state(state)
