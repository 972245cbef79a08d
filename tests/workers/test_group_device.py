"""The device of a worker's NCCL groups: current in the thread that makes one, and bound to it.

An unbound group makes its communicator in the first collective, on the thread's current device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rayzero.engine.device import CudaDevice, replace_device
from rayzero.workers import process_group
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import Assignment

GPU = torch.device("cuda", 0)


class _MadeError(RuntimeError):
    """Ends what follows, for which a GPU would be needed."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is asked of the device and of torch, in order."""
    calls: list[Any] = []

    def make_group(ranks: list[int], **options: Any) -> None:
        calls.append((options["backend"], options["device_id"]))
        raise _MadeError

    monkeypatch.setattr(CudaDevice, "make_current", lambda self: calls.append("current"))
    monkeypatch.setattr(dist, "new_group", make_group)
    monkeypatch.setattr(process_group, "StoreClient", lambda *_: HashStore())
    with replace_device(CudaDevice(GPU)):
        yield calls


def join() -> None:
    assignment = Assignment(
        rank=0,
        local_rank=0,
        local_world_size=1,
        vault="",
        generation=1,
        world_size=1,
        store_host="127.0.0.1",
        store_port=1,
    )
    process_group.join_process_group(assignment, GPU, 1.0, SocketTracker())


@pytest.mark.parametrize("make", [join, lambda: process_group.warm_up_communicator(GPU)])
def test_group_of_nccl_is_bound_to_the_device(make: Callable[[], None], calls: list[Any]):
    with pytest.raises(_MadeError):
        make()
    assert calls == ["current", ("nccl", GPU)]
