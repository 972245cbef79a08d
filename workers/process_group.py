"""The default process group of each generation: join, abort, and interrupt from another thread.

One process group exists at a time. Each generation has its own key prefix in the store, so that it
never reads a late key of an earlier one.

A gloo wait for a peer that is stopped or unreachable ends only at the group's timeout, and aborting
the group does not end it. Shutting down the group's sockets does, at once and on both sides. While
a group forms, a rank may wait for a connection that its peer never opens; then we open it.

The group of an asynchronous device (NCCL) is aborted instead, which ends its kernels on the device.
Its sockets are shut down only while it forms, where nothing else ends a wait: later the abort
itself uses them. The training thread and a command thread may abort at once: `group_lock` is held
meanwhile, and each aborts only a group that it finds. A group is created after such an abort.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    TCPStore,
    _unregister_all_process_groups,
)
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import _abort_process_group, _world

from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.device import get_device
from rayzero.workers.messages import Assignment
from rayzero.workers.rendezvous_store import AuthenticatedStore

_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")
_FD_FOLDER = Path("/proc/self/fd")
_SELF_CONNECT_S = 1.0  # of this process to its own listener: the kernel answers
group_lock = RLock()
"""Held to abort the default process group, and to take over a generation's channel: an abort in
flight must not meet the next generation's group and sockets."""
_group_store: list[AuthenticatedStore] = []
"""Of the default group, which keeps the C++ part alive, but not the Python object."""


class SocketTracker:
    """Tracks the sockets created inside `recording`, by inode.

    Sockets that other threads open meanwhile are tracked, too. Those of Ray's threads are gRPC
    channels, which reconnect by themselves.
    """

    def __init__(self) -> None:
        self._sockets_before: frozenset[str] | None = None
        self._sockets_after: frozenset[str] | None = None  # None inside `recording`
        self._world_size = 0

    @property
    def is_recording(self) -> bool:
        """Whether a group is being created."""
        return self._sockets_before is not None and self._sockets_after is None

    @contextmanager
    def recording(self, world_size: int) -> Iterator[None]:
        """Encloses the creation of a process group of `world_size` ranks and its store."""
        self._world_size = world_size
        self._sockets_before = frozenset(_open_sockets())
        yield
        self._sockets_after = frozenset(_open_sockets())

    def shutdown(self) -> None:
        """Ends the waits for peers: shuts down the connections created so far, and opens those that
        a group that is forming still waits for. From any thread; idempotent."""
        if self._sockets_before is None:
            return
        expected = self._world_size if self._sockets_after is None else 0
        for inode, descriptor in _open_sockets().items():
            new = inode not in self._sockets_before
            if new and (self._sockets_after is None or inode in self._sockets_after):
                with suppress(OSError):
                    _shutdown_tcp(descriptor, inode, expected)


def _open_sockets() -> dict[str, int]:
    """This process's sockets: inode to descriptor. Empty without /proc."""
    sockets = {}
    with suppress(OSError):
        for name in os.listdir(_FD_FOLDER):
            with suppress(OSError):
                if match := _SOCKET_LINK.match(os.readlink(_FD_FOLDER / name)):
                    sockets[match.group(1)] = int(name)
    return sockets


def _shutdown_tcp(descriptor: int, inode: str, expected: int) -> None:
    """Shuts down a connected TCP socket. gloo's listener stays open: gloo aborts the process if
    accept fails. It gets the connections it waits for: `expected` peers, each of which sends the
    number of its pair first. May raise OSError."""
    duplicate = os.dup(descriptor)
    if os.readlink(_FD_FOLDER / str(duplicate)) != f"socket:[{inode}]":
        os.close(duplicate)  # the socket was closed meanwhile, and its number reused
        return
    with socket.socket(fileno=duplicate) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            own.getpeername()
            own.shutdown(socket.SHUT_RDWR)
            return
        for number in range(expected):
            with socket.create_connection(own.getsockname()[:2], _SELF_CONNECT_S) as peer:
                peer.sendall(number.to_bytes(8, sys.byteorder))


def _connect_to_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store is there before it is assigned: without it, its process has died. torch's client
    would try again until the timeout, and nothing could end that."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise dist.DistNetworkError(f"the rendezvous store at {host}:{port}: {error}") from None
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def join_process_group(
    assignment: Assignment, device: torch.device, timeout_s: float, sockets: SocketTracker
) -> None:
    """Creates the default process group of a generation; returns when all members have joined.

    Also sets the environment variables that torchrun sets.

    Args:
        timeout_s: of the rendezvous, and of every collective of the group.

    Raises:
        RuntimeError: a peer did not join within `timeout_s`.
    """
    host, port = assignment.store_host, assignment.store_port
    os.environ.update(
        RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.world_size),
        LOCAL_RANK=str(assignment.local_rank),
        LOCAL_WORLD_SIZE=str(assignment.local_world_size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    own = get_device(device)
    own.make_current()  # per thread: this is the training thread
    # Groups are named by a per-process counter, which an aborted join has already incremented: its
    # peers that had not got as far would wait for a group of another name.
    _world.group_count = 0
    with sockets.recording(assignment.world_size):
        store = _connect_to_store(host, port, timeout_s)
        _group_store[:] = [AuthenticatedStore(store, assignment.secret)]
        dist.init_process_group(
            own.backend,
            store=PrefixStore(f"generation-{assignment.generation}", _group_store[0]),
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )


def warm_up_communicator(device: torch.device) -> None:
    """Makes a group of this rank alone, uses and aborts it: NCCL's first communicator loads its
    kernels. Before the first generation; `workers.start_timeout_s` limits it."""
    own = get_device(device)
    with group_lock:
        own.make_current()
        try:
            dist.init_process_group(
                own.backend,
                store=HashStore(),
                rank=0,
                world_size=1,
                device_id=device if device.type == "cuda" else None,
            )
            NcclBackend(c10d._get_default_group()).all_reduce(torch.zeros(1, device=device)).wait()
            own.synchronize()
        finally:
            _abort_if_any()


def abort_default_group(device: torch.device, sockets: SocketTracker) -> None:
    """Destroys the default group, if there is one, without waiting for peers.

    Their collectives fail at once, because their connections to this rank close. No thread of this
    process may be in a collective of gloo.
    """
    with group_lock:
        if sockets.is_recording or not get_device(device).asynchronous:
            sockets.shutdown()
        _abort_if_any()


def interrupt_collectives(device: torch.device, sockets: SocketTracker) -> None:
    """Aborts a wait for peers in the training thread, from another thread."""
    with group_lock:
        asynchronous = get_device(device).asynchronous
        if sockets.is_recording or not asynchronous:
            sockets.shutdown()
        if asynchronous and not sockets.is_recording:
            _abort_if_any()


def _abort_if_any() -> None:
    """Aborts the default group. torch keeps it in its tables if that fails: a new one could not be
    created."""
    if not dist.is_initialized():
        return
    try:
        _abort_process_group()
    finally:
        if dist.is_initialized():
            c10d._update_default_pg(None)
            tables: tuple[dict[Any, Any], ...] = (
                *(_world.pg_map, _world.pg_names, _world.pg_group_ranks),
                *(_world.pg_backend_config, _world.pg_to_tag, _world.tags_to_pg),
            )
            for table in tables:
                table.clear()
            _unregister_all_process_groups()


def is_collective_failure(error: BaseException) -> bool:
    """Whether torch raised `error` because a peer died or timed out, not because of user code."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "gloo/" in text or "NCCL" in text
