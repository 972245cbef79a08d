"""The process group of each generation: join, abort, and interrupt from another thread.

`dist.group.WORLD` is an `ElasticGroup`, through which the one group of the present generation is
reached. Each generation has its own key prefix in the store, so that it never reads a late key of
an earlier one.

What ends a wait of gloo for a peer is in `group_sockets`.

The group of an asynchronous device (NCCL) is aborted instead, which ends its kernels on the device.
Its sockets are shut down only while it forms, where nothing else ends a wait: later the abort
itself uses them. The training thread and a command thread may abort at once: `group_lock` is held
meanwhile, and each aborts only a group that it finds. A group is created after such an abort.
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
"""Held to abort a generation's process group, and to take over the channel of the next: an abort in
flight must not meet its group and sockets."""
POLL_INTERVAL_S = 1.0
"""How often NCCL's asynchronous error is read: a lock and a copy."""
_group_store: list[StoreClient] = []
"""Of that group, which keeps the C++ part alive, but not the Python object."""


def plan_process_group(
    assignment: Assignment, device: torch.device, begin: Callable[[], None] | None = None
) -> None:
    """Makes the ranks of a generation known, before its group exists: to torch, and by the
    environment variables that torchrun sets.

    Args:
        begin: of a generation that has not begun; what needs its group calls it, which waits for
            the generation, and joins it.
    """
    _set_environment(assignment)
    backend = get_device(device).backend
    place = GroupPlace(assignment.rank, assignment.world_size, device, backend)
    make_elastic_group().plan(place, begin)


def _set_environment(assignment: Assignment) -> None:
    """Sets the variables that torchrun sets; the store's address once the generation begins."""
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
        timeout_s: of the rendezvous, and of every collective of the group.

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
    """Makes a group of this rank alone, uses and aborts it: NCCL's first communicator loads its
    kernels. Before the first generation; `workers.start_timeout_s` limits it."""
    own = get_device(device)
    with group_lock:
        own.make_current()
        try:
            group = _form_group(HashStore(), device)
            NcclBackend(group).all_reduce(torch.zeros(1, device=device)).wait()
            own.synchronize()
        finally:
            make_elastic_group().abort_groups()


def warm_up_torch(device: torch.device) -> None:
    """Runs one step of a tiny model: the first backward starts autograd's threads. On a GPU it also
    makes what takes a replacement seconds in its first step: the context, the libraries' handles,
    and NCCL's first communicator. Raises what the device raises: it is of no use then."""
    get_device(device).warm_up()
    if get_device(device).asynchronous:
        warm_up_communicator(device)
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.square().sum().backward()
    optimizer.step()


def abort_default_group(device: torch.device, sockets: SocketTracker) -> None:
    """Destroys the generation's group, if there is one, without waiting for peers.

    Their collectives fail at once, because their connections to this rank close. No thread of this
    process may be in a collective of gloo.
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
    """Whether torch raised `error` because a peer died or timed out, not because of user code."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "gloo/" in text or "NCCL" in text


@contextmanager
def polled_group_errors(device: torch.device, on_error: Callable[[str], None]) -> Iterator[None]:
    """While it is entered, a thread polls the generation's group, if its backend reports errors;
    builds of torch without NCCL do not. The training thread waits for the device, not for the
    group: without this, a broken network would look like a rank that hangs in its own code.

    The thread ends with its first error, without a group, or within `POLL_INTERVAL_S` of the exit.

    Args:
        on_error: called on that thread, at most once.
    """
    if not get_device(device).asynchronous:
        yield
        return
    left = Event()

    def poll() -> None:
        read = None
        while not left.wait(POLL_INTERVAL_S):
            try:
                read = read or _error_reader(device)
                name = read().name if read is not None else "SUCCESS"
            except RuntimeError:  # the group was not made, or was aborted meanwhile
                return
            if name != "SUCCESS" and not left.is_set():
                on_error(f"the process group reports {name}: a peer, or the network, failed")
                return

    thread = Thread(target=poll, name="rayzero-group-errors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()


def _error_reader(device: torch.device) -> Callable[[], Any] | None:
    """The backend's method. Looked up: torch's base class does not have it in all builds."""
    group = elastic_group()
    return None if group is None else error_reader(group.get_group(), device)
