"""The calls of a worker to its vault: JSON packets over a unix socket, with file descriptors.

A request is {"call": a method of `WorkerRequests`, "arguments", "id"}. Its reply is a pickled (id,
error or None), with the descriptors that the method returned; a request whose id is null gets no
reply. The vault checks the requests that it receives; a worker trusts its vault.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

from rayzero.engine.errors import DataError
from rayzero.workers.vault.images import FetchRemote
from rayzero.workers.vault.peers import Peer
from rayzero.workers.vault.records import SlotRef
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.replicas import Replicas
from rayzero.workers.vault.slots import SlotHeader
from rayzero.workers.vault.weight_replicas import WeightReplicas

_MAX_IMAGE_BYTES = 2**50
MAX_PACKET_BYTES = 64 * 1024
"""Size limit of a message. Indexes and states go through shared memory."""

Descriptors: TypeAlias = list[int]
"""File descriptors for the worker; closed here once they are sent."""


@dataclass(eq=False)
class WorkerRequests:
    """The methods that a worker calls by `VaultClient`. Several threads run them at once, but those
    of one peer in order. A method returns the descriptors of its reply, if it has any; its errors
    are raised in the worker."""

    _node_id: str
    _registry: SlotRegistry
    _fetch: FetchRemote
    _weights: WeightReplicas
    _replicas: Replicas

    def register(self, peer: Peer, worker: int, pid: int, thread: int, report_fd: int) -> None:
        """Identifies the worker behind a connection. `thread` is the native id of a thread that
        exits with the process, or after `deregister`; `report_fd` is the descriptor of the
        process's crash report, or -1."""
        peer.register(worker, pid, thread, report_fd)

    def reserve(
        self,
        peer: Peer,
        generation: int,
        rank: int,
        world_size: int,
        index_bytes: int,
        data_bytes: int,
    ) -> Descriptors:
        """Returns an empty buffer. Makes the worker's buffers without a complete version spare."""
        header = SlotHeader(generation, rank, world_size, index_bytes, data_bytes)
        fd = self._registry.reserve(peer, header)
        if peer.closed:  # during the allocation: its end was handled before the buffer existed
            self._registry.discard_unfinished(peer)
        return [fd]

    def open_version(
        self, peer: Peer, generation: int, rank: int, step: int, node_id: str
    ) -> Descriptors:
        """Returns the buffer of a version in this vault; nothing if another node has it."""
        if node_id != self._node_id:
            return []
        return [self._registry.open_version(SlotRef(generation, rank, step, node_id))]

    def open_weights(
        self, peer: Peer, generation: int, rank: int, step: int, node_id: str
    ) -> Descriptors:
        """Returns a buffer with the weights of a version; nothing while they are being copied to
        this node. Does not wait: readers must not use up the ranks' threads for slow requests."""
        ref = SlotRef(generation, rank, step, node_id)
        if node_id == self._node_id or self._registry.has_version(ref):
            return [self._registry.open_version(ref)]
        fd = self._weights.open(peer, ref)
        return [] if fd is None else [fd]

    def fetch_version(
        self,
        peer: Peer,
        generation: int,
        rank: int,
        step: int,
        node_id: str,
        offset: int,
        length: int,
    ) -> Descriptors:
        """Returns a file with bytes of a version's image, read from another node's vault; fewer
        than `length` at the image's end."""
        ref = SlotRef(generation, rank, step, node_id)
        data = self._fetch(ref, offset, min(length, _MAX_IMAGE_BYTES))
        fd = os.memfd_create("rayzero-fetched", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
        except BaseException:
            os.close(fd)
            raise
        return [fd]

    def generation_complete(self, peer: Peer, generation: int) -> None:
        """Frees older generations: all ranks have a complete version of this one."""
        self._registry.generation_complete(generation)

    def generation_loaded(self, peer: Peer, generation: int, step: int) -> None:
        """Allows older steps to be overwritten: all ranks have loaded that step."""
        self._registry.generation_loaded(generation, step)

    def replicate(self, peer: Peer, generation: int, rank: int, step: int, nodes: str) -> None:
        """Orders copies of a complete version to these nodes, whose ids are separated by commas."""
        self._replicas.order(SlotRef(generation, rank, step, self._node_id), nodes.split(","))

    def step_replicated(self, peer: Peer, generation: int, step: int) -> None:
        """See `SlotRegistry.let_go`: other nodes have all ranks' versions of that step."""
        self._registry.let_go(generation, step)

    def trim(self, peer: Peer) -> None:
        """Frees spare buffers: all ranks have reserved theirs."""
        self._registry.trim()

    def deregister(self, peer: Peer) -> None:
        """Closes the session, so that the end of the connection is not reported as a loss."""
        peer.worker = -1
        self._registry.discard_unfinished(peer)


_ARGUMENT_TYPES = {
    name: [*method.__annotations__.values()][1:-1]  # without the peer and the result
    for name, method in vars(WorkerRequests).items()
    if not name.startswith("_")
}


def check_request(name: Any, arguments: Any) -> None:
    """Raises DataError if there is no such call, or the arguments have the wrong types."""
    types = _ARGUMENT_TYPES.get(name) if isinstance(name, str) else None
    if types is None:
        raise DataError(f"vault request {name!r}", f"one of {[*_ARGUMENT_TYPES]}")
    if not isinstance(arguments, list) or [type(value).__name__ for value in arguments] != types:
        raise DataError(f"vault request {name} with {arguments!r}", f"{name} with {types}")


def abstract_socket_name(address: str) -> str:
    """Returns the address as the kernel expects it: an abstract name starts with a zero byte."""
    return "\0" + address.removeprefix("@")
