"""What the detector finds, in programs of a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from torch import Tensor

from tests.support.virtual_device.device import VirtualDevice
from tests.support.virtual_device.machine import Machine
from tests.support.virtual_device.nccl import Alone, LaunchOrderError, Ranks, VirtualNccl
from tests.support.virtual_device.placement import DEVICE
from tests.support.virtual_device.rank import virtual_rank


@pytest.fixture
def machine() -> Iterator[Machine]:
    with virtual_rank() as machine:
        yield machine


@pytest.fixture
def device(machine: Machine) -> VirtualDevice:
    return VirtualDevice()


def on_device(*shape: int) -> Tensor:
    return torch.ones(*shape, device=DEVICE)


def test_a_kernel_on_another_stream_races_unless_it_waits(machine: Machine, device: VirtualDevice):
    side, values = device.new_stream(), on_device(8)
    with device.use_stream(side):
        values.add_(1)
    (race,) = machine.memory.races
    assert "ones writes on compute" in race
    assert "add_ writes on side1" in race

    machine.memory.races.clear()
    values.mul_(2)
    side.wait_stream(device.current_stream())
    with device.use_stream(side):
        values.add_(1)
    assert len(machine.memory.races) == 1  # mul_ on the compute stream after add_ on the side
    assert "mul_" in next(iter(machine.memory.races))


def test_an_event_orders_what_was_enqueued_before_it(machine: Machine, device: VirtualDevice):
    side, first, second = device.new_stream(), on_device(8), on_device(8)
    event = device.record_event()
    second.add_(1)
    side.wait_event(event)
    with device.use_stream(side):
        first.clone()
        assert not machine.memory.races
        second.clone()
    assert len(machine.memory.races) == 1


def test_reads_beside_reads_and_other_bytes_do_not_race(machine: Machine, device: VirtualDevice):
    side, values = device.new_stream(), on_device(8)
    side.wait_stream(device.current_stream())
    with device.use_stream(side):
        values[:4].clone()
        values[4:].zero_()
    values[:4].clone()
    values[2:4].sum()
    assert not machine.memory.races
    values[3:5].clone()
    assert len(machine.memory.races) == 1


def test_memory_must_live_until_other_streams_are_done(machine: Machine, device: VirtualDevice):
    def use(*, waited: bool) -> int:
        machine.memory.early_frees.clear()
        side, values = device.new_stream(), on_device(8)
        side.wait_stream(device.current_stream())
        with device.use_stream(side):
            values.clone()
        if waited:
            device.current_stream().wait_stream(side)
        del values
        return len(machine.memory.early_frees)

    assert use(waited=False) == 1
    assert use(waited=True) == 0


def test_host_memory_is_used_after_its_copy(machine: Machine, device: VirtualDevice):
    values, host = on_device(8), device.host_empty(8, torch.float32)
    host.copy_(values, non_blocking=True)
    event = device.record_event()
    host.sum()
    (race,) = machine.memory.races
    assert "copy_ writes on compute" in race
    assert "sum reads on host" in race
    machine.memory.races.clear()
    event.synchronize()
    host.sum()
    assert not machine.memory.races
    values.copy_(host, non_blocking=True)
    host.zero_()  # while it is copied
    assert len(machine.memory.races) == 1


def test_registered_memory_stays_until_its_copy_is_done(machine: Machine, device: VirtualDevice):
    host, values = torch.zeros(8), on_device(8)
    device.register_host(host)
    host.copy_(values, non_blocking=True)
    assert not machine.host_syncs
    device.unregister_host(host)
    assert len(machine.memory.early_frees) == 1


def test_what_the_host_waits_for_is_counted(machine: Machine, device: VirtualDevice):
    values = on_device(2)
    assert device.read(values) == [1.0, 1.0]
    values.to(torch.float64)
    device.send([1.0], torch.float32)
    values.copy_(torch.zeros(2).pin_memory(), non_blocking=True)
    assert [what.split(" at ")[0] for what in machine.host_syncs] == ["event.synchronize"]
    machine.host_syncs.clear()
    values.tolist()
    values.sum().item()
    values.cpu()
    values.copy_(torch.zeros(2))
    torch.tensor([1.0], device=DEVICE)
    if values.any():
        pass
    assert [what.split(" at ")[0] for what in machine.host_syncs] == [
        "tolist",
        "_local_scalar_dense",
        "blocking copy to the host",
        "blocking copy to the device",
        "blocking copy of Python numbers",
    ]


def test_devices_do_not_mix(machine: Machine):
    values = on_device(2)
    assert values.device == DEVICE
    assert values.cpu().device.type == "cpu"
    assert (values * torch.tensor(2.0)).device == DEVICE  # a number is passed by value
    with pytest.raises(RuntimeError, match="host and in device memory"):
        values + torch.ones(2)
    with pytest.raises(TypeError, match="no numpy array"):
        values.numpy()


def test_a_collective_is_ordered_by_its_wait_only(machine: Machine, device: VirtualDevice):
    nccl = VirtualNccl(Alone(0, 2))
    values = on_device(8)
    work = nccl.all_reduce(values, async_op=True)
    values.add_(1)
    assert len(machine.memory.races) == 1
    machine.memory.races.clear()
    work = nccl.all_reduce(values, async_op=True)  # after everything on the compute stream
    work.wait()
    values.add_(1)
    assert not machine.memory.races
    assert not machine.host_syncs
    with pytest.raises(RuntimeError, match="host memory, or not contiguous"):
        nccl.all_reduce(torch.ones(4), async_op=True)
    with pytest.raises(RuntimeError, match="host memory, or not contiguous"):
        nccl.all_reduce(on_device(4, 4).t(), async_op=True)
    with pytest.raises(RuntimeError, match="no type"):
        nccl.broadcast(on_device(4).short(), async_op=True)


def test_ranks_that_launch_in_another_order_are_found():
    ranks = Ranks(2)
    nccl, errors, sums = VirtualNccl(ranks), [], []

    def run(rank: int) -> None:
        ranks.as_rank(rank)
        with virtual_rank():
            first, second = on_device(4) * (rank + 1), on_device(2)
            nccl.all_reduce(first, async_op=True).wait()
            sums.append(first.tolist())
            try:
                for values in (first, second)[:: 1 - 2 * rank]:
                    nccl.all_reduce(values, async_op=True)
            except LaunchOrderError as error:
                errors.append(str(error))

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[3.0] * 4] * 2
    assert len(errors) == 2
    assert "('world', 'all_reduce', 4, 'torch.float32')" in errors[0]


def test_bytes_of_the_device_are_counted(machine: Machine):
    kept = on_device(1024)
    for _ in range(3):
        on_device(2048)
    torch.ones(4096)
    assert machine.memory.device_bytes == kept.nbytes
    assert machine.memory.peak_bytes == 4096 + 8192
