"""What the detector finds, in programs of a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def side_kernel(device: VirtualDevice, *, waits: bool) -> None:
    side, values = device.new_stream(), on_device(8)
    if waits:
        side.wait_stream(device.current_stream())
    with device.use_stream(side):
        values.add_(1)


def kernel_behind_an_event(device: VirtualDevice, *, waits: bool) -> None:
    side, values = device.new_stream(), on_device(8)
    before = device.record_event()
    values.add_(1)
    side.wait_event(device.record_event() if waits else before)
    with device.use_stream(side):
        values.clone()


def overlapping_bytes(device: VirtualDevice, *, waits: bool) -> None:
    side, values = device.new_stream(), on_device(8)
    side.wait_stream(device.current_stream())
    with device.use_stream(side):
        values[:4].clone()
        values[4:].zero_()
    values[:4].clone()
    values[2 : 4 if waits else 5].sum()


def host_read(device: VirtualDevice, *, waits: bool) -> None:
    host = device.host_empty(8, torch.float32)
    host.copy_(on_device(8), non_blocking=True)
    if waits:
        device.record_event().synchronize()
    host.sum()


def host_write(device: VirtualDevice, *, waits: bool) -> None:
    values, host = on_device(8), torch.zeros(8).pin_memory()
    values.copy_(host, non_blocking=True)
    if waits:
        device.record_event().synchronize()
    host.zero_()


def collective(device: VirtualDevice, *, waits: bool) -> None:
    values = on_device(8)
    work = VirtualNccl(Alone(0, 2)).all_reduce(values, async_op=True)
    if waits:
        work.wait()
    values.add_(1)


PROGRAMS = (side_kernel, kernel_behind_an_event, overlapping_bytes, host_read, host_write)


@pytest.mark.parametrize("program", [*PROGRAMS, collective])
def test_an_access_races_unless_it_waits(machine: Machine, device: VirtualDevice, program: Any):
    program(device, waits=True)
    assert not machine.memory.races
    program(device, waits=False)
    (race,) = machine.memory.races.values()
    assert race == 1


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


def test_nccl_refuses_what_it_cannot_send(machine: Machine):
    nccl = VirtualNccl(Alone(0, 2))
    for wrong in (torch.ones(4), on_device(4, 4).t()):
        with pytest.raises(RuntimeError, match="host memory, or not contiguous"):
            nccl.all_reduce(wrong, async_op=True)
    with pytest.raises(RuntimeError, match="no type"):
        nccl.broadcast(on_device(4).short(), async_op=True)


def test_ranks_that_launch_in_another_order_are_found():
    ranks = Ranks(2)
    nccl, errors, sums = VirtualNccl(ranks), [], []

    def run(rank: int) -> None:
        with virtual_rank():
            first, second = on_device(4) * (rank + 1), on_device(2)
            nccl.all_reduce(first, async_op=True).wait()
            sums.append(first.tolist())
            try:
                for values in (first, second)[:: 1 - 2 * rank]:
                    nccl.all_reduce(values, async_op=True)
            except LaunchOrderError as error:
                errors.append(str(error))

    ranks.run(run)
    assert sums == [[3.0] * 4] * 2
    assert len(errors) == 2
    assert "('world', 'all_reduce', 4, 'torch.float32')" in errors[0]
