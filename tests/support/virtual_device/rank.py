"""Runs the engine on a virtual accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rayzero.engine import builder, recut
from rayzero.engine.comm import nccl as nccl_module
from rayzero.engine.comm.backend import Backend
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.comm.process_group import SingleRankBackend
from rayzero.engine.device import replace_device
from rayzero.engine.offload import nvme_store, transfer
from rayzero.engine.offload.nvme_store import MappedFile
from rayzero.engine.state import ranges
from tests.support.virtual_device.device import VirtualDevice
from tests.support.virtual_device.machine import Machine, current_machine, use_machine
from tests.support.virtual_device.nccl import Alone, Ranks, VirtualNccl
from tests.support.virtual_device.operators import Operators
from tests.support.virtual_device.placement import DEVICE, Placement, frombuffer, group_tensors
from tests.support.virtual_device.timelines import Clock, Timeline, merge


@contextmanager
def virtual_cluster(ranks: Alone | Ranks) -> Iterator[None]:
    """Connects engines that are built in this process to virtual NCCL, on virtual devices."""
    nccl = VirtualNccl(ranks)

    def connect_backend() -> tuple[Backend, torch.device]:
        if ranks.world_size == 1:
            return SingleRankBackend(), DEVICE
        return NcclBackend(nccl.world), DEVICE  # type: ignore[arg-type]

    def connect() -> Collectives:
        return Collectives(*connect_backend())

    with ExitStack() as stack:
        stack.enter_context(replace_device(VirtualDevice()))
        for target, name, new in (
            (nccl_module, "dist", nccl),
            (nccl_module, "_all_gather", nccl.all_gather_single),
            (nccl_module, "_reduce_scatter", nccl.reduce_scatter_single),
            (torch._C, "_group_tensors_by_device_and_dtype", group_tensors),
            (torch, "frombuffer", frombuffer),
            (builder, "connect_collectives", connect),
            (recut, "connect_backend", connect_backend),
            (transfer, "CAST_NUMEL", 512),
            (ranges, "STAGING_BYTES", 512),
            (nvme_store, "ThreadPoolExecutor", VirtualPool),
            (MappedFile, "read", _booked(MappedFile.read, reads_file=True)),
            (MappedFile, "write", _booked(MappedFile.write, reads_file=False)),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        yield


@contextmanager
def virtual_rank() -> Iterator[Machine]:
    """The calling thread is a rank with a virtual accelerator of its own."""
    machine = Machine()
    with use_machine(machine), Placement(machine), Operators(machine):
        yield machine


def _booked(call: Callable[..., None], *, reads_file: bool) -> Callable[..., None]:
    """Input and output of a file, which torch's operators do not see."""

    def run(self: MappedFile, stored: Tensor, memory: Tensor) -> None:
        machine = current_machine()
        for tensor in (stored, memory):
            machine.home_of(tensor)
        source, target = (stored, memory) if reads_file else (memory, stored)
        machine.run("file", [source], [target], machine.host)
        with torch._C.DisableTorchFunction():
            call(self, stored, memory)

    return run


class VirtualPool(ThreadPoolExecutor):
    """Runs a task when it is submitted, on a timeline of its own: that of a thread which starts
    after `submit` and has ended for certain when `result` was asked for."""

    _tasks = 0

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        machine = current_machine()
        VirtualPool._tasks += 1
        thread = Timeline(f"{self._thread_name_prefix} {self._tasks}", on_host=True)
        merge(thread.clock, machine.host.clock)
        future = VirtualFuture(thread.clock)
        with machine.host_thread(thread):
            try:
                future.set_result(call(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  raised by `result`
                future.set_exception(error)
        return future


class VirtualFuture(Future[Any]):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def result(self, timeout: float | None = None) -> Any:
        merge(current_machine().host.clock, self._clock)
        return super().result(timeout)
