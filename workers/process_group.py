"""The default process group of each generation: join, abort, and interrupt from another thread.

One process group exists at a time. Each generation has its own key prefix in the store, so that it
never reads a late key of an earlier one.

A gloo wait for a peer that is stopped or unreachable ends only at the group's timeout, and aborting
the group does not end it. Shutting down the group's sockets does, at once and on both sides. While
a group forms, a rank may wait for a connection that its peer never opens; then we open it.
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

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group, _world

from rayzero.workers.messages import Assignment
from rayzero.workers.rendezvous_store import AuthenticatedStore

_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")
_FD_FOLDER = Path("/proc/self/fd")
_SELF_CONNECT_S = 1.0  # of this process to its own listener: the kernel answers
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
    timeout = timedelta(seconds=timeout_s)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # per thread: this is the training thread
    # Groups are named by a per-process counter, which an aborted join has already incremented: its
    # peers that had not got as far would wait for a group of another name.
    _world.group_count = 0
    with sockets.recording(assignment.world_size):
        store = _connect_to_store(host, port, timeout_s)
        _group_store[:] = [AuthenticatedStore(store, assignment.secret)]
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore(f"generation-{assignment.generation}", _group_store[0]),
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )


def abort_default_group(sockets: SocketTracker) -> None:
    """Destroys the default group, if there is one, without waiting for peers.

    Their collectives fail at once, because their connections to this rank close. No thread of this
    process may be in a collective.
    """
    sockets.shutdown()
    if dist.is_initialized():
        _abort_process_group()


def interrupt_collectives(sockets: SocketTracker) -> None:
    """Aborts a wait for peers in the training thread, from another thread."""
    sockets.shutdown()
    if dist.is_initialized() and dist.get_backend() == "nccl":
        _abort_process_group()


def is_collective_failure(error: BaseException) -> bool:
    """Whether torch raised `error` because a peer died or timed out, not because of user code."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "gloo/" in text or "NCCL" in text
