"""The process group of each generation: join, abort, and interrupt from another thread.

`dist.group.WORLD` is an `ElasticGroup`, which passes calls to the group of the present generation.
Each generation has its own key prefix in the store, so that it never reads a late key of
an earlier one.

`group_sockets` ends the waits of gloo for peers.

The group of an asynchronous device (NCCL) is aborted instead, which ends its kernels on the device.
Its sockets are shut down only while it forms, where nothing else ends a wait: later the abort
itself uses them. The training thread and a command thread may abort concurrently: each holds
`group_lock`, and aborts only a group that still exists. The next group is created after that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, RLock, Thread
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.comm.elastic_group import GroupPlace, elastic_group, make_elastic_group
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.device import get_device
from rayzero.engine.torch_private import HashStore, PrefixStore, Store, error_reader
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import Assignment
from rayzero.workers.rendezvous_store import StoreClient

group_lock = RLock()
"""Held while a generation's process group is aborted, and while the channel of the next generation
is set, whose group and sockets an abort in flight must not meet."""
POLL_INTERVAL_S = 1.0
"""Seconds between two reads of NCCL's asynchronous error. A read costs a lock and a copy."""
_group_store: list[StoreClient] = []
"""The store of the present group, which keeps the C++ part alive, but not the Python object."""


def plan_process_group(
    assignment: Assignment, device: torch.device, begin: Callable[[], None] | None = None
) -> None:
    """Makes the ranks of a generation known before its group exists: to torch, and in the
    environment variables that torchrun sets.

    Args:
        begin: passed for a generation that has not begun. Waits for the generation and joins it;
            called when the group is needed.
    """
    _set_environment(assignment)
    backend = get_device(device).backend
    place = GroupPlace(assignment.rank, assignment.world_size, device, backend)
    make_elastic_group().plan(place, begin)


def _set_environment(assignment: Assignment) -> None:
    """Sets the variables that torchrun sets. The store's address is set once the generation
    begins."""
    os.environ.update(
        RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.world_size),
        LOCAL_RANK=str(assignment.local_rank),
        LOCAL_WORLD_SIZE=str(assignment.local_world_size),
    )
    if not assignment.is_ahead:
        os.environ.update(MASTER_ADDR=assignment.store_host, MASTER_PORT=str(assignment.store_port))


def join_process_group(
    assignment: Assignment, device: torch.device, timeout_s: float, sockets: SocketTracker
) -> dist.ProcessGroup:
    """Creates the process group of a generation, after `plan_process_group`; returns when all
    members have joined.

    Args:
        timeout_s: limit of the rendezvous, and of every collective of the group.

    Raises:
        RuntimeError: a peer, or the store, did not answer within `timeout_s`.
    """
    get_device(device).make_current()  # per thread
    with sockets.recording(assignment.world_size):
        _group_store[:] = [
            StoreClient(
                assignment.store_host,
                assignment.store_port,
                assignment.secret,
                timeout_s,
                sockets.add_store,
                sockets.add_value,
            )
        ]
        own_keys = PrefixStore(f"generation-{assignment.generation}", _group_store[0])
        return _form_group(own_keys, device, timeout=timedelta(seconds=timeout_s))


def _form_group(store: Store, device: torch.device, **options: Any) -> dist.ProcessGroup:
    return make_elastic_group().form_group(
        store,
        backend=get_device(device).backend,
        device_id=device if device.type == "cuda" else None,
        **options,
    )


def warm_up_communicator(device: torch.device) -> None:
    """Creates, uses and aborts a group of this rank alone: NCCL's first communicator loads NCCL's
    kernels. Called before the first generation; `workers.start_timeout_s` limits the time."""
    nccl_device = get_device(device)
    with group_lock:
        nccl_device.make_current()
        try:
            group = _form_group(HashStore(), device)
            NcclBackend(group).all_reduce(torch.zeros(1, device=device)).wait()
            nccl_device.synchronize()
        finally:
            make_elastic_group().abort_groups()


def warm_up_torch(device: torch.device) -> None:
    """Runs one step of a tiny model, whose backward starts autograd's threads. On a GPU this also
    creates the context, the libraries' handles and NCCL's first communicator, which would cost a
    replacement seconds in its first step. Raises the device's error if the device is unusable."""
    get_device(device).warm_up()
    if get_device(device).asynchronous:
        warm_up_communicator(device)
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.square().sum().backward()
    optimizer.step()


def abort_default_group(device: torch.device, sockets: SocketTracker) -> None:
    """Destroys the generation's group, if there is one, without waiting for peers.

    The peers' collectives fail at once, because their connections to this rank close. No thread of
    this process may be in a gloo collective.
    """
    if (elastic := elastic_group()) is None:
        return
    with group_lock:
        if sockets.is_recording or not get_device(device).asynchronous:
            sockets.shutdown()
        elastic.abort_groups()


def interrupt_collectives(device: torch.device, sockets: SocketTracker) -> None:
    """Aborts a wait for peers in the training thread, from another thread."""
    with group_lock:
        asynchronous = get_device(device).asynchronous
        if sockets.is_recording or not asynchronous:
            sockets.shutdown()
        if asynchronous and not sockets.is_recording and (elastic := elastic_group()) is not None:
            elastic.abort_groups()


def is_collective_failure(error: BaseException) -> bool:
    """Returns whether torch raised `error` because a peer died or timed out, not because of user
    code."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "gloo/" in text or "NCCL" in text


@contextmanager
def polled_group_errors(device: torch.device, on_error: Callable[[str], None]) -> Iterator[None]:
    """Runs a thread that polls the generation's group for errors, if the backend reports any;
    builds of torch without NCCL do not. The training thread waits for the device, not for the
    group: without the polling, a broken network would look like a rank that hangs in its own code.

    The thread ends at the first error, when there is no group, or within `POLL_INTERVAL_S` of the
    exit.

    Args:
        on_error: called on that thread, at most once.
    """
    if not get_device(device).asynchronous:
        yield
        return
    exited = Event()

    def poll() -> None:
        read = None
        while not exited.wait(POLL_INTERVAL_S):
            try:
                read = read or _error_reader(device)
                name = read().name if read is not None else "SUCCESS"
            except RuntimeError:  # the group was not made, or was aborted meanwhile
                return
            if name != "SUCCESS" and not exited.is_set():
                on_error(f"the process group reports {name}: a peer, or the network, failed")
                return

    thread = Thread(target=poll, name="rayzero-group-errors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        exited.set()


def _error_reader(device: torch.device) -> Callable[[], Any] | None:
    """Returns the method that reads the backend's error; None without a group, or if the backend of
    this build of torch has none."""
    group = elastic_group()
    return None if group is None else error_reader(group.get_group(), device)
