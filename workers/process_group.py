"""Join, abort, connections of one generation.

Generations of the default process group: how a worker meets its peers, and how it leaves them.

One process group lives at a time. Every generation has its own prefix in the store, so that a
late key of an old one cannot be read by a new one.

The TCP connections of one generation's process group, so that a wait in it can be broken off.

A gloo wait for a peer that is stopped, or behind a cut link, ends only at the group's timeout;
aborting the group does not end it. Shutting its sockets down does, on both sides, at once.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group, _world

from rayzero.workers.messages import Assignment

_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")


_FD_FOLDER = Path("/proc/self/fd")


class SocketTracker:
    """Knows the sockets that were made inside `noting`, by inode.

    Another thread may have opened one of its own meanwhile. Of Ray's threads these are gRPC
    channels, which connect again by themselves.
    """

    def __init__(self) -> None:
        self._sockets_before: frozenset[str] | None = None
        self._sockets_after: frozenset[str] | None = None  # None while they are being made

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the making of a process group, its store included."""
        self._sockets_before = frozenset(_open_sockets())
        yield
        self._sockets_after = frozenset(_open_sockets())

    def shutdown(self) -> None:
        """Shuts down the connections made so far. From any thread; safe to repeat."""
        if self._sockets_before is None:
            return
        for inode, descriptor in _open_sockets().items():
            new = inode not in self._sockets_before
            if new and (self._sockets_after is None or inode in self._sockets_after):
                with suppress(OSError):
                    _shutdown_tcp(descriptor)


def _open_sockets() -> dict[str, int]:
    """This process's sockets: inode to descriptor. Empty where there is no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(_FD_FOLDER):
            with suppress(OSError):
                if match := _SOCKET_LINK.match(os.readlink(_FD_FOLDER / name)):
                    found[match.group(1)] = int(name)
    return found


def _shutdown_tcp(descriptor: int) -> None:
    """Shuts a connected TCP socket; others, such as gloo's listener, are left alone: it would
    end the process if its accept failed."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            one.getpeername()
            one.shutdown(socket.SHUT_RDWR)


def open_store(timeout_s: float) -> TCPStore:
    """Serves a store on a free port of this host, for as long as the returned object lives."""
    return TCPStore(
        "0.0.0.0",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join_process_group(
    assign: Assignment, device: torch.device, timeout_s: float, connections: SocketTracker
) -> None:
    """Makes the default process group of a generation; returns when every member is there.

    The environment is set as torchrun sets it, for scripts that look there.

    Raises:
        RuntimeError: a peer did not come within `timeout_s`, which is also the timeout of every
            collective of the group.
    """
    os.environ.update(
        RANK=str(assign.rank),
        WORLD_SIZE=str(assign.world_size),
        LOCAL_RANK=str(assign.local_rank),
        LOCAL_WORLD_SIZE=str(assign.local_world_size),
        MASTER_ADDR=assign.store_host,
        MASTER_PORT=str(assign.store_port),
    )
    timeout = timedelta(seconds=timeout_s)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # a thread's own setting: we are in the training thread
    # Groups are named by their number, which a join that was broken off has used up; a peer that
    # had not come so far would then wait for one of another name.
    _world.group_count = 0
    with connections.recording():
        store = TCPStore(
            assign.store_host,
            assign.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timeout,
        )
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore(f"generation-{assign.generation}", store),
            rank=assign.rank,
            world_size=assign.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )


def abort_default_group(connections: SocketTracker) -> None:
    """Ends the default group, if there is one, without waiting for anybody.

    The peers' collectives fail at once, because their connections to this rank close. Called when
    no thread is in a collective any more.
    """
    connections.shutdown()
    if dist.is_available() and dist.is_initialized():
        _abort_process_group()


def interrupt_collectives(connections: SocketTracker) -> None:
    """Ends the wait for peers that the training thread may be in; from another thread."""
    connections.shutdown()
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl":
        _abort_process_group()


def is_collective_failure(error: BaseException) -> bool:
    """Whether `error` is torch telling that a peer is gone or late, not a mistake in user code."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "NCCL" in text)
